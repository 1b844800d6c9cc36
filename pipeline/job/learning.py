"""Optimizer and learning-rate schedule of a run, from the JSON and the model's usual values.

The ``scheduler`` block becomes a schedule, or every reason why not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal

from pipeline.base.fields import AUTO, MISSING, Field, Undecided, remedy_for, value_problem, whole
from pipeline.base.problems import Problem
from pipeline.base.words import counted, did_you_mean
from pipeline.job.facts import Facts, known
from pipeline.job.foreign_keys import Foreign, never, only
from pipeline.job.job import Batch, OptimizerConfig, Resolved
from pipeline.job.models import TrainingDefaults
from pipeline.job.schedules import SCHEDULES, ConstantLR, LearningRate, WarmupCosineLR, parameters
from pipeline.job.schema import KEYS, Scheduler

# Where the JSON has none, and in the recipes: linear warm-up and a cosine down to a tenth (Brown et al. 2020,
# appendix B), which is as long as the run (Hoffmann et al. 2022, appendix B).
USUAL_SCHEDULE = Scheduler(
    "WarmupCosineLR",
    {"warmup_num_steps": AUTO, "total_num_steps": AUTO, "warmup_type": "linear", "cos_min_ratio": 0.1},
)
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


def resolve_learning(
    facts: Facts, train_steps: int | None, batch: Batch | None, was_constant: bool = False
) -> Learning:
    """Build both. An SGD without a rate of its own is left to its rule.

    Args:
        train_steps: None if the run's length has a problem of its own. The schedule's parameters are
            checked all the same.
        was_constant: A JSON without a scheduler continues a run that had none: its rate stays constant.

    Raises:
        Undecided: a key or the batch that is needed has a problem of its own.
    """
    lr, betas = facts.config.optimizer.params.lr, facts.config.optimizer.params.betas
    if betas != AUTO and len(betas) != 2:
        raise Undecided("optimizer.params.betas")
    is_absent = facts.settings.absent("scheduler")
    result = build_schedule(
        USUAL_SCHEDULE if is_absent and not was_constant else facts.config.scheduler,
        optimizer_lr=None if lr == AUTO else lr,
        train_steps=train_steps or ENDLESS,
        defaults=facts.defaults,
        where=facts.settings.where,
    )
    schedule = result.schedule
    if train_steps is None or schedule is None or (facts.optimizer == "SGD" and lr == AUTO):
        errors = tuple(problem for problem in result.problems if problem.severity == "error")
        return Learning(None, None, (), errors)
    notes = [*_chosen(schedule, result.resolved)] if is_absent else list(result.resolved)
    schedule = _scaled(facts, schedule, batch, notes)
    try:
        optimizer = _optimizer(facts, schedule.peak, notes)
    except Undecided:  # a parameter was refused; the schedule's problems are reported beside it
        optimizer = None
    note = Resolved("optimizer.params.lr", facts.defaults.learning_rate, USUAL) if facts.defaults else None
    if lr == AUTO and note is not None and note not in notes:
        notes.insert(0, note)
    return Learning(schedule, optimizer, tuple(notes), result.problems)


def _chosen(schedule: LearningRate, resolved: tuple[Resolved, ...]) -> Iterator[Resolved]:
    """What was resolved for a JSON without a scheduler: one note instead of one for each parameter."""
    yield from (note for note in resolved if not note.key.startswith("scheduler."))
    if isinstance(schedule, WarmupCosineLR):
        warmup = f"{counted(schedule.warmup_num_steps, 'step')} of linear warm-up"
        shape = f"{warmup}, half a cosine to a tenth of the peak at the last"
        reason = f'usual for GPTs: {shape}; "scheduler": null is a constant rate'
        yield Resolved("scheduler", str(schedule.type), reason)
    else:
        reason = "as in the checkpoint; a scheduler in the JSON replaces it"
        yield Resolved("scheduler", "a constant rate", reason)


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


PEAK_NAMES = ("warmup_max_lr", "cycle_max_lr")

_MOMENTUM = Foreign(
    "the optimizer's betas stay constant here",
    only(False),
    "the optimizer's betas stay constant here, a cycled momentum is not supported",
    'Set "cycle_momentum" to false',
)
_MOMENTA = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")
_RATIO = "WarmupCosineLR multiplies the optimizer's rate by ratios and has no rate of its own"
_RESUME = "the step comes from the checkpoint"

# Parameters that DeepSpeed's users bring along and that do not act here, by schedule; those of "" in any.
FOREIGN_PARAMETERS: dict[str, dict[str, Foreign]] = {
    "OneCycle": {
        "cycle_momentum": _MOMENTUM,
        # Inert where cycle_momentum is false.
        **dict.fromkeys(_MOMENTA, replace(_MOMENTUM, inert=never)),
    },
    "WarmupCosineLR": {
        "warmup_max_lr": Foreign("", never, _RATIO, "Set optimizer.params.lr instead"),
        "warmup_min_lr": Foreign("", never, _RATIO, "Set warmup_min_ratio instead"),
    },
    "": {"last_batch_iteration": Foreign(_RESUME, only(-1), _RESUME, "Remove it")},
}


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
    block: Scheduler | None,
    *,
    optimizer_lr: float | None,
    train_steps: int,
    defaults: TrainingDefaults | None,
    where: Callable[[str], str] = str,
) -> ScheduleResult:
    """The schedule that the block describes; the constant rate without one.

    Args:
        block: None for the constant rate.
        optimizer_lr: ``optimizer.params.lr`` if it is a number; None for "auto" or absent.
        train_steps: Length of the run.
        defaults: The model's usual settings, None if it has none.
        where: Dotted key -> what problems call it (file and line).

    Raises:
        Undecided: the block's type or its parameters were refused.
    """
    builder = _Builder(optimizer_lr, train_steps, defaults, where)
    schedule = builder.constant() if block is None else builder.from_block(block.type, block.params)
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

    def from_block(self, kind: str, params: dict[str, Any]) -> LearningRate | None:
        values = self.values(kind, params)
        if values is None:
            return None
        self.problems += rule_problems(kind, values, self.train_steps, self.where)
        return SCHEDULES[kind](**values)

    def values(self, kind: str, params: dict[str, Any]) -> dict[str, Any] | None:
        """Every field of the schedule, or None after a problem."""
        before, known = len(self.problems), parameters(kind)
        self.refuse_unknown(kind, params)
        if kind == "OneCycle" and "cycle_momentum" not in params:
            self.resolved.append(Resolved("scheduler.params.cycle_momentum", False, _MOMENTUM.note))
        values: dict[str, Any] = {}
        if kind == "WarmupCosineLR":
            values["lr"] = self.derive("peak", "optimizer.params.lr", {})
        for name, parameter in known.items():
            values[name] = self.value(name, parameter, params, values)
        failed = any(problem.severity == "error" for problem in self.problems[before:])
        return None if failed else values

    def refuse_unknown(self, kind: str, params: dict[str, Any]) -> None:
        foreign, known = {**FOREIGN_PARAMETERS.get(kind, {}), **FOREIGN_PARAMETERS[""]}, parameters(kind)
        if params.get("cycle_momentum") is False:  # then its values say nothing
            foreign |= {name: Foreign(_MOMENTUM.note) for name in foreign.keys() & set(_MOMENTA)}
        for name, value in params.items():
            key = f"scheduler.params.{name}"
            if name in foreign:
                self.problems.append(foreign[name].problem(self.where(key), value))
            elif name not in known:
                self.refuse(key, value, f"{kind} has no such parameter", did_you_mean(name, known))

    def value(self, name: str, parameter: Field, params: dict[str, Any], known: dict[str, Any]) -> Any:
        """One value: as given, resolved, or the default. A missing or wrong one is a problem and None."""
        key, auto = f"scheduler.params.{name}", parameter.details.get("auto")
        if name not in params:
            if absent := parameter.details.get("absent"):
                return self.derive(absent, key, known)
            if parameter.default is MISSING:
                self.refuse(key, None, "is required and was not given", remedy_for(parameter))
                return None
            return parameter.default
        given = whole(parameter, params[name])
        if given == AUTO and auto:
            return self.derive(auto, key, known)
        if problem := value_problem(parameter, given, self.where(key)):
            self.problems.append(problem)
            return None
        if name in PEAK_NAMES:
            self.check_agreement(key, given)
        return given

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
            rule = (
                f"is the peak, as in DeepSpeed, and optimizer.params.lr = {self.optimizer_lr:g} is not used"
            )
            self.problems.append(Problem(self.where(key), peak, rule, "", "note"))

    def refuse(self, key: str, value: object, rule: str, remedy: str) -> None:
        self.problems.append(Problem(self.where(key), value, rule, remedy))


Values = dict[str, Any]
# Parameter, rule, remedy, severity.
Finding = tuple[str, str, str, Literal["error", "warning"]]


def rule_problems(kind: str, values: Values, train_steps: int, where: Callable[[str], str]) -> list[Problem]:
    """What is wrong with values that are each in range by themselves."""
    findings = _one_cycle(values, train_steps) if kind == "OneCycle" else _warmup_family(values, train_steps)
    return [
        Problem(where(f"scheduler.params.{name}"), values[name], rule, remedy, severity)
        for name, rule, remedy, severity in findings
    ]


def _warmup_family(values: Values, train_steps: int) -> Iterator[Finding]:
    yield from _low_below_peak(values)
    yield from _phases_fit(values)
    yield from _ends_with_the_run(values, train_steps)


def _low_below_peak(values: Values) -> Iterator[Finding]:
    for name in {"warmup_min_lr", "min_lr"} & values.keys():
        peak = values["warmup_max_lr"]
        if values[name] > peak:
            yield name, f"exceeds the peak {peak:g}", "Lower it", "error"


def _phases_fit(values: Values) -> Iterator[Finding]:
    """Warm-up and a decay at the end must fit into total_num_steps."""
    total = values.get("total_num_steps")
    if total is None:
        return
    warmup, decay = values["warmup_num_steps"], values.get("decay_num_steps") or 0
    if warmup + decay > total:
        phases = f"warm-up of {warmup} steps" + (f" and decay of {decay}" if decay else "")
        yield "total_num_steps", f"is too short for the {phases}", "Raise it, or shorten the phases", "error"


def _ends_with_the_run(values: Values, train_steps: int) -> Iterator[Finding]:
    """Warnings where the schedule and the run have different lengths."""
    total = values.get("total_num_steps")
    if total is not None and total != train_steps:
        yield "total_num_steps", f"the run has {train_steps} steps", 'Use "auto" to follow the run', "warning"
    elif values["warmup_num_steps"] > train_steps:
        rule = f"the run has only {train_steps} steps, its peak is never reached"
        yield "warmup_num_steps", rule, 'Use "auto" to follow the run', "warning"
    elif "decay_num_steps" in values and total is None:
        end = values["warmup_num_steps"] + values["decay_num_steps"]
        if end > train_steps:
            rule = f"the decay would end at step {end}, the run ends at {train_steps}"
            yield "decay_num_steps", rule, 'Use "auto" to follow the run', "warning"


def _one_cycle(values: Values, train_steps: int) -> Iterator[Finding]:
    low, high = values["cycle_min_lr"], values["cycle_max_lr"]
    if low > high:
        yield "cycle_min_lr", f"exceeds cycle_max_lr = {high:g}", "Lower it", "error"
    yield from _stairs_fit(values)
    if bool(values["decay_lr_rate"]) != bool(values["decay_step_size"]):
        rule = f"and decay_step_size = {values['decay_step_size']}: a decay needs both above 0"
        yield "decay_lr_rate", rule, "Give both, or none", "error"
    cycle = values["cycle_first_step_size"] + values["cycle_second_step_size"]
    if low == 0 and train_steps >= cycle:
        rule = f"no step from {cycle} to {train_steps} trains, their rate is 0"
        yield "cycle_min_lr", rule, "Raise it, or lengthen the cycle beyond the run", "warning"


def _stairs_fit(values: Values) -> Iterator[Finding]:
    for half in ("first", "second"):
        count, steps = values[f"cycle_{half}_stair_count"], values[f"cycle_{half}_step_size"]
        if count > steps:
            yield f"cycle_{half}_stair_count", f"exceeds the {steps} steps of its half", "Lower it", "error"
    if values["cycle_first_stair_count"] and values["cycle_min_lr"] == 0:
        rule = "the first stair would have rate 0, its steps would not train"
        yield "cycle_min_lr", rule, "Raise it, or set cycle_first_stair_count to 0", "error"
