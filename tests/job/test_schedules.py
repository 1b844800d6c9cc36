"""Each schedule against rates worked out by hand, and what holds for all of them."""

import json
import math

import pytest

from pipeline.job.schedules import (
    SCHEDULES,
    WSD,
    ConstantLR,
    CosineWithFloor,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

# cos(pi / 4) / 2 = 0.353553; a cosine's quarters are then 1/2 +- that.
HALF_ROOT = math.sqrt(0.5) / 2

# (schedule, rates of steps 1, 2, 3, ...)
TABLE = {
    "constant": (ConstantLR(0.3), [0.3, 0.3, 0.3]),
    "warmup linear": (
        WarmupLR(0.8, 4, warmup_type="linear"),
        [0.2, 0.4, 0.6, 0.8, 0.8, 0.8],
    ),
    "warmup linear from a minimum": (
        WarmupLR(1.0, 4, warmup_min_lr=0.2, warmup_type="linear"),
        [0.4, 0.6, 0.8, 1.0, 1.0],
    ),
    # log(1 + s) / log(1 + 3) = log2(1 + s) / 2
    "warmup log": (WarmupLR(1.0, 3), [0.5, math.log2(3) / 2, 1.0, 1.0]),
    "no warmup": (WarmupLR(1.0, 0), [1.0, 1.0]),
    "one step of warmup": (WarmupLR(1.0, 1), [1.0, 1.0]),
    "decay": (
        WarmupDecayLR(1.2, 7, 2, warmup_type="linear"),
        # 1.2 - 0.2 per step from step 2; 0 would be step 8.
        [0.6, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0],
    ),
    "cosine": (
        WarmupCosineLR(2.0, 6, 2, cos_min_ratio=0.1, warmup_type="linear"),
        # 2 * (0.1 + 0.9 * c), c = (1 + cos(pi * (s - 2) / 4)) / 2
        [1.0, 2.0, 0.2 + 1.8 * (0.5 + HALF_ROOT), 1.1, 0.2 + 1.8 * (0.5 - HALF_ROOT), 0.2, 0.2],
    ),
    "cosine from a minimum": (
        WarmupCosineLR(1.0, 6, 2, warmup_min_ratio=0.5, cos_min_ratio=1.0, warmup_type="linear"),
        [0.75, 1.0, 1.0, 1.0],
    ),
    "cosine to nothing": (
        WarmupCosineLR(1.0, 5, 2, cos_min_ratio=0.0, warmup_type="linear"),
        # arrives at step 6, not at the last one
        [0.5, 1.0, 0.5 + HALF_ROOT, 0.5, 0.5 - HALF_ROOT, 0.0],
    ),
    "cosine with floor": (
        CosineWithFloor(1.0, 2, 4, 0.2),
        [0.5, 1.0, 0.2 + 0.8 * (0.5 + HALF_ROOT), 0.6, 0.2 + 0.8 * (0.5 - HALF_ROOT), 0.2, 0.2, 0.2],
    ),
    "wsd": (
        WSD(1.0, 2, 3, 8),
        # stable to step 5, then quarters; 0 would be step 9
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0],
    ),
    "wsd to a minimum": (WSD(1.0, 2, 2, 6, min_lr=0.4), [0.5, 1.0, 1.0, 1.0, 0.7, 0.4, 0.4]),
    "wsd sqrt": (
        # 1 - sqrt(1/4), 1 - sqrt(2/4), 1 - sqrt(3/4)
        WSD(1.0, 1, 3, 5, decay_type="sqrt"),
        [1.0, 1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0],
    ),
    "one cycle": (
        OneCycle(0.2, 1.0, 4, 2, decay_step_size=2, decay_lr_rate=0.5),
        # up by 0.2, down by 0.4, then 0.2 / (1 + 0.5 * s / 2)
        [0.4, 0.6, 0.8, 1.0, 0.6, 0.2, 0.2 / 1.25, 0.2 / 1.5, 0.2 / 1.75],
    ),
    "one cycle in stairs": (
        OneCycle(0.2, 1.0, 4, 4, cycle_first_stair_count=2, cycle_second_stair_count=4),
        [0.2, 0.6, 0.6, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_rates(name):
    schedule, rates = TABLE[name]
    assert [schedule(step) for step in range(1, len(rates) + 1)] == pytest.approx(rates, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", TABLE)
def test_the_first_step_trains(name):
    assert TABLE[name][0](1) > 0


# 0.1 + (0.3 - 0.1) * 1.0 is not 0.3 in floating point.
EXACT_PEAKS = [
    (WarmupLR(0.3, 7, 0.1), 7),
    (WarmupLR(0.3, 7, 0.1, "linear"), 7),
    (WarmupDecayLR(0.3, 20, 7, 0.1), 7),
    (WarmupCosineLR(0.3, 20, 7, 0.1), 7),
    (CosineWithFloor(0.3, 7, 10, 0.1), 7),
    (WSD(0.3, 7, 3, 20, 0.1), 7),
    (OneCycle(0.1, 0.3, 7, 5), 7),
]


@pytest.mark.parametrize(("schedule", "step"), EXACT_PEAKS, ids=str)
def test_the_peak_is_reached_exactly_and_not_before(schedule, step):
    assert schedule(step) == schedule.peak == 0.3
    assert schedule(step - 1) < 0.3
    assert max(schedule(s) for s in range(1, 40)) == 0.3


def test_decays_end_exactly_at_the_last_step():
    assert WarmupCosineLR(0.3, 20, 7, cos_min_ratio=0.1)(20) == 0.3 * 0.1
    assert CosineWithFloor(0.3, 7, 10, 0.01)(17) == 0.01
    assert WSD(0.3, 7, 3, 20, 0.01)(20) == 0.01


@pytest.mark.parametrize("schedule", [schedule for schedule, _ in TABLE.values()], ids=list(TABLE))
def test_scaling_multiplies_every_rate(schedule):
    scaled = schedule.scaled(2.0)
    assert type(scaled) is type(schedule)
    assert scaled.peak == 2 * schedule.peak
    for step in range(1, 12):
        assert scaled(step) == pytest.approx(2 * schedule(step), rel=1e-12)


@pytest.mark.parametrize("schedule", [schedule for schedule, _ in TABLE.values()], ids=list(TABLE))
def test_a_schedule_survives_json(schedule):
    saved = json.loads(json.dumps(schedule.to_json()))
    kind = ConstantLR if saved["type"] is None else SCHEDULES[saved["type"]]
    assert kind(**saved["params"]) == schedule


def test_a_schedule_describes_itself():
    schedule = WarmupLR(3e-4, 10, warmup_type="linear")
    assert str(schedule) == (
        "WarmupLR(warmup_max_lr=0.0003, warmup_num_steps=10, warmup_min_lr=0, warmup_type=linear)"
    )
    assert str(ConstantLR(0.1)) == "constant(lr=0.1)"


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_deepspeeds_two_idle_steps_are_not_inherited(kind):
    """DeepSpeed's own object gives our rates two steps later (linear), and starts with two zeros."""
    lr_schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    theirs = lr_schedules.WarmupLR(optimizer, 0.0, 1.0, 4, kind)
    used = []
    for _ in range(7):
        used.append(optimizer.param_groups[0]["lr"])
        theirs.step()
    ours = WarmupLR(1.0, 4, warmup_type=kind)
    assert used[:2] == [0.0, 0.0]
    assert ours(1) > 0
    if kind == "linear":
        assert used[2:] == [ours(step) for step in range(1, 6)]
