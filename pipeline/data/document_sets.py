"""Which documents of a token file belong to a set of samples. No torch.

Documents are held out whole, never by token. The training side is all documents but those: it is kept as
what it lacks, so that a hundred million documents cost each rank no list of their own.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pipeline.base.problems import JobError, Problem
from pipeline.data.shuffle import Order


class DocumentSet(Protocol):
    """Document ids, ascending: ``documents[numbers]`` are those at the places `numbers`."""

    def __len__(self) -> int: ...

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray: ...


class AllBut:
    """The documents 0 .. total - 1 without those `left_out` ([documents] int64, ascending).

    With 2 and 3 left out of 6, places 0 .. 3 hold 0 1 4 5: at place n, as many documents are missing before
    it as entries of left_out - arange = [2 2] are at most n.
    """

    def __init__(self, total: int, left_out: np.ndarray) -> None:
        self.left_out = left_out
        self._length = total - len(left_out)
        self._places = left_out - np.arange(len(left_out))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        if not len(self._places):
            return np.asarray(numbers, dtype=np.int64)
        # Searched in ascending order, which the processor's caches like: ten times as fast for millions.
        ascending = np.argsort(numbers)
        missing = np.empty(len(numbers), dtype=np.int64)
        missing[ascending] = np.searchsorted(self._places, numbers[ascending], side="right")
        return numbers + missing


def split_documents(
    num_documents: int, eval_fraction: float, seed: int, name: str = "the data"
) -> tuple[AllBut, np.ndarray]:
    """The training documents and, ascending, the held-out ones.

    A document is never on both sides. The held-out side has `eval_fraction` of the documents, rounded,
    but at least one, and leaves at least one to train on. It does not depend on epoch or layout.

    Raises:
        JobError: fewer than two documents, where something is to be held out of what is called `name`.
    """
    if eval_fraction == 0:
        return AllBut(num_documents, np.arange(0)), np.arange(0)
    if num_documents < 2:
        rule = f"documents are held out whole, and {name} is a single document"
        remedy = "Set it to 0, or give the data in several files"
        raise JobError([Problem("eval_fraction", eval_fraction, rule, remedy)])
    count = min(max(round(num_documents * eval_fraction), 1), num_documents - 1)
    held_out = np.sort(Order(num_documents, seed, "held out")(np.arange(count)))
    return AllBut(num_documents, held_out), held_out
