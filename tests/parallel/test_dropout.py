"""Dropout masks: their statistics, and what they may and may not depend on."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from pipeline.parallel.context import Parallel
from pipeline.parallel.dropout import (
    DropoutClock,
    MicroBatchCounter,
    dropout,
    dropout_keys,
    keep_mask,
    mix,
)
from pipeline.parallel.mesh import Coordinates, Mesh

CPU = torch.device("cpu")


def keys(step: int = 1, seed: int = 3, micro_batch: int = 0, site: int = 0, rows: int = 4) -> Tensor:
    return dropout_keys(DropoutClock(seed, 4, step), Parallel.single(), micro_batch, site, rows, CPU)


def mask(rate: float = 0.5, shape: tuple[int, int, int] = (4, 32, 64), **where: int) -> Tensor:
    return keep_mask(torch.Size(shape), rate, keys(rows=shape[0], **where), 0)


def correlation(x: Tensor, y: Tensor) -> float:
    return torch.corrcoef(torch.stack([x.flatten().float(), y.flatten().float()]))[0, 1].item()


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_kept(rate: float):
    kept = mask(rate, (4, 128, 256))
    count = kept.numel()
    deviation = math.sqrt(rate * (1 - rate) / count)
    assert abs((~kept).float().mean().item() - rate) <= 4 * deviation
    # along each axis as well: no row, position or channel is special
    for dim in range(3):
        means = (~kept).float().movedim(dim, 0).flatten(1).mean(1)
        worst = (means - rate).abs().max().item()
        assert worst <= 5.5 * math.sqrt(rate * (1 - rate) / (count / kept.shape[dim]))


def test_masks_of_different_places_are_independent():
    count = 4 * 32 * 64
    places = {
        "base": mask(),
        "step": mask(step=2),
        "seed": mask(seed=4),
        "micro batch": mask(micro_batch=1),
        "site": mask(site=1),
        "shifted by a row": mask().roll(1, 0),
        "shifted by a position": mask().roll(1, 1),
        "shifted by a channel": mask().roll(1, 2),
    }
    for (one, x), (other, y) in combinations(places.items(), 2):
        assert abs(correlation(x, y)) < 4.5 / math.sqrt(count), (one, other)


def test_the_same_place_has_the_same_mask():
    assert torch.equal(mask(), mask())


def test_the_hash_is_a_bijection_that_spreads_one_bit():
    values = mix(torch.arange(1 << 16))
    assert values.unique().numel() == 1 << 16
    assert int(values.min()) >= 0
    assert int(values.max()) < 1 << 32
    assert mix(12345) == int(mix(torch.tensor(12345)))
    flipped = mix(torch.arange(1 << 12) ^ 1) ^ mix(torch.arange(1 << 12))
    changed = sum(((flipped >> bit) & 1).float().mean().item() for bit in range(32))
    assert 15 < changed < 17  # of 32 bits


def test_scaling_keeps_the_mean_and_the_type():
    x = torch.ones(4, 64, 64, dtype=torch.bfloat16)
    out = dropout(x, 0.25, keys(), 0)
    assert out.dtype == torch.bfloat16
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).bfloat16().item()}
    assert out.float().mean().item() == pytest.approx(1.0, abs=0.02)


def test_masks_do_not_depend_on_the_layout():
    """8 samples: one rank's two micro-batches of 4, against data, sequence and tensor ranks' shares."""
    seed, rate, length, channels = 3, 0.4, 16, 8

    def masks(mesh: Mesh, here: Coordinates, micro_batches: int) -> list[Tensor]:
        rows = 8 // mesh.data // micro_batches
        clock, part = DropoutClock(seed, rows, step=5), length // mesh.sequence
        parallel = Parallel(mesh, here)
        shape = torch.Size((rows, part, channels))
        return [
            keep_mask(shape, rate, dropout_keys(clock, parallel, micro, 1, rows, CPU), here.sequence * part)
            for micro in range(micro_batches)
        ]

    whole = torch.cat(masks(Mesh(), Coordinates(0, 0, 0, 0), 1))
    assert torch.equal(torch.cat(masks(Mesh(), Coordinates(0, 0, 0, 0), 2)), whole)
    mesh = Mesh(data=2, sequence=2, tensor=2)
    rebuilt = torch.empty_like(whole)
    for rank in range(mesh.world_size):
        here = mesh.coordinates(rank)
        for micro, part in enumerate(masks(mesh, here, 2)):
            first = (micro * 2 + here.data) * 2
            rebuilt[first : first + 2, here.sequence * 8 : here.sequence * 8 + 8] = part
            assert torch.equal(part, whole[first : first + 2, here.sequence * 8 : here.sequence * 8 + 8])
    assert torch.equal(rebuilt, whole)


def test_the_counter_starts_anew_with_each_step():
    clock = DropoutClock(0, 1)
    counter = MicroBatchCounter(clock)
    seen = []
    for step in (1, 2, 3):
        clock.step = step
        seen.append([counter.advance() for _ in range(3)])
    assert seen == [[0, 1, 2]] * 3


def test_a_resumed_run_continues_with_the_same_masks():
    """Nothing but the step number goes into a mask, so a new clock set to that step has the same ones."""
    clock = DropoutClock(9, 4)
    for step in range(1, 6):
        clock.step = step
    resumed = DropoutClock(9, 4, step=5)
    before, after = (dropout_keys(c, Parallel.single(), 0, 2, 4, CPU) for c in (clock, resumed))
    assert torch.equal(before, after)
