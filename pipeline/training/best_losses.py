"""The lowest evaluation losses of a run, of each set and of all together, with the steps they were found at.

    {"loss": 2.31, "step": 400,
     "sets": {"books": {"loss": 2.10, "step": 400}, "code": {"loss": 2.4, "step": 380}}}

All together means the mean over the tokens of all sets. A set without a name is called "". No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Best(NamedTuple):
    """The lowest loss so far, and the step after which it was found."""

    loss: float
    step: int


def with_evaluation(
    best: Mapping[str, Any], step: int, losses: Mapping[str | None, tuple[float, int]]
) -> dict[str, Any]:
    """The lowest losses after an evaluation of every set: its loss, and its number of unmasked tokens."""
    if not losses:
        return dict(best)
    tokens = sum(count for _, count in losses.values())
    together = sum(loss * count for loss, count in losses.values()) / max(1, tokens)
    sets = dict(best.get("sets", {}))
    for name, (loss, _) in losses.items():
        sets[name or ""] = _lower(sets.get(name or ""), loss, step)
    known = {name: entry for name, entry in sets.items() if entry is not None}
    return {**(_lower(best or None, together, step) or {}), "sets": known}


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
    return f"best held-out loss {best['loss']:.4f} after step {best['step']}{each}"
