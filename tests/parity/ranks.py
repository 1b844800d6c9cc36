"""What each rank of a case does: train, and hand out the slices of the weights that it holds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from pipeline.checkpoints.copies import CopiesDiffer, CopyCheck
from pipeline.engine.build import build_engine
from pipeline.engine.distributed import start_distributed
from pipeline.engine.engine import StepResult, TrainEngine
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from pipeline.parallel.mesh import Coordinates
from pipeline.parallel.parameters import slicing_of
from tests.parity.batches import global_batches, micro_batches
from tests.parity.cases import SCALINGS, STEPS, Case

TIMEOUT = timedelta(seconds=60)
LOGITS_AT = (0, 5, 13)
# A batch whose mask leaves something in every row.
PARTIAL = 2


class Slice(NamedTuple):
    """A rank's part of a parameter: how it is sliced over tensor ranks, and the values, fp32."""

    full_shape: tuple[int, ...]
    dim: int | None
    values: Tensor


@dataclass
class RankRun:
    """What one rank saw.

    Attributes:
        steps: The engine's results.
        weights: Slices of the fp32 weights by name: before training, after the first step, after the last.
        copies: Digest of the weights that the next forward pass would use, by name.
        differ: What the run itself would say of copies that differ.
        eval_losses: After training: of the last batch, and of the first micro-batch of batch `PARTIAL` alone.
        logits: At each of `LOGITS_AT`, after training.
        scales: fp16's loss scale after each step.
        calls: How often the mutation, if there is one, was executed.
    """

    coordinates: Coordinates
    steps: list[StepResult] = field(default_factory=list)
    weights: list[dict[str, Slice]] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    differ: str = ""
    eval_losses: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    calls: int = 0


class Calls:
    """Counts how often the patched code runs."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


Mutation = Callable[[Calls], None]


def train_rank(case: Case, job: Job, mutate: Mutation | None = None) -> RankRun:
    """Train `STEPS` steps of `case`. Runs in a forked rank, so that a mutation's patches end with it."""
    calls = Calls()
    if mutate is not None:
        mutate(calls)
    start_distributed("cpu", 0, TIMEOUT)
    if fp16 := case.precision == "fp16":
        allow_fp16()
    injected = SCALINGS[case.scaling].overflows if fp16 else ()
    parallel = Parallel.create(job.mesh, TIMEOUT)
    engine = build_engine(job, parallel)
    run = RankRun(parallel.coordinates, weights=[slices(engine)])
    for step in range(STEPS):
        share = micro_batches(case, step, parallel.coordinates.data)
        overflows = parallel.rank == case.world_size - 1 and step in injected
        with _overflow(engine) if overflows else nullcontext():
            run.steps.append(engine.train_step(share, _num_tokens(case, step)))
        if fp16:
            run.scales.append(engine.deepspeed.optimizer.loss_scale)
        if step in (0, STEPS - 1):
            run.weights.append(slices(engine))
    run.copies = _copies(engine)
    try:
        CopyCheck(engine).before_save(STEPS)
    except CopiesDiffer as error:
        run.differ = str(error)
    part = micro_batches(case, PARTIAL, parallel.coordinates.data)[:1]
    run.eval_losses = [
        engine.eval_step(share, _num_tokens(case, STEPS - 1)),
        engine.eval_step(part, _num_tokens(case, PARTIAL, case.micro_batch * case.data)),
    ]
    run.logits = _logits(engine, case)
    run.calls = calls.count
    return run


def allow_fp16() -> None:
    """DeepSpeed keeps CPUs from what they can do slowly."""
    type(get_accelerator()).is_fp16_supported = lambda _: True


@contextmanager
def _overflow(engine: TrainEngine) -> Iterator[None]:
    """The gradient is infinite of one weight that all tensor peers of this rank hold, on this rank alone."""
    slicings = ((each, slicing_of(each)) for each in engine.module.parameters())
    norm = next(each for each, (shape, dim) in slicings if len(shape) == 1 and dim is None)
    handle = norm.register_hook(lambda gradient: gradient * math.inf)
    yield
    handle.remove()


def _num_tokens(case: Case, step: int, rows: int | None = None) -> int:
    return int(global_batches(case.batch).mask[step, :rows].sum())


def _logits(engine: TrainEngine, case: Case) -> list[Tensor]:
    rows = global_batches(case.batch).tokens[-1, : case.micro_batch]
    return [engine.next_token_logits(rows, position).clone() for position in LOGITS_AT]


def slices(engine: TrainEngine) -> dict[str, Slice]:
    """This rank's slice of each fp32 weight; ZeRO's shards are put together. Collective."""
    return {name: _slice(engine, parameter) for name, parameter in engine.module.named_parameters()}


def _slice(engine: TrainEngine, parameter: nn.Parameter) -> Slice:
    plain = engine.job.zero_stage == 0
    values = master_of(engine, parameter) if plain else safe_get_full_fp32_param(parameter).detach()
    slicing = slicing_of(parameter)
    shape = list(slicing.full_shape)
    if slicing.dim is not None:
        shape[slicing.dim] //= engine.parallel.mesh.tensor
    return Slice(slicing.full_shape, slicing.dim, values.float().reshape(shape).clone())


def master_of(engine: TrainEngine, parameter: nn.Parameter) -> Tensor:
    """Without ZeRO: the fp32 master of a 16-bit weight, where it is one tensor; else the weight."""
    optimizer = engine.deepspeed.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
        return next(master for weight, master in pairs if weight is parameter).detach()
    return parameter.detach()


def _copies(engine: TrainEngine) -> dict[str, str]:
    """A digest of each weight as the forward pass would read it. Collective under ZeRO-3."""
    digests = {}
    for name, parameter in engine.module.named_parameters():
        whole = (
            deepspeed.zero.GatheredParameters([parameter]) if engine.job.zero_stage == 3 else nullcontext()
        )
        with whole:
            raw = parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
            digests[name] = hashlib.blake2b(raw, digest_size=8).hexdigest()
    return digests
