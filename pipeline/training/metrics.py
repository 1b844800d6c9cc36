"""What a run measures: the numbers of each step and evaluation, and the lowest losses so far. No torch.

The lowest losses, of each set and of all together, lie in a checkpoint's state with the steps they were found
at:

    {"loss": 2.31, "step": 400,
     "sets": {"books": {"loss": 2.10, "step": 400}, "code": {"loss": 2.4, "step": 380}}}

All together means the mean over the tokens of all sets. A set without a name is called "". A run that keeps
its best checkpoints has beside them ``"lowest": [[400, 2.31], [380, 2.33]]``, steps and their losses of all
together, the lowest first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Best(NamedTuple):
    """The lowest loss so far, and the step after which it was found."""

    loss: float
    step: int


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step of the whole job; equal on every rank but for the times.

    Attributes:
        step: Optimizer steps taken, counted from 1.
        loss: Mean over the step's unmasked tokens, natural logarithm.
        grad_norm: Global 2-norm of the gradient, before clipping.
        lr: Learning rate that this step was taken with.
        tokens: Tokens consumed since step 1, each counted once (sequence, tensor and pipeline peers
            read the same ones).
        step_time: Seconds for data, forward, backward and update; not for evaluation and saving.
        tokens_per_second: Of the whole job, in this step.
        tflops_per_device: 10^12 model floating-point operations per second and device.
        mfu: Share of the device's dense peak, 0 to 1; None where the peak is not known.
        data_time: Seconds of `step_time` spent waiting for data.
        skipped: The update was not applied (overflow under fp16 loss scaling).
        time: When the step was over, in seconds since 1970 (UTC).
        save_time: Seconds since the step before in which training waited for a checkpoint to be saved.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_time: float
    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None
    data_time: float
    skipped: bool
    time: float = 0.0
    save_time: float = 0.0


@dataclass(frozen=True)
class EvalMetrics:
    """Loss on validation documents after `step` optimizer steps, mean per unmasked token.

    Attributes:
        name: Of the validation set, or of the source that the documents were held out of; None where a single
            source is trained on, whose validation part needs no name.
        eval_time: Seconds that the evaluation of this set took.
        time: When it was over, in seconds since 1970 (UTC).
        best: The lowest of this set so far, this one included; for the console. None: not known.
    """

    step: int
    eval_loss: float
    name: str | None = None
    best: Best | None = None
    eval_time: float | None = None
    time: float | None = None


class MetricsSink(Protocol):
    """Anything that takes the numbers as they come: the file, the console, the monitors.

    Only rank 0 has sinks, so the loop runs over a tuple that is empty on the other ranks.
    """

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluation(self, metrics: EvalMetrics) -> None: ...


def with_evaluation(
    best: Mapping[str, Any],
    step: int,
    losses: Mapping[str | None, tuple[float, int]],
    keep: int | None = None,
) -> dict[str, Any]:
    """The lowest losses after an evaluation of every set: its loss, and its number of unmasked tokens.

    `keep`: as many of all together are listed; None: there is no list.
    """
    if not losses:
        return dict(best)
    tokens = sum(count for _, count in losses.values())
    together = sum(loss * count for loss, count in losses.values()) / max(1, tokens)
    sets = dict(best.get("sets", {}))
    for name, (loss, _) in losses.items():
        sets[name or ""] = _lower(sets.get(name or ""), loss, step)
    known = {name: entry for name, entry in sets.items() if entry is not None}
    listed = {} if keep is None else {"lowest": _lowest(best, together, step)[:keep]}
    return {**(_lower(best or None, together, step) or {}), "sets": known, **listed}


def _lowest(best: Mapping[str, Any], loss: float, step: int) -> list[list[Any]]:
    """Steps and losses, the lowest first, with a new one; the earlier first of equal ones. A run that had no
    list begins with the lowest that it knows."""
    before = best.get("lowest", [[best["step"], best["loss"]]] if "loss" in best else [])
    found = [*before, [step, loss]] if math.isfinite(loss) else before
    return sorted(found, key=lambda each: (each[1], each[0]))


def _lower(best: Mapping[str, Any] | None, loss: float, step: int) -> dict[str, Any] | None:
    """The lower of an entry and a new loss; the earlier of equal ones. No number is lower than none."""
    known = best is not None and "loss" in best
    if math.isfinite(loss) and (not known or loss < best["loss"]):
        return {"loss": loss, "step": step}
    return {"loss": best["loss"], "step": best["step"]} if known else None


def best_of(best: Mapping[str, Any], name: str | None) -> Best | None:
    """The lowest loss of a set; None before it had a finite one."""
    entry = best.get("sets", {}).get(name or "")
    return None if entry is None else Best(entry["loss"], entry["step"])


def best_line(best: Mapping[str, Any]) -> str | None:
    """The lowest losses in words; None where there are none."""
    if "loss" not in best:
        return None
    names = [name for name in best["sets"] if name]
    each = "".join(
        f", {name} {best['sets'][name]['loss']:.4f} after step {best['sets'][name]['step']}" for name in names
    )
    return f"best validation loss {best['loss']:.4f} after step {best['step']}{each}"
