"""A case against one process in plain PyTorch: everything that differs by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.model.gpt import SequentialGPT, plan_layers
from pipeline.parallel.context import Parallel
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import ParameterFactory
from tests.parity.batches import global_batches
from tests.parity.cases import SCALINGS, SEED, STEPS, Case
from tests.parity.ranks import LOGITS_AT, PARTIAL, RankRun, Slice
from tests.reference import (
    LossScale,
    MixedRun,
    ReferenceRun,
    token_loss,
    train_mixed_reference,
    train_reference,
)


class Tolerance(NamedTuple):
    """Largest relative difference of losses, and of all else."""

    loss: float
    other: float


# bf16 keeps 8 bits: each activation and its gradient are rounded by up to 2^-9 = 0.2 %.
# fp16 keeps 11, and its oracle rounds, too: what differs is where.
TOLERANCE = {"fp32": Tolerance(1e-5, 1e-5), "bf16": Tolerance(1e-2, 6e-2), "fp16": Tolerance(1e-3, 5e-3)}
# Relative spacing of numbers: what storing a weight may change it by.
SPACING = {"fp32": 2.0**-23, "bf16": 2.0**-7}
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Difference(NamedTuple):
    """One quantity that is not what it must be; `size` is relative, and above `allowed`."""

    what: str
    size: float
    allowed: float


class OracleGPT(SequentialGPT):
    """The model on one device; each forward pass is a step, for dropout's sake."""

    def __init__(self, case: Case) -> None:
        self_clock = DropoutClock(SEED, case.batch)
        factory = ParameterFactory(SEED, Parallel.single())
        super().__init__(plan_layers(case.config, factory, self_clock, "none"))
        self.clock = self_clock

    def forward(self, tokens: Tensor) -> Tensor:
        self.clock.step += 1
        return super().forward(tokens)


class Oracle(NamedTuple):
    """Training as it must go, and the model after it."""

    run: ReferenceRun
    initial: dict[str, Tensor]
    model: OracleGPT

    @torch.no_grad()
    def eval_loss(self, case: Case, step: int, rows: int) -> float:
        """Of the first `rows` of a batch."""
        tokens, labels, mask = (part[step, :rows] for part in global_batches(case.batch))
        return token_loss(self.model.eval()(tokens), labels, mask, case.config.vocab_size).item()

    @torch.no_grad()
    def logits(self, case: Case) -> list[Tensor]:
        """At each of `LOGITS_AT`, for the first row of the last batch."""
        row = global_batches(case.batch).tokens[-1, :1]
        return list(self.model.eval()(row)[0, list(LOGITS_AT), : case.config.vocab_size])


def oracle(case: Case) -> Oracle:
    """The reference of `case`; layouts of the same numbers share it."""
    numbers = ["model", "batch", "clip", "learning_rate", "optimizer", "weight_decay"]
    if case.precision == "fp16":  # bf16 has the fp32 oracle
        numbers += ["precision", "scaling"]
    return _oracle(replace(Case(), **{name: getattr(case, name) for name in numbers}))


@cache
def _oracle(case: Case) -> Oracle:
    model = OracleGPT(case)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    batches = global_batches(case.batch)
    train: Callable[..., ReferenceRun] = train_reference
    if case.precision == "fp16":
        block, overflows = SCALINGS[case.scaling]
        train = partial(train_mixed_reference, scale=_loss_scale(block), overflows=overflows)
    run = train(
        lambda: model,
        *batches,
        learning_rate=case.learning_rate,
        gradient_clipping=case.clip,
        vocab_size=case.config.vocab_size,
        optimizer=None if case.optimizer == "SGD" else partial(_torch_optimizer, case),
    )
    return Oracle(run, initial, model)


def _loss_scale(block: Mapping[str, Any]) -> LossScale:
    """What the keys of an fp16 block mean, with the defaults of ds_configs/README.md."""
    if "loss_scale" in block:
        return LossScale(block["loss_scale"])
    return LossScale(
        2.0 ** block["initial_scale_power"],
        block.get("loss_scale_window", 1000),
        block["hysteresis"],
        block.get("consecutive_hysteresis", False),
    )


def _torch_optimizer(case: Case, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Weight decay acts on matrices only."""
    matrices = {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": case.weight_decay}
    vectors = {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0}
    if case.optimizer == "momentum":
        return torch.optim.SGD([matrices, vectors], case.learning_rate, momentum=0.9)
    return torch.optim.AdamW([matrices, vectors], case.learning_rate, betas=(0.9, 0.95), eps=1e-3)


def replica_differences(runs: list[RankRun]) -> list[Difference]:
    """Ranks that hold the same slice of the same weight, tied copies included, but not the same bits."""
    differences = []
    seen: dict[tuple, tuple] = {}
    for run in runs:
        for name, part in run.weights[-1].items():
            holder = run.coordinates.tensor if part.dim is not None else 0
            mine = (part.values, run.copies[name])
            values, copy = seen.setdefault((name, holder), mine)
            if copy != mine[1] or not torch.equal(values, part.values):
                differences.append(Difference(f"replica of {name}", _relative(part.values, values), 0.0))
    return differences


def assemble(runs: list[RankRun], moment: int) -> dict[str, Tensor]:
    """Full weights from the ranks' slices; the first holder of each slice speaks for its replicas."""
    held: dict[str, dict[int, Slice]] = {}
    for run in runs:
        for name, part in run.weights[moment].items():
            held.setdefault(name, {}).setdefault(run.coordinates.tensor, part)
    return {name: _whole([parts[rank] for rank in sorted(parts)]) for name, parts in held.items()}


def differences(case: Case, runs: list[RankRun]) -> list[Difference]:
    """Everything in which the ranks' training is not the oracle's.

    Losses, norms: relative. Gradients, weights: the norm of the difference over the norm of the tensor,
    because single elements can be zero in exact arithmetic (the bias of k, without positions). Gradients
    are read from the first update, (w0 - w1) / lr, so that the rounding of w0 and w1 comes on top:
    ``spacing * |w| / lr``. Adam's update does not show the gradient.
    """
    truth, tolerance = oracle(case), TOLERANCE[case.precision]
    # But where bf16 has none that are whole, the weights that are compared are the fp32 masters.
    spacing = SPACING["bf16" if case.precision == "bf16" and not case.zero else "fp32"]
    found = [difference for run in runs for difference in _scalars(case, run, truth, tolerance)]
    initial, first, last = (assemble(runs, moment) for moment in range(3))
    if initial.keys() != truth.initial.keys():
        return [Difference(f"names {sorted(initial.keys() ^ truth.initial.keys())}", math.inf, 0.0)]
    clip = min(1.0, case.clip / (truth.run.grad_norms[0] + 1e-6)) if case.clip else 1.0
    for name, weight in truth.initial.items():
        start = weight.to(FORMATS[case.precision]).float()
        if not torch.equal(initial[name], start):
            found.append(Difference(f"initial {name}", _relative(initial[name], start), 0.0))
        if case.optimizer != "AdamW" and math.isfinite(truth.run.grad_norms[0]):
            gradient = truth.run.gradients[name] * clip
            rounding = spacing * weight.norm().item() / case.learning_rate
            allowed = tolerance.other + rounding / gradient.norm().item()
            found += _beyond(
                f"gradient {name}", (initial[name] - first[name]) / case.learning_rate, gradient, allowed
            )
        found += _beyond(f"weight {name}", last[name], truth.run.weights[name], tolerance.other)
    return found


def _scalars(case: Case, run: RankRun, truth: Oracle, tolerance: Tolerance) -> list[Difference]:
    """Losses, norms and logits; each rank reports them all."""
    part = case.micro_batch * case.data
    expected_eval = [truth.eval_loss(case, STEPS - 1, case.batch), truth.eval_loss(case, PARTIAL, part)]
    losses = [step.loss for step in run.steps] + run.eval_losses
    pairs = [
        ("losses by step, then evaluated", losses, [*truth.run.losses, *expected_eval], tolerance.loss),
        ("norms by step", [step.grad_norm for step in run.steps], truth.run.grad_norms, tolerance.other),
    ]
    found = _scaling(run, truth.run) if isinstance(truth.run, MixedRun) else []
    for what, values, expected, allowed in pairs:
        for index, (value, right) in enumerate(zip(values, expected, strict=True)):
            found += _beyond(f"{what}, {index}", torch.tensor(value), torch.tensor(right), allowed)
    for position, logits, right in zip(LOGITS_AT, run.logits, truth.logits(case), strict=True):
        found += _beyond(f"logits at {position}", logits, right, tolerance.other)
    return [Difference(f"rank {tuple(run.coordinates)}: {d.what}", d.size, d.allowed) for d in found]


def _scaling(run: RankRun, truth: MixedRun) -> list[Difference]:
    """Which steps are left out, and the loss scale after each."""
    here = {"skipped": tuple(step.skipped for step in run.steps), "scales": tuple(run.scales)}
    right = {"skipped": truth.skipped, "scales": truth.scales}
    return [] if here == right else [Difference(f"{here}, not {right}", math.inf, 0.0)]


def _beyond(what: str, value: Tensor, expected: Tensor, allowed: float) -> list[Difference]:
    size = _relative(value, expected)
    # Written so that NaN counts as a difference.
    return [] if size <= allowed else [Difference(what, size, allowed)]


def _relative(value: Tensor, expected: Tensor) -> float:
    if torch.equal(value, expected):  # both infinite, where a step is skipped
        return 0.0
    return ((value - expected).norm() / expected.norm()).item()


def _whole(parts: list[Slice]) -> Tensor:
    dim = parts[0].dim
    whole = parts[0].values if dim is None else torch.cat([part.values for part in parts], dim)
    assert whole.shape == parts[0].full_shape
    return whole
