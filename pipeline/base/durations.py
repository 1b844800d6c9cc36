"""Lengths of time as people and batch systems write them."""

from __future__ import annotations

import re

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_WITH_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
# Slurm's: days-hours[:minutes[:seconds]], hours:minutes:seconds, minutes:seconds.
_WITH_COLONS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def parse_duration(text: str) -> int:
    """Seconds: ``3600``, ``90m``, ``3h30m``, ``1-12:00:00``, ``12:30:00``, ``30:00`` (minutes and seconds).

    A bare number is seconds (Slurm takes it for minutes).

    Raises:
        ValueError: none of these.
    """
    if text.isdecimal():
        return int(text)
    if text and (match := _WITH_UNITS.fullmatch(text)):
        return sum(int(n or 0) * size for n, size in zip(match.groups(), _UNITS.values(), strict=True))
    if match := _WITH_COLONS.fullmatch(text):
        return _slurm_seconds(*match.groups())
    raise ValueError("is no length of time, such as 3600, 90m, 3h30m or 1-12:00:00")


def _slurm_seconds(days: str | None, *parts: str | None) -> int:
    given = [int(part) for part in parts if part is not None]
    if any(part > 59 for part in given[1:]) or (days is not None and given[0] > 23):
        raise ValueError("has more than 23 hours beside days, or more than 59 minutes or seconds")
    if days is None and len(given) == 2:
        given = [0, *given]  # minutes:seconds
    hours, minutes, seconds = [*given, 0, 0][:3]
    return int(days or 0) * _UNITS["d"] + hours * _UNITS["h"] + minutes * _UNITS["m"] + seconds
