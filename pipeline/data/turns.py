"""Whose turn it is: the sources of a blend, in an order that keeps their weights at every moment. No torch.

After t turns a source of weight w has had between w t - c and w t + c of them, c = 1 - 1 / (2 K - 2) for K
sources, so never a whole sample too many or too few. That such an order exists for any weights is Tijdeman's
theorem (The chairman assignment problem, 1980). Its n-th turn (n from 0) then falls between two dates:

    not before  ceil((n + 1 - c) / w)     else it would be ahead by more than c
    not after   floor((n + c) / w) + 1    else it would be behind by more than c

and jobs of one unit with whole-number dates, taken by the earliest last date among those that have begun, all
keep their dates if any order does. All dates are computed in whole numbers, so that nothing drifts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

# Turns between two remembered places: a step back costs at most as many turns again.
_MARK_EVERY = 1 << 14
# Longest period that is kept as a table. Weights of three digits have one of at most 1,000.
_TABLE_SIZE = 1 << 14


class Turns:
    """The order of turns of sources with `weights`: a pure function of the weights and the place.

    Weights with a small common denominator D give a table: after D turns each source has had exactly its
    share, and all begins again. Others are walked through, a few microseconds per turn; that is cheap from
    front to back, which is how training reads, and starts at any place whose counts are known.

    Args:
        weights: Positive; only their ratios count. Fractions, so that 0.1 is a tenth.
        place: Turns taken before.
        counts: How many of them each source had, as `counts` gave them; None at place 0.
    """

    def __init__(
        self, weights: Sequence[Fraction], place: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        common = math.lcm(*(weight.denominator for weight in weights))
        shares = [int(weight * common) for weight in weights]
        divisor = math.gcd(*shares)
        self._shares = [share // divisor for share in shares]
        self._total = sum(self._shares)
        self._table: np.ndarray | None = None
        self._begin(0, [0] * len(shares))
        if self._total <= _TABLE_SIZE:
            self._table = self._walk(0, self._total)
        else:
            self._begin(place, list(counts or [0] * len(shares)))

    def take(self, place: int, number: int) -> np.ndarray:
        """The `number` turns from `place` on: [2, number] int64, sources and their own turns before.

        Raises:
            ValueError: `place` lies before the one this object began with.
        """
        if self._table is None:
            return self._walk(place, number)
        periods, inside = np.divmod(np.arange(place, place + number), self._total)
        turns = self._table[:, inside]
        turns[1] += periods * np.array(self._shares)[turns[0]]
        return turns

    def counts(self, place: int) -> list[int]:
        """Turns of each source among the first `place`.

        Raises:
            ValueError: as `take`.
        """
        if self._table is None:
            self._go_to(place)
            return list(self._counts)
        periods, inside = divmod(place, self._total)
        had = np.bincount(self._table[0, :inside], minlength=len(self._shares)).tolist()
        return [periods * share + count for share, count in zip(self._shares, had, strict=True)]

    def _begin(self, place: int, counts: list[int]) -> None:
        self._marks = [(place, tuple(counts))]
        self._return_to(self._marks[0])

    def _return_to(self, mark: tuple[int, tuple[int, ...]]) -> None:
        self._place, counts = mark
        self._counts = list(counts)
        self._dates = [self._dates_of(source, count) for source, count in enumerate(counts)]

    def _walk(self, place: int, number: int) -> np.ndarray:
        self._go_to(place)
        turns = [self._next() for _ in range(number)]
        return np.array(turns, dtype=np.int64).reshape(number, 2).T

    def _go_to(self, place: int) -> None:
        if place < self._place:
            marks = [mark for mark in self._marks if mark[0] <= place]
            if not marks:
                raise ValueError(f"place {place} lies before {self._marks[0][0]}, where these turns begin")
            self._return_to(marks[-1])
        while self._place < place:
            self._next()

    def _next(self) -> tuple[int, int]:
        self._place += 1
        now = self._place
        _, source = min((last, source) for source, (first, last) in enumerate(self._dates) if first <= now)
        count = self._counts[source]
        self._counts[source] = count + 1
        self._dates[source] = self._dates_of(source, count + 1)
        if now >= self._marks[-1][0] + _MARK_EVERY:
            self._marks.append((now, tuple(self._counts)))
        return source, count

    def _dates_of(self, source: int, count: int) -> tuple[int, int]:
        """First and last date of turn `count`. With w = share / total and 1 - c = 1 / d, d = 2 K - 2:
        (n + 1 / d) / w = (n d + 1) total / (d share), (n + 1 - 1 / d) / w = (n d + d - 1) total / (d share).
        A single source has w = 1 and every turn; d = 1 says that."""
        d = max(2 * len(self._shares) - 2, 1)
        below = d * self._shares[source]
        first = -(-(count * d + 1) * self._total // below)
        return first, (count * d + d - 1) * self._total // below + 1
