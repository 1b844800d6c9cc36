"""Every parameter that a ``scheduler`` block may hold, per schedule, as data. No torch.

Names and defaults are DeepSpeed's where it has the schedule, with two exceptions: an absent
warmup_max_lr is the optimizer's rate in WarmupDecayLR too (DeepSpeed: 0.001), and momentum is not cycled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How "auto", or an absent value, is found: see `pipeline.job.scheduler_block`.
Source = Literal["peak", "zero", "warmup", "train_steps", "rest", "fifth", "tenth_of_peak", "first_half"]


@dataclass(frozen=True)
class Parameter:
    """One entry of ``scheduler.params``.

    Attributes:
        kind: ``rate`` (learning rate, >= 0), ``ratio`` (0 to 1), ``number`` (>= 0), ``steps``
            (whole number) or ``choice``.
        meaning: What it does.
        default: Value when absent; None: it must be given, or comes from `absent`.
        auto: Where the value "auto" comes from; None: "auto" is refused.
        absent: Where an absent value comes from, if not from `default`.
        low: Least number of steps.
        above: A rate must be greater than 0.
        choices: The words allowed for a choice.
    """

    kind: Literal["rate", "ratio", "number", "steps", "choice"]
    meaning: str
    default: float | int | str | None = None
    auto: Source | None = None
    absent: Source | None = None
    low: int = 0
    above: bool = False
    choices: tuple[str, ...] = ()


_PEAK = Parameter("rate", "Rate at the end of warm-up.", auto="peak", absent="peak", above=True)
_START = Parameter("rate", "Rate before the first step.", default=0.0, auto="zero")
_WARMUP = Parameter("steps", "Steps of warm-up.", default=1000, auto="warmup")
_WARMUP_GIVEN = Parameter("steps", "Steps of linear warm-up.", auto="warmup")
_WARMUP_TYPE = Parameter("choice", "Shape of warm-up.", default="log", choices=("log", "linear"))
_TOTAL = Parameter("steps", "Step at which the decay ends.", auto="train_steps", low=1)

PARAMETERS: dict[str, dict[str, Parameter]] = {
    "WarmupLR": {
        "warmup_min_lr": _START,
        "warmup_max_lr": _PEAK,
        "warmup_num_steps": _WARMUP,
        "warmup_type": _WARMUP_TYPE,
    },
    "WarmupDecayLR": {
        "total_num_steps": _TOTAL,
        "warmup_min_lr": _START,
        "warmup_max_lr": _PEAK,
        "warmup_num_steps": _WARMUP,
        "warmup_type": _WARMUP_TYPE,
    },
    "WarmupCosineLR": {
        "total_num_steps": _TOTAL,
        "warmup_min_ratio": Parameter("ratio", "Share of the optimizer's rate before the first step.", 0.0),
        "warmup_num_steps": _WARMUP,
        "cos_min_ratio": Parameter("ratio", "Share of the optimizer's rate at the end.", 0.0001),
        "warmup_type": _WARMUP_TYPE,
    },
    "OneCycle": {
        "cycle_min_lr": Parameter("rate", "Rate before and after the cycle."),
        "cycle_max_lr": Parameter("rate", "Rate in its middle.", auto="peak", above=True),
        "cycle_first_step_size": Parameter("steps", "Steps up.", default=2000, low=1),
        "cycle_second_step_size": Parameter("steps", "Steps down; absent: as up.", absent="first_half"),
        "cycle_first_stair_count": Parameter("steps", "Levels on the way up; 0: smooth.", default=0),
        "cycle_second_stair_count": Parameter(
            "steps", "Levels on the way down; absent: as up.", absent="first_half"
        ),
        "decay_step_size": Parameter("steps", "Steps of one interval of decay after the cycle.", default=0),
        "decay_lr_rate": Parameter(
            "number", "After n intervals: cycle_min_lr / (1 + n * this).", default=0.0
        ),
        "cycle_momentum": Parameter("choice", "Only false.", default="false", choices=("false",)),
    },
    "WSD": {
        "warmup_max_lr": _PEAK,
        "warmup_num_steps": _WARMUP_GIVEN,
        "decay_num_steps": Parameter("steps", "Steps of decay at the end.", auto="fifth", low=1),
        "total_num_steps": _TOTAL,
        "min_lr": Parameter("rate", "Rate at the end.", default=0.0),
        "decay_type": Parameter(
            "choice", "Shape of the decay.", default="linear", choices=("linear", "sqrt")
        ),
    },
    "CosineWithFloor": {
        "warmup_max_lr": _PEAK,
        "warmup_num_steps": _WARMUP_GIVEN,
        "decay_num_steps": Parameter("steps", "Steps from the peak to the floor.", auto="rest", low=1),
        "min_lr": Parameter("rate", "The floor.", auto="tenth_of_peak"),
    },
}

_MOMENTUM = (
    "the optimizer's betas stay constant here, a cycled momentum is not supported",
    'Remove it; "cycle_momentum": false alone is accepted',
)
_RATIO = "WarmupCosineLR multiplies the optimizer's rate by ratios and has no rate of its own"
_RESUME = "the step comes from the checkpoint"

# (rule, remedy) for parameters that DeepSpeed's users bring along but that would do nothing.
REFUSED: dict[str, dict[str, tuple[str, str]]] = {
    "OneCycle": dict.fromkeys(("cycle_min_mom", "cycle_max_mom", "decay_mom_rate"), _MOMENTUM),
    "WarmupCosineLR": {
        "warmup_max_lr": (_RATIO, "Set optimizer.params.lr instead"),
        "warmup_min_lr": (_RATIO, "Set warmup_min_ratio instead"),
    },
}
REFUSED_ANYWHERE = {"last_batch_iteration": (_RESUME, "Remove it")}
