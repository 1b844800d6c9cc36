"""Words for messages: numbers of things, choices, long lists, sizes, the nearest existing name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_NAMES_SHOWN = 6


def counted(number: int, name: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the likely spelling, or the whole choice."""
    choice = sorted(known)
    near = get_close_matches(name.lower(), choice, n=1, cutoff=0.6)
    words = sorted(name.lower().replace("-", "_").split("_"))
    near = near or [other for other in choice if sorted(other.split("_")) == words]
    return f"The nearest name is {near[0]}" if near else f"Choose from {', '.join(choice)}"


def listed(numbers: Iterable[int]) -> str:
    """``1, 2 or 4``."""
    names = [str(number) for number in numbers]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def few(names: Iterable[str]) -> str:
    """The first of many: ``h1, h2, h3, h4, h5 and 14 more``."""
    known = list(names)
    if len(known) <= _NAMES_SHOWN:
        return ", ".join(known)
    return f"{', '.join(known[: _NAMES_SHOWN - 1])} and {len(known) - _NAMES_SHOWN + 1} more"


def size(number: float) -> str:
    """Bytes for a person: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
