"""Small host-side agreements between ranks at each step, over a gloo group that no device work can delay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline.base.words import after_step, cut, ranges
from pipeline.data.loader import StepBatch, digest
from pipeline.parallel.context import Parallel

T = TypeVar("T")


class BatchMismatch(RuntimeError):
    """Ranks that must hold the same samples do not."""


@dataclass(frozen=True)
class StepAgreement:
    """What all ranks know of a step before it runs.

    Attributes:
        tokens: Unmasked labels of the step in the whole job, each counted once.
        stop: Some rank was asked to stop.
        reason: The lowest such rank, and the code that it gave for its reason; None where none was.
        writing: Some rank is still writing files of a checkpoint.
    """

    tokens: int
    stop: bool
    reason: tuple[int, int] | None = None
    writing: bool = False


def gather_rows(parallel: Parallel, *values: int) -> torch.Tensor:
    """Every rank's int64 `values`, [world, values], on the CPU."""
    mine = torch.tensor(values, dtype=torch.int64)
    if parallel.control_group is None:
        return mine.unsqueeze(0)
    rows = [torch.empty_like(mine) for _ in range(parallel.mesh.world_size)]
    dist.all_gather(rows, mine, group=parallel.control_group)
    return torch.stack(rows)


def gather_objects(parallel: Parallel, value: T) -> list[T]:
    """Every rank's `value`, by rank; for small things that can be pickled. Collective."""
    if parallel.control_group is None:
        return [value]
    values: list[Any] = [None] * parallel.mesh.world_size
    dist.all_gather_object(values, value, group=parallel.control_group)
    return values


class DataMismatch(RuntimeError):
    """Hosts that must read the same tokens do not."""


class StartMismatch(RuntimeError):
    """Hosts that must continue from the same checkpoint do not see the same one."""


class WeightsMismatch(RuntimeError):
    """Hosts that must begin with the same weights do not see the same files."""


class JobMismatch(RuntimeError):
    """Ranks that must run the same job have resolved different ones."""


def agree_on_job(facts: Mapping[str, Any]) -> None:
    """Compare what each rank has resolved from its files: one may have been edited while ranks started.

    Collective over all ranks, before process groups are made: ranks of two layouts would wait for each other.

    Args:
        facts: Values that all ranks must have, by name.

    Raises:
        JobMismatch: on every rank alike, naming the ranks that differ from rank 0, and in what.
    """
    values = {name: json.dumps(value, sort_keys=True) for name, value in facts.items()}
    digests = _of_all_ranks(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not odd:
        return
    all_values = _of_all_ranks(values)
    first, other = all_values[0], all_values[odd[0]]
    changed = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
    shown = "; ".join(
        f"{name} {cut(str(first.get(name)))} on rank 0, {cut(str(other.get(name)))} on rank {odd[0]}"
        for name in changed
    )
    raise JobMismatch(
        f"ranks [{ranges(odd)}] have read another job than rank 0 ({shown}): one of its files is another "
        f"one on their hosts, or was changed while ranks started"
    )


def _of_all_ranks(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree_on_weights(parallel: Parallel, fingerprint: str) -> None:
    """Compare the files of initial weights that each rank reads, by the hexadecimal hash of what they are.

    Raises:
        WeightsMismatch: on every rank alike, naming the ranks that differ from rank 0.
    """
    rows = gather_rows(parallel, int(fingerprint[:15], 16))
    if odd := _unlike_first(rows[:, 0]):
        raise WeightsMismatch(
            f"ranks [{ranges(odd)}] see other files of weights than rank 0: give every host the same folder"
        )


def agree_on_start(parallel: Parallel, fingerprint: str, step: int) -> None:
    """Compare the tokens that each rank reads, by the hexadecimal hash of all of them, and the step after
    which each would resume.

    Raises:
        DataMismatch, StartMismatch: on every rank alike, naming the ranks that differ from rank 0.
    """
    rows = gather_rows(parallel, int(fingerprint[:15], 16), step)  # 60 bits fit an int64
    if odd := _unlike_first(rows[:, 0]):
        raise DataMismatch(
            f"ranks [{ranges(odd)}] read other training tokens than rank 0: give every host the same files, "
            f"or for the embedded corpus the same Python version"
        )
    if odd := _unlike_first(rows[:, 1]):
        steps = ", ".join(f"rank {rank} {after_step(int(rows[rank, 1]))}" for rank in (0, odd[0]))
        raise StartMismatch(
            f"ranks [{ranges(odd)}] find another checkpoint to resume from than rank 0 ({steps}): "
            f"the output folder must be the same, shared one on every host"
        )


def _unlike_first(values: torch.Tensor) -> list[int]:
    """Ranks whose value, of [world], is not rank 0's."""
    return (values != values[0]).nonzero().flatten().tolist()


def agree_on_step(
    parallel: Parallel, batch: StepBatch, stop: int, verify: bool, writing: bool = False
) -> StepAgreement:
    """Count the step's tokens, share a stop request and, where `verify`, compare the samples themselves.

    Args:
        stop: 0, or this rank's reason to stop, as a number.
        writing: This rank is still writing files of a checkpoint.

    Raises:
        BatchMismatch: on every rank alike, naming the ranks that differ from their peers (ranks with the same
            data index must read the same samples, in all stages, tensor and sequence slices).
    """
    tokens = sum(int(micro.mask.sum()) for micro in batch.micro_batches)
    rows = gather_rows(parallel, tokens, int(stop), digest(batch) if verify else 0, int(writing))
    if verify:
        _compare(parallel, rows[:, 2], batch)
    # One rank of each data index speaks for its peers: stage 0, sequence 0, tensor 0.
    counting = parallel.mesh.grid[0, :, 0, 0].tolist()
    reason = first_reason(rows[:, 1])
    tokens = int(rows[counting, 0].sum())
    return StepAgreement(tokens, reason is not None, reason, bool(rows[:, 3].any()))


def first_reason(codes: torch.Tensor) -> tuple[int, int] | None:
    """The first rank whose code, of [world], is not 0, with the code."""
    ranks = codes.nonzero().flatten().tolist()
    return (ranks[0], int(codes[ranks[0]])) if ranks else None


def _compare(parallel: Parallel, digests: torch.Tensor, batch: StepBatch) -> None:
    odd = []
    for peers in parallel.mesh.groups("pipeline", "sequence", "tensor"):
        odd += [rank for rank in peers if digests[rank] != digests[peers[0]]]
    if odd:
        raise BatchMismatch(
            f"the samples from {batch.first_sample} on differ between ranks that share a data index: "
            f"ranks [{ranges(odd)}] against the first of their peers; check that every host reads "
            f"the same data files"
        )
