"""Sources and weights as one endless order of samples. No torch.

Position p of the order belongs to the source whose turn it is (`pipeline.data.turns`), and is that source's
next sample in its own order, which is endless, too: a small source begins its next epoch while a large one
is still in its first. So each source is read exactly once per epoch of its own, whatever the weights are
and were.

    weights 1/2 1/4 1/4    position 0 1 2 3 4 5 6 7 ...
                           books    0     1 2     3
                           code       0       1
                           mails        0       1
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from pipeline.data.packing import PackedDataset, Samples
from pipeline.data.turns import Turns
from pipeline.data.watched_file import WatchedFile


@dataclass(frozen=True)
class Source:
    """One source of a blend.

    Attributes:
        name: For people.
        weight: Share of the samples, above 0.
        dataset: Its samples.
        fingerprint: Tells its tokens and documents; how a checkpoint recognises it.
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

    Weights hold from position `start` on: a run that was continued with other weights has the samples before
    it behind it, `begun` of each source.

    Args:
        sources: All of one sequence length.
        start: Position at which these weights began to count.
        place: Position from which on it will be read, `start` if None, and with it
        taken: the samples of each source taken from `start` to `place`, as `taken` gave them.

    Raises:
        ValueError: sources of several sequence lengths, or none.
    """

    def __init__(
        self,
        sources: Sequence[Source],
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
        self._turns = Turns(weights, (start if place is None else place) - start, taken)
        # The loader's thread reads on while the training loop asks where a step ended.
        self._lock = threading.Lock()

    @property
    def num_documents(self) -> int:
        return sum(source.dataset.num_documents for source in self.sources)

    @property
    def num_tokens(self) -> int:
        return sum(source.dataset.num_tokens for source in self.sources)

    @property
    def samples_per_epoch(self) -> int:
        """Of all sources, an epoch each."""
        return sum(source.dataset.samples_per_epoch for source in self.sources)

    @property
    def dropped_tokens(self) -> int:
        """Of all sources, in an epoch each."""
        return sum(source.dataset.dropped_tokens for source in self.sources)

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
            ValueError: `position` lies before the first one that can be read.
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
