"""The ``scheduler`` block of the JSON -> a learning-rate schedule, or every reason why not. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from pipeline.base.problems import Problem
from pipeline.base.words import did_you_mean
from pipeline.job.job import Resolved
from pipeline.job.model_presets import TrainingDefaults
from pipeline.job.scheduler_params import PARAMETERS, REFUSED, REFUSED_ANYWHERE, Parameter
from pipeline.job.scheduler_rules import rule_problems
from pipeline.job.schedules import SCHEDULES, ConstantLR, LearningRate

AUTO = "auto"
PEAK_NAMES = ("warmup_max_lr", "cycle_max_lr")


@dataclass(frozen=True)
class ScheduleResult:
    """A schedule, or the errors that prevent one.

    Attributes:
        schedule: None if any problem is an error.
        resolved: Values that were "auto" or left out, and what they became.
        problems: Errors and warnings.
    """

    schedule: LearningRate | None
    resolved: tuple[Resolved, ...]
    problems: tuple[Problem, ...]


def build_schedule(
    block: dict[str, Any] | None,
    *,
    optimizer_lr: float | None,
    train_steps: int,
    defaults: TrainingDefaults | None,
    where: Callable[[str], str] = str,
) -> ScheduleResult:
    """The schedule that the block describes; the constant rate without one.

    Args:
        block: ``{"type": ..., "params": {...}}``; None if the JSON has none.
        optimizer_lr: ``optimizer.params.lr`` if it is a number; None for "auto" or absent.
        train_steps: Length of the run.
        defaults: The model's usual settings, None if it has none.
        where: Dotted key -> what problems call it (file and line).
    """
    builder = _Builder(optimizer_lr, train_steps, defaults, where)
    schedule = builder.constant() if block is None else builder.from_block(block)
    if any(problem.severity == "error" for problem in builder.problems):
        schedule = None
    return ScheduleResult(schedule, tuple(builder.resolved), tuple(builder.problems))


def usual_warmup(train_steps: int, defaults: TrainingDefaults | None) -> tuple[int, str]:
    """Warm-up steps for "auto", and why: the model's, but never more than a tenth of the run."""
    tenth = train_steps // 10
    if defaults is None or defaults.warmup_steps > tenth:
        return tenth, f"a tenth of {train_steps} steps"
    return defaults.warmup_steps, "usual for this model"


@dataclass
class _Builder:
    """Collects values, what they were resolved to, and problems, for one block."""

    optimizer_lr: float | None
    train_steps: int
    defaults: TrainingDefaults | None
    where: Callable[[str], str]
    resolved: list[Resolved] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def constant(self) -> LearningRate | None:
        rate = self.derive("peak", "optimizer.params.lr", {})
        return None if rate is None else ConstantLR(rate)

    def from_block(self, block: dict[str, Any]) -> LearningRate | None:
        kind = block.get("type")
        if kind is None:
            self.refuse("scheduler.type", None, "is required", f"Choose from {', '.join(SCHEDULES)}")
            return None
        if kind not in SCHEDULES:
            self.refuse(
                "scheduler.type", kind, "there is no such schedule", did_you_mean(str(kind), SCHEDULES)
            )
            return None
        values = self.values(kind, block.get("params", {}))
        if values is None:
            return None
        self.problems += rule_problems(kind, values, self.train_steps, self.where)
        values.pop("cycle_momentum", None)
        return SCHEDULES[kind](**values)

    def values(self, kind: str, params: dict[str, Any]) -> dict[str, Any] | None:
        """Every field of the schedule, or None after a problem."""
        before = len(self.problems)
        self.refuse_unknown(kind, params)
        values: dict[str, Any] = {}
        if kind == "WarmupCosineLR":
            values["lr"] = self.derive("peak", "optimizer.params.lr", {})
        for name, parameter in PARAMETERS[kind].items():
            values[name] = self.value(name, parameter, params, values)
        return values if len(self.problems) == before else None

    def refuse_unknown(self, kind: str, params: dict[str, Any]) -> None:
        refused = {**REFUSED.get(kind, {}), **REFUSED_ANYWHERE}
        for name, value in params.items():
            if name in refused:
                self.refuse(f"scheduler.params.{name}", value, *refused[name])
            elif name not in PARAMETERS[kind]:
                rule = f"{kind} has no such parameter"
                self.refuse(f"scheduler.params.{name}", value, rule, did_you_mean(name, PARAMETERS[kind]))

    def value(self, name: str, parameter: Parameter, params: dict[str, Any], known: dict[str, Any]) -> Any:
        """One value: as given, resolved, or the default. A missing or wrong one is a problem and None."""
        key = f"scheduler.params.{name}"
        if name not in params:
            if parameter.absent:
                return self.derive(parameter.absent, key, known)
            if parameter.default is None:
                remedy = 'Give a value, or "auto"' if parameter.auto else "Give a value"
                self.refuse(key, None, "is required and was not given", remedy)
            return parameter.default
        given = params[name]
        if given == AUTO and parameter.auto:
            return self.derive(parameter.auto, key, known)
        rule = wrong(parameter, given)
        if rule:
            remedy = 'Correct the value, or use "auto"' if parameter.auto else "Correct the value"
            self.refuse(key, given, rule, remedy)
            return None
        if name in PEAK_NAMES:
            self.check_agreement(key, given)
        return int(given) if parameter.kind == "steps" else given

    def derive(self, source: str, key: str, known: dict[str, Any]) -> Any:
        """A value that the run defines, noted with its reason. None if what it depends on is missing."""
        if source == "first_half":
            return known[key.rpartition(".")[2].replace("second", "first")]
        value, reason = self.derived(source, known) or (None, "")
        if value is not None and reason != key:
            self.resolved.append(Resolved(key, value, reason))
        return value

    def derived(self, source: str, known: dict[str, Any]) -> tuple[float | int, str] | None:
        if source == "peak":
            return self.peak()
        if source == "zero":
            return 0.0, "warm-up starts from nothing"
        if source == "warmup":
            return usual_warmup(self.train_steps, self.defaults)
        if source == "train_steps":
            return self.train_steps, "length of the run"
        if source == "tenth_of_peak":
            peak = known["warmup_max_lr"]
            return None if peak is None else (peak / 10, "a tenth of the peak")
        return self.decay_steps(source, known["warmup_num_steps"])

    def decay_steps(self, source: str, warmup: int | None) -> tuple[int, str] | None:
        """The whole run after warm-up ("rest"), or a fifth of the run as far as warm-up leaves it."""
        if warmup is None:
            return None
        left, fifth = self.train_steps - warmup, ceil(self.train_steps / 5)
        if source == "fifth" and fifth <= left:
            return fifth, f"a fifth of {self.train_steps} steps"
        return max(1, left), "steps left after warm-up"

    def peak(self) -> tuple[float, str] | None:
        """The optimizer's rate and where it comes from, or a problem."""
        if self.optimizer_lr is not None:
            return self.optimizer_lr, "optimizer.params.lr"
        if self.defaults is not None:
            return self.defaults.learning_rate, "usual for this model"
        rule = "no learning rate is given, and only presets have a usual one"
        self.refuse("optimizer.params.lr", AUTO, rule, "Give a number")
        return None

    def check_agreement(self, key: str, peak: float) -> None:
        if self.optimizer_lr is not None and self.optimizer_lr != peak:
            rule = f"differs from optimizer.params.lr = {self.optimizer_lr:g}, which means the same"
            self.refuse(key, peak, rule, 'Set one of the two to "auto"')

    def refuse(self, key: str, value: object, rule: str, remedy: str) -> None:
        self.problems.append(Problem(self.where(key), value, rule, remedy))


def wrong(parameter: Parameter, value: object) -> str | None:
    """The rule that `value` breaks, if any. Whole floats (1e4) pass as steps."""
    if parameter.kind == "choice":
        # JSON's false is the one choice that is not a word.
        word = str(value).lower() if isinstance(value, bool) else value
        return None if word in parameter.choices else f"must be {' or '.join(parameter.choices)}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "must be a number"
    if parameter.kind == "steps":
        whole = float(value).is_integer() and value >= parameter.low
        return None if whole else f"must be a whole number of at least {parameter.low}"
    if parameter.kind == "ratio":
        return None if 0 <= value <= 1 else "must be from 0 to 1"
    if parameter.above:
        return None if value > 0 else "must be above 0"
    return None if value >= 0 else "must be at least 0"
