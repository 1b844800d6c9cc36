"""A job, resolved: everything that is known before a rank starts. The rest of the code reads only this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.base.problems import Problem
from pipeline.job.options import Options
from pipeline.job.schedules import LearningRate
from pipeline.job.world import World
from pipeline.model.config import ModelConfig
from pipeline.parallel.mesh import Mesh

Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Precision:
    """Number formats.

    Attributes:
        compute: Weights and activations in the forward and backward pass.
        accumulation: Gradients summed over micro-batches.
        reason: Why these, as printed.
    """

    compute: Dtype
    accumulation: Dtype
    reason: str


@dataclass(frozen=True)
class Batch:
    """The batch of one optimizer step; train = micro * accumulation * data parallel size.

    Attributes:
        train_batch_size: Sequences of the whole job.
        micro_batch_size: Sequences in one forward pass of one data-parallel replica.
        accumulation_steps: Micro-batches per step.
        sequence_length: Tokens per sequence, not divided by sequence parallelism.
    """

    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    sequence_length: int

    @property
    def tokens_per_step(self) -> int:
        return self.train_batch_size * self.sequence_length


@dataclass(frozen=True)
class OptimizerConfig:
    """A torch optimizer and its arguments. lr is the schedule's peak, after any lr scaling.

    `fused` selects torch's single-kernel implementation. `momentum` and `nesterov` are SGD's; `betas`
    and `eps` Adam's.
    """

    type: Literal["AdamW", "Adam", "SGD"]
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    fused: bool = True


@dataclass(frozen=True)
class Resolved:
    """A value the user left open ("auto" or absent), what it became, and why."""

    key: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value} ({self.reason})"


@dataclass(frozen=True)
class Job:
    """What will run.

    Attributes:
        stages: Boundaries of the layer list, one more than there are chunks: chunk c holds layers
            stages[c] .. stages[c + 1] - 1. Chunks = pipeline stages, or twice that for DualPipeV.
        schedule: Learning rate as a function of the step, counted from 1.
        gradient_clipping: Largest gradient norm; 0 = off.
        eval_interval, save_interval: Steps; 0 = only after the last step.
        deepspeed: Exactly what `deepspeed.initialize(config=...)` receives.
        monitors: Enabled monitors with their settings. The job feeds them itself, DeepSpeed does not.
        json: The user's DeepSpeed JSON as read, before anything was resolved.
        resolved: Values that were left open, in the order they were decided.
        problems: Warnings only.
    """

    options: Options
    world: World
    model: ModelConfig
    mesh: Mesh
    batch: Batch
    precision: Precision
    zero_stage: int
    pipeline_schedule: Literal["1f1b", "dualpipev"]
    stages: tuple[int, ...]
    activation_checkpointing: Literal["none", "full", "selective"]
    train_steps: int
    eval_interval: int
    save_interval: int
    schedule: LearningRate
    gradient_clipping: float
    optimizer: OptimizerConfig
    output_dir: str
    deepspeed: dict[str, Any]
    monitors: dict[str, dict[str, object]]
    json: dict[str, Any]
    resolved: tuple[Resolved, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def deepspeed_reports(self) -> bool:
        """Whether the JSON asks for lines of DeepSpeed's own, which are silenced otherwise."""
        flags = ("wall_clock_breakdown", "memory_breakdown", "dump_state")
        logged = self.deepspeed.get("comms_logger", {}).get("enabled", False)
        return logged or "steps_per_print" in self.json or any(self.deepspeed.get(flag) for flag in flags)
