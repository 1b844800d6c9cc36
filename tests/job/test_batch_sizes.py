"""Batch arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.base.problems import JobError
from pipeline.job.batch import MICRO, TRAIN, BatchRequest, resolve_batch

OPEN = BatchRequest(None, None, None, False, 4, 512, 1024, 1024, 768)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        # train, micro, steps, train is "auto"  ->  train, micro, steps; 4 data ranks
        ((64, 4, 4, False), (64, 4, 4)),
        ((64, 4, None, False), (64, 4, 4)),
        ((64, None, 4, False), (64, 4, 4)),
        ((None, 4, 4, False), (64, 4, 4)),
        ((None, 4, 4, True), (64, 4, 4)),
        ((None, 4, None, False), (16, 4, 1)),
        ((None, 4, None, True), (512, 4, 32)),
        ((None, 3, None, True), (516, 3, 43)),  # 512 is no multiple of 3 * 4
        ((None, None, 3, True), (516, 43, 3)),
        ((64, None, None, False), (64, 16, 1)),
        (
            (None, None, None, False),
            (512, 16, 8),
        ),  # 2**24 // (1024 * 768) = 21; the divisor of 128 below is 16
        ((None, None, None, True), (512, 16, 8)),
    ],
)
def test_two_of_three_or_fewer(given: tuple, sizes: tuple[int, int, int]) -> None:
    train, micro, steps, auto = given
    batch, notes = resolve_batch(replace(OPEN, train=train, micro=micro, steps=steps, train_auto=auto))
    assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps) == sizes
    assert batch.tokens_per_step == sizes[0] * 1024
    assert len(notes) == sum(value is None for value in given[:3])


@pytest.mark.parametrize(
    ("train", "micro", "steps", "rule", "remedy"),
    [
        (7, 2, None, "a multiple of 2 (train_micro_batch_size_per_gpu) * 4 (data ranks) = 8, and 7 / 8", "8"),
        (4, 8, None, "= 32, and 4 / 32 leaves 4", "Use 32 or 64"),
        (20, None, 2, "a multiple of 2 (gradient_accumulation_steps) * 4 (data ranks) = 8", "Use 16 or 24"),
        (6, None, None, "a multiple of 4 (data ranks) = 4, and 6 / 4 leaves 2", "Use 4 or 8"),
        (
            64,
            4,
            2,
            "4 * gradient_accumulation_steps 2 * 4 data ranks = 32",
            "Use 32, or leave one of the three out",
        ),
    ],
)
def test_shows_the_arithmetic(
    train: int, micro: int | None, steps: int | None, rule: str, remedy: str
) -> None:
    with pytest.raises(JobError) as error:
        resolve_batch(replace(OPEN, train=train, micro=micro, steps=steps))
    (problem,) = error.value.problems
    assert problem.key == TRAIN and problem.value == train
    assert rule in problem.rule
    assert remedy in problem.remedy


def test_a_pipeline_gets_its_micro_batches() -> None:
    batch, _ = resolve_batch(replace(OPEN, data=1, usual=16, tokens=64, hidden_size=96, wanted_steps=8))
    assert (batch.micro_batch_size, batch.accumulation_steps) == (2, 8)
    batch, _ = resolve_batch(replace(OPEN, data=8, usual=16, least_steps=4, wanted_steps=8))
    assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps) == (32, 1, 4)


def test_long_sequences_get_a_micro_batch_of_one() -> None:
    batch, notes = resolve_batch(replace(OPEN, tokens=8192, sequence_length=8192, hidden_size=12288))
    assert (batch.micro_batch_size, batch.accumulation_steps) == (1, 128)
    assert "16,777,216" in next(note.reason for note in notes if note.key == MICRO)


def test_a_model_without_a_usual_batch_needs_one() -> None:
    with pytest.raises(JobError, match="no usual batch"):
        resolve_batch(replace(OPEN, usual=None))
