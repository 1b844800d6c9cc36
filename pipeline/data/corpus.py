"""Which files a run learns from: one document per file. No torch.

`--data` names text files and folders. Folders are searched recursively for files with one of
`TEXT_SUFFIXES`; hidden names and links to folders are not followed. Without `--data` the corpus is the
source text of the running interpreter's standard library: real text, about 10 MB, on every machine.
"""

from __future__ import annotations

import codecs
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from pipeline.job.problems import JobError, Problem
from pipeline.job.user_input import exists, is_file, is_folder

# Plain text and source code, as they are. Other kinds of files would be learned with their markup.
_PROSE = (".txt", ".text", ".md", ".rst", ".tex")
_CODE = (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".sh")
TEXT_SUFFIXES = _PROSE + _CODE

# Not the library itself, far more tests than code, or tables generated into modules.
_NOT_LIBRARY = {"site-packages", "dist-packages", "lib-dynload", "test", "tests", "idlelib", "lib2to3"}
_LIBRARY_LEFT_OUT = frozenset(_NOT_LIBRARY | {"encodings", "pydoc_data"})
_LIBRARY_GENERATED = ("_sysconfigdata", "config-")
# Bytes of a named file that are looked at before a run starts.
_BEGINNING = 1 << 16


@dataclass(frozen=True)
class TextFile:
    """One document.

    Attributes:
        path: Where it is.
        size: Bytes.
        mtime_ns: Time of its last change, nanoseconds; with the size it tells a changed file.
        named: The user named this very file, so it must be usable; one found in a folder may be skipped.
    """

    path: str
    size: int
    mtime_ns: int
    named: bool

    def read(self) -> str:
        """The text, without a byte-order mark, line ends as they are.

        Raises:
            UnicodeDecodeError: not UTF-8.
            JobError: it cannot be read, or it is another file than was listed.
        """
        try:
            text = Path(self.path).read_bytes()
            now = Path(self.path).stat()
        except OSError as error:
            raise JobError([_unreadable(self.path, error)]) from error
        if (len(text), now.st_size, now.st_mtime_ns) != (self.size, self.size, self.mtime_ns):
            rule = f"changed while it was read ({self.size} bytes before, {now.st_size} now)"
            raise JobError([Problem("data", self.path, rule, "Start again when nothing writes to it")])
        return text.decode("utf-8-sig")


@dataclass(frozen=True)
class Skipped:
    """A file that was found and is not used, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Corpus:
    """The documents in their order, and what was left aside.

    Attributes:
        name: For the console.
        files: One document each.
        skipped: Files that look like documents but are none (empty, found twice).
        num_other: Files in the folders whose suffix is not in `TEXT_SUFFIXES`.
    """

    name: str
    files: tuple[TextFile, ...]
    skipped: tuple[Skipped, ...] = ()
    num_other: int = 0


def data_problems(paths: Sequence[str]) -> tuple[Problem, ...]:
    """What is wrong with the paths of `--data`, found without reading more than a file's beginning."""
    problems = tuple(problem for path in paths if (problem := _path_problem(Path(path))) is not None)
    if problems or not paths or not all(is_file(path) and not Path(path).stat().st_size for path in paths):
        return problems
    return (_no_document(", ".join(paths), [Skipped(path, "empty") for path in paths]),)


def find_corpus(paths: Sequence[str]) -> Corpus:
    """List the documents of `paths`, or of the standard library when there are none.

    The order is that of `paths`, sorted by name inside each folder.

    Raises:
        JobError: a path that does not exist, is no text, or cannot be listed; no document at all.
    """
    if problems := data_problems(paths):
        raise JobError(problems)
    if not paths:
        return _collect(f"Python {sys.version.split()[0]} standard library", _library_files(), frozenset())
    named = {path for path in paths if not Path(path).is_dir()}
    found = [name for path in paths for name in (_walk(Path(path)) if Path(path).is_dir() else (path,))]
    return _collect(", ".join(paths), found, named)


def _path_problem(path: Path) -> Problem | None:
    if is_folder(path):
        try:
            if any(_is_text(name) for name in _walk(path)):
                return None
        except OSError as error:
            return _unreadable(str(path), error)
        rule = f"the folder holds no file with one of the suffixes {' '.join(TEXT_SUFFIXES)}"
        return Problem("data", str(path), rule, "Name a folder that does, or the files themselves")
    if not is_file(path):
        rule = "is no file or folder" if exists(path) else "does not exist"
        return Problem("data", str(path), rule, "Give the path of a text file or of a folder of them")
    if path.suffix and not _is_text(path.name):
        rule = f"the suffix {path.suffix} is not one of plain text ({' '.join(TEXT_SUFFIXES)})"
        return Problem("data", str(path), rule, "Give plain text; if it is, rename the file to end in .txt")
    return _beginning_problem(path)


def _beginning_problem(path: Path) -> Problem | None:
    """Whether a named file cannot be read, or is binary; most of those are not UTF-8 from the start."""
    try:
        with path.open("rb") as file:
            codecs.getincrementaldecoder("utf-8")().decode(file.read(_BEGINNING))
    except OSError as error:
        return _unreadable(str(path), error)
    except UnicodeDecodeError as error:
        return not_utf8(str(path), error)
    return None


def _collect(name: str, found: Sequence[str], named: Set[str]) -> Corpus:
    """Turn the names found into documents, each file once."""
    files: list[TextFile] = []
    skipped: list[Skipped] = []
    seen: dict[str, str] = {}
    texts = [path for path in found if path in named or _is_text(path)]
    for path in texts:
        real = os.path.realpath(path)
        if real in seen:
            skipped.append(Skipped(path, f"the same file as {seen[real]}"))
            continue
        seen[real] = path
        try:
            status = Path(path).stat()
        except OSError as error:
            raise JobError([_unreadable(path, error)]) from error
        if status.st_size:
            files.append(TextFile(path, status.st_size, status.st_mtime_ns, path in named))
        else:
            skipped.append(Skipped(path, "empty"))
    if not files:
        raise JobError([_no_document(name, skipped)])
    return Corpus(name, tuple(files), tuple(skipped), len(found) - len(texts))


def _walk(root: Path, left_out: Set[str] = frozenset()) -> Iterator[str]:
    """Every file below `root`, sorted, without hidden ones and the folders named in `left_out`.

    Raises:
        OSError: a folder that cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        for name in sorted(names):
            if not name.startswith("."):
                yield str(Path(folder, name))


def _library_files() -> list[str]:
    """The standard library's modules in a fixed order, without tests, packages and generated tables.

    A few packages have an empty `__init__.py`; those are no news to report as skipped.
    """
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path
        for path in _walk(root, _LIBRARY_LEFT_OUT)
        if path.endswith(".py")
        and not Path(path).relative_to(root).parts[0].startswith(_LIBRARY_GENERATED)
        and Path(path).stat().st_size
    ]


def _is_text(path: str) -> bool:
    return path.lower().endswith(TEXT_SUFFIXES)


def not_utf8(path: str, error: UnicodeDecodeError) -> Problem:
    """A named file that is not text."""
    rule = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}"
    return Problem("data", path, rule, "Convert it to UTF-8, or leave it out")


def _unreadable(path: str, error: OSError) -> Problem:
    rule = f"cannot be read ({error.strerror}: {error.filename})"
    return Problem("data", path, rule, "Make it readable, or leave it out")


def _no_document(name: str, skipped: Sequence[Skipped]) -> Problem:
    aside = "; ".join(f"{entry.path} is {entry.reason}" for entry in skipped[:3])
    rule = "there is no text in it" + (f" ({aside})" if aside else "")
    return Problem("data", name, rule, "Give files or folders with text")
