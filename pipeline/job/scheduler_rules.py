"""Rules between the parameters of one learning-rate schedule, and between them and the run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from pipeline.base.problems import Problem

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
    for name in ("warmup_min_lr", "min_lr"):
        peak = values.get("warmup_max_lr")
        if peak is not None and values.get(name, 0) > peak:
            yield name, f"exceeds the peak {peak:g}", "Lower it", "error"


def _phases_fit(values: Values) -> Iterator[Finding]:
    """Warm-up and a decay at the end must fit into total_num_steps."""
    total = values.get("total_num_steps")
    if total is None:
        return
    warmup = values["warmup_num_steps"]
    decay = values.get("decay_num_steps", 0)
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
