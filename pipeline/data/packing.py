"""Documents of tokens packed into samples of one length.

In every epoch the documents are put one after the other in a new order (a function of seed and
epoch), and the stream is cut into windows of S + 1 tokens, each S tokens after the one before it, so
that every token but the first is predicted exactly once:

    stream    a b c d e f g h i j k|        S = 4
    sample 0  a b c d e                     inputs a b c d, labels b c d e
    sample 1          e f g h i             inputs e f g h, labels f g h i
    tail                        i j k       fewer than S labels left: dropped, or padded and masked

A training set drops the tail (the next epoch's shuffle puts other tokens there); a validation set keeps
it, so that its loss covers each of its tokens.

Sample i of an epoch, and so position p of the endless order, is a pure function of tokens, documents, seed
and sequence length. It costs an index of the epoch's documents (`pipeline.data.order`), none of
samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from pipeline.data.order import Complement, DocumentSet, EpochIndexes, Order
from pipeline.data.token_file import TokenError


@dataclass(frozen=True)
class Samples:
    """Rows of one length.

    Attributes:
        tokens: [rows, S + 1] int64; inputs are [:, :-1], labels are [:, 1:].
        num_labels: [rows] int64; labels at and after this position are padding.
        indices: [rows] int64; epoch * samples per epoch + number of the sample in its epoch.
        documents: [rows, S + 1] int64, each token's document, counted from 0 in its row; padding is one of
            its own. None unless the packing finds documents.
        counted: [rows, S] bool, False where the label begins another document than its input ends; None
            where those count like any other.
        sources: [rows] int64, number of the blend's source; None where there is one.
    """

    tokens: np.ndarray
    num_labels: np.ndarray
    indices: np.ndarray
    documents: np.ndarray | None = None
    counted: np.ndarray | None = None
    sources: np.ndarray | None = None


@dataclass(frozen=True)
class _Epoch:
    """One epoch's orders: `begins` [documents + 1] are the documents' places in the shuffled stream."""

    documents: Order
    begins: np.ndarray
    samples: Order


@dataclass(frozen=True)
class Packing:
    """How documents become samples.

    Attributes:
        sequence_length: S, inputs (and labels) per sample.
        seed: Chooses the orders, together with the epoch.
        keep_tail: Pad the last sample of an epoch instead of dropping it.
        find_documents: Return the document of each token.
        mask_document_end: Do not count the label after a document's last token.
        vocab_size: Ids from here on are refused when they are read; None allows any.
    """

    sequence_length: int
    seed: int
    keep_tail: bool = False
    find_documents: bool = False
    mask_document_end: bool = False
    vocab_size: int | None = None


class PackedDataset:
    """Samples of `sequence_length` + 1 tokens; position p of the endless shuffled order is a pure function.

    Args:
        tokens: All tokens of the token file, [tokens], usually memory-mapped.
        offsets: Document j is ``tokens[offsets[j]:offsets[j + 1]]``, [documents + 1] int64.
        documents: The documents of this set (its side of the split).
        index_stem: Where long indexes are shared by the ranks of a host; see `EpochIndexes`.

    Raises:
        ValueError: there is not one sample.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        documents: DocumentSet | Sequence[int],
        packing: Packing,
        index_stem: Path | None = None,
    ) -> None:
        self.packing = packing
        self.sequence_length = sequence_length = packing.sequence_length
        # Slices of a memmap cost more than those of a plain array over the same pages.
        self._tokens = np.asarray(tokens) if isinstance(tokens, np.ndarray) else tokens
        self._offsets = np.asarray(offsets)
        self._documents = documents if isinstance(documents, Complement) else np.asarray(documents, np.int64)
        self.num_tokens = _num_tokens(self._offsets, self._documents)
        labels = max(self.num_tokens - 1, 0)
        self.samples_per_epoch, rest = divmod(labels, sequence_length)
        self.samples_per_epoch += packing.keep_tail and rest > 0
        if not self.samples_per_epoch:
            raise ValueError(
                f"{self.num_tokens} tokens do not fill one sample of {sequence_length} + 1 tokens"
            )
        self._indexes = EpochIndexes(self._offsets, self._documents, packing.seed, index_stem)
        # Two epochs, as a batch may cross an edge. The cache belongs to this object, and is thread-safe.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    @property
    def num_documents(self) -> int:
        return len(self._documents)

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the end of every epoch that no sample holds."""
        return max(self.num_tokens - 1 - self.samples_per_epoch * self.sequence_length, 0)

    def documents(self, first: int = 0, every: int = 1) -> Iterator[np.ndarray]:
        """The tokens of each document, [tokens], from number `first` on one of `every`."""
        for number in range(first, len(self._documents), every):
            document = int(self._documents[np.array([number])][0])
            yield self._tokens[int(self._offsets[document]) : int(self._offsets[document + 1])]

    def read(self, positions: Sequence[int] | np.ndarray) -> Samples:
        """The samples at `positions` of the order: position = samples consumed before it, from 0 on.

        Raises:
            TokenError: a token id beyond the vocabulary.
        """
        shape = (len(positions), self.sequence_length + 1)
        tokens = np.zeros(shape, dtype=np.int64)
        documents = None
        if self.packing.find_documents or self.packing.mask_document_end:
            documents = np.zeros(shape, dtype=np.int64)
        num_labels, indices = np.empty((2, len(positions)), dtype=np.int64)
        for epoch, rows, numbers in self._by_epoch(positions):
            indices[rows] = epoch * self.samples_per_epoch + numbers
            num_labels[rows] = self._fill(tokens, documents, rows, self._epoch(epoch), numbers) - 1
        self._check(tokens)
        counted = documents[:, 1:] == documents[:, :-1] if self.packing.mask_document_end else None
        shown = documents if self.packing.find_documents else None
        return Samples(tokens, num_labels, indices, shown, counted)

    def indices(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """`Samples.indices` at `positions`, [positions] int64, without reading their tokens."""
        indices = np.empty(len(positions), dtype=np.int64)
        for epoch, rows, numbers in self._by_epoch(positions):
            indices[rows] = epoch * self.samples_per_epoch + numbers
        return indices

    def _by_epoch(
        self, positions: Sequence[int] | np.ndarray
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Each epoch of `positions`, which of them are in it, and the numbers of their samples there."""
        epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), self.samples_per_epoch)
        for epoch in np.unique(epochs).tolist():
            rows = np.flatnonzero(epochs == epoch)
            yield epoch, rows, self._epoch(epoch).samples(places[rows])

    def _make_epoch(self, epoch: int) -> _Epoch:
        return _Epoch(
            self._indexes.order(epoch),
            self._indexes.begins(epoch),
            Order(self.samples_per_epoch, self.packing.seed, "samples", epoch),
        )

    def _fill(
        self,
        tokens: np.ndarray,
        documents: np.ndarray | None,
        rows: np.ndarray,
        epoch: _Epoch,
        numbers: np.ndarray,
    ) -> np.ndarray:
        """Copy the samples `numbers` of `epoch` into `rows`, document by document; [rows] tokens copied."""
        begins = numbers * self.sequence_length
        ends = np.minimum(begins + tokens.shape[1], self.num_tokens)
        firsts = np.searchsorted(epoch.begins, begins, side="right") - 1
        counts = np.searchsorted(epoch.begins, ends, side="left") - firsts
        # One piece per document and row; `inside` is the document's number in its row.
        row = np.repeat(np.arange(len(rows)), counts)
        inside = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = firsts[row] + inside
        starts = np.maximum(epoch.begins[places], begins[row])
        stops = np.minimum(epoch.begins[places + 1], ends[row])
        origins = self._offsets[self._documents[epoch.documents(places)]] + starts - epoch.begins[places]
        pieces = (rows[row], starts - begins[row], stops - begins[row], origins, inside)
        for at, start, stop, origin, number in zip(*(each.tolist() for each in pieces), strict=True):
            tokens[at, start:stop] = self._tokens[origin : origin + stop - start]
            if documents is not None:
                documents[at, start:stop] = number
        if documents is not None:
            for at in np.flatnonzero(ends - begins < tokens.shape[1]).tolist():
                documents[rows[at], ends[at] - begins[at] :] = counts[at]
        return ends - begins

    def _check(self, tokens: np.ndarray) -> None:
        if self.packing.vocab_size is None or not tokens.size:
            return
        least, greatest = int(tokens.min()), int(tokens.max())
        if least < 0 or greatest >= self.packing.vocab_size:
            raise TokenError(
                f"the data holds the token id {least if least < 0 else greatest}, and the model's vocabulary "
                f"has the ids 0 .. {self.packing.vocab_size - 1}: the tokens were made with another "
                "tokenizer, or the file is damaged"
            )


def _num_tokens(offsets: np.ndarray, documents: Complement | np.ndarray) -> int:
    if isinstance(documents, Complement):
        return int(offsets[-1]) - int(offsets[0]) - _num_tokens(offsets, documents.left_out)
    return int((offsets[documents + 1] - offsets[documents]).sum())
