"""Which tokens of a source are held out for validation.

Documents are taken whole, in an order of the seed, until the wanted tokens are reached. One that would take
far more than is missing is split: its end is held out, from a document's or line's beginning on. So one text
file can be evaluated on, and a long document among short ones does not become the validation set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.data.order import Complement, Order, split_documents
from pipeline.data.token_file import TokenFile
from pipeline.data.tokenizer import Tokenizer

# Held out at most where no share was asked for: its loss is known to a thousandth, and it costs no training.
USUAL_LIMIT = 10_000_000
# Documents looked at in one go.
_CHUNK = 1 << 16
# Tokens around the wanted place in which a document or line may begin.
_WINDOW = 1 << 15


@dataclass(frozen=True)
class SplitRule:
    """How much is held out, and counted in what; a checkpoint keeps it.

    Attributes:
        fraction: Share of each source, 0 to below 1.
        limit: Tokens of each source at most; None: no limit.
        by_documents: The share is of documents, none of which is split where there are two: the rule of
            runs whose checkpoints do not say.
    """

    fraction: float
    limit: int | None = None
    by_documents: bool = False

    def to_json(self) -> dict[str, int | None] | None:
        """For a checkpoint; None where it is the rule of one that does not say."""
        return None if self.by_documents else {"limit": self.limit}

    @property
    def name(self) -> str:
        """For names of files."""
        return f"{self.fraction}" if self.by_documents else f"{self.fraction}-of-tokens-{self.limit}"


@dataclass(frozen=True)
class Split:
    """Two sets of documents.

    Attributes:
        offsets: Document j is ``tokens[offsets[j]:offsets[j + 1]]``, [documents + 1] int64. One more than the
            token file has where a document was split.
        train: To train on.
        held_out: To evaluate.
        said: What a user should know about it.
    """

    offsets: np.ndarray
    train: Complement
    held_out: Complement | np.ndarray
    said: tuple[str, ...] = ()


def split_source(file: TokenFile, rule: SplitRule, seed: int, tokenizer: Tokenizer) -> Split:
    """The split of one source: a pure function of its tokens, the rule and the seed."""
    offsets, total = file.offsets, file.num_documents
    if rule.fraction == 0 or (rule.by_documents and total > 1):
        return Split(offsets, *split_documents(total, rule.fraction, seed))
    tokens = int(offsets[-1] - offsets[0])
    if tokens < 2:  # nothing to divide; packing says that there is too little
        return Split(offsets, *split_documents(total, 0.0, seed))
    share = round(tokens * rule.fraction)
    wanted = min(max(share if rule.limit is None else min(share, rule.limit), 2), tokens - 1)
    more = "--eval_fraction, in another --output_dir, asks for more"
    capped = (f"capped: {rule.fraction:.1%} would be {share:,} tokens; {more}",)
    said = capped if share > wanted else ()
    documents, before = _documents_up_to(offsets, wanted, seed)
    last = int(documents[-1])
    length = int(offsets[last + 1] - offsets[last])
    if len(documents) < total and before + length <= wanted * 1.5:
        held_out = np.sort(documents)
        return Split(offsets, Complement(total, held_out), held_out, said)
    cut, where = _place(file, last, wanted - before, tokenizer)
    held_out = np.sort(np.where(documents >= last, documents + 1, documents))
    held = int(offsets[last + 1]) - cut
    line = f"one document is split {where}: its last {held:,} of {length:,} tokens are held out"
    return Split(np.insert(offsets, last + 1, cut), Complement(total + 1, held_out), held_out, (line, *said))


def _documents_up_to(offsets: np.ndarray, wanted: int, seed: int) -> tuple[np.ndarray, int]:
    """Documents in the order of `seed` up to the one with which they have `wanted` tokens, and the tokens of
    those before it."""
    count = len(offsets) - 1
    order, taken, tokens = Order(count, seed, "held out"), [], 0
    for first in range(0, count, _CHUNK):
        ids = order(np.arange(first, min(first + _CHUNK, count)))
        ends = tokens + np.cumsum(offsets[ids + 1] - offsets[ids])
        reached = int(np.searchsorted(ends, wanted))
        taken.append(ids[: reached + 1])
        if reached < len(ids):
            return np.concatenate(taken), int(ends[reached - 1]) if reached else tokens
        tokens = int(ends[-1])
    raise AssertionError("fewer tokens than a share of them")


def _place(file: TokenFile, document: int, tokens: int, tokenizer: Tokenizer) -> tuple[int, str]:
    """Where the last `tokens` of a document begin, moved to the nearest beginning of a document in it, else
    of a line, by less than half of them; and its name."""
    begin, end = int(file.offsets[document]), int(file.offsets[document + 1])
    wanted = min(max(end - tokens, begin + 1), end - 1)
    window = min((tokens - 1) // 2, _WINDOW)
    first, last = max(begin, wanted - window), min(end - 1, wanted + window)
    near = np.asarray(file.tokens[first:last])
    ids = np.unique(near).tolist()
    lines = [id for id in ids if id < tokenizer.vocab_size and tokenizer.decode([id]).endswith("\n")]
    for name, ends in (("document", [tokenizer.end_of_document]), ("line", lines)):
        places = first + 1 + np.flatnonzero(np.isin(near, ends))
        if len(places):
            return int(places[np.argmin(np.abs(places - wanted))]), f"where a {name} begins"
    return wanted, "inside a line, as none begins near"
