"""From inputs to token files: read, encode on all cores, write; once per cache folder."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.base.files import file_lock, sync_folder
from pipeline.base.json_reader import saved_json
from pipeline.base.problems import JobError, Problem, job_error
from pipeline.data.corpus import Corpus, no_document
from pipeline.data.encoding import Encoded, Encoder, encode_tasks
from pipeline.data.losses import REFUSED
from pipeline.data.records import ReadPosition, Task, read_tasks
from pipeline.data.token_file import TokenFile, join_token_files, open_token_file, remarks, token_problems
from pipeline.data.token_writer import Counts, TokenWriter, finish_interrupted
from pipeline.data.tokenizer import Tokenizer

# Shown on every rank, because any rank of a host may be the one that tokenizes.
logger = logging.getLogger(__name__)

# Changes when the same inputs would give other tokens.
FORMAT = 2
# Below this many bytes of input, starting processes costs more than they save.
_SMALL = 16 << 20
_PROGRESS_SECONDS = 1.0
DEFAULT_WAIT = 1800.0
# Characters after which texts of which too much is lost are refused, before all of them are read.
_ENOUGH = 50_000_000
# Files of which a sample has the beginning, and characters of each.
_PLACES, _PLACE_SIZE = 4, 1 << 16
# Of `Counts`, in PREFIX.json.
_TOLD_COUNTS = (
    *("documents", "tokens", "characters", "lost_characters", "unknown_tokens", "lost_examples"),
    *("end_markers", "longest", "max_token"),
)
# The token files inside a cache folder.
_NAME = "tokens"


@dataclass(frozen=True)
class Rules:
    """What decides which documents there are, beside the inputs and the tokenizer.

    Attributes:
        text_field: JSON field or column that holds the text.
        on_bad_record: Whether a record that cannot be used stops the preparation or is skipped and counted.
        document_separator: What stands between documents inside a record; None: a record is a document.
        on_lost_characters: Whether texts of which the tokenizer does not keep `REFUSED` stop the preparation.
    """

    text_field: str = "text"
    on_bad_record: Literal["stop", "skip"] = "stop"
    document_separator: str | None = None
    on_lost_characters: Literal["stop", "continue"] = "stop"

    def to_json(self) -> dict[str, str]:
        """The rules that hold, so that an option that is not used leaves no trace."""
        unused = {"document_separator": None, "on_lost_characters": "stop"}
        return {
            key: value for key, value in asdict(self).items() if key not in unused or unused[key] != value
        }


@dataclass(frozen=True)
class PreparationProgress:
    """How far a preparation is; speeds are since it was started or continued.

    Attributes:
        share: Of the input's bytes, 0 to 1.
        seconds_left: At this speed; None before one is known.
        counts: Of all starts.
    """

    share: float
    documents_per_second: float
    tokens_per_second: float
    seconds_left: float | None
    counts: Counts

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f"{timedelta(seconds=round(self.seconds_left))} left"
        return (
            f"{self.share:6.1%}  {self.counts.documents:,} documents ({self.documents_per_second:,.0f}/s)"
            f"  {self.counts.tokens:,} tokens ({self.tokens_per_second:,.0f}/s)  {left}"
        )


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of Megatron's two usual types that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")


def usual_workers(corpus: Corpus) -> int:
    """All cores that this process may use, or one if the input is small."""
    if sum(file.size for file in corpus.files) < _SMALL:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_identity(corpus: Corpus, tokenizer: Tokenizer, rules: Rules | None = None) -> str:
    """Hash of format, tokenizer, rules, and each file's path, size and time, which decide the tokens."""
    description = {
        "format": FORMAT,
        "tokenizer": tokenizer.identity,
        "rules": (rules or Rules()).to_json(),
        "files": [
            [str(Path(file.path).absolute()), file.size, file.mtime_ns, file.named, file.kind]
            for file in corpus.files
        ],
        "skipped": [[entry.path, entry.reason] for entry in corpus.skipped],
    }
    return hashlib.blake2b(json.dumps(description).encode(), digest_size=12).hexdigest()


def write_tokens(
    prefix: str,
    corpus: Corpus,
    tokenizer: Tokenizer,
    rules: Rules,
    workers: int,
    progress: Callable[[PreparationProgress], None] = lambda _: None,
) -> dict[str, Any]:
    """Tokenize the files of `corpus` into ``PREFIX.bin``, ``.idx`` and ``.json``; the description.

    What an earlier call with the same arguments began before it was killed is continued. Memory does not grow
    with the input; a single record must fit.

    Raises:
        JobError: inputs that cannot be used, no document at all, a full disk, or a killed worker.
        OSError: the files cannot be written.
    """
    identity = cache_identity(corpus, tokenizer, rules)
    finish_interrupted(prefix, identity)
    if (done := _finished(prefix, identity)) is not None:
        return done
    encoder = Encoder(
        tokenizer, token_dtype(tokenizer.vocab_size), rules.text_field, rules.document_separator
    )
    with _explained(prefix, workers), TokenWriter(prefix, encoder.dtype, identity) as writer:
        if writer.resumed:
            logger.info(f"continuing after {writer.counts.documents:,} documents")
        else:
            for entry in corpus.skipped:
                writer.counts.skip(entry.path, entry.reason)
        try:
            _write_all(writer, corpus, encoder, rules, workers, progress)
            _require_fit(writer.counts, tokenizer, rules)
            if not writer.counts.documents:
                raise JobError([no_document(corpus.name, writer.counts.skipped)])
        except JobError:
            writer.discard()
            raise
        writer.commit()
        description = _description(corpus, tokenizer, rules, identity, encoder.dtype, writer.counts)
        writer.finish(description)
    logger.info(f"tokenized {description['documents']:,} documents into {description['tokens']:,} tokens")
    return description


@contextmanager
def _explained(prefix: str, workers: int) -> Iterator[None]:
    """Turns a full disk and a killed worker into problems."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        rule = "the disk is full; what was safely written before is kept"
        remedy = "Free some space and start again, which continues; or write to another disk"
        raise job_error("output", prefix, rule, remedy) from error
    except BrokenProcessPool as error:
        rule = "a worker process was killed, perhaps for lack of memory; what is written is kept"
        remedy = "Start again, which continues; with fewer --workers if memory is short"
        raise job_error("workers", workers, rule, remedy) from error


def _write_all(
    writer: TokenWriter,
    corpus: Corpus,
    encoder: Encoder,
    rules: Rules,
    workers: int,
    progress: Callable[[PreparationProgress], None],
) -> None:
    cut = encoder.tokenizer.cuts_at_lines
    tasks = read_tasks(corpus.files, rules.text_field, writer.place, cut, rules.document_separator)
    meter = _Meter(sum(file.size for file in corpus.files), writer.counts, progress)
    problems: list[Problem] = []
    with ExitStack() as stack:
        encoded = encode_tasks(tasks, encoder, workers)
        stack.callback(encoded.close)  # type: ignore[attr-defined]
        for task, result in encoded:
            problems += _add(writer, task, result, rules)
            if problems:
                break  # those of one task, about a megabyte, are reported together
            if writer.counts.characters >= _ENOUGH:
                _require_fit(writer.counts, encoder.tokenizer, rules)
            if task.after is not None:
                writer.commit_sometimes(task.after)
            meter.update(task.bytes_done)
    if problems:
        raise JobError(problems)


def _add(writer: TokenWriter, task: Task, result: Encoded, rules: Rules) -> list[Problem]:
    """Write a task's tokens and count what has none; the problems that must stop the preparation."""
    if task.broken:
        writer.abandon()
    problems = _unusable(writer.counts, task, result, rules)
    if result.bad and rules.on_bad_record == "stop":
        return problems
    writer.write(result.tokens, result.lengths, task.closed)
    _count_text(writer.counts, result)
    return problems


def _unusable(counts: Counts, task: Task, result: Encoded, rules: Rules) -> list[Problem]:
    """Count what gives no document; the problems that must stop the preparation."""
    problems = []
    for file, reason in task.skipped:
        if file.named and rules.on_bad_record == "stop":
            remedy = "Convert it to UTF-8, or leave it out (--on_bad_record skip)"
            problems.append(Problem("data", file.path, f"is {reason}", remedy))
        counts.skip(file.path, reason)
    for name, reason in result.bad:
        if rules.on_bad_record == "stop":
            return [*problems, bad_record(name, reason)]
        counts.skip(name, reason)
    for name, reason in result.empty:
        counts.skip(name, reason)
    return problems


def _count_text(counts: Counts, result: Encoded) -> None:
    counts.characters += result.characters
    counts.lose(result.losses)
    counts.end_markers += result.end_markers


def _require_fit(counts: Counts, tokenizer: Tokenizer, rules: Rules, of: str = "") -> None:
    """Raises JobError if the tokenizer does not keep enough of the texts so far; `of` says which part."""
    sizes = counts.characters, counts.tokens
    if rules.on_lost_characters == "continue" or counts.losses.share(*sizes) < REFUSED:
        return
    rule = f"{of}{counts.losses.told(*sizes)}; from {REFUSED:.0%} on that is refused"
    remedy = (
        "Give a tokenizer that was made for such text (python -m pipeline.prepare --train_tokenizer makes "
        "one), or --on_lost_characters continue"
    )
    raise job_error("tokenizer", tokenizer.facts.name, rule, remedy)


@dataclass(frozen=True)
class Sampled:
    """What the beginnings of some files say of a corpus.

    Attributes:
        tokens: Of the whole corpus, by the tokens of each byte of these files.
        remarks: As those of token files.
    """

    tokens: int
    remarks: tuple[str, ...]


def sample_text(corpus: Corpus, tokenizer: Tokenizer, rules: Rules) -> Sampled:
    """Encode the beginnings of up to `_PLACES` files at even distances, which takes a fraction of a second.

    Raises:
        JobError: a file or record there that would stop the preparation, or a tokenizer that loses too much
            of each beginning.
    """
    encoder = Encoder(
        tokenizer, token_dtype(tokenizer.vocab_size), rules.text_field, rules.document_separator
    )
    total, files = Counts(), corpus.files[:: -(-len(corpus.files) // _PLACES)]
    tokens = num_bytes = 0.0
    unfit = []
    for file in files:
        tasks = read_tasks([file], rules.text_field, ReadPosition(), True, rules.document_separator)
        task = next((task for task in tasks if task.records or task.skipped), Task(bytes_done=file.size))
        part, share = _beginning(task)
        result, counts = encoder(part), Counts()
        if problems := _unusable(counts, part, result, rules):
            raise JobError(problems)
        for each in (counts, total):
            _count_text(each, result)
            each.tokens += len(result.tokens)
        unfit.append(counts.losses.share(counts.characters, counts.tokens) >= REFUSED)
        tokens, num_bytes = tokens + len(result.tokens) / share, num_bytes + task.bytes_done
    if all(unfit):
        _require_fit(total, tokenizer, rules, f"of the first {total.characters:,} characters looked at, ")
    whole = sum(file.size for file in corpus.files)
    return Sampled(round(tokens / max(num_bytes, 1) * whole), remarks(asdict(total)))


def _beginning(task: Task) -> tuple[Task, float]:
    """The first records of a task, about `_PLACE_SIZE` characters of it, and which share of it they are."""
    kept, size = [], 0
    for record in task.records:
        if size >= _PLACE_SIZE:
            break
        kept.append(record[: _PLACE_SIZE - size] if isinstance(record, str) else record)
        size += len(kept[-1] or "")
    whole = sum(len(record or "") for record in task.records)
    closed = task.closed and (size == whole or task.json)  # a text that is cut does not end here
    part = replace(task, records=kept, names=task.names[: len(kept)], closed=closed)
    return part, size / whole if whole else 1.0


class _Meter:
    """Computes the progress from the counts and reports it, at most once per second."""

    def __init__(self, total: int, counts: Counts, progress: Callable[[PreparationProgress], None]) -> None:
        self._total, self._counts, self._progress = max(total, 1), counts, progress
        self._begin = self._last = time.monotonic()
        self._documents, self._tokens = counts.documents, counts.tokens
        self._first: int | None = None

    def update(self, bytes_done: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = bytes_done
        if now - self._last < _PROGRESS_SECONDS:
            return
        self._last, seconds = now, now - self._begin
        read = bytes_done - self._first
        self._progress(
            PreparationProgress(
                min(bytes_done / self._total, 1.0),
                (self._counts.documents - self._documents) / seconds,
                (self._counts.tokens - self._tokens) / seconds,
                (self._total - bytes_done) * seconds / read if read else None,
                self._counts,
            )
        )


def _description(
    corpus: Corpus, tokenizer: Tokenizer, rules: Rules, identity: str, dtype: np.dtype, counts: Counts
) -> dict[str, Any]:
    known = asdict(counts)
    return {
        "format": "MMIDIDX 1",
        "identity": identity,
        "dtype": dtype.name,
        **{key: known[key] for key in _TOLD_COUNTS},
        "tokenizer": {
            "identity": tokenizer.identity,
            "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document,
        },
        "rules": rules.to_json(),
        "source": corpus.name,
        "files": [asdict(file) for file in corpus.files],
        "num_skipped": counts.num_skipped,
        "skipped": known["skipped"],
        "seconds": round(counts.seconds, 1),
    }


def _finished(prefix: str, identity: str) -> dict[str, Any] | None:
    """The description, if exactly these tokens exist already.

    Raises:
        JobError: other files have those names.
    """
    taken = [path for suffix in ("idx", "bin", "json") if (path := Path(f"{prefix}.{suffix}")).exists()]
    if not taken:
        return None
    try:
        description = saved_json(Path(f"{prefix}.json"))
        if description["identity"] == identity and len(taken) == 3:
            return description
    except (OSError, ValueError, KeyError, TypeError):
        pass  # reported below, like any other file of that name
    rule = f"{taken[0].name} exists already, made from other inputs or options"
    raise job_error("output", prefix, rule, "Remove it, or use another PREFIX")


def bad_record(name: str, reason: str) -> Problem:
    """The problem of a record that stops the preparation."""
    return Problem("data", name, reason, "Correct it, or use --on_bad_record skip, which counts such records")


def cached_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    rules: Rules | None = None,
    time_limit: float = DEFAULT_WAIT,
) -> TokenFile:
    """The tokens of `corpus`: of its text, made under `folder` if not there yet, and of its token files.

    Every rank of a host calls it. One makes the tokens in a temporary folder, which is renamed when it is
    complete and on the disk; the others wait at most `time_limit` seconds. A killed process leaves no lock,
    and the next one continues its work.

    Raises:
        JobError: inputs that cannot be used, a damaged cache, or token files of another tokenizer.
        TimeoutError: the process at work did not finish in time.
        OSError: the folder cannot be written.
    """
    prefixes = list(corpus.token_files)
    files = [open_token_file(prefix) for prefix in prefixes]
    problems = [
        problem
        for prefix, file in zip(prefixes, files, strict=True)
        for problem in token_problems(prefix, file, tokenizer.identity, tokenizer.vocab_size)
    ]
    if problems:
        raise JobError(problems)
    if corpus.files:
        files.insert(0, _tokens_of_text(corpus, tokenizer, folder, rules or Rules(), time_limit))
        prefixes.insert(0, "the text")
    return join_token_files(prefixes, files)


def _tokens_of_text(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, rules: Rules, time_limit: float
) -> TokenFile:
    folder.mkdir(parents=True, exist_ok=True)
    identity = cache_identity(corpus, tokenizer, rules)
    finished = folder / identity
    if not finished.is_dir():
        with file_lock(folder / f"{identity}.lock", time_limit):
            if not finished.is_dir():
                _make(finished, corpus, tokenizer, rules)
    try:
        return open_token_file(str(finished / _NAME))
    except JobError as error:
        rule = f"the token cache is damaged ({error.problems[0].rule})"
        raise job_error("data", str(finished), rule, "Delete this folder; it is made again") from error


def _make(finished: Path, corpus: Corpus, tokenizer: Tokenizer, rules: Rules) -> None:
    """Write the token folder, which gets its name when it is complete. Called with the lock held."""
    logger.info(f"tokenizing {len(corpus.files):,} files of {corpus.name}")
    temporary = finished.with_name(f"{finished.name}.partial")
    temporary.mkdir(exist_ok=True)
    try:
        write_tokens(str(temporary / _NAME), corpus, tokenizer, rules, usual_workers(corpus))
    except JobError:
        # Nothing to continue, unless a full disk or a killed worker left a progress file.
        if not (temporary / f"{_NAME}.progress.json").exists():
            shutil.rmtree(temporary)
        raise
    temporary.rename(finished)
    sync_folder(finished.parent)
