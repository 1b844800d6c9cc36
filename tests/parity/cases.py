"""Layouts as data: what a case is, and the job that it describes to the pipeline as a user would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.job.job import Job
from pipeline.job.options import Options
from pipeline.job.resolve import resolve
from pipeline.job.world import Host, World
from pipeline.model.config import ModelConfig

STEPS = 4
SEQUENCE = 16
SEED = 7

# 257 of 384 columns are tokens: sliced in 4, rank 2 holds both kinds and rank 3 nothing but padding. A large
# init_std gives every parameter a gradient worth comparing.
GPT = ModelConfig(
    name="gpt",
    vocab_size=257,
    hidden_size=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    ffn_hidden_size=64,
    max_position_embeddings=24,
    init_std=0.1,
)
LLAMA = replace(
    GPT,
    name="llama",
    num_kv_heads=2,
    position="rotary",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    qkv_bias=False,
    tied=False,
)
MODELS = {
    "gpt": GPT,
    "untied": replace(GPT, name="untied", tied=False, activation="gelu"),
    "five layers": replace(GPT, name="five layers", num_layers=5),
    "seven layers": replace(GPT, name="seven layers", num_layers=7),
    "no bias": replace(GPT, name="no bias", bias=False, qkv_bias=False),
    "llama": LLAMA,
    "llama, 4 kv heads": replace(LLAMA, name="llama, 4 kv heads", num_kv_heads=4),
    "qwen": replace(LLAMA, name="qwen", num_kv_heads=4, qkv_bias=True, tied=True),
    "qk norm": replace(LLAMA, name="qk norm", qk_norm=True, tied=True),
    "dropout": replace(GPT, name="dropout", dropout=0.1, attention_dropout=0.2),
}

# Type in the JSON and parameters. Adam divides by the root of the squared gradient: a large eps keeps it from
# blowing up the rounding of gradients that are zero in exact arithmetic.
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "AdamW": ("AdamW", {"betas": [0.9, 0.95], "eps": 1e-3}),
}


class Scaling(NamedTuple):
    """How fp16 scales, and what overflows.

    Attributes:
        block: Further keys of the JSON's ``fp16`` block.
        overflows: Steps in which one rank's gradient of one weight is infinite, whatever the scale.
    """

    block: Mapping[str, Any]
    overflows: tuple[int, ...] = ()


SCALINGS = {
    # Halved by step 1, doubled by step 3, the last one.
    "halved": Scaling({"initial_scale_power": 10, "loss_scale_window": 1, "hysteresis": 1}, (1,)),
    # Two overflows, but not in a row.
    "kept": Scaling({"initial_scale_power": 10, "hysteresis": 2, "consecutive_hysteresis": True}, (1, 3)),
    "fixed": Scaling({"loss_scale": 1000}, (1,)),
    # Too large for steps 0 and 1, the second of which halves it. In step 0 the largest gradient is
    # 0.3 * 2^18 = 84,000 with half of it, and fp16 ends at 65,504. Replicas would sum to more.
    "too large": Scaling({"initial_scale_power": 19, "loss_scale_window": 1, "hysteresis": 2}),
}


@dataclass(frozen=True)
class Case:
    """One layout and everything else that decides the numbers.

    Attributes:
        model: Name in `MODELS`.
        pipeline, data, sequence, tensor: Parallel sizes.
        zero: ZeRO stage; `zero_options` are further keys of its block.
        accumulation: Micro-batches per step.
        batch: Sequences per step.
        clip: Largest gradient norm; 0 is off.
        learning_rate: The same in every step. With clipping it must make up for the short gradients, or
            the weights' own rounding would hide them.
        optimizer: SGD, momentum (SGD with 0.9) or AdamW.
        recompute: Activation checkpointing.
        schedule, partition: Of the pipeline.
        precision: fp32, bf16 or fp16; `accumulate` is the format of the gradient sum.
        scaling: Name in `SCALINGS`; of fp16.
    """

    model: str = "gpt"
    pipeline: int = 1
    data: int = 1
    sequence: int = 1
    tensor: int = 1
    zero: int = 0
    zero_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    accumulation: int = 1
    batch: int = 8
    clip: float = 0.0
    learning_rate: float = 0.5
    optimizer: str = "SGD"
    weight_decay: float = 0.0
    recompute: str = "none"
    schedule: str = "1f1b"
    partition: str | tuple[int, ...] = "parameters"
    precision: str = "fp32"
    accumulate: str = "fp32"
    scaling: str = "halved"

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.sequence * self.tensor

    @property
    def micro_batch(self) -> int:
        return self.batch // (self.data * self.accumulation)

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.model]

    @property
    def id(self) -> str:
        """The layout in short, then whatever differs from the default."""
        sizes = {"pp": self.pipeline, "dp": self.data, "sp": self.sequence, "tp": self.tensor}
        layout = "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one"
        parts = [layout, f"zero{self.zero}"]
        parts += [f"{key}={_word(value)}" for key, value in self.zero_options.items()]
        names = (
            "accumulation",
            "model",
            "clip",
            "optimizer",
            "recompute",
            "schedule",
            "partition",
            "scaling",
        )
        for name in names:
            value = getattr(self, name)
            if value != getattr(Case, name):
                parts.append(f"{name}={_word(value)}")
        return " ".join([*parts, *([self.precision] if self.precision != "fp32" else [])])

    def deepspeed_json(self) -> dict[str, Any]:
        """The JSON that a user would write."""
        zero: dict[str, Any] = {"stage": self.zero}
        if self.zero:
            # Small enough that a step takes several buckets.
            zero["reduce_bucket_size"] = 20_000
        if self.zero == 3:
            # Else parameters of this size would stay whole on every rank.
            zero["stage3_param_persistence_threshold"] = 40
        layout: dict[str, Any] = {"stages": self.pipeline}
        if self.pipeline > 1:
            partition = self.partition
            layout["partition"] = list(partition) if isinstance(partition, tuple) else partition
            layout["schedule"] = self.schedule
        params = {
            "lr": self.learning_rate,
            "weight_decay": self.weight_decay,
            **_OPTIMIZERS[self.optimizer][1],
        }
        return {
            "train_batch_size": self.batch,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": {"type": _OPTIMIZERS[self.optimizer][0], "params": params},
            "scheduler": None,
            "zero_optimization": {**zero, **self.zero_options},
            "bf16": {"enabled": self.precision == "bf16"},
            **(
                {"fp16": {"enabled": True, **SCALINGS[self.scaling].block}}
                if self.precision == "fp16"
                else {}
            ),
            "data_types": {"grad_accum_dtype": self.accumulate},
            "pipeline": layout,
            "tensor_parallel": {"autotp_size": self.tensor},
            "sequence_parallel_size": self.sequence,
            "activation_checkpointing": {"mode": self.recompute},
        }

    def job(self, folder: Path) -> Job:
        """The job, resolved from files in `folder` as `pretrain.py` resolves it.

        Raises:
            JobError: the case breaks a rule.
        """
        model, config = folder / "model.json", folder / "ds.json"
        model.write_text(json.dumps(self.config.to_json()), encoding="utf-8")
        config.write_text(json.dumps(self.deepspeed_json()), encoding="utf-8")
        options = Options(
            deepspeed_config=str(config),
            model=str(model),
            seq_length=SEQUENCE,
            train_steps=STEPS,
            output_dir=str(folder / "run"),
            seed=SEED,
        )
        # A job in fp16 is refused on CPUs, because DeepSpeed refuses it there.
        device = "cuda" if self.precision == "fp16" else "cpu"
        return resolve(options, World((Host("localhost", self.world_size),), device))


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return "-".join(str(item) for item in value)
    return value["device"] if isinstance(value, dict) else str(value)
