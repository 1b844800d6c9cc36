"""Sources and weights as one endless order of samples.

Position p of the order belongs to the source whose turn it is (`BlendSchedule`), and is that source's
next sample in its own order, which is endless, too: a small source begins its next epoch while a large one
is still in its first. So each source is read exactly once per epoch of its own, whatever the weights are
and were.

    weights 1/2 1/4 1/4    position 0 1 2 3 4 5 6 7 ...
                           books    0     1 2     3
                           code       0       1
                           mails        0       1

The schedule keeps the weights at every moment. After t turns a source of weight w has had between w t - c
and w t + c of them, c = 1 - 1 / (2 K - 2) for K sources, so never a whole sample too many or too few. That
such an order exists for any weights is Tijdeman's theorem (The chairman assignment problem, 1980). A source's
n-th turn (n from 0) then falls between two dates:

    not before  ceil((n + 1 - c) / w)     else it would be ahead by more than c
    not after   floor((n + c) / w) + 1    else it would be behind by more than c

and jobs of one unit with whole-number dates, taken by the earliest last date among those that have begun, all
keep their dates if any order does. All dates are computed in whole numbers, so that nothing drifts.

A checkpoint keeps how far each source has been read (`BlendState`), and `resume_blend` resumes from it:

    {"start": 800,
     "sources": [{"name": "books", "fingerprint": "9c..", "weight": "7/10", "begun": 400, "taken": 90}, ...]}

`start` is the position at which the weights began to count, `begun` the samples of a source that were read
by then, `taken` those read since. A source that was left out stays with weight 0, so that it resumes where it
was when it comes back.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from pipeline.base.problems import JobError, Problem
from pipeline.base.words import few
from pipeline.data.packing import PackedDataset, Samples
from pipeline.data.token_file import WatchedFile

# Turns between two remembered places: a step back costs at most as many turns again.
_MARK_EVERY = 1 << 14
# Longest period that is kept as a table. Weights of three digits have one of at most 1,000.
_TABLE_SIZE = 1 << 14


class BlendSchedule:
    """The order of turns of sources with `weights`: a pure function of the weights and the place.

    Weights with a small common denominator D give a table: after D turns each source has had exactly its
    share, and all begins again. Others are computed turn by turn, a few microseconds each; that is
    cheap from front to back, which is how training reads, and starts at any place whose counts are known.

    Args:
        weights: Positive; only their ratios count. Fractions, so that 0.1 is a tenth.
        place: Turns taken before.
        counts: How many of them each source had, as `counts` returned them; None at place 0.
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
            ValueError: `place` is before the one that this object began with.
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
                raise ValueError(f"place {place} is before {self._marks[0][0]}, the first of this schedule")
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


@dataclass(frozen=True)
class BlendSource:
    """One source of a blend.

    Attributes:
        name: For messages and metrics.
        weight: Share of the samples, above 0.
        dataset: Its samples.
        fingerprint: Hash of its tokens and documents, by which a checkpoint recognises it.
        files: What must not change while it is read.
        begun: Samples of it that were taken before the blend's first position.
    """

    name: str
    weight: Fraction
    dataset: PackedDataset
    fingerprint: str
    files: tuple[WatchedFile, ...] = ()
    begun: int = 0


class Blend:
    """The samples of several sources: after any number of them, `weight` of each to within one sample.

    Weights hold from position `start` on: a run that was resumed with other weights has read the samples
    before it, `begun` of each source.

    Args:
        sources: All of one sequence length.
        start: Position at which these weights began to count.
        place: The first position that will be read, `start` if None.
        taken: Samples of each source from `start` to `place`, as the method `taken` returned them.

    Raises:
        ValueError: sources of several sequence lengths, or none.
    """

    def __init__(
        self,
        sources: Sequence[BlendSource],
        start: int = 0,
        place: int | None = None,
        taken: Sequence[int] | None = None,
    ) -> None:
        lengths = {source.dataset.sequence_length for source in sources}
        if len(lengths) != 1:
            raise ValueError(f"a blend needs sources of one sequence length, not {sorted(lengths)}")
        (self.sequence_length,) = lengths
        self.sources = tuple(sources)
        self.start = start
        weights = [source.weight for source in sources]
        self._turns = BlendSchedule(weights, (start if place is None else place) - start, taken)
        # The loader's thread reads on while the training loop asks where a step ended.
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        return sum(source.dataset.num_tokens for source in self.sources)

    @property
    def fingerprint(self) -> str:
        """Equal on hosts that read the same samples in the same order."""
        state = hashlib.blake2b(repr(self.start).encode(), digest_size=16)
        for source in self.sources:
            state.update(repr((source.weight, source.fingerprint, source.begun)).encode())
        return state.hexdigest()

    def taken(self, position: int) -> list[int]:
        """Samples of each source among the positions from `start` up to `position`.

        Raises:
            ValueError: `position` is before the first one that can be read.
        """
        with self._lock:
            return self._turns.counts(position - self.start)

    def locate(self, positions: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The number of the source, and the position in its own order, of each of `positions`; int64.

        Raises:
            ValueError: as `taken`.
        """
        places = np.asarray(positions, dtype=np.int64) - self.start
        if not len(places):
            return places, places
        first = int(places.min())
        with self._lock:
            sources, own = self._turns.take(first, int(places.max()) - first + 1)[:, places - first]
        return sources, own + np.array([source.begun for source in self.sources])[sources]

    def read(self, positions: Sequence[int] | np.ndarray) -> Samples:
        """The samples at `positions`.

        Raises:
            ValueError: as `taken`.
            TokenError: ids beyond the vocabulary, or files that changed.
        """
        sources, own = self.locate(positions)
        if not len(sources):
            return replace(self._read(0, own), sources=sources)
        parts = {int(number): np.flatnonzero(sources == number) for number in np.unique(sources)}
        read = [self._read(number, own[rows]) for number, rows in parts.items()]
        if len(read) == 1:
            return replace(read[0], sources=sources)
        rows = np.argsort(np.concatenate(list(parts.values())))
        names = ("tokens", "num_labels", "indices", "documents", "counted")
        columns = ([getattr(samples, name) for samples in read] for name in names)
        joined = (None if each[0] is None else np.concatenate(each)[rows] for each in columns)
        return Samples(*joined, sources=sources)  # type: ignore[arg-type]

    def names(self, positions: Sequence[int] | np.ndarray) -> list[str]:
        """Source and number of the samples at `positions`, such as ``books 12``; reads no tokens.

        Raises:
            ValueError: as `taken`.
        """
        sources, own = self.locate(positions)
        names = np.empty(len(own), dtype=object)
        for number in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == number)
            source = self.sources[number]
            names[rows] = [f"{source.name} {index}" for index in source.dataset.indices(own[rows]).tolist()]
        return names.tolist()

    def _read(self, number: int, positions: np.ndarray) -> Samples:
        for file in self.sources[number].files:
            file.check()
        return self.sources[number].dataset.read(positions)


@dataclass(frozen=True)
class SourceState:
    """One source in a checkpoint; its fields are described at the top of this file."""

    name: str
    fingerprint: str
    weight: Fraction
    begun: int
    taken: int

    @property
    def consumed(self) -> int:
        """Samples of it that were read in all."""
        return self.begun + self.taken


@dataclass(frozen=True)
class BlendState:
    """How far the sources have been read.

    Attributes:
        start: Position at which the weights began to count.
        sources: In the blend's order, then those that were left out.
    """

    start: int
    sources: tuple[SourceState, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "start": self.start,
            "sources": [vars(source) | {"weight": str(source.weight)} for source in self.sources],
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> BlendState:
        """What `to_json` returned.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        sources = [{**source, "weight": Fraction(source["weight"])} for source in saved["sources"]]
        return cls(saved["start"], tuple(SourceState(**source) for source in sources))


@dataclass(frozen=True)
class ResumedBlend:
    """A blend that resumes from a checkpoint.

    Attributes:
        blend: To be read from the checkpoint's position on.
        left_out: Sources that it no longer holds.
        changes: What differs from the checkpoint, in sentences for the console.
    """

    blend: Blend
    left_out: tuple[SourceState, ...] = ()
    changes: tuple[str, ...] = ()

    def state(self, position: int) -> dict[str, Any]:
        """What a checkpoint at `position` keeps.

        Raises:
            ValueError: `position` is before the one it resumed from.
        """
        counts = self.blend.taken(position)
        sources = [
            SourceState(source.name, source.fingerprint, source.weight, source.begun, taken)
            for source, taken in zip(self.blend.sources, counts, strict=True)
        ]
        return BlendState(self.blend.start, (*sources, *self.left_out)).to_json()


def resume_blend(sources: Sequence[BlendSource], saved: BlendState | None, position: int) -> ResumedBlend:
    """The blend of `sources` for a run that has consumed `position` samples.

    With the sources and weights of the checkpoint it is the same order, continued. Otherwise the new weights
    count from `position` on, and each source continues after its last sample that was read.

    Args:
        saved: The checkpoint's; None at the start of a run.

    Raises:
        JobError: a source holds other tokens than before, none of those trained on is left, or two are the
            same.
    """
    if problems := _twice(sources):
        raise JobError(problems)
    if saved is None:
        return ResumedBlend(Blend(sources))
    before = {source.fingerprint: source for source in saved.sources}
    if problems := _unknown_sources(sources, saved):
        raise JobError(problems)
    active = [source for source in saved.sources if source.weight > 0]
    here = {source.fingerprint: source for source in sources}
    ordered = [here[source.fingerprint] for source in saved.sources if source.fingerprint in here]
    ordered += [source for source in sources if source.fingerprint not in before]
    left_out = tuple(
        replace(source, weight=Fraction(0), begun=source.consumed, taken=0)
        for source in saved.sources
        if source.fingerprint not in here
    )
    if [(s.fingerprint, s.weight) for s in active] == [(s.fingerprint, s.weight) for s in ordered]:
        same = [replace(source, begun=before[source.fingerprint].begun) for source in ordered]
        taken = [source.taken for source in active]
        return ResumedBlend(Blend(same, saved.start, position, taken), left_out)
    moved = [
        replace(source, begun=before[source.fingerprint].consumed) if source.fingerprint in before else source
        for source in ordered
    ]
    return ResumedBlend(Blend(moved, position), left_out, tuple(_changes(moved, saved, position)))


def _twice(sources: Sequence[BlendSource]) -> list[Problem]:
    first: dict[str, str] = {}
    problems = []
    for source in sources:
        if source.fingerprint in first:
            rule = f"holds the same tokens as {first[source.fingerprint]}, which are then trained on twice"
            problems.append(Problem("data", source.name, rule, "Give it once, with both weights added"))
        first.setdefault(source.fingerprint, source.name)
    return problems


def _unknown_sources(sources: Sequence[BlendSource], saved: BlendState) -> list[Problem]:
    """Sources under whose name the checkpoint knows other tokens, and data that is new altogether."""
    here = {source.fingerprint for source in sources}
    known = {source.fingerprint for source in saved.sources}
    gone = {source.name: source for source in saved.sources if source.fingerprint not in here}
    problems = [
        Problem(
            "data",
            source.name,
            f"holds other tokens (fingerprint {source.fingerprint}) than the checkpoint was trained on "
            f"({gone[source.name].fingerprint}), and its position does not apply to them",
            "Restore the data (of a folder that now gives more files, name each of the earlier ones), give "
            "it another name in --data_blend, or begin a run in another --output_dir",
        )
        for source in sources
        if source.fingerprint not in known and source.name in gone
    ]
    if not problems and not here & known:
        names = few(source.name for source in saved.sources)
        rule = f"holds none of the sources that the checkpoint was trained on ({names})"
        remedy = "Restore the data, keep one of those sources, or begin a run in another --output_dir"
        problems.append(Problem("data", few(source.name for source in sources), rule, remedy))
    return problems


def _changes(sources: Sequence[BlendSource], saved: BlendState, position: int) -> list[str]:
    before = {source.fingerprint: source for source in saved.sources}
    lines = [f"data: other sources or weights from sample {position:,} on"]
    for source in sources:
        old = before.get(source.fingerprint)
        share = f"{float(source.weight):.4g}"
        if old is None:
            lines.append(f"  {source.name}: new, weight {share}")
            continue
        epoch, number = divmod(source.begun, source.dataset.samples_per_epoch)
        lines.append(
            f"  {source.name}: weight {float(old.weight):.4g} -> {share}, "
            f"continues at sample {number:,} of its epoch {epoch:,}"
        )
    here = {source.fingerprint for source in sources}
    for old in saved.sources:
        if old.fingerprint not in here and old.weight > 0:
            lines.append(f"  {old.name}: left out after {old.consumed:,} samples")
    return lines
