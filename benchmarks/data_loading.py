"""Reading samples in their shuffled order, and making the order.

    python -m benchmarks.data_loading [reading|index|all] [--rounds R] [--documents N] [--json FILE]

reading    batches of 8 samples of 2,048 tokens from random places of a file of 10^8 tokens in documents of
           1,000 on average, in the page cache: one source, three sources blended, and with the documents of
           each token. Beside them, in turns, a bare loop that copies as many random windows of the same file
           to int64 and knows neither documents nor epochs: what the memory gives.
index      the index of an epoch of N documents (default 10^8), all of them, and those beside 5 % held out,
           written to a file, then opened by a second rank; and the places of 10^6 samples in the order of
           10^8, which need no index.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the project is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from benchmarks.report import Report, paired_ratio, spread
from pipeline.data.blend import Blend, BlendSource
from pipeline.data.loader import micro_batch
from pipeline.data.order import Complement, EpochIndexes, Order, split_documents
from pipeline.data.packing import PackedDataset, Packing

# Tokens per second and rank that reading must reach.
SPEED_TO_REACH = 50e6
SEQUENCE, BATCH = 2048, 8
TOKENS, DOCUMENTS = 10**8, 10**5
BATCHES = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit code 0."""
    parser = argparse.ArgumentParser("python -m benchmarks.data_loading", description=__doc__)
    parser.add_argument("what", choices=("reading", "index", "all"), nargs="?", default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=10**8, help="of the index")
    parser.add_argument("--json", help="file for all numbers")
    given = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    report = Report("loading data", "cpu", {"rounds": given.rounds, "documents": given.documents})
    with tempfile.TemporaryDirectory() as folder:
        if given.what in ("reading", "all"):
            results["reading"] = _reading(Path(folder), given.rounds, report)
        if given.what in ("index", "all"):
            results["index"] = _index(Path(folder), given.documents, report)
    report.write(given.json, **results)
    return 0


def _reading(folder: Path, rounds: int, report: Report) -> dict[str, Any]:
    tokens, offsets = _token_file(folder)
    contenders = {
        "bare copies": _bare(tokens),
        "one source": _batches(_blend(tokens, offsets, 1)),
        "three sources": _batches(_blend(tokens, offsets, 3)),
        "one source, with documents": _batches(_blend(tokens, offsets, 1, find_documents=True)),
    }
    for read in contenders.values():
        read()  # page cache, and the epoch's index
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, read in contenders.items():
            begin = time.perf_counter()
            read()
            speeds[name].append(BATCHES * BATCH * SEQUENCE / (time.perf_counter() - begin))
    bare = speeds["bare copies"]
    rows = [
        (name, f"{median(each) / 1e6:.0f}", f"{spread(each):.0%}", f"{paired_ratio(each, bare):.2f}")
        for name, each in speeds.items()
    ]
    report.say(f"Random samples of {SEQUENCE:,} tokens; to reach: {SPEED_TO_REACH / 1e6:.0f}")
    report.table(("", "million tokens/s", "+-", "of bare copies"), rows)
    return speeds


def _token_file(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(0)
    path = folder / "tokens.bin"
    dice.integers(0, 50_000, TOKENS, dtype=np.uint16).tofile(path)
    edges = np.sort(dice.choice(TOKENS - 1, DOCUMENTS - 1, replace=False)) + 1
    return np.memmap(path, np.uint16, "r"), np.concatenate(([0], edges, [TOKENS]))


def _blend(tokens: np.ndarray, offsets: np.ndarray, sources: int, **options: bool) -> Blend:
    """Equal shares of the documents as sources, weights 5 : 3 : 2."""
    parts = np.array_split(np.arange(DOCUMENTS), sources)
    return Blend(
        [
            BlendSource(
                str(number),
                Fraction(weight),
                PackedDataset(tokens, offsets, part, Packing(SEQUENCE, number, vocab_size=50_000, **options)),
                str(number),
            )
            for number, (part, weight) in enumerate(zip(parts, (5, 3, 2), strict=False))
        ]
    )


def _batches(blend: Blend) -> Callable[[], None]:
    def read() -> None:
        for first in range(0, BATCHES * BATCH, BATCH):
            micro_batch(blend.read(np.arange(first, first + BATCH)))

    return read


def _bare(tokens: np.ndarray) -> Callable[[], None]:
    plain = np.asarray(tokens)
    begins = np.random.default_rng(1).integers(0, TOKENS - SEQUENCE - 1, (BATCHES, BATCH)).tolist()

    def read() -> None:
        for batch in begins:
            np.stack([plain[begin : begin + SEQUENCE + 1].astype(np.int64) for begin in batch])

    return read


def _index(folder: Path, documents: int, report: Report) -> dict[str, Any]:
    offsets = np.arange(0, 20 * documents + 1, 20)
    everything = Complement(documents, np.arange(0))
    most, _ = split_documents(documents, 0.05, 1)

    def seconds(action: Callable[[], object]) -> float:
        begin = time.perf_counter()
        action()
        return time.perf_counter() - begin

    results = {
        "first rank": seconds(lambda: EpochIndexes(offsets, everything, 1, folder / "order").begins(0)),
        "second rank": seconds(lambda: EpochIndexes(offsets, everything, 1, folder / "order").begins(0)),
        "beside held-out documents": seconds(
            lambda: EpochIndexes(offsets, most, 1, folder / "most").begins(0)
        ),
        "10^6 samples of 10^8": seconds(lambda: Order(10**8, 1, "samples", 0)(np.arange(10**6))),
    }
    rows = [(name, f"{value:.3g}") for name, value in results.items()]
    report.say(f"Index of an epoch of {documents:,} documents")
    report.table(("", "seconds"), rows)
    return results


if __name__ == "__main__":
    raise SystemExit(main())
