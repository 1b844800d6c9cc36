"""Each remedy of the memory rule is followed: the rank then holds what the remedy said, and all of them
together lead to a job without a problem."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.problems import Problem
from pipeline.base.words import size
from pipeline.job.resolve import Draft
from tests.job.drafts import A100, draft, world

V100 = ("cuda", "Tesla V100-SXM2-32GB", False)
NOT_ASKED = ("cuda", None, True)
BF16, STAGES, TENSOR = (
    {"bf16": {"enabled": True}},
    {"pipeline": {"stages": 4}},
    {"tensor_parallel": {"autotp_size": 4}},
)


def zero(stage: int, **offload: str) -> dict[str, Any]:
    blocks = {f"offload_{what}": {"device": device} for what, device in offload.items()}
    return {"zero_optimization": {"stage": stage, **blocks}}


# model, slots, device, JSON
JOBS: list[tuple[str, tuple[int, ...], tuple, dict[str, Any]]] = [
    ("gpt2-124m", (1,), A100, {"train_micro_batch_size_per_gpu": 256}),
    ("gpt2-124m", (1,), V100, {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 96}),
    ("qwen2-7b", (2,), A100, BF16),
    ("gpt3-175b", (8,) * 16, A100, BF16 | zero(2)),
    ("gpt2-xl", (8,), V100, {"fp16": {"enabled": True}, **zero(0)}),
    ("gpt3-6.7b", (8,), A100, BF16 | zero(0)),
    ("gpt3-13b", (8,), A100, BF16 | zero(1) | {"data_types": {"grad_accum_dtype": "bf16"}}),
    ("gpt3-6.7b", (8,), NOT_ASKED, {}),
    ("gpt3-6.7b", (8,), V100, {}),
    ("llama3-8b", (1,), A100, BF16),
    ("llama3-8b", (8,), A100, zero(2, optimizer="cpu")),
    ("llama3-8b", (8,), A100, BF16 | zero(2, param="cpu") | {"train_micro_batch_size_per_gpu": 64}),
    ("llama3-8b", (8,) * 8, V100, zero(1)),
    ("llama3-8b", (8,), V100, {"fp16": {"enabled": True}} | STAGES),
    ("llama3-70b", (8,), A100, {}),
    ("llama3-70b", (8,), A100, BF16 | zero(3, optimizer="cpu")),
    ("llama3-70b", (8,), A100, BF16 | STAGES | zero(1)),
    ("llama3-70b", (8,), A100, TENSOR | zero(1)),
    ("llama3-70b", (8,), NOT_ASKED, STAGES),
]

OFFLOAD = "zero_optimization.offload_"
# What a part of a remedy says: the pattern, and the keys that it names, with groups of the pattern in them.
STAGE = "zero_optimization.stage"
PARTS: list[tuple[str, dict[str, str]]] = [
    (rf"set {STAGE} to 3 and, in it, offload_optimizer.device to cpu",
     {STAGE: "3", f"{OFFLOAD}optimizer.device": "cpu"}),
    (rf"set {STAGE} to 3 and, in it, offload_optimizer.device to cpu and offload_param.device to cpu",
     {STAGE: "3", f"{OFFLOAD}optimizer.device": "cpu", f"{OFFLOAD}param.device": "cpu"}),
    (rf"turn (bf16|fp16) on and set {STAGE} to (\d)", {r"\1.enabled": "true", STAGE: r"\2"}),
    (r"use (\d+) ranks with ZeRO stage (\d)", {"ranks": r"\1", STAGE: r"\2"}),
    (r"use (\d+) ranks with ZeRO stage (\d), (tensor_parallel.autotp_size) (\d)",
     {"ranks": r"\1", STAGE: r"\2", r"\3": r"\4"}),
    (r"set ([\w.]+) to (\w+)", {r"\1": r"\2"}),
    (r"set ([\w.]+) to (\w+) and ([\w.]+) to (\w+)", {r"\1": r"\2", r"\3": r"\4"}),
]  # fmt: skip


def keys_of(part: str) -> dict[str, Any]:
    (found,) = [(m, keys) for text, keys in PARTS if (m := re.fullmatch(text, part, re.IGNORECASE))][:1]
    match, keys = found
    said = {match.expand(key): match.expand(value) for key, value in keys.items()}
    return {key: int(value) if value.isdigit() else value == "true" or value for key, value in said.items()}


def followed(remedy: str, config: dict[str, Any], slots: tuple[int, ...]) -> tuple[int, ...]:
    """Do what the remedy says to `config`; the slots."""
    changes, _, _ = re.sub(r"^.*(?:Else: |of memory: |formulas\. )", "", remedy).rpartition(": ")
    for part in changes.split("; "):
        for key, value in keys_of(part).items():
            *blocks, name = key.split(".")
            block = config
            for outer in blocks:
                block = block.setdefault(outer, {})
            block[name] = value
    ranks = config.pop("ranks", None)
    return (8,) * (ranks // 8) if ranks else slots


def memory_problems(made: Draft) -> list[Problem]:
    return [problem for problem in made.problems if "optimizer state of a rank" in problem.rule]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]} {len(job[1])}x{job[1][0]} {job[3]}")
def test_remedies_that_are_followed_lead_to_a_job_that_fits(job: tuple, tmp_path: Path) -> None:
    model, slots, device, given = job
    config = {name: dict(value) if isinstance(value, dict) else value for name, value in given.items()}
    made, steps = draft(tmp_path, config, world(*slots, device=device), model=model), 0
    assert memory_problems(made)
    while problems := memory_problems(made):
        (problem,) = problems
        before, steps = made.memory, steps + 1
        assert steps <= 2, problem.remedy
        slots = followed(problem.remedy, config, slots)
        made = draft(tmp_path, config, world(*slots, device=device), model=model)
        held, said = made.memory, re.search(r"([\d.]+ GiB)(, [\d.]+ \w+ of host.*)?$", problem.remedy)
        assert said and said[1] in (size(held.state), size(held.total)), (problem.remedy, held)
        assert held.state < before.state or held.total < before.total
    assert not [problem for problem in made.problems if problem.severity == "error"]


MIB = 2**20
CPU = ("cpu", None, False)


@pytest.mark.parametrize(
    ("model", "device", "given", "missing", "change"),
    [
        ("gpt2-124m", A100, {"train_micro_batch_size_per_gpu": 32}, 500, "Set train_micro"),
        ("gpt2-124m", A100, {"train_micro_batch_size_per_gpu": 1}, None, "Set activation_checkpointing"),
        ("gpt2-xl", A100, BF16 | zero(1) | {"train_micro_batch_size_per_gpu": 1}, 4000, "Set zero_optim"),
        ("gpt2-124m", CPU, {"train_micro_batch_size_per_gpu": 16}, 2000, "Set train_micro"),
        ("gpt2-124m", CPU, zero(0) | {"train_micro_batch_size_per_gpu": 1}, 1000, "Set zero_optim"),
    ],
)
def test_what_a_rank_without_memory_is_told_saves_what_was_missing(
    model: str, device: tuple, given: dict[str, Any], missing: int | None, change: str, tmp_path: Path
) -> None:
    config, number = dict(given), None if missing is None else missing * MIB
    before = draft(tmp_path, config, world(8, device=device), model=model)
    told = before.job.less_memory(number, device == CPU)
    assert told.startswith(f"A rank needs {size(before.memory.total)} by the formulas. {change}"), told
    slots = followed(told, config, (8,))
    after = draft(tmp_path, config, world(*slots, device=device), model=model)
    assert told.endswith(f": {size(after.memory.total)}")
    assert after.memory.total <= before.memory.total - (number or before.memory.total // 10)


def test_where_no_change_saves_as_much_the_model_is_too_large_or_not_alone(tmp_path: Path) -> None:
    job = draft(tmp_path, {}, world(1, device=CPU), model="gpt2-124m").job
    assert "; give --seq_length 512: " in job.less_memory(18000 * MIB, True)
    needs, _, _ = job.less_memory(None, True).partition(". ")
    assert job.less_memory(10**12, True).startswith(f"{needs}: free what else is in use there")


def test_host_memory_of_a_job_on_gpus_is_that_of_what_it_offloads(tmp_path: Path) -> None:
    config = BF16 | zero(3, optimizer="cpu")
    told = draft(tmp_path, config, world(8, device=A100), model="gpt2-xl").job.less_memory(None, True)
    assert re.fullmatch(
        r"Offloaded state of a rank takes .* GiB of it: use more hosts, .* or offload less", told
    )
