"""Every key that DeepSpeed receives, with another value than its default, trains two steps in every engine,
at every ZeRO stage and in every number format that a CPU has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.base.fields import Field
from pipeline.job.schema import KEYS
from tests.covering import slow
from tests.end_to_end.jobs import Workshop
from tests.harness import run_job

PASSED = {path: key for path, key in KEYS.items() if key.details.get("passed") and not key.block}
# Values where one that differs from the default is no value for a small job on CPUs.
VALUES: dict[str, Any] = {
    "communication_data_type": "fp32",
    "comms_logger.prof_ops": ["all_reduce"],
    "zero_optimization.zero_hpz_partition_size": 2,
    "zero_optimization.overlap_comm": False,  # without streams of a device there is nothing to overlap
    "zero_optimization.reduce_bucket_size": 5000,
    "zero_optimization.allgather_bucket_size": 5000,
    "zero_optimization.sub_group_size": 5000,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "cpu",
    "steps_per_print": 1,
}
# What a CPU cannot have: fp16, drives without DeepSpeed's compiled reader.
ELSEWHERE = ("fp16.", "aio.", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init",
             "pipeline_read", "pipeline_write")  # fmt: skip
# Switches that a key needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "comms_logger.": {"comms_logger.enabled": True},
    "comms_logger.prof_ops": {"comms_logger.prof_all": False},
    "zero_optimization.offload_optimizer.": {"zero_optimization.offload_optimizer.device": "cpu"},
    "zero_optimization.offload_param.": {"zero_optimization.offload_param.device": "cpu"},
}
# Engine -> blocks of the JSON; ZeRO stages that it has.
ENGINES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, (0, 1, 2, 3)),
    "1f1b": ({"pipeline": {"stages": 2}}, (0, 1)),
    "dualpipev": ({"pipeline": {"stages": 2, "schedule": "dualpipev"}}, (0, 1)),
}
# Weights and sums.
FORMATS = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "fp32"), "bf16 sums": ("bf16", "bf16")}
COMBINATIONS = [
    (engine, stage, form)
    for engine, (_, stages) in ENGINES.items()
    for stage in stages
    for form in FORMATS
    if (stage, form) != (0, "bf16")  # refused: no fp32 sums without ZeRO
]


def value(path: str, key: Field) -> Any:
    """One that is not the default."""
    if path in VALUES:
        return VALUES[path]
    default = key.default
    if isinstance(default, bool):
        return not default
    return default + 1 if default else 5000


def keys(engine: str, stage: int, form: str) -> dict[str, Any]:
    """Those that act."""
    no_offload = (
        ("offload",) if engine != "plain" and form == "bf16" else ()
    )  # refused: the rule "tied gradients"
    return {
        path: value(path, key)
        for path, key in PASSED.items()
        if not any(part in path for part in (*ELSEWHERE, *no_offload))
        and stage in key.details.get("zero_stages", (stage,))
    }


def config(engine: str, stage: int, form: str, given: dict[str, Any]) -> dict[str, Any]:
    """The blocks of a JSON with those keys."""
    compute, sums = FORMATS[form]
    values: dict[str, Any] = {
        **ENGINES[engine][0],
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": compute == "bf16"},
        "data_types": {"grad_accum_dtype": sums},
    }
    for path, one in given.items():
        block = values
        *outer, name = path.split(".")
        for each in outer:
            block = block.setdefault(each, {})
        block[name] = one
    return values


def beside(path: str) -> dict[str, Any]:
    return {k: v for start, more in BESIDE.items() if path.startswith(start) for k, v in more.items()}


def trains(folder: Path, values: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    shop = Workshop(folder)
    run_job(shop.arguments("run", shop.config(**values), "--log_interval", "1"), 2).check()
    assert [line["step"] for line in shop.steps("run")] == [1, 2]


def combined(row: tuple[str, int, str]) -> set[tuple[str, int | str]]:
    """By this some combinations are chosen that always run."""
    engine, stage, form = row
    return {(engine, stage), (engine, form)}


@pytest.mark.parametrize("row", slow((), COMBINATIONS, combined), ids=str)
def test_all_keys_that_act_train_together(row: tuple[str, int, str], tmp_path: Path) -> None:
    trains(tmp_path, config(*row, keys(*row)))


@pytest.mark.repeats
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage", "form"), COMBINATIONS)
@pytest.mark.timeout(900)
def test_each_key_trains_alone(engine: str, stage: int, form: str, tmp_path: Path) -> None:
    for path, one in keys(engine, stage, form).items():
        trains(tmp_path / path, config(engine, stage, form, {path: one, **beside(path)}))
