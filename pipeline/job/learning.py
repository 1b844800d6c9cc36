"""Optimizer and learning-rate schedule of a run, from the JSON and the model's usual values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.base.problems import Problem
from pipeline.job.facts import Facts, known
from pipeline.job.job import Batch, OptimizerConfig, Resolved
from pipeline.job.model_presets import TrainingDefaults
from pipeline.job.scheduler_block import build_schedule
from pipeline.job.schedules import LearningRate
from pipeline.job.settings import Undecided
from pipeline.job.validate import AUTO

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
    lr = facts.config.get("optimizer.params.lr", AUTO)
    facts.config.get("scheduler.type")  # undecided if it was refused already
    betas = facts.config.get("optimizer.params.betas", AUTO)
    if betas != AUTO and len(betas) != 2:
        raise Undecided("optimizer.params.betas")
    result = build_schedule(
        facts.config.get("scheduler"),
        optimizer_lr=None if lr == AUTO else lr,
        train_steps=train_steps or ENDLESS,
        defaults=facts.defaults,
        where=facts.config.where,
    )
    schedule = result.schedule
    if train_steps is None or schedule is None or (facts.optimizer == "SGD" and lr == AUTO):
        errors = tuple(problem for problem in result.problems if problem.severity == "error")
        return Learning(None, None, (), errors)
    notes = list(result.resolved)
    schedule = _scaled(facts, schedule, batch, notes)
    optimizer = _optimizer(facts, schedule.peak, notes)
    note = Resolved("optimizer.params.lr", facts.defaults.learning_rate, USUAL) if facts.defaults else None
    if lr == AUTO and note is not None and note not in notes:
        notes.insert(0, note)
    return Learning(schedule, optimizer, tuple(notes), result.problems)


def _scaled(facts: Facts, schedule: LearningRate, batch: Batch | None, notes: list[Resolved]) -> LearningRate:
    """The schedule with every rate times (train batch / base batch), to the power 1 (Goyal et al. 2017,
    section 2.1) or 1/2 (Malladi et al. 2022, for Adam)."""
    rule = facts.config.get("lr_scaling.rule", "none")
    base = facts.config.get("lr_scaling.base_batch_size")
    if rule == "none" or base is None:
        return schedule
    train = known(batch).train_batch_size
    factor = (train / base) ** (1.0 if rule == "linear" else 0.5)
    scaled = schedule.scaled(factor)
    shown = f"{train} / {base}" if rule == "linear" else f"sqrt({train} / {base})"
    notes.append(Resolved("peak learning rate", scaled.peak, f"lr_scaling: {schedule.peak:g} * {shown}"))
    return scaled


def _optimizer(facts: Facts, peak: float, notes: list[Resolved]) -> OptimizerConfig:
    params: dict[str, Any] = facts.config.get("optimizer.params", {})
    kind = facts.optimizer
    if facts.config.get("optimizer.type") is None:
        notes.append(Resolved("optimizer.type", kind, "default"))
    usual = facts.defaults
    if kind == "SGD":
        return OptimizerConfig(
            type="SGD",
            lr=peak,
            weight_decay=_or_usual("weight_decay", params, 0.0, "default for SGD", notes),
            momentum=params.get("momentum", 0.0),
            nesterov=params.get("nesterov", False),
            fused=params.get("fused", True),
        )
    decoupled = kind == "AdamW" or params.get("adam_w_mode", True)
    reason = USUAL if usual else "usual for GPTs"
    betas = _or_usual("betas", params, usual.betas if usual else TrainingDefaults.betas, reason, notes)
    decay = usual.weight_decay if usual else TrainingDefaults.weight_decay
    return OptimizerConfig(
        type="AdamW" if decoupled else "Adam",
        lr=peak,
        betas=(float(betas[0]), float(betas[1])),
        eps=_or_usual("eps", params, 1e-8, "default", notes),
        weight_decay=_or_usual("weight_decay", params, decay, reason, notes),
        fused=params.get("fused", True),
    )


def _or_usual(name: str, params: dict[str, Any], usual: Any, reason: str, notes: list[Resolved]) -> Any:
    """A parameter as given; where it is absent or "auto" the usual value, which is noted."""
    if params.get(name, AUTO) != AUTO:
        return params[name]
    notes.append(Resolved(f"optimizer.params.{name}", usual, reason))
    return usual
