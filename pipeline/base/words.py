"""Words for messages: numbers of things, choices, long lists, sizes, the nearest existing name."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

# At the end of a line: a program with options, which somebody may copy.
_COMMAND = re.compile(
    r"(?:^|(?<=: )|(?<=  ))(?:\S*/\S+|deepspeed|torchrun|accelerate|python\S*|srun|sbatch) .*-.*$"
)
_NAMES_SHOWN, _LONGEST_NAME = 6, 150


def counted(number: int, name: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def after_step(step: int) -> str:
    """When something happened: ``after step 5``, ``before the first step``."""
    return f"after step {step}" if step else "before the first step"


def near(name: str, known: Iterable[str]) -> str | None:
    """The likely spelling of an unknown name."""
    choice = sorted(known)
    words = sorted(name.lower().replace("-", "_").split("_"))
    found = get_close_matches(name.lower(), choice, n=1, cutoff=0.6)
    return next(iter([*found, *(other for other in choice if sorted(other.split("_")) == words)]), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the likely spelling, or the whole choice."""
    nearest, choice = near(name, known), ", ".join(sorted(known))
    return f"The nearest name is {nearest}" if nearest else f"Choose from {choice}"


def listed(numbers: Iterable[int]) -> str:
    """``1, 2 or 4``."""
    names = [str(number) for number in numbers]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def few(names: Iterable[str]) -> str:
    """The ends of a long list: ``h1, h2, h3, h4, 14 more and h19``."""
    known = [cut(name, _LONGEST_NAME) for name in names]
    if len(known) <= _NAMES_SHOWN:
        return ", ".join(known)
    first = known[: _NAMES_SHOWN - 2]
    return f"{', '.join(first)}, {len(known) - len(first) - 1:,} more and {known[-1]}"


def ends(lines: Sequence[str], most: int) -> list[str]:
    """At most so many of the lines: the first, how many more, and the last."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 2], f"... {len(lines) - most + 1:,} more", lines[-1]]


def cut(text: str, longest: int = 300) -> str:
    """The ends of a long text, and how long it is."""
    if len(text) <= longest:
        return text
    return f"{text[: longest * 2 // 3]} ... {text[-longest // 6 :]} ({len(text):,} characters)"


def wrapped(text: str, width: int) -> str:
    """`text` in lines of at most `width` columns, broken at spaces, what follows of a line indented. A
    command continues as a shell reads it. A word that is longer, such as a path, stays whole."""
    return "\n".join(part for line in text.split("\n") for part in _wrapped_line(line, width))


def _wrapped_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] or "  "
    command = _COMMAND.search(line)
    prose = line if command is None else line[: command.start()].rstrip()
    lines = _filled(prose, width, indent) if prose.strip() else []
    if command is None:
        return lines
    if len(indent + command[0]) <= width:
        return [*lines, indent + command[0]]
    *first, last = _filled(indent + command[0], width - 2, indent + "  ")
    return [*lines, *(f"{each} \\" for each in first), last]


def _filled(line: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        line, max(width, len(indent) + 20), subsequent_indent=indent, expand_tabs=False,
        replace_whitespace=False, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def first_line(text: str) -> str:
    """The first line that says something; empty where none does."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def rank_list(numbers: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-3, 8``."""
    return f"rank{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"


def ranges(numbers: Sequence[int]) -> str:
    """``0-3, 8``, for a list of ranks."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return few(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def size(number: float) -> str:
    """Bytes for a person: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
