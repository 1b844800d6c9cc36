"""Documents of tokens packed into samples of one length. No torch.

In every epoch the documents are put one after the other in a new order (a function of seed and
epoch), and the stream is cut into windows of S + 1 tokens, each S tokens after the one before it, so
that every token but the first is predicted exactly once:

    stream    a b c d e f g h i j k|        S = 4
    sample 0  a b c d e                     inputs a b c d, labels b c d e
    sample 1          e f g h i             inputs e f g h, labels f g h i
    tail                        i j k       fewer than S labels left: dropped, or padded and masked

A training set drops the tail (the next epoch's shuffle puts other tokens there); a held-out set keeps
it, so that its loss covers each of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipeline.data.shuffle import permutation


@dataclass(frozen=True)
class Samples:
    """Rows of one length.

    Attributes:
        tokens: [rows, S + 1] int64; inputs are [:, :-1], labels are [:, 1:].
        num_labels: [rows] int64; labels at and after this position are padding.
        indices: [rows] int64; epoch * samples per epoch + number of the sample in its epoch.
    """

    tokens: np.ndarray
    num_labels: np.ndarray
    indices: np.ndarray


@dataclass(frozen=True)
class _Epoch:
    """One epoch's orders: `begins` [documents + 1] are the documents' places in the shuffled stream."""

    documents: np.ndarray
    begins: np.ndarray
    samples: np.ndarray


class PackedDataset:
    """Samples of `sequence_length` + 1 tokens; position p of the endless shuffled order is a pure function.

    Args:
        tokens: All tokens of the token file, [tokens], usually memory-mapped.
        offsets: Document j is ``tokens[offsets[j]:offsets[j + 1]]``, [documents + 1] int64.
        documents: The documents of this set (its side of the split).
        sequence_length: S, inputs (and labels) per sample.
        seed: Chooses the orders, together with the epoch.
        keep_tail: Pad the last sample of an epoch instead of dropping it.

    Raises:
        ValueError: there is not one sample.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        documents: Sequence[int] | np.ndarray,
        sequence_length: int,
        seed: int,
        keep_tail: bool = False,
    ) -> None:
        self.sequence_length = sequence_length
        self.seed = seed
        self._tokens = tokens
        self._documents = np.asarray(documents, dtype=np.int64)
        self._begins = np.asarray(offsets, dtype=np.int64)[self._documents]
        self._lengths = np.asarray(offsets, dtype=np.int64)[self._documents + 1] - self._begins
        self.num_tokens = int(self._lengths.sum())
        labels = max(self.num_tokens - 1, 0)
        self.samples_per_epoch = -(-labels // sequence_length) if keep_tail else labels // sequence_length
        if not self.samples_per_epoch:
            raise ValueError(
                f"{self.num_tokens} tokens do not fill one sample of {sequence_length} + 1 tokens"
            )
        # Two epochs, as a batch may cross an edge. The cache belongs to this object, and is thread-safe.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    @property
    def num_documents(self) -> int:
        return len(self._documents)

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the end of every epoch that no sample holds."""
        return max(self.num_tokens - 1 - self.samples_per_epoch * self.sequence_length, 0)

    def read(self, positions: Sequence[int] | np.ndarray) -> Samples:
        """The samples at `positions` of the order: position = samples consumed before it, from 0 on."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, places = np.divmod(positions, self.samples_per_epoch)
        tokens = np.zeros((len(positions), self.sequence_length + 1), dtype=np.int64)
        num_labels = np.empty(len(positions), dtype=np.int64)
        numbers = np.empty(len(positions), dtype=np.int64)
        for row, (epoch, place) in enumerate(zip(epochs.tolist(), places.tolist(), strict=True)):
            orders = self._epoch(epoch)
            numbers[row] = orders.samples[place]
            num_labels[row] = self._fill(tokens[row], orders, int(numbers[row]) * self.sequence_length) - 1
        return Samples(tokens, num_labels, epochs * self.samples_per_epoch + numbers)

    def _make_epoch(self, epoch: int) -> _Epoch:
        documents = permutation(self.num_documents, self.seed, "documents", epoch)
        begins = np.concatenate(([0], np.cumsum(self._lengths[documents])))
        return _Epoch(documents, begins, permutation(self.samples_per_epoch, self.seed, "samples", epoch))

    def _fill(self, row: np.ndarray, epoch: _Epoch, place: int) -> int:
        """Copy the stream from `place` on into `row`, document by document; returns the tokens copied."""
        filled = 0
        number = int(np.searchsorted(epoch.begins, place, side="right")) - 1
        while filled < len(row) and number < self.num_documents:
            document = epoch.documents[number]
            inside = place + filled - int(epoch.begins[number])
            count = min(int(self._lengths[document]) - inside, len(row) - filled)
            begin = int(self._begins[document]) + inside
            row[filled : filled + count] = self._tokens[begin : begin + count]
            filled += count
            number += 1
        return filled
