"""Layouts under document masks: each trains as one process does that runs every document alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.data.loader import MicroBatch
from pipeline.engine.build import build_engine
from pipeline.engine.distributed import start_distributed
from pipeline.engine.engine import TrainEngine
from pipeline.job.job import Job
from pipeline.model.gpt import SequentialGPT, plan_layers
from pipeline.parallel import documents as documents_module
from pipeline.parallel.context import Parallel
from pipeline.parallel.documents import DocumentReader, PassDocuments
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import ParameterFactory
from tests.covering import slow
from tests.harness import run_ranks
from tests.parity import compare, ranks
from tests.parity.batches import global_batches
from tests.parity.cases import SEED, SEQUENCE, STEPS, Case
from tests.parity.compare import TOLERANCE, Difference, Oracle, differences, replica_differences
from tests.parity.layouts import ALL_ON_CPU, CLIP
from tests.parity.ranks import LOGITS_AT, TIMEOUT, Calls, RankRun, train_rank

plain_micro_batches = ranks.micro_batches

LAYOUTS = (
    Case(accumulation=2),
    Case(model="llama", accumulation=2, recompute="full"),
    Case(data=2, zero=3, accumulation=2),
    Case(tensor=2, model="qk norm", recompute="selective"),
    Case(sequence=2, accumulation=2, **CLIP),
    Case(sequence=2, zero=1, model="llama"),
    Case(pipeline=2, accumulation=4, **CLIP),
    Case(pipeline=2, accumulation=4, schedule="dualpipev"),
    Case(data=2, zero=2, model="dropout", accumulation=2),
    *(Case(data=2, zero=stage, model="qwen", accumulation=2, **CLIP) for stage in (0, 1, 2)),
    Case(data=2, zero=3, zero_options=ALL_ON_CPU, model="llama", recompute="full", accumulation=2),
    Case(data=3, batch=12, accumulation=2),
    Case(tensor=4, model="five layers", **CLIP),
    Case(sequence=4, model="llama", **CLIP),  # two copies of each kv head
    Case(sequence=4, zero=3, recompute="selective"),
    Case(sequence=8, zero=2, model="llama", recompute="full"),
    Case(data=2, sequence=2, tensor=2, zero=3, model="qk norm", **CLIP),
    Case(pipeline=2, accumulation=1, model="llama"),
    Case(pipeline=4, accumulation=8, model="qwen", **CLIP),
    Case(pipeline=2, accumulation=4, model="llama", recompute="full"),
    Case(pipeline=2, accumulation=4, recompute="selective"),
    Case(pipeline=2, data=2, sequence=2, zero=1, accumulation=2, model="llama", **CLIP),
    Case(pipeline=2, sequence=2, tensor=2, zero=1, accumulation=4, model="five layers", **CLIP),
    Case(pipeline=3, accumulation=8, schedule="dualpipev", model="seven layers", **CLIP),
    Case(pipeline=2, accumulation=8, schedule="dualpipev", model="llama", recompute="full"),
    Case(pipeline=2, sequence=2, accumulation=4, schedule="dualpipev", model="qwen", recompute="selective"),
    Case(sequence=2, model="dropout", recompute="full"),
    Case(tensor=2, zero=3, model="dropout", recompute="selective", accumulation=2),
    Case(pipeline=2, accumulation=4, model="dropout", recompute="full", **CLIP),
    Case(pipeline=2, sequence=2, accumulation=4, schedule="dualpipev", model="dropout"),
)


def what_masks_meet(case: Case) -> set[tuple[Hashable, ...]]:
    """By this some of `LAYOUTS` are chosen that always run; the rest are repeats."""
    sliced = case.sequence > 1  # a document may then cross the border of two ranks
    return {
        ("pipelined", case.pipeline > 1, case.schedule, sliced),
        ("tensor", case.tensor > 1),
        *((name, getattr(case, name)) for name in ("model", "zero", "recompute")),
    }


# A document of 6 tokens in rows of 16: the lengths of the documents before and after it.
DOCUMENT = 6
NEIGHBOURS = (((), (10,)), ((10,), ()), ((3, 2), (5,)), ((1, 1, 4), (1, 3)))


@cache
def global_documents(rows: int) -> Tensor:
    """Document numbers, [steps, rows, sequence]: other edges in each row and step.

    A document ends after one token in four. Rows 1 and 2 of each step are one document, and one for each
    token. So documents cross, begin and end at the borders of sequence slices.
    """
    generator = torch.Generator().manual_seed(77)
    edges = torch.rand((STEPS, rows, SEQUENCE), generator=generator) < 0.25
    edges[:, 1], edges[:, 2] = False, True
    edges[..., 0] = False
    return edges.cumsum(-1)


def documents_of(tokens: Tensor, rows: int) -> Tensor:
    """The documents of rows of the batches, found by their tokens, which differ between all rows."""
    every = zip(global_batches(rows).tokens.flatten(0, 1), global_documents(rows).flatten(0, 1), strict=True)
    known = {tuple(row.tolist()): documents for row, documents in every}
    return torch.stack([known[tuple(row.tolist())] for row in tokens])


class AloneGPT(SequentialGPT):
    """The model on one device; runs each document of a batch by itself, and knows of no mask."""

    def __init__(self, case: Case) -> None:
        factory = ParameterFactory(SEED, Parallel.single())
        super().__init__(plan_layers(case.config, factory, DropoutClock(SEED, case.batch), "none"))
        self.rows = case.batch

    def forward(self, tokens: Tensor) -> Tensor:
        documents = documents_of(tokens, self.rows)
        return torch.stack([self._row(*each) for each in zip(tokens, documents, strict=True)])

    def _row(self, tokens: Tensor, documents: Tensor) -> Tensor:
        lengths = documents.bincount().tolist()
        parts = [super(AloneGPT, self).forward(part[None])[0] for part in tokens.split(lengths)]
        return torch.cat(parts)


class DropoutGPT(SequentialGPT):
    """For models with dropout, which is a function of the place in the batch: the whole batch, masked."""

    def __init__(self, case: Case) -> None:
        self_clock, pass_documents = DropoutClock(SEED, case.batch), PassDocuments()
        factory = ParameterFactory(SEED, Parallel.single())
        super().__init__(plan_layers(case.config, factory, self_clock, "none", pass_documents))
        self.clock, self.pass_documents, self.rows = self_clock, pass_documents, case.batch

    def forward(self, tokens: Tensor) -> Tensor:
        self.pass_documents.set_documents([documents_of(tokens, self.rows)], "cpu")
        self.clock.step += 1
        return super().forward(tokens)


@cache
def masked_oracle(case: Case) -> Oracle:
    """`compare.oracle` with the model above."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "OracleGPT", DropoutGPT if case.config.dropout else AloneGPT)
        return compare._oracle.__wrapped__(case)


def with_documents(case: Case, step: int, data_rank: int) -> list[MicroBatch]:
    """The micro-batches of the other layout tests, with documents."""
    documents = global_documents(case.batch)[step]
    batches = plain_micro_batches(case, step, data_rank)
    return [replace(batch, documents=documents[list(batch.samples)]) for batch in batches]


def logits_with_documents(engine: TrainEngine, case: Case) -> list[Tensor]:
    size = case.micro_batch
    rows, documents = global_batches(case.batch).tokens[-1, :size], global_documents(case.batch)[-1, :size]
    return [engine.next_token_logits(rows, position, documents).clone() for position in LOGITS_AT]


def use_documents(calls: Calls, break_it: Callable[[Calls], None] | None = None) -> None:
    """Runs in each rank before it trains."""
    ranks.micro_batches, ranks._logits = with_documents, logits_with_documents
    if break_it is not None:
        break_it(calls)


def train(
    case: Case, folder: Path, break_it: Callable[[Calls], None] | None = None
) -> tuple[list[RankRun], list[Difference]]:
    job = case.job(folder)
    job = replace(job, data=replace(job.data, document_mask=True))
    runs = run_ranks(train_rank, case.world_size, case, job, partial(use_documents, break_it=break_it))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "oracle", masked_oracle)
        return runs, differences(case, runs)


def check(case: Case, folder: Path) -> None:
    runs, found = train(case, folder)
    assert found == []
    assert replica_differences(runs) == []


@pytest.mark.parametrize("case", slow((), LAYOUTS, what_masks_meet), ids=lambda case: case.id)
def test_layout_trains_as_documents_alone(case: Case, tmp_path: Path):
    check(case, tmp_path)


def logits_among_neighbours(case: Case, job: Job) -> list[Tensor]:
    """Logits after the last token of one document, in rows in which other documents surround it."""
    start_distributed("cpu", 0, TIMEOUT)
    engine = build_engine(job, Parallel.create(job.mesh, TIMEOUT))
    document = global_batches(case.batch).tokens[0, 0, :DOCUMENT]
    found = []
    for step, (before, after) in enumerate(NEIGHBOURS):
        lengths = torch.tensor([*before, DOCUMENT, *after])
        documents = torch.arange(len(lengths)).repeat_interleave(lengths).expand(case.micro_batch, SEQUENCE)
        tokens = global_batches(case.batch).tokens[step, : case.micro_batch].clone()
        end = sum(before) + DOCUMENT
        tokens[0, end - DOCUMENT : end] = document
        found.append(engine.next_token_logits(tokens, end - 1, documents))
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case(model="llama"),
        Case(sequence=2, tensor=2, model="llama"),
        Case(pipeline=2, sequence=2, accumulation=4),
        Case(pipeline=2, accumulation=4, schedule="dualpipev", model="qwen"),
    ],
    ids=lambda case: case.id,
)
@torch.no_grad()
def test_logits_do_not_depend_on_neighbours(case: Case, tmp_path: Path):
    factory = ParameterFactory(SEED, Parallel.single())
    model = SequentialGPT(plan_layers(case.config, factory, DropoutClock(SEED, case.batch), "none"))
    document = global_batches(case.batch).tokens[0, :1, :DOCUMENT]
    alone = model(document)[0, -1, : case.config.vocab_size]
    for rank in run_ranks(logits_among_neighbours, case.world_size, case, case.job(tmp_path)):
        for logits in rank:
            assert (logits - alone).norm() <= TOLERANCE["fp32"].other * alone.norm()
        if case.world_size == 1:
            # Among each other: a matrix product of other sizes (the document alone has fewer rows) may round
            # differently, as may another number of threads.
            assert all(torch.equal(logits, rank[0]) for logits in rank)


def first_micro_batch_only(calls: Calls) -> None:
    """Layers do not count: every micro-batch gets the documents of the first."""

    def advance(self: DocumentReader):
        calls()
        return self.pass_documents.layouts[0]

    DocumentReader.advance = advance


def count_recomputation(calls: Calls) -> None:
    """Blocks look up their documents where recomputation repeats it."""
    from pipeline.model.layers import Block

    run, advance = Block._run, DocumentReader.advance

    def wrap(self, x, micro_batch, documents):
        calls()
        layouts = self.documents.pass_documents.layouts
        self.seen = getattr(self, "seen", -1) + 1
        return run(self, x, micro_batch, layouts[self.seen % len(layouts)])

    Block._run, DocumentReader.advance = wrap, advance


def local_positions(calls: Calls) -> None:
    """Every sequence rank takes the first rank's positions."""

    def first_slice(tensor: Tensor, parallel: Parallel) -> Tensor:
        calls()
        return tensor.chunk(parallel.mesh.sequence, dim=1)[0]

    from pipeline.model import layers

    layers.ulysses.sequence_slice = first_slice


def positions_go_on(calls: Calls) -> None:
    """Positions count through the row."""
    make = documents_module.document_layout

    def wrap(documents, device):
        calls()
        layout = make(documents, device)
        return replace(layout, positions=torch.arange(documents.shape[1]).expand(documents.shape))

    documents_module.document_layout = wrap


MUTATIONS = (
    (Case(pipeline=2, accumulation=4, **CLIP), first_micro_batch_only),
    (Case(model="dropout", accumulation=2, recompute="full"), count_recomputation),
    (Case(sequence=2, accumulation=2, **CLIP), local_positions),
    (Case(accumulation=2), positions_go_on),
)


@pytest.mark.slow
@pytest.mark.parametrize("case, mutation", MUTATIONS, ids=lambda each: getattr(each, "__name__", None))
def test_an_error_in_the_code_is_found(case: Case, mutation: Callable[[Calls], None], tmp_path: Path):
    runs, found = train(case, tmp_path, mutation)
    assert min(run.calls for run in runs) > 0
    assert found


@pytest.mark.slow
def test_without_documents_the_masked_reference_is_not_met(tmp_path: Path):
    case = Case()
    runs = run_ranks(train_rank, 1, case, case.job(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "oracle", masked_oracle)
        assert differences(case, runs)


def _train_without_documents(case: Case, job: Job) -> str:
    try:
        train_rank(case, job)
    except ValueError as error:
        return str(error)
    return "trained"


def test_micro_batches_without_documents_are_refused(tmp_path: Path):
    case = Case()
    job = case.job(tmp_path)
    job = replace(job, data=replace(job.data, document_mask=True))
    assert "without documents" in run_ranks(_train_without_documents, 1, case, job)[0]
