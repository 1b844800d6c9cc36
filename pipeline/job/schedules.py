"""The learning rate as a pure function of the step; no state.

`schedule(step)` is the rate of update number `step`, counted from 1. What holds for each schedule:

- The first step already trains: its rate is above 0.
- The peak is reached exactly at the last warm-up step, step W: linear warm-up gives step s the fraction
  s / W, logarithmic log(1 + s) / log(1 + W).
- A decay arrives at its end value at the last step T, and stays there. Where the end value is 0 it
  arrives one step later: an update with rate 0 would be wasted.

Names and parameters are DeepSpeed's where it has the schedule. Its off-by-two is not inherited: there, the
counter is one behind and starts at -1, so that the first two updates have rate 0 and everything comes two
steps late; its cosine starts one step in and never reaches the peak. Defaults are DeepSpeed's, too, with two
exceptions: an absent warmup_max_lr is the optimizer's rate in WarmupDecayLR as well (DeepSpeed: 0.001), and
momentum is not cycled.

The fields of a schedule are its parameters in the JSON. Beside default and meaning they say where the value
"auto" comes from (`auto`; without, "auto" is refused), and where an absent one does, if not from the default
(`absent`): see `pipeline.job.learning`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pipeline.base.fields import MISSING, Field, Limits, described, fields_of

Rate = Annotated[float, Limits(0)]
PeakRate = Annotated[float, Limits(0, above=True)]
Ratio = Annotated[float, Limits(0, 1)]
Steps = Annotated[int, Limits(0)]
SomeSteps = Annotated[int, Limits(1)]
WarmupType = Literal["log", "linear"]


def _peak() -> Any:
    meaning = "Rate at the end of warm-up."
    return described(meaning=meaning, auto="peak", absent="peak", default_text="optimizer's rate")


def _start() -> Any:
    return described(0.0, "Rate before the first step.", auto="zero")


def _warmup(default: Any = 1000, meaning: str = "Steps of warm-up.") -> Any:
    return described(default, meaning, auto="warmup")


def _warmup_type() -> Any:
    return described("log", "Shape of warm-up.")


def _as_first(meaning: str, default: int) -> Any:
    return described(default, meaning, absent="first_half", default_text="as the first half")


def _total() -> Any:
    return described(meaning="Step at which the decay ends.", auto="train_steps")


@dataclass(frozen=True)
class LearningRate(ABC):
    """A schedule; its fields are its parameters, resolved.

    Class attributes:
        type: Name in the ``scheduler`` block; None for the constant rate, which has no block.
        rates: The fields that are learning rates, which `scaled` multiplies.
    """

    type: ClassVar[str | None] = None
    rates: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __call__(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1."""

    @property
    def peak(self) -> float:
        """The highest rate."""
        return float(getattr(self, self.rates[-1]))

    def scaled(self, factor: float) -> LearningRate:
        """The same shape with every rate multiplied by `factor`."""
        return replace(self, **{name: getattr(self, name) * factor for name in self.rates})

    def to_json(self) -> dict[str, Any]:
        """As a ``scheduler`` block; the constant rate has type null."""
        return {"type": self.type, "params": asdict(self)}

    def __str__(self) -> str:
        values = ", ".join(f"{field.name}={_short(getattr(self, field.name))}" for field in fields(self))
        return f"{self.type or 'constant'}({values})"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def between(low: float, high: float, fraction: float) -> float:
    """Linear interpolation that is exact at both ends, which low + (high - low) * 1.0 is not."""
    return low * (1.0 - fraction) + high * fraction


def warmup_fraction(step: int, num_steps: int, kind: str) -> float:
    """How far warm-up has come at `step`: above 0 at step 1, exactly 1 from step `num_steps` on."""
    if step >= num_steps:
        return 1.0
    if kind == "log":
        return math.log1p(step) / math.log1p(num_steps)
    return step / num_steps


def decay_fraction(step: int, start: int, end: int, end_value: float) -> float:
    """How far a decay has come: 0 at step `start`, 1 at step `end`, or at end + 1 for an end value of 0."""
    arrival = end if end_value > 0 else end + 1
    return 1.0 if step >= arrival else (step - start) / (arrival - start)


def half_cosine(fraction: float) -> float:
    """From 1 down to 0 along half a cosine; exact at both ends."""
    return 0.5 * (1.0 + math.cos(math.pi * fraction))


@dataclass(frozen=True)
class ConstantLR(LearningRate):
    """The optimizer's rate at every step: ``"scheduler": null``."""

    lr: float
    rates: ClassVar[tuple[str, ...]] = ("lr",)

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True)
class WarmupLR(LearningRate):
    """Warm-up from warmup_min_lr to warmup_max_lr over warmup_num_steps steps, then constant."""

    warmup_max_lr: PeakRate = _peak()
    warmup_num_steps: Steps = _warmup()
    warmup_min_lr: Rate = _start()
    warmup_type: WarmupType = _warmup_type()
    type: ClassVar[str | None] = "WarmupLR"
    rates: ClassVar[tuple[str, ...]] = ("warmup_min_lr", "warmup_max_lr")

    def __call__(self, step: int) -> float:
        fraction = warmup_fraction(step, self.warmup_num_steps, self.warmup_type)
        return between(self.warmup_min_lr, self.warmup_max_lr, fraction)


@dataclass(frozen=True)
class WarmupDecayLR(LearningRate):
    """Warm-up as WarmupLR, then linearly towards 0, which follows the last of total_num_steps steps.

    With W = 4 and T = 9 the rates after the peak are 5/6, 4/6, 3/6, 2/6, 1/6 of it.
    """

    warmup_max_lr: PeakRate = _peak()
    total_num_steps: SomeSteps = _total()
    warmup_num_steps: Steps = _warmup()
    warmup_min_lr: Rate = _start()
    warmup_type: WarmupType = _warmup_type()
    type: ClassVar[str | None] = "WarmupDecayLR"
    rates: ClassVar[tuple[str, ...]] = ("warmup_min_lr", "warmup_max_lr")

    def __call__(self, step: int) -> float:
        if step <= self.warmup_num_steps:
            fraction = warmup_fraction(step, self.warmup_num_steps, self.warmup_type)
            return between(self.warmup_min_lr, self.warmup_max_lr, fraction)
        fraction = decay_fraction(step, self.warmup_num_steps, self.total_num_steps, 0.0)
        return between(self.warmup_max_lr, 0.0, fraction)


@dataclass(frozen=True)
class WarmupCosineLR(LearningRate):
    """Ratios of the optimizer's rate `lr`: from warmup_min_ratio up to 1, then down half a cosine to
    cos_min_ratio at step total_num_steps (Loshchilov & Hutter 2017, equation 5, one period).
    """

    lr: float
    total_num_steps: SomeSteps = _total()
    warmup_num_steps: Steps = _warmup()
    warmup_min_ratio: Ratio = described(0.0, "Share of the optimizer's rate before the first step.")
    cos_min_ratio: Ratio = described(0.0001, "Share of the optimizer's rate at the end.")
    warmup_type: WarmupType = _warmup_type()
    type: ClassVar[str | None] = "WarmupCosineLR"
    rates: ClassVar[tuple[str, ...]] = ("lr",)

    def __call__(self, step: int) -> float:
        if step <= self.warmup_num_steps:
            fraction = warmup_fraction(step, self.warmup_num_steps, self.warmup_type)
            return self.lr * between(self.warmup_min_ratio, 1.0, fraction)
        fraction = decay_fraction(step, self.warmup_num_steps, self.total_num_steps, self.cos_min_ratio)
        return self.lr * between(self.cos_min_ratio, 1.0, half_cosine(fraction))


@dataclass(frozen=True)
class CosineWithFloor(LearningRate):
    """Linear warm-up, half a cosine over decay_num_steps steps down to min_lr, then constant at min_lr.

    GPT-3 decays to a tenth over 260 of its 300 billion tokens (Brown et al. 2020, appendix B): a decay
    that is shorter than the run.
    """

    warmup_max_lr: PeakRate = _peak()
    warmup_num_steps: Steps = _warmup(MISSING, "Steps of linear warm-up.")
    decay_num_steps: SomeSteps = described(meaning="Steps from the peak to the floor.", auto="rest")
    min_lr: Rate = described(meaning="The floor.", auto="tenth_of_peak")
    type: ClassVar[str | None] = "CosineWithFloor"
    rates: ClassVar[tuple[str, ...]] = ("min_lr", "warmup_max_lr")

    def __call__(self, step: int) -> float:
        if step <= self.warmup_num_steps:
            return self.warmup_max_lr * warmup_fraction(step, self.warmup_num_steps, "linear")
        end = self.warmup_num_steps + self.decay_num_steps
        fraction = decay_fraction(step, self.warmup_num_steps, end, self.min_lr)
        return between(self.min_lr, self.warmup_max_lr, half_cosine(fraction))


@dataclass(frozen=True)
class WSD(LearningRate):
    """Warm-up, stable, decay (Hu et al. 2024, section 4.2): linear warm-up, constant at the peak, then a
    decay over the last decay_num_steps of total_num_steps steps to min_lr.

    decay_type is ``linear``, or ``sqrt``: 1 - sqrt(fraction), which falls faster at first (Hägele et
    al. 2024, section 3.2).
    """

    warmup_max_lr: PeakRate = _peak()
    warmup_num_steps: Steps = _warmup(MISSING, "Steps of linear warm-up.")
    decay_num_steps: SomeSteps = described(meaning="Steps of decay at the end.", auto="fifth")
    total_num_steps: SomeSteps = _total()
    min_lr: Rate = described(0.0, "Rate at the end.")
    decay_type: Literal["linear", "sqrt"] = described("linear", "Shape of the decay.")
    type: ClassVar[str | None] = "WSD"
    rates: ClassVar[tuple[str, ...]] = ("min_lr", "warmup_max_lr")

    def __call__(self, step: int) -> float:
        start = self.total_num_steps - self.decay_num_steps
        if step <= start:
            return self.warmup_max_lr * warmup_fraction(step, self.warmup_num_steps, "linear")
        fraction = decay_fraction(step, start, self.total_num_steps, self.min_lr)
        return between(
            self.warmup_max_lr, self.min_lr, math.sqrt(fraction) if self.decay_type == "sqrt" else fraction
        )


@dataclass(frozen=True)
class OneCycle(LearningRate):
    """Up from cycle_min_lr to cycle_max_lr in cycle_first_step_size steps, down again in
    cycle_second_step_size, then cycle_min_lr / (1 + decay_lr_rate * intervals), an interval being
    decay_step_size steps (Smith 2018). A stair count cuts a half into that many equal levels.
    """

    cycle_min_lr: Rate = described(meaning="Rate before and after the cycle.")
    cycle_max_lr: PeakRate = described(meaning="Rate in its middle.", auto="peak")
    cycle_first_step_size: SomeSteps = described(2000, "Steps up.")
    cycle_second_step_size: Steps = _as_first("Steps down.", 2000)
    cycle_first_stair_count: Steps = described(0, "Levels on the way up; 0: smooth.")
    cycle_second_stair_count: Steps = _as_first("Levels on the way down.", 0)
    decay_step_size: Steps = described(0, "Steps of one interval of decay after the cycle.")
    decay_lr_rate: Rate = described(0.0, "After n intervals: cycle_min_lr / (1 + n * this).")
    type: ClassVar[str | None] = "OneCycle"
    rates: ClassVar[tuple[str, ...]] = ("cycle_min_lr", "cycle_max_lr")

    def __call__(self, step: int) -> float:
        cycle = self.cycle_first_step_size + self.cycle_second_step_size
        if step > cycle:
            return self._after(step - cycle)
        if step <= self.cycle_first_step_size:
            height = _stairs(step, self.cycle_first_step_size, self.cycle_first_stair_count)
        else:
            height = _stairs(cycle - step, self.cycle_second_step_size, self.cycle_second_stair_count)
        return between(self.cycle_min_lr, self.cycle_max_lr, height)

    def _after(self, steps: int) -> float:
        intervals = steps / self.decay_step_size if self.decay_step_size else 0.0
        return self.cycle_min_lr / (1.0 + self.decay_lr_rate * intervals)


def _stairs(position: int, length: int, count: int) -> float:
    """position / length, rounded down to a multiple of 1 / count unless count is 0."""
    return position * count // length / count if count else position / length


SCHEDULES: dict[str, type[LearningRate]] = {
    str(kind.type): kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, WSD, CosineWithFloor)
}


def parameters(kind: str) -> dict[str, Field]:
    """What a ``scheduler`` block of that type may hold, by name."""
    return {name: field for name, field in fields_of(SCHEDULES[kind]).items() if field.meaning}
