"""Records to tokens, on one process or all cores, in the order of the records."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from pipeline.base.problems import JobError, Problem
from pipeline.base.words import few
from pipeline.data.losses import Losses
from pipeline.data.records import Task, separator_pattern
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.tokenizer_folder import END

# Tasks ahead of the writer, for each worker: enough to keep it busy, few enough to bound memory.
_AHEAD = 3


class BadRecord(ValueError):
    """Why a record cannot be used."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of a task.

    Attributes:
        tokens: All of them, [tokens].
        lengths: Tokens of each document (or part), end of document included where it ends here.
        bad: (name, reason) of records that cannot be used, in order.
        empty: (name, reason) of records without a document.
        characters: Of the texts.
        losses: What the tokens do not keep of them.
        end_markers: How often the texts hold, as letters, what ends a document.
    """

    tokens: np.ndarray
    lengths: tuple[int, ...]
    bad: tuple[tuple[str, str], ...]
    empty: tuple[tuple[str, str], ...]
    characters: int
    losses: Losses
    end_markers: int


@dataclass(frozen=True)
class Encoder:
    """How tasks are encoded.

    Attributes:
        tokenizer: Gives the ids.
        dtype: Of the ids in the result.
        text_field: Field of the text in JSON lines.
        separator: What stands between documents inside a record; None: a record is a document.
    """

    tokenizer: Tokenizer
    dtype: np.dtype
    text_field: str
    separator: str | None = None

    def __call__(self, task: Task) -> Encoded:
        """The tokens of a task.

        Raises:
            JobError: the tokenizer gives the end of a document inside one.
        """
        texts: list[tuple[str, str]] = []
        bad: list[tuple[str, str]] = []
        empty: list[tuple[str, str]] = []
        for name, record in zip(task.names, task.records, strict=True):
            try:
                text = text_of(record, self.text_field)
            except BadRecord as error:
                bad.append((name, str(error)))
                continue
            found = self._documents(text, task)
            texts += [(name, document) for document in found]
            # Separators with nothing between them are no document that was left out.
            if not found and not (self.separator and self.separator in text):
                empty.append((name, "empty"))
        pieces: list[np.ndarray] = []
        lengths: list[int] = []
        end = np.array([self.tokenizer.end_of_document])
        documents = [text for _, text in texts]
        batch = self.tokenizer.encode_batch(documents)
        losses = self.tokenizer.losses(documents, batch)
        for number, ((name, _), ids) in enumerate(zip(texts, batch, strict=True), 1):
            if (ids == end).any():
                raise JobError([_ends_itself(self.tokenizer, name)])
            closed = task.closed or number < len(texts)
            if closed and not len(ids) and not (task.continued and number == 1):
                empty.append((name, "the tokenizer keeps nothing of it"))
                continue
            pieces += [ids, end] if closed else [ids]
            lengths.append(len(ids) + closed)
        tokens = np.concatenate(pieces, dtype=self.dtype, casting="unsafe") if pieces else end[:0]
        markers = sum(
            text.count(marker) for marker in {END, self.tokenizer.facts.eos_token} for text in documents
        )
        characters = sum(map(len, documents))
        return Encoded(tokens, tuple(lengths), tuple(bad), tuple(empty), characters, losses, markers)

    def _documents(self, text: str, task: Task) -> list[str]:
        """The documents of a record, or the parts of them that a part of a long text has."""
        if self.separator is None:
            return [text] if text or not task.closed else []
        first, *others = split_text(text, self.separator)
        # White space between two separators is no document; what a long text goes on with is part of one.
        kept = [other for other in others if other.strip()]
        return [first, *kept] if first.strip() or task.continued else kept


def _ends_itself(tokenizer: Tokenizer, name: str) -> Problem:
    rule = f"gives its end of a document, id {tokenizer.end_of_document}, inside the text of {name}"
    remedy = (
        "Name a token of its own as eos_token, one that is neither the unknown token nor in ordinary text"
    )
    return Problem("tokenizer: eos_token", tokenizer.facts.eos_token, rule, remedy)


def split_text(text: str, separator: str | None) -> list[str]:
    """What stands between the separators; all of it where there is none."""
    return [text] if separator is None else re.split(separator_pattern(separator), text)


def text_of(record: str | bytes | None, text_field: str) -> str:
    """The text of a record.

    Raises:
        BadRecord: it has none that can be used.
    """
    if isinstance(record, str):
        return record
    if record is None:
        raise BadRecord("the row has no text (null)")
    try:
        value = json.loads(record.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRecord(f"a JSON {type(value).__name__}, where an object is expected")
    if text_field not in value:
        raise BadRecord(f"no field {text_field!r}; it has {few(map(repr, value)) or 'none'}")
    text = value[text_field]
    if not isinstance(text, str):
        raise BadRecord(f"field {text_field!r} holds {type(text).__name__}, where text is expected")
    if b"\\u" in record and any("\ud800" <= character <= "\udfff" for character in text):
        raise BadRecord("half a character (a lone surrogate), which UTF-8 cannot hold")
    return text


def encode_tasks(tasks: Iterator[Task], encoder: Encoder, workers: int) -> Iterator[tuple[Task, Encoded]]:
    """Encode `tasks` in order, each with its result; the records themselves are not kept.

    Args:
        tasks: Read as they are needed, a few ahead.
        encoder: Copied to each process.
        workers: Processes; 1 encodes in this one.

    Raises:
        BrokenProcessPool: a worker was ended from outside.
    """
    if workers == 1:
        for task in tasks:
            yield replace(task, records=[], names=[]), encoder(task)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoder,))
    waiting: deque[tuple[Task, Future[Encoded]]] = deque()
    try:
        for task in tasks:
            waiting.append((replace(task, records=[], names=[]), pool.submit(_encode, task)))
            if len(waiting) >= _AHEAD * workers:
                done, result = waiting.popleft()
                yield done, result.result()
        while waiting:
            done, result = waiting.popleft()
            yield done, result.result()
    finally:
        pool.shutdown(cancel_futures=True)


# Of a worker process: the encoder of all its tasks. A process pool offers no other way to keep it.
_worker_encoder: list[Encoder] = []


def _start_worker(encoder: Encoder) -> None:
    """Prepare a worker process: its own encoder on one thread; it ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_encoder[:] = [encoder]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(task: Task) -> Encoded:
    return _worker_encoder[0](task)
