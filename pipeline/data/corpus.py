"""The inputs of a run, found and listed without reading them.

`--data` names, alone or mixed:

    text files              one document each
    .jsonl .ndjson .json    one document a line, in a field of each object; also with .gz or .zst behind it
    .parquet                one document a row, in a column
    a saved `datasets` folder (save_to_disk), and hub:NAME[:SPLIT], a dataset of the hub
    PREFIX                  Megatron token files PREFIX.bin and PREFIX.idx, used as they are
    s3://, gs://, http(s):// any of these in a remote store, replaced by local copies before it is listed here
    folders                 searched recursively for files of the first three kinds, through links as well

What a folder holds beside them is counted by ending (`pipeline.data.folder_search`). Without `--data` the
corpus is the source text of the running interpreter's standard library: real text, about 10 MB, everywhere.
"""

from __future__ import annotations

import codecs
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.user_input import exists, is_file, is_folder
from pipeline.base.words import few
from pipeline.data.folder_search import Found, left_out_text, search
from pipeline.data.inputs import (
    RECORD_SUFFIXES,
    TEXT_SUFFIXES,
    Kind,
    arrow_files,
    holds_json_lines,
    hub_files,
    hub_problem,
    is_json,
    is_remote,
    is_saved_dataset,
    kind_of,
    remote_problem,
    token_prefix,
)
from pipeline.hugging_face.folder_files import is_hub_name

# Of the standard library's folder: other packages, tests, and tables generated into modules.
_NOT_LIBRARY = {"site-packages", "dist-packages", "lib-dynload", "test", "tests", "idlelib", "lib2to3"}
_LIBRARY_LEFT_OUT = frozenset(_NOT_LIBRARY | {"encodings", "pydoc_data"})
_LIBRARY_GENERATED = ("_sysconfigdata", "config-")
_KNOWN = " ".join((*RECORD_SUFFIXES, *TEXT_SUFFIXES))
# Bytes of a named file that are read before a run starts.
_BEGINNING = 1 << 16


@dataclass(frozen=True)
class SourceSpec:
    """Where some of the documents come from.

    Attributes:
        name: For the console, the metrics and the checkpoint.
        paths: Files and folders; none means the embedded corpus.
        weight: Share of the samples, above 0; the sources' weights add up to 1.
    """

    name: str
    paths: tuple[str, ...]
    weight: Fraction = Fraction(1)


@dataclass(frozen=True)
class InputFile:
    """A file with one document or many.

    Attributes:
        path: Where it is.
        size: Bytes.
        mtime_ns: Time of its last change, nanoseconds; with the size it shows that a file changed.
        named: The user gave this very file, so it must be usable; one found in a folder may be skipped.
        kind: How it is read.
    """

    path: str
    size: int
    mtime_ns: int
    named: bool
    kind: Kind = "text"

    def check_unchanged(self) -> None:
        """Call after reading, so that what was read is what was listed.

        Raises:
            JobError: the file has changed since it was listed, or is gone.
        """
        try:
            now = Path(self.path).stat()
        except OSError as error:
            raise JobError([unreadable(self.path, error)]) from error
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            rule = f"changed while it was read ({self.size} bytes before, {now.st_size} now)"
            raise job_error("data", self.path, rule, "Start again when nothing writes to it")


@dataclass(frozen=True)
class Skipped:
    """A file or record that was found and is not used, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Corpus:
    """The inputs in their order, and what is not used.

    Attributes:
        name: For the console.
        files: To be tokenized.
        skipped: Files of a kind that is read which are not used (empty, found twice).
        left_out: How much else the folders hold, by ending or another reason.
        token_files: Prefixes of token files, which need no tokenizing; their documents come last.
    """

    name: str
    files: tuple[InputFile, ...]
    skipped: tuple[Skipped, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    token_files: tuple[str, ...] = ()


def data_problems(paths: Sequence[str], written: Sequence[str] = ()) -> tuple[Problem, ...]:
    """What is wrong with the paths of `--data`, found without reading more than a file's beginning, and notes
    on what their folders hold beside data. `written` as in `search`."""
    problems = tuple(problem for path in paths for problem in _path_problems(path, written))
    if problems or not paths or not all(is_file(path) and not Path(path).stat().st_size for path in paths):
        return problems
    return (no_document(few(paths), [Skipped(path, "empty") for path in paths]),)


def find_corpus(paths: Sequence[str], written: Sequence[str] = ()) -> Corpus:
    """List the inputs of `paths`, or of the standard library when there are none.

    The order is that of `paths`, sorted by name inside each folder; token files come last.

    Args:
        written: Folders that this program writes to, which are never its input.

    Raises:
        JobError: a path that does not exist, is of no kind that is read, or cannot be listed; a dataset that
            cannot be loaded; no document at all.
    """
    if errors := [each for each in data_problems(paths, written) if each.severity == "error"]:
        raise JobError(errors)
    if not paths:
        name = f"Python {sys.version.split()[0]} standard library"
        return _collect(name, Found(_library_files()), frozenset())
    prefixes = {path: token_prefix(path) for path in paths}
    raw = [path for path in paths if prefixes[path] is None]
    token_files = tuple(dict.fromkeys(prefix for prefix in prefixes.values() if prefix is not None))
    named = {path for path in raw if not Path(path).is_dir()}
    found = Found()
    for path in raw:
        here = _expand(path, written)
        found.files += here.files
        found.left_out += here.left_out
    return _collect(few(paths), found, named, token_files)


def _expand(path: str, written: Sequence[str]) -> Found:
    """The files that `path` stands for."""
    if is_hub_name(path):
        return Found(hub_files(path))
    if is_saved_dataset(Path(path)):
        return Found(arrow_files(Path(path)))
    return search(Path(path), written) if Path(path).is_dir() else Found([path])


def _path_problems(name: str, written: Sequence[str]) -> Iterator[Problem]:
    path = Path(name)
    try:
        if is_hub_name(name) or is_remote(name):
            found = hub_problem(name) if is_hub_name(name) else remote_problem(name)
            yield from [found] if found else []
        elif (prefix := token_prefix(name)) is not None:
            yield from _half_token_files(name, prefix)
        elif not name.endswith(os.sep) and is_file(f"{name}.bin") and is_file(f"{name}.idx"):
            kind = "folder" if is_folder(path) else "file"
            rule = f"names two things: this {kind}, and the token files {name}.bin and .idx"
            other = f"{name}/ for the folder" if kind == "folder" else "rename the file to mean it"
            yield Problem("data", name, rule, f"Give {name}.idx for the tokens, or {other}")
        elif is_saved_dataset(path):
            arrow_files(path)
        elif is_folder(path):
            yield from _folder_problems(name, search(path, written))
        elif (problem := _file_problem(name)) is not None:
            yield problem
    except JobError as error:
        yield from error.problems
    except OSError as error:
        yield unreadable(name, error)


def _half_token_files(name: str, prefix: str) -> Iterator[Problem]:
    """Token files of which one is missing."""
    for missing in (f"{prefix}{suffix}" for suffix in (".bin", ".idx") if not is_file(f"{prefix}{suffix}")):
        rule = f"{missing} is missing; token files are PREFIX.bin and PREFIX.idx, both"
        yield Problem("data", name, rule, "Restore that file, or prepare again")


def _folder_problems(name: str, found: Found) -> Iterator[Problem]:
    """A folder without data, or a note on what it holds beside them."""
    left_out = left_out_text(found.left_out) if found.left_out else ""
    if not found.files:
        rule = f"the folder holds no file with one of the suffixes {_KNOWN}"
        rule += f" ({left_out})" if left_out else ""
        yield Problem("data", name, rule, "Give a folder that does, or the files themselves")
    elif left_out:
        yield Problem("data", name, left_out, "", severity="note")


def _file_problem(name: str) -> Problem | None:
    path = Path(name)
    if not is_file(path):
        rule = "is no file or folder" if exists(path) else "does not exist"
        remedy = (
            "Give the path of a text, .jsonl or .parquet file, of a folder of them, the PREFIX of token "
            "files, or hub:NAME for a dataset of the hub"
        )
        return Problem("data", name, rule, remedy)
    if path.suffix and kind_of(path.name) is None:
        rule = f"the suffix {path.suffix} is not one of those that are read ({_KNOWN})"
        remedy = "Convert or unpack it; plain text must end in .txt, lines of JSON objects in .jsonl"
        return Problem("data", name, rule, remedy)
    if is_json(name) and path.stat().st_size and not holds_json_lines(name, least=1):
        rule = "does not have one JSON object on each line"
        remedy = (
            "Write each object on a line of its own (jq -c '.[]' for a list), in a file that ends in .jsonl"
        )
        return Problem("data", name, rule, remedy)
    return _reading_problem(path, kind_of(path.name) in (None, "text"))


def _reading_problem(path: Path, is_text: bool) -> Problem | None:
    """Whether a named file cannot be opened, or is no text although it should be: most binary files are not
    UTF-8 from the start."""
    try:
        with path.open("rb") as file:
            if is_text:
                codecs.getincrementaldecoder("utf-8")().decode(file.read(_BEGINNING))
    except OSError as error:
        return unreadable(str(path), error)
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}"
        return Problem("data", str(path), rule, "Convert it to UTF-8, or leave it out")
    return None


def _collect(name: str, found: Found, named: Set[str], token_files: tuple[str, ...] = ()) -> Corpus:
    """Turn the files found into inputs, each once."""
    files: list[InputFile] = []
    skipped: list[Skipped] = []
    seen: dict[str, str] = {}
    for path in found.files:
        real = os.path.realpath(path)
        if real in seen:
            skipped.append(Skipped(path, f"the same file as {seen[real]}"))
            continue
        seen[real] = path
        try:
            status = Path(path).stat()
        except OSError as error:
            raise JobError([unreadable(path, error)]) from error
        if status.st_size:
            kind = kind_of(path) or "text"  # a named file may lack an ending
            files.append(InputFile(path, status.st_size, status.st_mtime_ns, path in named, kind))
        else:
            skipped.append(Skipped(path, "empty"))
    if not files and not token_files:
        raise JobError([no_document(name, skipped)])
    return Corpus(name, tuple(files), tuple(skipped), found.left_out, token_files)


def _library_files() -> list[str]:
    """The standard library's modules in a fixed order, without tests, packages and generated tables.

    A few packages have an empty `__init__.py`, which need not be reported as skipped.
    """
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path
        for path in search(root, without=_LIBRARY_LEFT_OUT).files
        if path.endswith(".py")
        and not Path(path).relative_to(root).parts[0].startswith(_LIBRARY_GENERATED)
        and Path(path).stat().st_size
    ]


def unreadable(path: str, error: OSError) -> Problem:
    """The problem of a path that cannot be read."""
    rule = f"cannot be read ({error.strerror}: {error.filename})"
    return Problem("data", path, rule, "Make it readable, or leave it out")


def no_document(name: str, skipped: Sequence[Skipped]) -> Problem:
    """The problem of data without a single document."""
    reasons = "; ".join(f"{entry.path}: {entry.reason}" for entry in skipped[:3])
    rule = "there is no text in it" + (f" ({reasons})" if reasons else "")
    return Problem("data", name, rule, "Give files or folders with UTF-8 text")
