"""Into every layout and out of it again: what training computes is what transformers computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.checkpoints.manifest import TrainState
from pipeline.engine.build import build_engine
from pipeline.engine.distributed import start_distributed
from pipeline.engine.folder_weights import FolderWeights
from pipeline.export import main as export
from pipeline.hugging_face.tensor_map import Block, Entry
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from tests.checkpoints.layouts import find
from tests.checkpoints.small import TIMEOUT, save_checkpoint
from tests.covering import slow
from tests.harness import run_ranks
from tests.hugging_face.folders import (
    TOKENS,
    first_loss,
    job,
    logits_of_transformers,
    loss_of_transformers,
    write_folder,
)
from tests.model.hugging_face import KINDS

TOLERANCE = 1e-5
# Each layout by itself with each kind; of the combinations, one with positions of its own and one without.
ALONE = ("one", "tp2", "dp2 zero3", "pp2", "dualpipev2", "sp2")
COMBINED = ("dp2 zero2", "tp2 zero3", "tp2 sp2 zero2", "pp2 tp2 zero1")


def divided(layout: str) -> set[str]:
    """What divides the weights: by this some layouts are chosen that always run."""
    found = find(layout)
    stages = [found.schedule] if found.pipeline > 1 else []
    return {*stages, *(["tensor"] if found.tensor > 1 else []), *(["zero 3"] if found.zero == 3 else [])}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind."""
    base = tmp_path_factory.mktemp("folders")
    return {kind: write_folder(base / kind, kind) for kind in KINDS}


def start_and_save(jobs: list[Job], fault: Callable[[], None] | None = None) -> list[float]:
    """For each job: begin with its folder's weights, save them, take a step. Returns the steps' losses."""
    if fault is not None:
        fault()
    start_distributed("cpu", 0, TIMEOUT)
    parallel = Parallel.create(jobs[0].mesh, TIMEOUT)
    losses = []
    for each in jobs:
        weights = FolderWeights(each.initial_weights.folder, each.model)
        engine = build_engine(each, parallel, weights)
        save_checkpoint(engine, each, TrainState())
        losses.append(first_loss(engine))
    return losses


def check(layout: str, kinds: tuple[str, ...], folders: dict[str, Path], tmp_path: Path) -> None:
    jobs = {kind: job(tmp_path, folders[kind], layout, output_dir=str(tmp_path / kind)) for kind in kinds}
    losses = run_ranks(start_and_save, find(layout).ranks, list(jobs.values()))
    for index, kind in enumerate(kinds):
        assert [rank[index] for rank in losses] == pytest.approx(
            [loss_of_transformers(folders[kind])] * len(losses), rel=TOLERANCE
        ), kind
        out = tmp_path / f"{kind} out"
        tokenizer = ("--tokenizer", "bytes")  # which a run saves, and these did not run
        assert export([str(tmp_path / kind), str(out), "--max_shard_size", "40KB", *tokenizer]) == 0
        expected = logits_of_transformers(folders[kind], TOKENS)
        assert torch.equal(logits_of_transformers(out, TOKENS), expected), kind


@pytest.mark.parametrize("layout", slow((), ALONE, divided))
def test_every_kind_in_and_out(layout: str, folders: dict[str, Path], tmp_path: Path):
    check(layout, KINDS, folders, tmp_path)


@pytest.mark.parametrize("layout", slow((), COMBINED, divided))
def test_in_and_out_of_combined_layouts(layout: str, folders: dict[str, Path], tmp_path: Path):
    check(layout, ("gpt2", "qwen2"), folders, tmp_path)


@pytest.mark.slow
def test_in_and_out_of_all_four_at_once(folders: dict[str, Path], tmp_path: Path):
    check("pp2 dp2 sp2 tp2 zero1", ("llama",), folders, tmp_path)


# What a rank reads and holds ---------------------------------------------------------------------------


def reads(jobs: list[Job]) -> list[tuple[int, int, int]]:
    """For each job: elements read, most elements held at a time, elements of the largest parameter's part."""
    start_distributed("cpu", 0, TIMEOUT)
    parallel = Parallel.create(jobs[0].mesh, TIMEOUT)
    return [_reads(each, parallel) for each in jobs]


def _reads(job: Job, parallel: Parallel) -> tuple[int, int, int]:
    count, largest, most = 0, 0, 0
    alive: list[Any] = []

    class Watched(FolderWeights):
        def _read(self, *arguments: Any) -> np.ndarray:
            nonlocal count
            values = super()._read(*arguments)
            count += values.size
            return values

        def part(self, *arguments: Any) -> torch.Tensor:
            nonlocal most, largest
            tensor = super().part(*arguments)
            largest = max(largest, tensor.numel())
            alive.append((weakref.ref(tensor.untyped_storage()), tensor.numel()))
            most = max(most, sum(numel for reference, numel in alive if reference() is not None))
            return tensor

    build_engine(job, parallel, Watched(job.initial_weights.folder, job.model))
    return count, most, largest


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp2 zero3", "pp2"])
def test_no_rank_holds_the_whole_model(layout: str, folders: dict[str, Path], tmp_path: Path):
    kinds = ("untied gpt2", "llama")
    ranks = run_ranks(reads, 2, [job(tmp_path, folders[kind], layout) for kind in kinds])
    for kind, found in zip(kinds, zip(*ranks, strict=True), strict=True):
        total = sum(values.numel() for values in _state(folders[kind]).values())
        counts = [count for count, _, _ in found]
        if layout == "dp2 zero3":  # one layer's weight and bias, then they are divided
            # A thread that has just sent a smaller one may still hold it.
            assert all(most <= 1.4 * largest < total / 3 for _, most, largest in found)
        else:  # tensor ranks both have the norms
            assert total <= sum(counts) < 1.05 * total
            assert max(counts) < 0.65 * total
            # What stays is counted as held, so that the line above for ZeRO 3 says something.
            assert all(most >= count for count, most, _ in found)


def _state(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


# That these tests can fail -----------------------------------------------------------------------------


def exchange_two_of_q_k_v() -> None:
    """q and k where they have as many rows, else k and v."""
    init = Entry.__init__

    def exchanged(self: Entry, name: str, blocks: tuple[Block, ...], *arguments: Any, **more: Any) -> None:
        if name.endswith("qkv.weight"):
            q, k, v = blocks
            blocks = (k, q, v) if q.rows == k.rows else (q, v, k)
        init(self, name, blocks, *arguments, **more)

    Entry.__init__ = exchanged  # type: ignore[method-assign]


def forget_to_transpose() -> None:
    """Of the square ones, which fit either way."""
    read = FolderWeights._read

    def as_stored(self: FolderWeights, block: Any, entry: Entry, *where: Any) -> np.ndarray:
        values = read(self, block, entry, *where)
        square = entry.transposed and values.shape[0] == values.shape[1]
        return values.T if square else values

    FolderWeights._read = as_stored  # type: ignore[method-assign]


def take_the_other_slice() -> None:
    part = FolderWeights.part
    FolderWeights.part = lambda self, name, slicing, parts, index: part(self, name, slicing, parts, 1 - index)  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "layout"),
    [
        (exchange_two_of_q_k_v, "gpt2", "one"),
        (exchange_two_of_q_k_v, "llama", "one"),
        (forget_to_transpose, "gpt2", "one"),
        (take_the_other_slice, "qwen2", "tp2"),
    ],
    ids=lambda value: value.__name__ if callable(value) else value,
)
def test_the_loss_sees_a_wrong_weight(
    fault: Callable[[], None], kind: str, layout: str, folders: dict[str, Path], tmp_path: Path
):
    wrong = run_ranks(start_and_save, find(layout).ranks, [job(tmp_path, folders[kind], layout)], fault)
    right = loss_of_transformers(folders[kind])
    assert all(abs(loss - right) > 10 * TOLERANCE * right for (loss,) in wrong), (wrong, right)
