"""The scheduler block: what it builds, what "auto" becomes, what it refuses."""

import dataclasses

import pytest

from pipeline.job.learning import build_schedule, usual_warmup
from pipeline.job.models import PRESETS
from pipeline.job.schedules import (
    SCHEDULES,
    WSD,
    ConstantLR,
    OneCycle,
    WarmupCosineLR,
    WarmupLR,
    parameters,
)
from pipeline.job.schema import Scheduler

DEFAULTS = dataclasses.replace(PRESETS["tiny"].training, learning_rate=5e-3, warmup_steps=100)


def _build(kind=None, params=None, *, lr=None, steps=1000, defaults=DEFAULTS):
    block = None if kind is None else Scheduler(kind, params or {})
    return build_schedule(block, optimizer_lr=lr, train_steps=steps, defaults=defaults)


def _resolved(result):
    return {entry.key.rpartition(".")[2]: entry.value for entry in result.resolved}


def test_no_block_is_the_constant_rate():
    assert _build(lr=1e-3).schedule == ConstantLR(1e-3)
    result = _build()
    assert result.schedule == ConstantLR(5e-3)
    assert _resolved(result) == {"lr": 5e-3}


def test_no_rate_anywhere_is_a_problem():
    result = _build(defaults=None)
    assert result.schedule is None
    assert [problem.key for problem in result.problems] == ["optimizer.params.lr"]
    assert _build("WarmupLR", defaults=None).schedule is None
    assert _build("WarmupCosineLR", {"total_num_steps": 1000}, defaults=None).schedule is None


def test_a_full_block_is_taken_as_written():
    params = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 1e2, "warmup_type": "linear"}
    result = _build("WarmupLR", params, lr=1e-3)
    assert result.schedule == WarmupLR(1e-3, 100, 1e-5, "linear")
    assert isinstance(result.schedule.warmup_num_steps, int)
    assert (result.resolved, result.problems) == ((), ())


def test_deepspeeds_defaults():
    schedule = _build("WarmupCosineLR", {"total_num_steps": 4000}, lr=1e-3, steps=4000).schedule
    assert schedule == WarmupCosineLR(1e-3, 4000, 1000, 0.0, 0.0001, "log")
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
    assert _build("OneCycle", params).schedule == OneCycle(1e-4, 1e-3, 2000, 2000)
    params |= {"cycle_first_step_size": 50, "cycle_first_stair_count": 5, "cycle_momentum": False}
    assert _build("OneCycle", params).schedule == OneCycle(1e-4, 1e-3, 50, 50, 5, 5)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
def test_every_auto_together_makes_a_schedule_for_any_length(kind, steps):
    params = {name: "auto" for name, parameter in parameters(kind).items() if parameter.auto}
    params |= {"cycle_min_lr": 1e-4} if kind == "OneCycle" else {"warmup_num_steps": "auto"}
    result = _build(kind, params, steps=steps)
    assert result.problems == ()
    assert result.schedule.peak == 5e-3
    assert all(result.schedule(step) > 0 for step in range(1, steps + 1))
    assert set(params) <= set(_resolved(result)) | {"cycle_min_lr"}


def test_auto_values():
    params = {"warmup_num_steps": "auto", "decay_num_steps": "auto", "total_num_steps": "auto"}
    result = _build("WSD", params)
    assert result.schedule == WSD(5e-3, 100, 200, 1000)
    params = {"warmup_num_steps": 100, "decay_num_steps": "auto", "min_lr": "auto"}
    schedule = _build("CosineWithFloor", params, lr=1e-3).schedule
    assert (schedule.decay_num_steps, schedule.min_lr) == (900, 1e-4)


def test_usual_warmup_is_the_models_but_at_most_a_tenth_of_the_run():
    assert usual_warmup(1000, DEFAULTS)[0] == 100
    assert usual_warmup(500, DEFAULTS)[0] == 50
    assert usual_warmup(5, DEFAULTS)[0] == 0
    assert usual_warmup(2000, None)[0] == 200


WARMUP = {"warmup_num_steps": 10}
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 100}

# (type, params, key of the problem, part of its text)
REFUSED = [
    ("WarmupLR", {"warmup_steps": 10}, "warmup_steps", "warmup_num_steps"),
    ("WarmupLR", {"last_batch_iteration": 3}, "last_batch_iteration", "checkpoint"),
    ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps", "at least 0"),
    ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps", "whole number"),
    ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps", "must be a whole number, not true"),
    ("WarmupLR", {"warmup_max_lr": 0}, "warmup_max_lr", "above 0"),
    ("WarmupLR", {"warmup_max_lr": "1e-3"}, "warmup_max_lr", "must be a number"),
    ("WarmupLR", {"warmup_min_lr": -1e-3}, "warmup_min_lr", "at least 0"),
    ("WarmupLR", {"warmup_min_lr": 1.0}, "warmup_min_lr", "exceeds the peak"),
    ("WarmupLR", {"warmup_type": "cosine"}, "warmup_type", "one of log, linear"),
    ("WarmupLR", {"warmup_type": "auto"}, "warmup_type", "one of log, linear"),
    ("WarmupDecayLR", {}, "total_num_steps", "was not given"),
    ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps", "at least 1"),
    ("WarmupDecayLR", {"total_num_steps": 9, **WARMUP}, "total_num_steps", "warm-up of 10 steps"),
    (
        "WarmupCosineLR",
        {"total_num_steps": 1000, "warmup_max_lr": 1.0},
        "warmup_max_lr",
        "optimizer.params.lr",
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 1000, "cos_min_ratio": 1.1},
        "cos_min_ratio",
        "at least 0 and at most 1",
    ),
    ("OneCycle", {"cycle_max_lr": 1.0}, "cycle_min_lr", "was not given"),
    ("OneCycle", CYCLE | {"cycle_min_lr": 1.0}, "cycle_min_lr", "exceeds cycle_max_lr"),
    ("OneCycle", CYCLE | {"cycle_momentum": True}, "cycle_momentum", 'Set "cycle_momentum" to false'),
    ("OneCycle", CYCLE | {"cycle_min_mom": 0.8}, "cycle_min_mom", "betas stay constant"),
    ("OneCycle", CYCLE | {"decay_lr_rate": 0.1}, "decay_lr_rate", "needs both"),
    ("OneCycle", CYCLE | {"decay_step_size": 10}, "decay_lr_rate", "needs both"),
    ("OneCycle", CYCLE | {"cycle_second_stair_count": 101}, "cycle_second_stair_count", "exceeds the 100"),
    ("OneCycle", CYCLE | {"cycle_min_lr": 0, "cycle_first_stair_count": 2}, "cycle_min_lr", "first stair"),
    ("WSD", WARMUP | {"total_num_steps": 1000}, "decay_num_steps", "was not given"),
    ("WSD", WARMUP | {"total_num_steps": 20, "decay_num_steps": 11}, "total_num_steps", "decay of 11"),
    ("CosineWithFloor", WARMUP | {"decay_num_steps": 9, "min_lr": 1.0}, "min_lr", "exceeds the peak"),
]


@pytest.mark.parametrize(("kind", "params", "key", "text"), REFUSED)
def test_refusals(kind, params, key, text):
    block = Scheduler(kind, params)
    result = build_schedule(block, optimizer_lr=None, train_steps=1000, defaults=DEFAULTS)
    assert result.schedule is None
    errors = [problem for problem in result.problems if problem.severity == "error"]
    assert [problem.key.rpartition(".")[2] for problem in errors] == [key.rpartition(".")[2]]
    assert text in str(errors[0])


def test_all_problems_are_reported_together():
    params = {"warmup_num_step": 1, "warmup_max_lr": -1, "warmup_type": "x", "total_num_steps": None}
    problems = _build("WarmupDecayLR", params).problems
    assert len(problems) == 4


def test_of_two_peaks_the_schedules_counts_as_in_deepspeed():
    params = {"warmup_max_lr": 1e-3}
    assert _build("WarmupLR", params, lr=1e-3).schedule.peak == 1e-3
    assert _build("WarmupLR", params).schedule.peak == 1e-3
    built = _build("WarmupLR", params | WARMUP, lr=2e-3)
    assert built.schedule.peak == 1e-3
    (note,) = built.problems
    assert note.severity == "note" and "optimizer.params.lr = 0.002 is not used" in note.rule


WARNED = [
    ("WarmupLR", {"warmup_num_steps": 1001}, "warmup_num_steps", "never reached"),
    ("WarmupDecayLR", {"total_num_steps": 900, **WARMUP}, "total_num_steps", "the run has 1000 steps"),
    ("CosineWithFloor", WARMUP | {"decay_num_steps": 991, "min_lr": 0}, "decay_num_steps", "at step 1001"),
    ("OneCycle", CYCLE | {"cycle_min_lr": 0}, "cycle_min_lr", "no step from 200 to 1000 trains"),
]


@pytest.mark.parametrize(("kind", "params", "key", "text"), WARNED)
def test_warnings_leave_the_schedule(kind, params, key, text):
    result = _build(kind, params)
    assert result.schedule is not None
    (problem,) = result.problems
    assert problem.severity == "warning"
    assert problem.key == f"scheduler.params.{key}"
    assert text in problem.rule


def test_problems_carry_the_place_in_the_file():
    block = Scheduler("WarmupLR", {"warmup_type": "x"})
    result = build_schedule(
        block, optimizer_lr=None, train_steps=10, defaults=DEFAULTS, where=lambda key: f"{key} (f.json:3)"
    )
    assert result.problems[0].key == "scheduler.params.warmup_type (f.json:3)"


def test_the_parameter_table_describes_the_schedules():
    for name, schedule in SCHEDULES.items():
        fields = {field.name for field in dataclasses.fields(schedule)}
        assert fields - {"lr"} == set(parameters(name))
        assert all(parameter.meaning.endswith(".") for parameter in parameters(name).values())
