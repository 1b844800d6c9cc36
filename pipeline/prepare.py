"""``python -m pipeline.prepare INPUT... --output PREFIX``: text to token files, offline, on all cores.

Exit codes: 0 done, 2 with every problem if the inputs or options are wrong, 1 anything else. Killed or
interrupted, the same command continues.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pipeline.base.command import run_command, show_messages
from pipeline.base.fields import range_problems
from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_WRONG_JOB, JobError, Problem
from pipeline.base.words import counted
from pipeline.data.corpus import Corpus, data_problems, find_corpus
from pipeline.data.inputs import token_prefix
from pipeline.data.preparation import PreparationProgress, Rules, usual_workers, write_tokens
from pipeline.data.remote_cache import RemoteCache
from pipeline.data.token_file import open_token_file
from pipeline.data.token_report import TokenReport
from pipeline.data.tokenizer import (
    BESIDE_TOKENS,
    Tokenizer,
    chosen_tokenizer,
    load_tokenizer,
    tokenizer_facts,
)
from pipeline.data.tokenizer_training import train_tokenizer
from pipeline.job.options import BadRecord, Count, Gigabytes, read_command_line
from pipeline.job.report import console, print_interruption, print_problems

PROGRAM = "python -m pipeline.prepare"


@dataclass(frozen=True)
class PrepareOptions:
    """Turn text into token files, PREFIX.bin and PREFIX.idx in Megatron's format, for --data PREFIX."""

    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT [INPUT ...]")]
    """What --data of a run takes: text, .jsonl[.gz|.zst] and .parquet files, folders of them, saved datasets,
    hub:NAME. With --inspect alone, token files."""
    output: str | None = None
    """PREFIX of the files to make."""
    tokenizer: str | None = None
    """bytes, or a Hugging Face tokenizer folder. None: bytes."""
    train_tokenizer: int | None = None
    """Train a byte-level BPE of this many ids on the inputs first, and save it as PREFIX.tokenizer."""
    text_field: str = "text"
    """The field of JSON lines, and the column of Parquet files and datasets, that holds the text."""
    on_bad_record: BadRecord = "stop"
    """stop: the first record that cannot be used ends it with a message; skip: they are counted."""
    workers: Count | None = None
    """Processes that tokenize. None: one for each core, or one for a small input."""
    cache_dir: str | None = None
    """Folder for local copies of inputs at s3://, gs:// and http(s):// addresses. None: PREFIX.remote."""
    cache_size: Gigabytes = 100.0
    """Gigabytes that the copies may take; the least recently used ones make room."""
    inspect: bool = False
    """Print what is in the token files made, or in those given as inputs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, inspect, or both; the exit code."""
    options = read_command_line(PrepareOptions, arguments, PROGRAM)
    try:
        if problems := _problems(options):
            raise JobError(problems)
        show_messages(_say)
        if options.output is not None:
            _prepare(options, options.output)
        if options.inspect:
            for prefix in [options.output] if options.output is not None else options.inputs:
                _inspect(token_prefix(prefix) or prefix, options.tokenizer)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    except BrokenPipeError:
        # Who reads the output, `head` say, has enough. Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (OSError, KeyboardInterrupt) as error:
        print_interruption(error)
        return EXIT_FAILED
    return EXIT_FINISHED


def _problems(options: PrepareOptions) -> list[Problem]:
    """Everything that is wrong with the command line."""
    problems = list(data_problems(options.inputs))
    if not options.inputs:
        problems.append(Problem("inputs", "", "there are none", "Name files or folders with text"))
    if options.output is None and not options.inspect:
        rule = "says where the token files go"
        problems.append(Problem("output", None, rule, "Give --output PREFIX, or --inspect to look at some"))
    if options.output is None:
        problems += [
            Problem(
                "inputs", path, "is no PREFIX of token files", "Give one, or --output PREFIX to make some"
            )
            for path in options.inputs
            if token_prefix(path) is None
        ]
    problems += range_problems(options)
    if options.train_tokenizer is not None and options.output is None:
        rule = "is saved beside the token files"
        problems.append(Problem("train_tokenizer", options.train_tokenizer, rule, "Give --output PREFIX"))
    if options.train_tokenizer is not None and options.tokenizer is not None:
        rule = "is not used where one is trained"
        problems.append(Problem("tokenizer", options.tokenizer, rule, "Leave out one of the two options"))
    try:
        tokenizer_facts(options.tokenizer)
    except JobError as error:
        problems += error.problems
    return problems


def _prepare(options: PrepareOptions, prefix: str) -> None:
    folder = Path(options.cache_dir or f"{prefix}.remote")
    with RemoteCache(folder, int(options.cache_size * 1e9)) as remote:
        _prepare_local(options, prefix, find_corpus(remote.localize(options.inputs)))


def _prepare_local(options: PrepareOptions, prefix: str, corpus: Corpus) -> None:
    if corpus.token_files:
        rule = "holds tokens already"
        raise JobError(
            [Problem("inputs", name, rule, "Give text, or name it in --data") for name in corpus.token_files]
        )
    rules = Rules(options.text_field, options.on_bad_record)  # type: ignore[arg-type]
    folder = Path(f"{prefix}{BESIDE_TOKENS}")
    tokenizer = _tokenizer(options, corpus, rules, folder)
    workers = options.workers or usual_workers(corpus)
    size = sum(file.size for file in corpus.files)
    parts = counted(len(corpus.files), "file"), f"{size / 1e6:,.1f} MB", counted(workers, "worker")
    _say(", ".join(parts))
    line = _ProgressLine()
    show_messages(line.say)
    description = write_tokens(prefix, corpus, tokenizer, rules, workers, line)
    if options.train_tokenizer is None:
        tokenizer.save(folder)  # a run finds it there
    _say(f"{prefix}.bin, .idx, .json: tokenizer {tokenizer.identity}, {description['seconds']} s")
    if description["num_skipped"]:
        first = "; ".join(f"{entry['path']} ({entry['reason']})" for entry in description["skipped"][:5])
        _say(f"skipped {description['num_skipped']:,} files or records: {first}")


def _tokenizer(options: PrepareOptions, corpus: Corpus, rules: Rules, folder: Path) -> Tokenizer:
    """The tokenizer to use; `folder` is its place beside the tokens."""
    if options.train_tokenizer is not None:
        return train_tokenizer(corpus, rules, options.train_tokenizer, folder)
    tokenizer = load_tokenizer(options.tokenizer)
    if folder.exists() and tokenizer_facts(str(folder)).identity != tokenizer.identity:
        rule = f"{folder} holds another tokenizer"
        raise JobError([Problem("tokenizer", options.tokenizer, rule, "Remove it, or use another PREFIX")])
    return tokenizer


def _inspect(prefix: str, tokenizer: str | None) -> None:
    name = chosen_tokenizer(tokenizer, [prefix])
    for line in TokenReport(prefix, open_token_file(prefix), load_tokenizer(name)).lines():
        print(line)


def _say(message: str) -> None:
    print(message, flush=True)


class _ProgressLine:
    """One line that is written over on a terminal; a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._next = time.monotonic() + (0 if self._terminal else 10)

    def __call__(self, progress: PreparationProgress) -> None:
        if time.monotonic() < self._next:
            return
        text = progress_text(progress)
        if self._terminal:
            print(f"\r{text:<100}", end="", flush=True)
        else:
            _say(text)
            self._next = time.monotonic() + 10

    def say(self, message: str) -> None:
        if self._terminal:
            print("\r" + " " * 100, end="\r")
        _say(message)


def progress_text(progress: PreparationProgress) -> str:
    """The line about a preparation under way."""
    counts, left = progress.counts, progress.seconds_left
    return (
        f"{progress.share:6.1%}  {counts.documents:,} documents ({progress.documents_per_second:,.0f}/s)"
        f"  {counts.tokens:,} tokens ({progress.tokens_per_second:,.0f}/s)"
        f"  {'' if left is None else _time(left) + ' left'}"
    )


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


if __name__ == "__main__":
    run_command(main)
