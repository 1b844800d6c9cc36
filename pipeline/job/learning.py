"""Optimizer and learning-rate schedule of a run, from the JSON and the model's usual values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.base.fields import AUTO, Undecided
from pipeline.base.problems import Problem
from pipeline.job.facts import Facts, known
from pipeline.job.job import Batch, OptimizerConfig, Resolved
from pipeline.job.model_presets import TrainingDefaults
from pipeline.job.scheduler import build_schedule
from pipeline.job.schedules import LearningRate
from pipeline.job.schema import KEYS

# Stands in for a run of unknown length: longer than any phase of a schedule.
ENDLESS = 10**12
USUAL = "usual for this model"


@dataclass(frozen=True)
class Learning:
    """Schedule and optimizer; None after an error."""

    schedule: LearningRate | None
    optimizer: OptimizerConfig | None
    resolved: tuple[Resolved, ...]
    problems: tuple[Problem, ...]


def resolve_learning(facts: Facts, train_steps: int | None, batch: Batch | None) -> Learning:
    """Build both. An SGD without a rate of its own is left to its rule.

    Args:
        train_steps: None if the run's length has a problem of its own. The schedule's parameters are
            checked all the same.

    Raises:
        Undecided: a key or the batch that is needed has a problem of its own.
    """
    lr, betas = facts.config.optimizer.params.lr, facts.config.optimizer.params.betas
    if betas != AUTO and len(betas) != 2:
        raise Undecided("optimizer.params.betas")
    result = build_schedule(
        facts.config.scheduler,
        optimizer_lr=None if lr == AUTO else lr,
        train_steps=train_steps or ENDLESS,
        defaults=facts.defaults,
        where=facts.settings.where,
    )
    schedule = result.schedule
    if train_steps is None or schedule is None or (facts.optimizer == "SGD" and lr == AUTO):
        errors = tuple(problem for problem in result.problems if problem.severity == "error")
        return Learning(None, None, (), errors)
    notes = list(result.resolved)
    schedule = _scaled(facts, schedule, batch, notes)
    try:
        optimizer = _optimizer(facts, schedule.peak, notes)
    except Undecided:  # a parameter was refused; the schedule's problems are reported beside it
        optimizer = None
    note = Resolved("optimizer.params.lr", facts.defaults.learning_rate, USUAL) if facts.defaults else None
    if lr == AUTO and note is not None and note not in notes:
        notes.insert(0, note)
    return Learning(schedule, optimizer, tuple(notes), result.problems)


def _scaled(facts: Facts, schedule: LearningRate, batch: Batch | None, notes: list[Resolved]) -> LearningRate:
    """The schedule with every rate times (train batch / base batch), to the power 1 (Goyal et al. 2017,
    section 2.1) or 1/2 (Malladi et al. 2022, for Adam)."""
    rule, base = facts.config.lr_scaling.rule, facts.config.lr_scaling.base_batch_size
    if rule == "none" or base is None:
        return schedule
    train = known(batch).train_batch_size
    factor = (train / base) ** (1.0 if rule == "linear" else 0.5)
    scaled = schedule.scaled(factor)
    shown = f"{train} / {base}" if rule == "linear" else f"sqrt({train} / {base})"
    notes.append(Resolved("peak learning rate", scaled.peak, f"lr_scaling: {schedule.peak:g} * {shown}"))
    return scaled


def _optimizer(facts: Facts, peak: float, notes: list[Resolved]) -> OptimizerConfig:
    params, kind, usual = facts.config.optimizer.params, facts.optimizer, facts.defaults
    if facts.settings.absent("optimizer.type"):
        notes.append(Resolved("optimizer.type", kind, "default"))

    def open_to(name: str, value: Any, reason: str) -> Any:
        """A parameter as given; where it is absent or "auto" the usual value, which is noted."""
        if facts.settings.given(f"optimizer.params.{name}"):
            return getattr(params, name)
        notes.append(Resolved(f"optimizer.params.{name}", value, reason))
        return value

    if kind == "SGD":
        return OptimizerConfig(
            type="SGD",
            lr=peak,
            weight_decay=open_to("weight_decay", 0.0, "default for SGD"),
            momentum=params.momentum,
            nesterov=params.nesterov,
            fused=params.fused,
        )
    decoupled = kind == "AdamW" or params.adam_w_mode
    reason = USUAL if usual else "usual for GPTs"
    training = usual or TrainingDefaults
    betas = open_to("betas", training.betas, reason)
    return OptimizerConfig(
        type="AdamW" if decoupled else "Adam",
        lr=peak,
        betas=(float(betas[0]), float(betas[1])),
        eps=open_to("eps", KEYS["optimizer.params.eps"].default, "default"),
        weight_decay=open_to("weight_decay", training.weight_decay, reason),
        fused=params.fused,
    )
