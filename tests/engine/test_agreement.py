"""What ranks tell each other before a step: 8 of them, 2 pipeline stages x 2 data x 2 tensor ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from pipeline.data.loader import MicroBatch, StepBatch
from pipeline.engine.agreement import (
    BatchMismatch,
    DataMismatch,
    StartMismatch,
    agree_on_start,
    agree_on_step,
    gather_rows,
)
from pipeline.parallel.context import Parallel
from pipeline.parallel.mesh import Mesh
from tests.harness import init_deepspeed_distributed, run_ranks

MESH = Mesh(2, 2, 1, 2)
LIMIT = timedelta(seconds=30)


def batch(data_rank: int, unmasked: int = 3) -> StepBatch:
    """Two micro-batches that differ between data ranks."""
    tokens = torch.arange(8).reshape(1, 8) + 10 * data_rank
    mask = torch.arange(8).reshape(1, 8) < unmasked
    micro = MicroBatch(tokens, tokens + 1, mask, (data_rank,))
    return StepBatch((micro, micro), first_sample=40, num_samples=4, num_tokens=32)


def parallel() -> Parallel:
    init_deepspeed_distributed()
    return Parallel.create(MESH, LIMIT)


def agree(
    stopping: int | None = None, odd: tuple[int, ...] = (), verify: bool = True
) -> tuple[int, bool] | str:
    """One agreement: rank `stopping` was asked to stop, ranks `odd` hold other samples than they should."""
    here = parallel()
    data_rank = here.coordinates.data
    # The second data rank has no unmasked token at all.
    mine = batch(data_rank, unmasked=0 if data_rank else 3)
    if here.rank in odd:
        mine.micro_batches[1].labels[0, 7] += 1
    try:
        agreed = agree_on_step(here, mine, 15 * (here.rank == stopping), verify)
    except BatchMismatch as error:
        return str(error)
    return agreed.tokens, agreed.stop


def start(odd_data: int | None, odd_step: int | None) -> str:
    here = parallel()
    fingerprint = "f" * 14 + ("0" if here.rank == odd_data else "f") + "0" * 17
    try:
        agree_on_start(here, fingerprint, 7 if here.rank == odd_step else 5)
    except (DataMismatch, StartMismatch) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rows() -> list[list[int]]:
    here = parallel()
    return gather_rows(here, here.rank, -(2**62)).tolist()


def test_every_rank_has_every_rows_values():
    expected = [[rank, -(2**62)] for rank in range(8)]
    assert run_ranks(rows, 8) == [expected] * 8


def test_tokens_are_counted_once_whatever_peers_read_them():
    """3 unmasked labels in each of 2 micro-batches of data rank 0; 4 ranks hold them."""
    assert run_ranks(agree, 8) == [(6, False)] * 8


@pytest.mark.parametrize("rank", [0, 7])
def test_one_ranks_stop_is_everyones(rank: int):
    assert run_ranks(agree, 8, rank) == [(6, True)] * 8


def test_ranks_with_other_samples_are_named_to_all():
    says = set(run_ranks(agree, 8, None, (3, 5)))
    assert len(says) == 1
    assert "the samples from 40 on differ" in (text := says.pop())
    assert "ranks [5, 3]" in text or "ranks [3, 5]" in text


def test_samples_are_compared_only_where_asked():
    assert run_ranks(agree, 8, None, (3,), False) == [(6, False)] * 8


def test_equal_starts_agree():
    assert run_ranks(start, 8, None, None) == [""] * 8


def test_other_data_is_named_to_all():
    """The hashes differ in the last of the digits that are compared."""
    (says,) = set(run_ranks(start, 8, 6, None))
    assert says.startswith("DataMismatch: ranks [6] read other training tokens than rank 0")


def test_another_checkpoint_is_named_to_all():
    (says,) = set(run_ranks(start, 8, None, 4))
    assert says.startswith("StartMismatch: ranks [4] find another checkpoint")
    assert "rank 0 after step 5, rank 4 after step 7" in says


def test_one_rank_agrees_with_itself():
    agreed = agree_on_step(Parallel.single(), batch(0), True, True)
    assert (agreed.tokens, agreed.stop) == (6, True)
    agree_on_start(Parallel.single(), "0" * 32, 5)
