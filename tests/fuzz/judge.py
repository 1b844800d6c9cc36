"""Runs a command in this process and says what no command may do, whatever it is given."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.base.command import complete_process
from pipeline.base.problems import EXIT_FINISHED, EXIT_WRONG_JOB
from tests.fuzz.files import make_files

LONGEST_OUTPUT = 30_000  # characters
SECONDS = 60
# What is made of data, most of which may have been read when a record is found that is no text.
_WORK = ("./out/data", "./made.tokenizer")
_REASON = re.compile(r"error|Error|required|cannot start|Unrecognized|Missing")
# What `Case.files` may hold in place of bytes.
FIFO, FOLDER, LOOP = "fifo", "folder", "loop"


@dataclass(frozen=True)
class Case:
    """One call of a command.

    Attributes:
        files: Written before it, below the folder of the case: bytes, or what stands there instead of a file.
        environ: Variables of the call; None: it is not set.
    """

    command: str
    arguments: Sequence[str] = ()
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    environ: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """How a call ended.

    Attributes:
        code: Its exit code; None: it raised something, or did not end.
        faults: What it may not do.
    """

    code: int | None
    text: str
    faults: list[str]


class Hangs(BaseException):
    """Raised in a call that takes too long."""


class Desk:
    """A folder with every kind of input, the current one while cases run in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = self._snapshot()

    def judge(self, case: Case, main: Callable[[Sequence[str]], int]) -> Ending:
        """Call a command; what it has made is removed afterwards."""
        self._clear()
        for name, content in case.files.items():
            _place(Path(name), content)
        before = snapshot(Path())
        ending = call(case, main)
        changed = {entry for entry in snapshot(Path()) ^ before if not entry[0].startswith(_WORK)}
        changed = {entry for entry in changed if entry[0] != "./out"}  # made for it
        if ending.code != EXIT_FINISHED and changed:
            ending.faults.append(f"exit code {ending.code}, and written was {sorted(changed, key=str)[:6]}")
        return ending

    def _snapshot(self) -> set[tuple]:
        """The folder made anew."""
        os.chdir(self._folder.parent)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        os.chdir(self._folder)
        make_files(self._folder)
        return snapshot(Path())

    def _clear(self) -> None:
        now = snapshot(Path())
        if self._made - now:
            self._made = self._snapshot()
        for path, *_ in sorted(now - self._made, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path) if Path(path).is_dir() and not Path(path).is_symlink() else Path(
                    path
                ).unlink()


def call(case: Case, main: Callable[[Sequence[str]], int]) -> Ending:
    """Call a command with its streams in memory."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    faults: list[str] = []
    code: int | None = None
    try:
        with _environment(case.environ), _streams(out, err), _limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            complete_process()
            code = main(list(case.arguments))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Hangs as late:
        place = "".join(traceback.format_tb(late.__traceback__)[-3:])
        faults.append(f"no end after {SECONDS} s: {place}")
    except BaseException as error:  # noqa: BLE001  (each is a finding)
        faults.append("".join(traceback.format_exception(error)))
    out.flush()
    err.flush()
    text = (out.buffer.getvalue() + err.buffer.getvalue()).decode()  # type: ignore[attr-defined]
    return Ending(code, text, [*faults, *_faults_of(text, code)])


def _faults_of(text: str, code: int | None) -> Iterator[str]:
    if "Traceback" in text:
        yield f"a traceback: {text[-3000:]}"
    elif code not in (None, EXIT_FINISHED, EXIT_WRONG_JOB):
        yield f"exit code {code}: {text[-1500:]}"
    if len(text) > LONGEST_OUTPUT:
        yield f"{len(text)} characters of output: {text[:300]} ... {text[-300:]}"
    if code == EXIT_WRONG_JOB and not _REASON.search(text):
        yield f"no reason: {text[-1000:]}"
    if re.search(r"\w+Warning: ", text):
        yield f"a library's warning: {text[-1500:]}"


def snapshot(folder: Path) -> set[tuple]:
    """Everything below a folder with its kind, and files with size and time."""
    found = set()
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = (path := Path(root) / name).lstat()
            is_file = name in files
            found.add(
                (f"./{path}", status.st_mode, is_file and status.st_size, is_file and status.st_mtime_ns)
            )
    return found


def _place(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == FIFO:
        os.mkfifo(path)
    elif content == FOLDER:
        path.mkdir()
    else:
        path.symlink_to(path.name)


@contextlib.contextmanager
def _streams(out: io.TextIOWrapper, err: io.TextIOWrapper) -> Iterator[None]:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        before, sys.stdin = sys.stdin, io.StringIO()
        try:
            yield
        finally:
            sys.stdin = before


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    for name in (name for name, value in changes.items() if value is None):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
