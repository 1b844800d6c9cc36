"""Preparing data: speed beside the bare tokenizer's `encode_batch`, and memory over the size of the input.

    python -m benchmarks.data speed  [--megabytes N] [--rounds R] [--json FILE]
    python -m benchmarks.data memory [--megabytes SMALL LARGE] [--tokenizer bpe|bytes] [--json FILE]

Both use the source text of Python's standard library, repeated, as JSON lines on the disk, and a byte-level
BPE trained on it. `speed` takes turns: the bare tokenizer encodes texts that are in memory already, on all
cores, in batches of 1,000, and throws the ids away; the preparation reads the file, parses it, encodes,
and writes token files. Their ratio is that of two neighbouring runs. `memory` is the largest
resident size of all processes of a preparation together, looked at ten times a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the project is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import psutil

from benchmarks.report import Report, paired_ratio, spread
from pipeline.data.corpus import find_corpus
from pipeline.data.preparation import Rules, usual_workers, write_tokens
from pipeline.data.token_file import open_token_file
from pipeline.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from pipeline.data.tokenizer_training import train_tokenizer

SPEED_TO_REACH = 0.9
VOCABULARY = 16_384
_BATCH = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit code 0."""
    parser = argparse.ArgumentParser("python -m benchmarks.data", description=__doc__)
    parser.add_argument("what", choices=("speed", "memory"))
    parser.add_argument("--megabytes", type=int, nargs="+", help="of text; default 100, memory: 100 400")
    parser.add_argument("--tokenizer", choices=("bpe", "bytes"), default="bpe", help="for memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for all numbers")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer(find_corpus(()), Rules(), VOCABULARY, folder / "bpe")
        if given.what == "speed":
            _speed(folder, (given.megabytes or [100])[0], given.rounds, given.json)
        else:
            tokenizer = "bytes" if given.tokenizer == "bytes" else str(folder / "bpe")
            _memory(folder, given.megabytes or [100, 400], tokenizer, given.json)
    return 0


def standard_library(megabytes: int) -> Iterator[str]:
    """Texts of that many megabytes together."""
    texts = [Path(file.path).read_text(encoding="utf-8") for file in find_corpus(()).files]
    left = megabytes * 1_000_000
    while left > 0:
        for text in texts:
            yield text
            left -= len(text)
            if left <= 0:
                return


def _write(path: Path, megabytes: int) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for text in standard_library(megabytes):
            stream.write(json.dumps({"text": text}) + "\n")


def _speed(folder: Path, megabytes: int, rounds: int, path: str | None) -> None:
    report = Report("preparing data: speed", "cpu", {"megabytes": megabytes, "rounds": rounds})
    _write(folder / "texts.jsonl", megabytes)
    corpus = find_corpus([str(folder / "texts.jsonl")])
    tokenizer = load_tokenizer(str(folder / "bpe"))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    texts = list(standard_library(megabytes))
    bare, fast, ours = [], [], []
    for number in range(rounds):
        bare.append(_seconds(tokenizer.backend.encode_batch, texts))
        fast.append(_seconds(tokenizer.backend.encode_batch_fast, texts))
        begin = time.perf_counter()
        prefix = str(folder / f"tokens{number}")
        write_tokens(prefix, corpus, tokenizer, Rules(), usual_workers(corpus))
        ours.append(time.perf_counter() - begin)
    tokens = len(open_token_file(prefix).tokens)
    named = {"encode_batch alone": bare, "encode_batch_fast alone": fast, "pipeline.prepare": ours}
    rows = [
        (label, f"{median(seconds):.2f}", f"{spread(seconds):.1%}", f"{tokens / median(seconds):,.0f}")
        for label, seconds in named.items()
    ]
    report.table(("", "seconds", "+-", "tokens/s"), rows)
    ratio = paired_ratio(bare, ours)
    verdict = "yes" if ratio >= SPEED_TO_REACH else "NO"
    report.say(f"prepare / encode_batch: {ratio:.3f}, to reach {SPEED_TO_REACH}: {verdict}")
    report.say(f"prepare / encode_batch_fast, which leaves out offsets: {paired_ratio(fast, ours):.3f}")
    report.write(path, seconds=named, ratio=ratio, tokens=tokens)


def _seconds(encode: Callable[..., object], texts: Sequence[str]) -> float:
    begin = time.perf_counter()
    for place in range(0, len(texts), _BATCH):
        encode(texts[place : place + _BATCH], add_special_tokens=False)
    return time.perf_counter() - begin


def _memory(folder: Path, sizes: Sequence[int], tokenizer: str, path: str | None) -> None:
    settings = {"megabytes": list(sizes), "tokenizer": Path(tokenizer).name}
    report = Report("preparing data: memory", "cpu", settings)
    rows: list[dict[str, Any]] = []
    for megabytes in sizes:
        file = folder / f"{megabytes}.jsonl"
        _write(file, megabytes)
        command = [sys.executable, "-m", "pipeline.prepare", str(file), "--tokenizer", tokenizer]
        peak, seconds = _peak([*command, "--output", str(folder / f"tokens{megabytes}")])
        rows.append({"megabytes": megabytes, "peak_megabytes": peak / 1e6, "seconds": seconds})
    report.table(
        ("input MB", "peak memory MB", "seconds"),
        [(row["megabytes"], f"{row['peak_megabytes']:.0f}", f"{row['seconds']:.1f}") for row in rows],
    )
    growth = rows[-1]["peak_megabytes"] / rows[0]["peak_megabytes"]
    report.say(f"memory of the largest input / of the smallest: {growth:.3f}")
    report.write(path, rows=rows, growth=growth)


def _peak(command: Sequence[str]) -> tuple[int, float]:
    """Largest resident size of a command and its children, in bytes, and its time in seconds."""
    begin, peak = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, sum(_resident(each) for each in [watched, *_children(watched)]))
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    return peak, time.perf_counter() - begin


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


if __name__ == "__main__":
    sys.exit(main())
