"""Two checkpoints compared to the last bit, in a rank, where DeepSpeed is imported already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def differing_files(first: Path, second: Path) -> list[str]:
    """What is not equal in two checkpoint folders: names of files, or paths of values inside them."""
    import torch

    names = {str(path.relative_to(first)) for path in first.rglob("*.pt")}
    others = {str(path.relative_to(second)) for path in second.rglob("*.pt")}
    if not names:
        return [f"no shards in {first}"]
    found = [f"only in one: {name}" for name in sorted(names ^ others)]
    for name in sorted(names & others):
        one, two = (torch.load(folder / name, weights_only=False) for folder in (first, second))
        found += [f"{name}: {where}" for where in _differences(one, two, "")]
    return found


def _differences(one: Any, two: Any, where: str) -> list[str]:
    import torch

    if type(one) is not type(two):
        return [f"{where} {type(one).__name__} and {type(two).__name__}"]
    if isinstance(one, torch.Tensor):
        same = one.dtype == two.dtype and torch.equal(one, two)
        return [] if same else [f"{where} differs"]
    if isinstance(one, np.ndarray):
        return [] if np.array_equal(one, two) else [f"{where} differs"]
    if isinstance(one, dict):
        found = [f"{where} keys {one.keys() ^ two.keys()}"] if one.keys() != two.keys() else []
        common = one.keys() & two.keys()
        return found + [d for key in common for d in _differences(one[key], two[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)):
        found = [f"{where} length"] if len(one) != len(two) else []
        pairs = enumerate(zip(one, two, strict=False))
        return found + [d for index, pair in pairs for d in _differences(*pair, f"{where}[{index}]")]
    if hasattr(one, "__dict__") and not callable(one):
        return _differences(vars(one), vars(two), f"{where}<{type(one).__name__}>")
    return [] if one == two else [f"{where} {one!r} and {two!r}"]
