"""A job, resolved: everything that is known before a rank starts. The rest of the code reads only this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pipeline.base.problems import Problem
from pipeline.data.corpus import SourceSpec
from pipeline.data.tokenizer_folder import TokenizerFacts
from pipeline.job.initial_weights import InitialWeights
from pipeline.job.schedules import LearningRate
from pipeline.job.world import World
from pipeline.model.config import ModelConfig
from pipeline.parallel.mesh import Mesh

if TYPE_CHECKING:
    from pipeline.job.options import Options  # which reads the schema, which has the names of this module

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

    @property
    def moments(self) -> int:
        """Numbers of state that are kept for each parameter."""
        return 2 if self.type in ("Adam", "AdamW") else int(self.momentum > 0)


@dataclass(frozen=True)
class Resolved:
    """A value the user left open ("auto" or absent), what it became, and why."""

    key: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value} ({self.reason})"


@dataclass(frozen=True)
class DataSpec:
    """What a run reads, and which of it becomes samples.

    Attributes:
        training: The sources; their weights add up to 1.
        validation: Named sets, evaluated whole.
        tokenizer: What its folder said; the run and its checkpoints keep a copy.
        model_has_tokenizer: It is the one in the model's folder, because nothing else was named.
        text_field, on_bad_record, on_lost_characters, document_separator, document_mask, mask_document_end:
            As the options say.
        held_out_fraction: Share of each source's tokens that is held out, 0 to below 1.
        held_out_limit: Tokens of each source that are held out at most; None: no limit.
        eval_samples: Per evaluation, of each set; 0 = none.
        cache_folder: Where copies of remote objects are kept, on a disk of each host.
        cache_bytes: What they may take there.
    """

    training: tuple[SourceSpec, ...]
    validation: tuple[SourceSpec, ...]
    tokenizer: TokenizerFacts
    model_has_tokenizer: bool
    text_field: str
    on_bad_record: Literal["stop", "skip"]
    document_separator: str | None
    on_lost_characters: Literal["stop", "continue"]
    document_mask: bool
    mask_document_end: bool
    held_out_fraction: float
    held_out_limit: int | None
    eval_samples: int
    cache_folder: str
    cache_bytes: int


@dataclass(frozen=True)
class SaveRules:
    """How checkpoints are written and kept.

    Attributes:
        interval: Steps; 0 = only after the last step.
        in_background: While training continues, from a copy in host memory.
        stop_on_failure: A save that failed ends the run.
        keep_last: Checkpoints that are kept, the newest ones; None: all.
        keep_every: Beside them: those whose step is a multiple of this.
        keep_best: Beside them: those of so many lowest validation losses, which are saved for that.
    """

    interval: int
    in_background: bool
    stop_on_failure: bool
    keep_last: int | None
    keep_every: int | None
    keep_best: int | None = None


@dataclass(frozen=True)
class StopRules:
    """What stops a run before its end, beside signals.

    Attributes:
        time_limit: Seconds from `started_at`; None: none.
        started_at: When the job was launched, in seconds since 1970; None: when rank 0 started.
        file: The stop file as named; None: the one in the output folder.
        stamp: What lay there at the launch (`pipeline.job.stop_file`); None: not looked at.
    """

    time_limit: float | None
    started_at: float | None
    file: str | None
    stamp: str | None


@dataclass(frozen=True)
class Reporting:
    """What a run says of itself.

    Attributes:
        log_interval: Steps between lines on the console.
        log_samples: Whether samples.jsonl is written.
        sample_tokens, sample_prompt: The text generated after the last step, and what it continues.
    """

    log_interval: int
    log_samples: bool
    sample_tokens: int
    sample_prompt: str


@dataclass(frozen=True)
class Job:
    """What will run. No file of the user's is read again once this exists, but for the data's own.

    Attributes:
        options: The command line, for run.json and for another start; what a run does is in the fields
            below.
        stages: Boundaries of the layer list, one more than there are chunks: chunk c holds layers
            stages[c] .. stages[c + 1] - 1. Chunks = pipeline stages, or twice that for DualPipeV.
        schedule: Learning rate as a function of the step, counted from 1.
        gradient_clipping: Largest gradient norm; 0 = off.
        seed: Of the initial weights, the sample order and dropout.
        initial_weights: Where the weights of step 0 come from.
        identity: What makes two runs the same one (`pipeline.job.run_file.identity`).
        resume: auto, never, or the path of a checkpoint.
        allow_pickle: MODULE.NAME of what a checkpoint's files may call beyond DeepSpeed's own.
        eval_interval: Steps; 0 = only after the last step.
        deepspeed: Exactly what `deepspeed.initialize(config=...)` receives.
        monitors: Enabled monitors with their settings. The job feeds them itself, DeepSpeed does not.
        json: The user's DeepSpeed JSON as read, before anything was resolved.
        less_memory: What to change where a rank has run out of memory, called with the bytes that were
            missing (None: not known), and whether they were the host's.
        command: What started the run, before its options; empty where nobody knows.
        arguments: The options as they were typed.
        resolved: Values that were left open, in the order they were decided.
        problems: Warnings only.
    """

    options: Options
    world: World
    model: ModelConfig
    data: DataSpec
    initial_weights: InitialWeights
    identity: dict[str, Any]
    seed: int
    mesh: Mesh
    batch: Batch
    precision: Precision
    zero_stage: int
    pipeline_schedule: Literal["1f1b", "dualpipev"]
    stages: tuple[int, ...]
    activation_checkpointing: Literal["none", "full", "selective"]
    train_steps: int
    eval_interval: int
    saves: SaveRules
    stops: StopRules
    reporting: Reporting
    resume: str
    allow_pickle: tuple[str, ...]
    schedule: LearningRate
    gradient_clipping: float
    optimizer: OptimizerConfig
    output_dir: str
    deepspeed: dict[str, Any]
    monitors: dict[str, dict[str, object]]
    json: dict[str, Any]
    less_memory: Callable[[int | None, bool], str] = field(compare=False, repr=False)
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    resolved: tuple[Resolved, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def deepspeed_reports(self) -> bool:
        """Whether the JSON asks for lines of DeepSpeed's own, which are silenced otherwise."""
        flags = ("wall_clock_breakdown", "memory_breakdown", "dump_state")
        logged = "comms_logger" in self.deepspeed  # only where it is on
        return logged or "steps_per_print" in self.json or any(self.deepspeed.get(flag) for flag in flags)
