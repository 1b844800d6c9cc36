"""Layouts to go from and to, as data, and the jobs that describe them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.checkpoints.small import MODEL
from tests.end_to_end.jobs import write_text

SEQUENCE = 16
# A large eps: Adam would blow up the rounding of gradients that are zero in exact arithmetic.
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1}}
OPTIMIZERS = {
    "AdamW": ADAM,
    "SGD": {"type": "SGD", "params": {"lr": 0.1}},
    "momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
}
CONFIG: dict[str, Any] = {"train_batch_size": 8, "gradient_clipping": 1.0}
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
    """One layout: how many ranks, and what the JSON says."""

    ranks: int
    config: dict[str, Any] = field(default_factory=dict, hash=False)


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    """A ZeRO block. Parameters of this size would otherwise stay whole at stage 3."""
    more = {"stage3_param_persistence_threshold": 40, "sub_group_size": 3000} if stage == 3 else {}
    return {"zero_optimization": {"stage": stage, **more, **settings}}


def stages(count: int, **settings: Any) -> dict[str, Any]:
    return {"pipeline": {"stages": count, **settings}}


TENSOR = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCES = {"sequence_parallel_size": 2}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
DUAL = {**stages(2, schedule="dualpipev"), "train_micro_batch_size_per_gpu": 1}

LAYOUTS = {
    "one": Layout(1),
    "dp2": Layout(2),
    "dp2 zero1": Layout(2, zero(1)),
    "dp2 zero2": Layout(2, zero(2)),
    "dp2 zero3": Layout(2, zero(3)),
    "dp4 zero1": Layout(4, zero(1)),
    "dp4 zero3": Layout(4, zero(3)),
    "dp4 zero3 second shard": Layout(4, zero(3, zero_hpz_partition_size=2)),
    "dp2 zero2 round robin": Layout(2, zero(2, round_robin_gradients=True, parameter_alignment=True)),
    "dp2 zero2 offload": Layout(2, zero(2, **OFFLOAD)),
    "dp2 zero3 offload": Layout(2, zero(3, **OFFLOAD, offload_param={"device": "cpu", "pin_memory": False})),
    "pp2": Layout(2, stages(2)),
    "pp2 other boundaries": Layout(2, stages(2, partition=[5, 2])),
    "pp2 zero1": Layout(2, {**stages(2), **zero(1)}),
    "pp2 dp2 zero1": Layout(4, {**stages(2), **zero(1)}),
    "pp4": Layout(4, stages(4)),
    "dualpipev": Layout(2, DUAL),
    "dualpipev zero1": Layout(2, {**DUAL, **zero(1)}),
    "tp2": Layout(2, TENSOR),
    "tp2 zero3": Layout(2, {**TENSOR, **zero(3)}),
    "tp4": Layout(4, {"tensor_parallel": {"autotp_size": 4}}),
    "sp2": Layout(2, SEQUENCES),
    "sp2 zero1": Layout(2, {**SEQUENCES, **zero(1)}),
    "pp2 tp2 zero1": Layout(4, {**stages(2), **TENSOR, **zero(1)}),
    "pp2 tp2": Layout(4, {**stages(2), **TENSOR}),
    "tp2 sp2 zero2": Layout(4, {**TENSOR, **SEQUENCES, **zero(2)}),
    "four-way": Layout(16, {**stages(2), **TENSOR, **SEQUENCES, **zero(1)}),
    "bf16 dp2 zero1": Layout(2, {**BF16, **zero(1)}),
    "bf16 dp2 zero1 offload": Layout(2, {**BF16, **zero(1, **OFFLOAD)}),
    "bf16 dp2 zero2": Layout(2, {**BF16, **zero(2)}),
    "bf16 dp2 zero3": Layout(2, {**BF16, **zero(3)}),
    "bf16 pp2 zero1": Layout(2, {**BF16, **stages(2), **zero(1)}),
    "bf16 dp2 zero0": Layout(2, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}),
    "bf16 pp2 zero0": Layout(
        2, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}, **stages(2)}
    ),
}


def arguments(
    folder: Path, run: str, layout: str, *, steps: int, model: str = "tied", optimizer: str = "AdamW"
) -> list[str]:
    """The command line of a run in `folder`, in one of `LAYOUTS`."""
    text, described, config = (
        folder / "text",
        folder / f"{model}.json",
        folder / f"{layout}, {optimizer}.json",
    )
    if not text.exists():
        write_text(text)
    described.write_text(json.dumps(asdict(MODELS[model])), encoding="utf-8")
    values = {**CONFIG, **LAYOUTS[layout].config, "optimizer": OPTIMIZERS[optimizer]}
    config.write_text(json.dumps(values), encoding="utf-8")
    return [
        *("--deepspeed_config", str(config), "--model", str(described), "--data", str(text)),
        *("--seq_length", str(SEQUENCE), "--train_steps", str(steps), "--sample_tokens", "0"),
        *("--output_dir", str(folder / run), "--eval_samples", "0"),
    ]
