"""Reading inputs as a stream of records, in pieces that fit in memory.

A record is a document's text, or a line of JSON that holds one; the JSON is parsed by the process that
encodes it, because parsing costs as much as reading. Records come in `Task`s of about a megabyte. After each
task, its `ReadPosition` says where to read on, so that a killed preparation can be continued.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.base.problems import JobError, job_error
from pipeline.base.words import few
from pipeline.data.corpus import InputFile, unreadable
from pipeline.data.inputs import is_packed, unpacked

TASK_BYTES = 1 << 20
_TASK_RECORDS = 4096
# A text file above this is read and encoded part by part.
PART_BYTES = 4 << 20
_ROWS = 1024
# Of columns; tables written by other programs often have text as bytes, or numbered in a dictionary.
_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}


@dataclass(frozen=True)
class ReadPosition:
    """Where to read on: this file, after that many of its records, which ended at that byte (JSON lines)."""

    file: int = 0
    records: int = 0
    byte: int = 0


@dataclass
class Task:
    """Records to encode.

    Attributes:
        json: Records are lines of JSON, as bytes; else texts.
        records: The texts or lines. None is a row without text.
        names: Of each record, for messages; for JSON and rows, ``FILE:NUMBER`` counted from 1.
        closed: The last record is the end of its document; false for a part of a long text.
        continued: The first record goes on with the document that the last task left open.
        broken: The long text that was begun is not UTF-8 after all; what was written of it is removed.
        skipped: Files that are no text, with the reason. Files that the user named must stop the preparation.
        after: Where to read on; None inside a long text.
        bytes_done: Of all files, read so far.
    """

    json: bool = False
    records: list[str | bytes | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    closed: bool = True
    continued: bool = False
    broken: bool = False
    skipped: list[tuple[InputFile, str]] = field(default_factory=list)
    after: ReadPosition | None = None
    bytes_done: int = 0


def separator_pattern(separator: str) -> str:
    """What stands between two documents: the separator, and the line break after it."""
    return re.escape(separator) + r"(?:\r?\n)?"


def read_tasks(
    files: Sequence[InputFile],
    text_field: str,
    start: ReadPosition,
    cut_long_texts: bool,
    separator: str | None = None,
) -> Iterator[Task]:
    """The records of `files` from `start` on.

    Args:
        files: Of any kinds.
        text_field: Column of the text in Parquet and Arrow files.
        start: Where to begin.
        cut_long_texts: Text files above `PART_BYTES` come in parts, cut before a line break that follows a
            letter or digit.
        separator: Between the documents of a text file; files above `PART_BYTES` are cut there, too.

    Raises:
        JobError: a file that cannot be read, is damaged, changes while it is read, or lacks the column.
    """
    before = sum(file.size for file in files[: start.file])
    texts = Task()
    size = 0
    for number, file in enumerate(files[start.file :], start.file):
        here = start if number == start.file else ReadPosition(number)
        end = ReadPosition(number + 1)
        if file.kind == "text" and (file.size <= PART_BYTES or not (cut_long_texts or separator)):
            size += _add_text(texts, file)
            texts.after, texts.bytes_done = end, before + file.size
            if size >= TASK_BYTES or len(texts.records) >= _TASK_RECORDS:
                yield texts
                texts, size = Task(), 0
        else:
            if texts.after is not None:
                yield texts
                texts, size = Task(), 0
            if file.kind == "text":
                tasks = _long_text(file, here, cut_long_texts, separator)
            else:
                tasks = _records(file, text_field, here)
            for task in _with_problems(file, tasks):
                task.bytes_done += before
                yield task
            file.check_unchanged()
            yield Task(after=end, bytes_done=before + file.size)
        before += file.size
    if texts.after is not None:
        yield texts


def read_texts(
    files: Sequence[InputFile], text_field: str, separator: str | None
) -> Iterator[tuple[str, Any]]:
    """(name, record) of each record, JSON lines as bytes and texts as str; for training a tokenizer."""
    for task in read_tasks(files, text_field, ReadPosition(), True, separator):
        yield from zip(task.names, task.records, strict=True)


def _with_problems(file: InputFile, tasks: Iterator[Task]) -> Iterator[Task]:
    """Errors of damaged or unreadable files as problems."""
    try:
        yield from tasks
    except (OSError, EOFError, zlib.error) as error:
        # The decompressors raise an OSError without a number, the system one with.
        if isinstance(error, OSError) and error.errno is not None:
            raise JobError([unreadable(file.path, error)]) from error
        rule = f"is damaged or cut off: {error}"
        raise job_error("data", file.path, rule, "Create or download the file again") from error


def _add_text(task: Task, file: InputFile) -> int:
    """Read a whole text file into `task`; its characters, as read."""
    try:
        content = Path(file.path).read_bytes()
    except OSError as error:
        raise JobError([unreadable(file.path, error)]) from error
    file.check_unchanged()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        position = error.start + len(content) - len(error.object)  # error.object has no byte-order mark
        task.skipped.append((file, f"not UTF-8 at byte {position}"))
        return 0
    task.records.append(text)
    task.names.append(file.path)
    return len(content)


def _long_text(file: InputFile, start: ReadPosition, cut: bool, separator: str | None) -> Iterator[Task]:
    """One document in parts; with a separator, documents, of which a long one comes in parts."""
    decoder = codecs.getincrementaldecoder("utf-8" if start.byte else "utf-8-sig")()
    rest, place, is_open = "", start.byte, False
    with Path(file.path).open("rb") as stream:
        stream.seek(start.byte)
        while True:
            block = stream.read(PART_BYTES)
            place += len(block)
            try:
                rest += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                reason = f"not UTF-8 at byte {place - len(error.object) + error.start}"
                if separator:
                    reason += "; its documents before that are used"
                yield Task(broken=True, skipped=[(file, reason)])
                return
            if not block:
                if is_open or separator is None or rest.strip():
                    yield Task(records=[rest], names=[file.path], continued=is_open, bytes_done=place)
                return
            end = _after_separators(rest, separator) if separator else 0
            if end:
                part, rest = rest[:end], rest[end:]
                done = place - len(rest.encode()) - len(decoder.getstate()[0])
                after = ReadPosition(start.file, 0, done)
                yield Task(records=[part], names=[file.path], continued=is_open, after=after, bytes_done=done)
                is_open = False
            # What may be the beginning of a separator stays together.
            end = _safe_cut(rest[: len(rest) - len(separator) - 2] if separator else rest) if cut else 0
            if end:
                part, rest = rest[:end], rest[end:]
                yield Task(
                    records=[part], names=[file.path], closed=False, continued=is_open, bytes_done=place
                )
                is_open = True


def _after_separators(text: str, separator: str) -> int:
    """The end of the last separator, with its line break; one whose line break may still come is left."""
    found = re.finditer(separator_pattern(separator), text)
    last = len(text) - len(separator) - 2
    return max((match.end() for match in found if match.start() <= last), default=0)


def _safe_cut(text: str) -> int:
    """The last place before a line break that follows a letter or digit; 0 where there is none."""
    place = text.rfind("\n")
    while place > 0 and not text[place - 1].isalnum():
        place = text.rfind("\n", 0, place)
    return max(place, 0)


def _records(file: InputFile, text_field: str, start: ReadPosition) -> Iterator[Task]:
    """JSON lines or rows, from `start` on."""
    json = file.kind == "jsonl"
    rows = _lines(file, start) if json else _rows(file, text_field, start.records)
    task, size, number = Task(json=json), 0, start.records
    for record, byte in rows:
        number += 1
        if not json or not record.isspace():  # blank lines are no records
            task.records.append(record)
            task.names.append(f"{file.path}:{number}")
            size += len(record or "")
        task.after, task.bytes_done = ReadPosition(start.file, number, byte), byte
        if size >= TASK_BYTES or len(task.records) >= _TASK_RECORDS:
            yield task
            task, size = Task(json=json), 0
    if task.after is not None:
        yield task


def _lines(file: InputFile, start: ReadPosition) -> Iterator[tuple[bytes, int]]:
    """(line, bytes of the file read with it) of plain or compressed text."""
    with Path(file.path).open("rb", buffering=1 << 20) as raw:
        if is_packed(file.path):
            for number, line in enumerate(unpacked(raw, file.path), 1):
                if number > start.records:
                    yield line, raw.tell()
            return
        raw.seek(start.byte)
        byte = start.byte
        for line in raw:
            byte += len(line)
            yield line, byte


def _rows(file: InputFile, text_field: str, skip: int) -> Iterator[tuple[str | None, int]]:
    """(text, about how many bytes of the file were read up to it) of a column."""
    done = 0
    for batch, share in _batches(file, text_field):
        if done + len(batch) > skip:
            for text in _strings(batch.slice(max(skip - done, 0))):
                yield text, int(share * file.size)
        done += len(batch)


def _batches(file: InputFile, text_field: str) -> Iterator[tuple[Any, float]]:
    """(array of strings, share of the file's rows or bytes that are read) piece by piece."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        if file.kind == "parquet":
            with parquet.ParquetFile(file.path) as table:
                _check_column(file, table.schema_arrow, text_field)
                rows, done = max(table.metadata.num_rows, 1), 0
                for batch in table.iter_batches(_ROWS, columns=[text_field]):
                    done += len(batch)
                    yield batch.column(0), done / rows
        else:
            with pa.OSFile(file.path) as raw, pa.ipc.open_stream(raw) as stream:
                _check_column(file, stream.schema, text_field)
                for batch in stream:
                    yield batch.column(stream.schema.get_field_index(text_field)), raw.tell() / file.size
    except pa.ArrowInvalid as error:
        rule = f"is damaged or no {file.kind} file ({str(error).partition(chr(10))[0]})"
        raise job_error("data", file.path, rule, "Create or download the file again") from error


def _check_column(file: InputFile, schema: Any, text_field: str) -> None:
    import pyarrow as pa

    if text_field not in schema.names:
        rule = f"{file.path} has no column of that name; it has {few(schema.names)}"
        raise job_error("text_field", text_field, rule, "Give one of these with --text_field")
    kind = schema.field(text_field).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    if str(values) not in _TEXT_TYPES:
        rule = f"{file.path} holds values of type {kind} there, not text"
        raise job_error("text_field", text_field, rule, "Give a column of text with --text_field")


def _strings(array: Any) -> list[Any]:
    """Python strings of an Arrow array; bytes where a value is not UTF-8, so that it can be reported."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    try:
        values = array.to_pylist()
    except UnicodeDecodeError:
        values = array.cast(pa.large_binary()).to_pylist()
    return [_text_or_bytes(value) if isinstance(value, bytes) else value for value in values]


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value
