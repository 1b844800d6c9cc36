"""Layouts to go from and to, as data, and the jobs that describe them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.checkpoints.small import MODEL
from tests.end_to_end.jobs import write_text

SEQUENCE = 16
# A large eps: Adam would blow up the rounding of gradients that are zero in exact arithmetic.
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1}}
OPTIMIZERS = {
    "AdamW": ADAM,
    "Adam": {**ADAM, "type": "Adam", "params": {**ADAM["params"], "adam_w_mode": False}},
    "SGD": {"type": "SGD", "params": {"lr": 0.1}},
    "momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
}
CONFIG: dict[str, Any] = {"train_batch_size": 8, "gradient_clipping": 1.0, "scheduler": None}
SMALL = replace(
    MODEL, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=4, max_position_embeddings=SEQUENCE
)
LLAMA = replace(
    SMALL,
    num_kv_heads=2,
    position="rotary",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    qkv_bias=False,
    qk_norm=True,
    tied=False,
)
MODELS = {"tied": SMALL, "untied": replace(SMALL, tied=False), "llama": LLAMA}


@dataclass(frozen=True)
class Layout:
    """One layout: a value on each axis, and settings of its JSON that are no axis.

    Attributes:
        schedule: ``plain`` is DeepSpeed's engine without a pipeline.
        compute: With bf16 at ZeRO 0 gradients are summed in bf16, too: DeepSpeed cannot do otherwise.
    """

    pipeline: int = 1
    data: int = 1
    sequence: int = 1
    tensor: int = 1
    zero: int = 0
    schedule: str = "plain"
    offload: str = "none"
    compute: str = "fp32"
    more: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.sequence * self.tensor

    @property
    def config(self) -> dict[str, Any]:
        """Its part of the JSON."""
        config: dict[str, Any] = {"zero_optimization": self._zero()}
        if self.pipeline > 1:
            config["pipeline"] = {"stages": self.pipeline, "schedule": self.schedule}
        if self.schedule == "dualpipev":
            config["train_micro_batch_size_per_gpu"] = 1
        if self.tensor > 1:
            config["tensor_parallel"] = {"autotp_size": self.tensor}
        if self.sequence > 1:
            config["sequence_parallel_size"] = self.sequence
        if self.compute == "bf16":
            sums = "bf16" if self.zero == 0 else "fp32"
            config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": sums}}
        for block, values in self.more.items():
            config[block] = {**config[block], **values}
        return config

    def _zero(self) -> dict[str, Any]:
        block: dict[str, Any] = {"stage": self.zero}
        if self.zero == 3:  # parameters of this size would otherwise stay whole
            block |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 3000}
        if self.offload == "cpu":
            block["offload_optimizer"] = CPU
        if self.offload == "cpu" and self.zero == 3:
            block["offload_param"] = CPU
        return block

    def values(self) -> dict[str, Any]:
        """Its value on each axis of the matrices."""
        return {axis: getattr(self, axis) for axis in AXES}


CPU = {"device": "cpu", "pin_memory": False}
# What the matrices must cover, and with which values. The number of ranks follows from the four sizes.
AXES: dict[str, tuple[Any, ...]] = {
    "pipeline": (1, 2, 4),
    "schedule": ("plain", "1f1b", "dualpipev"),
    "tensor": (1, 2, 4),
    "sequence": (1, 2),
    "data": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "offload": ("none", "cpu"),
    "ranks": (1, 2, 4),
}
_SIZES = {"pp": "pipeline", "dp": "data", "sp": "sequence", "tp": "tensor", "zero": "zero"}


def parse(name: str) -> Layout:
    """The layout that a name such as ``pp2 tp2 zero1``, ``dualpipev2`` or ``bf16 dp2 zero3 offload`` means;
    ``one`` is one rank."""
    values: dict[str, Any] = {}
    for word in name.split():
        letters = word.rstrip("0123456789")
        number = word.removeprefix(letters)
        if word in ("one", "bf16", "offload"):
            values |= {"one": {}, "bf16": {"compute": "bf16"}, "offload": {"offload": "cpu"}}[word]
        elif letters == "dualpipev":
            values |= {"pipeline": int(number), "schedule": "dualpipev"}
        else:
            values[_SIZES[letters]] = int(number)
    if values.get("pipeline", 1) > 1:
        values.setdefault("schedule", "1f1b")
    return Layout(**values)


# Settings that change what lies where in the files, and are no axis.
SPECIAL = {
    "dp4 zero3 second shard": replace(
        parse("dp4 zero3"), more={"zero_optimization": {"zero_hpz_partition_size": 2}}
    ),
    "dp2 zero2 round robin": replace(
        parse("dp2 zero2"),
        more={"zero_optimization": {"round_robin_gradients": True, "parameter_alignment": True}},
    ),
    "pp2 other boundaries": replace(parse("pp2"), more={"pipeline": {"partition": [5, 2]}}),
}


def find(name: str) -> Layout:
    """A layout by its name: one of `SPECIAL`, or as `parse` reads it."""
    return SPECIAL[name] if name in SPECIAL else parse(name)


def arguments(
    folder: Path, run: str, layout: str, *more: str, steps: int, model: str = "tied", optimizer: str = "AdamW"
) -> list[str]:
    """The command line of a run in `folder`, in the layout that is called so."""
    text, described, config = (
        folder / "text",
        folder / f"{model}.json",
        folder / f"{layout}, {optimizer}.json",
    )
    if not text.exists():
        write_text(text)
    described.write_text(json.dumps(MODELS[model].to_json()), encoding="utf-8")
    values = {**CONFIG, **find(layout).config, "optimizer": OPTIMIZERS[optimizer]}
    config.write_text(json.dumps(values), encoding="utf-8")
    return [
        *("--deepspeed_config", str(config), "--model", str(described), "--data", str(text)),
        *("--seq_length", str(SEQUENCE), "--train_steps", str(steps), "--sample_tokens", "0"),
        *("--output_dir", str(folder / run), "--eval_samples", "0", *more),
    ]
