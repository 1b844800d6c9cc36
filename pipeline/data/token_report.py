"""What is in token files, for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.data.token_file import TokenFile
from pipeline.data.tokenizer import Tokenizer

_BAR = 40
_SHOWN_DOCUMENTS = 3
_SHOWN_TOKENS = 60
# Tokens whose ids are looked at; beyond, they are those of the file's beginning and of its end.
_LOOKED_AT = 1 << 26


@dataclass(frozen=True)
class TokenReport:
    """An opened token file, to be printed.

    Attributes:
        prefix: Its name.
        file: The tokens.
        tokenizer: To decode with.
    """

    prefix: str
    file: TokenFile
    tokenizer: Tokenizer

    def lines(self) -> Iterator[str]:
        """Counts, lengths, ids, and the beginnings of the first documents."""
        lengths = np.diff(self.file.offsets)
        documents, tokens = self.file.num_documents, len(self.file.tokens)
        yield f"{self.prefix}: {documents:,} documents, {tokens:,} tokens, {self._size()}"
        made = self.file.tokenizer_hash or "unknown: no description beside the files"
        yield f"tokenizer: {made}"
        if self.file.num_skipped:
            yield f"skipped while preparing: {self.file.num_skipped:,}"
        if not len(lengths):
            return
        yield (
            f"tokens per document: least {lengths.min():,}, median {int(np.median(lengths)):,}, "
            f"mean {lengths.mean():,.1f}, most {lengths.max():,}"
        )
        yield from _histogram(lengths)
        yield from self._ids()
        for number in range(min(_SHOWN_DOCUMENTS, self.file.num_documents)):
            begin, end = self.file.offsets[number : number + 2].tolist()
            shown = self.file.tokens[begin : min(end, begin + _SHOWN_TOKENS)]
            more = f" ... ({end - begin:,} tokens)" if end - begin > _SHOWN_TOKENS else ""
            yield f"document {number}: {self._decoded(shown)!r}{more}"

    def _size(self) -> str:
        size = Path(f"{self.prefix}.bin").stat().st_size
        return f"{size / 1e6:,.1f} MB of {self.file.tokens[:0].dtype.name}"

    def _ids(self) -> Iterator[str]:
        tokens = self.file.tokens
        half = _LOOKED_AT // 2
        parts = [tokens[:]] if len(tokens) <= _LOOKED_AT else [tokens[:half], tokens[len(tokens) - half :]]
        used = np.unique(np.concatenate([np.unique(part) for part in parts]))
        whole = "" if len(parts) == 1 else f" (of the first and last {half:,} tokens)"
        vocabulary = self.tokenizer.vocab_size
        found = f"{len(used):,} of the tokenizer's {vocabulary:,} are used"
        yield f"ids: {used.min():,} to {used.max():,}, {found}{whole}"
        if used.max() >= vocabulary:
            yield f"WARNING: ids above {vocabulary - 1:,} are not this tokenizer's; name theirs (--tokenizer)"

    def _decoded(self, tokens: np.ndarray) -> str:
        known = tokens[(tokens >= 0) & (tokens < self.tokenizer.vocab_size)]
        return self.tokenizer.decode(known.tolist())


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """One line for each power of two."""
    classes = np.bincount(np.frexp(np.maximum(lengths, 1).astype(np.float64) - 0.5)[1].clip(0))
    for power, count in enumerate(classes.tolist()):
        if count:
            low = (1 << power >> 1) + 1 if power else 0
            bar = "#" * max(round(_BAR * count / max(classes)), 1)
            yield f"{low:>13,} to {1 << power:<13,} {count:>13,} {bar}"
