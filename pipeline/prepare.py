"""``python -m pipeline.prepare INPUT... --output PREFIX``: text to token files, offline, on all cores.

Exit codes: 0 done, 2 with every problem if the inputs or options are wrong, 1 anything else. Killed or
interrupted, the same command continues.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from pipeline.base.command import run_command, show_messages
from pipeline.base.command_line import read_command_line
from pipeline.base.fields import range_problems
from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_WRONG_JOB, JobError, Problem, job_error
from pipeline.base.user_input import exists, is_folder, unwritable
from pipeline.base.words import counted
from pipeline.data.corpus import Corpus, data_problems, find_corpus
from pipeline.data.folder_search import left_out_text
from pipeline.data.inputs import token_prefix
from pipeline.data.preparation import PreparationProgress, Rules, usual_workers, write_tokens
from pipeline.data.remote_cache import RemoteCache
from pipeline.data.token_file import TokenFile, open_token_file, remarks
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.tokenizer_folder import BESIDE_TOKENS, chosen_tokenizer, tokenizer_facts
from pipeline.data.tokenizer_training import train_tokenizer
from pipeline.job.options import (
    BadRecord,
    FolderName,
    Gigabytes,
    LostCharacters,
    Name,
    PathName,
    Workers,
)
from pipeline.job.report import console, print_interruption, print_problems

PROGRAM = "python -m pipeline.prepare"
# Of --inspect: the histogram's width, and what is shown and counted of large files.
_BAR, _SHOWN_DOCUMENTS, _SHOWN_TOKENS = 40, 3, 60
_COUNTED_TOKENS = 1 << 26
# Stands for what files have behind PREFIX while they are written.
_LONGEST_SUFFIX = ".progress.json.0000000000"


@dataclass(frozen=True)
class PrepareOptions:
    """Turn text into token files, PREFIX.bin and PREFIX.idx in Megatron's format, for --data PREFIX."""

    inputs: Annotated[tuple[PathName, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT [INPUT ...]")]
    """What --data of a run takes: text files, .jsonl, .ndjson and .json with an object on each line (also .gz
    and .zst), .parquet, folders of them, saved datasets, hub:NAME. With --inspect alone, token files."""
    output: Annotated[PathName, "PREFIX"] | None = None
    """What the names of the files to make begin with."""
    tokenizer: FolderName | None = None
    """bytes, or a Hugging Face tokenizer folder. None: bytes."""
    train_tokenizer: int | None = None
    """Train a byte-level BPE of this many ids on the inputs first, and save it as PREFIX.tokenizer."""
    text_field: str = "text"
    """The field of JSON lines, and the column of Parquet files and datasets, that holds the text."""
    on_bad_record: BadRecord = "stop"
    """stop: the first record that cannot be used ends it with a message; skip: they are counted."""
    on_lost_characters: LostCharacters = "stop"
    """stop: texts of which the tokenizer does not keep a fifth of the characters, or which become its unknown
    token in a fifth of the ids, are refused; continue: they are used, with a warning."""
    document_separator: Name | None = None
    """What stands between two documents inside a text, "<|endoftext|>" say; with it goes the line break that
    follows. None: each file, line or row is one document."""
    workers: Workers | None = None
    """Processes that tokenize. None: one for each core, or one for a small input."""
    cache_dir: FolderName | None = None
    """Folder for local copies of inputs at s3://, gs:// and http(s):// addresses. None: PREFIX.remote."""
    cache_size: Gigabytes = 100.0
    """Gigabytes that the copies may take; the least recently used ones make room."""
    inspect: bool = False
    """Print what is in the token files made, or in those given as inputs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, inspect, or both; the exit code."""
    try:
        options = read_command_line(PrepareOptions, arguments, PROGRAM)
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
        raise  # no interruption: the reader of the output, `head` say, has ended, as `run_command` expects
    except (OSError, KeyboardInterrupt) as error:
        print_interruption(error)
        return EXIT_FAILED
    return EXIT_FINISHED


def _problems(options: PrepareOptions) -> list[Problem]:
    """Everything that is wrong with the command line."""
    problems = [each for each in data_problems(options.inputs) if each.severity == "error"]
    if not options.inputs:
        problems.append(Problem("inputs", "", "there are none", "Give files or folders with text"))
    if options.output is None and not options.inspect:
        rule = "is required unless token files are inspected"
        problems.append(Problem("output", None, rule, "Give --output PREFIX, or --inspect"))
    if options.output is None:
        rule, remedy = "is no PREFIX of token files", "Give one, or --output PREFIX to make some"
        unprepared = [path for path in options.inputs if token_prefix(path) is None]
        problems += [Problem("inputs", path, rule, remedy) for path in unprepared]
    problems += _prefix_problems(options.output)
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


def _prefix_problems(prefix: str | None) -> list[Problem]:
    """A PREFIX that is a folder, a file or one of the files to make: --data PREFIX could not mean it."""
    if prefix is None:
        return []
    if prefix.endswith((".bin", ".idx")):
        rule = "is the name of a token file, not the PREFIX of both"
        return [Problem("output", prefix, rule, f"Give --output {prefix[:-4] or 'tokens'}")]
    if prefix.endswith("/") or not Path(prefix).name or is_folder(prefix):
        rule = "is a folder, and a PREFIX is the beginning of files' names"
        return [Problem("output", prefix, rule, f"Give --output {Path(prefix) / 'tokens'}")]
    if exists(prefix):
        rule = "is a file, which --data would read in place of the tokens"
        return [Problem("output", prefix, rule, f"Give --output {prefix}.tokens")]
    if rule := unwritable(f"{prefix}{_LONGEST_SUFFIX}/.."):
        return [Problem("output", prefix, rule, "Give a PREFIX in a folder that you may write to")]
    return []


def _prepare(options: PrepareOptions, prefix: str) -> None:
    folder = Path(options.cache_dir or f"{prefix}.remote")
    with RemoteCache(folder, int(options.cache_size * 1e9)) as remote:
        written = [str(folder), f"{prefix}{BESIDE_TOKENS}"]
        _prepare_local(options, prefix, find_corpus(remote.localize(options.inputs), written))


def _prepare_local(options: PrepareOptions, prefix: str, corpus: Corpus) -> None:
    if corpus.token_files:
        rule, remedy = "holds tokens already", "Give text, or use it with --data as it is"
        raise JobError(Problem("inputs", name, rule, remedy) for name in corpus.token_files)
    rules = Rules(
        options.text_field,
        options.on_bad_record,  # type: ignore[arg-type]
        options.document_separator,
        options.on_lost_characters,  # type: ignore[arg-type]
    )
    folder = Path(f"{prefix}{BESIDE_TOKENS}")
    tokenizer = _tokenizer(options, corpus, rules, folder)
    workers = options.workers or usual_workers(corpus)
    size = sum(file.size for file in corpus.files)
    _say(f"{counted(len(corpus.files), 'file')}, {size / 1e6:,.1f} MB, {counted(workers, 'worker')}")
    if corpus.left_out:
        _say(left_out_text(corpus.left_out))
    line = _ProgressLine()
    show_messages(line.say)
    description = write_tokens(prefix, corpus, tokenizer, rules, workers, line)
    if options.train_tokenizer is None:
        tokenizer.save(folder)  # a run finds it there
    _say(f"{prefix}.bin, .idx, .json: tokenizer {tokenizer.identity}, {description['seconds']} s")
    for line in remarks(description):
        _say(line)
    if description["num_skipped"]:
        first = "; ".join(f"{entry['path']} ({entry['reason']})" for entry in description["skipped"][:5])
        _say(f"skipped {description['num_skipped']:,} files or records: {first}")


def _tokenizer(options: PrepareOptions, corpus: Corpus, rules: Rules, folder: Path) -> Tokenizer:
    """The tokenizer to use; `folder` is where it is saved, beside the tokens."""
    if options.train_tokenizer is not None:
        return train_tokenizer(corpus, rules, options.train_tokenizer, folder)
    tokenizer = load_tokenizer(options.tokenizer)
    if folder.exists() and tokenizer_facts(str(folder)).identity != tokenizer.identity:
        rule = f"{folder} holds another tokenizer"
        raise job_error("tokenizer", options.tokenizer, rule, "Remove it, or use another PREFIX")
    return tokenizer


def _say(message: str) -> None:
    print(message, flush=True)


class _ProgressLine:
    """On a terminal one line that is overwritten; otherwise a line every ten seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._next = time.monotonic() + (0 if self._terminal else 10)

    def __call__(self, progress: PreparationProgress) -> None:
        if time.monotonic() < self._next:
            return
        if self._terminal:
            print(f"\r{progress!s:<100}", end="", flush=True)
        else:
            _say(str(progress))
            self._next = time.monotonic() + 10

    def say(self, message: str) -> None:
        if self._terminal:
            print("\r" + " " * 100, end="\r")
        _say(message)


def _inspect(prefix: str, tokenizer_name: str | None) -> None:
    """Print what is in token files: counts, lengths, ids, and the beginnings of the first documents."""
    tokenizer = load_tokenizer(chosen_tokenizer(tokenizer_name, [prefix]))
    for line in _report(prefix, open_token_file(prefix), tokenizer):
        print(line)


def _report(prefix: str, file: TokenFile, tokenizer: Tokenizer) -> Iterator[str]:
    lengths, tokens = np.diff(file.offsets), file.tokens
    megabytes = Path(f"{prefix}.bin").stat().st_size / 1e6
    size = f"{megabytes:,.1f} MB of {tokens[:0].dtype.name}"
    yield f"{prefix}: {file.num_documents:,} documents, {len(tokens):,} tokens, {size}"
    yield f"tokenizer: {file.tokenizer_hash or 'unknown: no description beside the files'}"
    yield from file.remarks
    if file.num_skipped:
        yield f"skipped while preparing: {file.num_skipped:,}"
    if not len(lengths):
        return
    yield (
        f"tokens per document: least {lengths.min():,}, median {int(np.median(lengths)):,}, "
        f"mean {lengths.mean():,.1f}, most {lengths.max():,}"
    )
    yield from _histogram(lengths)
    yield from _ids(file, tokenizer.vocab_size)
    for number in range(min(_SHOWN_DOCUMENTS, file.num_documents)):
        begin, end = file.offsets[number : number + 2].tolist()
        shown = tokens[begin : min(end, begin + _SHOWN_TOKENS)]
        text = tokenizer.decode(shown[(shown >= 0) & (shown < tokenizer.vocab_size)].tolist())
        more = f" ... ({end - begin:,} tokens)" if end - begin > _SHOWN_TOKENS else ""
        yield f"document {number}: {text!r}{more}"


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """One line for each power of two."""
    classes = np.bincount(np.frexp(np.maximum(lengths, 1).astype(np.float64) - 0.5)[1].clip(0))
    for power, count in enumerate(classes.tolist()):
        if count:
            low = (1 << power >> 1) + 1 if power else 0
            bar = "#" * max(round(_BAR * count / max(classes)), 1)
            yield f"{low:>13,} to {1 << power:<13,} {count:>13,} {bar}"


def _ids(file: TokenFile, vocabulary: int) -> Iterator[str]:
    tokens, half = file.tokens, _COUNTED_TOKENS // 2
    whole = len(tokens) <= _COUNTED_TOKENS
    parts = [tokens[:]] if whole else [tokens[:half], tokens[len(tokens) - half :]]
    used = np.unique(np.concatenate([np.unique(part) for part in parts]))
    found = f"{len(used):,} of the tokenizer's {vocabulary:,} are used"
    note = "" if whole else f" (of the first and last {half:,} tokens)"
    yield f"ids: {used.min():,} to {used.max():,}, {found}{note}"
    if used.max() >= vocabulary:
        yield f"WARNING: ids above {vocabulary - 1:,} are not this tokenizer's; give theirs (--tokenizer)"


if __name__ == "__main__":
    run_command(main)
