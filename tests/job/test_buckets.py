"""The gradient bucket that a job gets where its JSON is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.job.drafts import A100, CPU, draft, world

KEY = "zero_optimization.reduce_bucket_size"
BASE: dict[str, Any] = {"train_batch_size": 32, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
GPT2 = 124_475_904  # with 50,304 padded rows


def bucket(tmp_path: Path, model: str, config: dict[str, Any], device: tuple = A100) -> int | None:
    """What DeepSpeed receives, which a silent JSON's job also reports."""
    job = draft(tmp_path, {**BASE, **config}, world(8, device=device), model=model, train_steps=10).job
    assert job is not None
    passed = job.deepspeed["zero_optimization"].get("reduce_bucket_size")
    noted = {note.key: note.value for note in job.resolved}
    assert noted.get(KEY) == (None if "reduce_bucket_size" in config["zero_optimization"] else passed)
    return passed


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_holds_no_more_than_a_ranks_parameters(tmp_path: Path, stage: int) -> None:
    assert bucket(tmp_path, "gpt2-124m", {"zero_optimization": {"stage": stage}}) == GPT2


def test_counts_the_largest_stage(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2, "partition": [8, 8]}}
    table, positions, block = 50_304 * 768, 1_024 * 768, 7_087_872
    assert bucket(tmp_path, "gpt2-124m", config) == table + positions + 6 * block


def test_counts_both_chunks_of_a_dualpipev_rank(tmp_path: Path) -> None:
    pipeline = {"stages": 2, "partition": [4, 4, 4, 4], "schedule": "dualpipev"}
    config = {"zero_optimization": {"stage": 1}, "pipeline": pipeline, "train_micro_batch_size_per_gpu": 1}
    table, positions, norm, block = 50_304 * 768, 1_024 * 768, 2 * 768, 7_087_872
    assert bucket(tmp_path, "gpt2-124m", config) == table + positions + norm + 4 * block


def test_a_tensor_rank_holds_a_slice(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}
    assert bucket(tmp_path, "gpt2-124m", config) == GPT2 // 2


def test_large_models_keep_deepspeeds_size(tmp_path: Path) -> None:
    assert bucket(tmp_path, "gpt2-xl", {"zero_optimization": {"stage": 2}}) == 500_000_000


def test_cpu_ranks_get_small_ones(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}}
    assert bucket(tmp_path, "gpt2-124m", config, CPU) == 1_000_000
    assert bucket(tmp_path, "tiny", config, CPU) == 372_576


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    ],
    ids=["nothing is sharded", "BF16_Optimizer has no bucket"],
)
def test_is_left_out_where_nothing_reads_it(tmp_path: Path, config: dict[str, Any]) -> None:
    assert bucket(tmp_path, "gpt2-124m", config) is None


def test_the_json_wins(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 12_345}}
    assert bucket(tmp_path, "gpt2-124m", config) == 12_345
