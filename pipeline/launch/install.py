"""Makes the project's virtual environment, once. Run by launch.sh; standard library only, Python >= 3.10.

.venv/                   the environment, with the pinned versions of constraints.txt; may be a link to a
                         folder of its own, on a larger disk say
.venv/.setup/project     the project that it is for
.venv/.setup/tests       there if it has the tools for tests, too; kept when it is made again
.venv/.setup/stamp       what it was made from; written last, so that an interrupted set-up is done again
.venv/.setup/lock        held while it is made: a second start waits, and then finds it ready
.venv/.setup/install.log all that pip said
"""

from __future__ import annotations

import argparse
import fcntl
import getpass
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

SPECIFICATIONS = ("constraints.txt", "pyproject.toml")
# The last and longest phase, in which pip says nothing more.
_INSTALLING = "installing the packages"
# pip's lines that show where it is, and how a progress line calls that.
_PHASES = (
    (re.compile(r"\s*Downloading (\S+) \((.+)\)"), "downloading {0} ({1})"),
    (re.compile(r"Collecting ([A-Za-z0-9_.-]+)"), "resolving {0}"),
    (re.compile(r"Building wheels? for collected packages: (.+)"), "building {0}"),
    (re.compile(r"Installing collected packages: (.+)"), _INSTALLING),
)
# What pip's errors mean to somebody who only wanted to train.
_CAUSES = (
    ("No space left on device", "The disk is full; torch with CUDA needs about 10 GB."),
    ("Temporary failure in name resolution", "The package index cannot be reached: is there a network?"),
    ("NewConnectionError", "The package index cannot be reached: is there a network, or a proxy to set?"),
    ("No matching distribution found", "The package index has no fitting release for this Python."),
    ("Permission denied", "A file or folder may not be written."),
    ("ResolutionImpossible", "Versions that are asked for together do not fit together:"),
)
_SHOW_EVERY_SECONDS = 30.0
# As `pipeline.base.problems` has it, which this file cannot import.
EXIT_STOPPED = 3


class SetupError(Exception):
    """The environment cannot be made; the message says why and what to do."""


class Setup:
    """The environment of the project in folder `root`.

    Args:
        for_tests: With the tools for tests; an environment that has them keeps them.
    """

    def __init__(self, root: Path, for_tests: bool = False) -> None:
        self.root, self.for_tests = root, for_tests
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.state = self.venv / ".setup"
        self.log = self.state / "install.log"
        self.tests = self.state / "tests"

    def stamp(self, python_version: str) -> str:
        """Identity of an environment: pinned versions, project, Python's minor version, folder.

        The folder counts because scripts and the editable install hold absolute paths.
        """
        digest = hashlib.sha256()
        for name in SPECIFICATIONS:
            digest.update((self.root / name).read_bytes() + b"\0")
        digest.update(f"{python_version}\0{self.root}".encode())
        return digest.hexdigest()

    def is_ready(self) -> bool:
        """Whether the environment is complete and made from the present files."""
        return self._lack() is None

    def _lack(self) -> str | None:
        """What keeps the environment from being used as it is."""
        try:
            written = (self.state / "stamp").read_text(encoding="utf-8")
        except FileNotFoundError:
            return "is not complete"
        except PermissionError:
            return f"may not be read by {_user()}"
        version = self._python_version()
        if version is None:
            return f"has no Python that {_user()} can start"
        if written != self.stamp(version):
            return f"was not made from the present {' and '.join(SPECIFICATIONS)} in this folder"
        return "has no tools for tests" if self.for_tests and not self.tests.exists() else None

    def ensure(self) -> None:
        """Make the environment unless it is ready. Several processes may call it together.

        Raises:
            SetupError: it cannot be made, or .venv is somebody else's.
        """
        lack = self._lack()
        if lack is None:
            return
        self._refuse_without_write_access(lack)
        if self.venv.is_symlink():
            self._refuse_a_link_to_others()
        elif self.venv.is_dir() and any(self.venv.iterdir()) and not self.state.is_dir():
            raise SetupError(f"{self.venv} was not made by launch.sh. Remove or rename it, and start again.")
        self.state.mkdir(parents=True, exist_ok=True)
        (self.state / "project").write_text(str(self.root), encoding="utf-8")
        with self._lock():
            if not self.is_ready():
                self._make()

    def _refuse_without_write_access(self, lack: str) -> None:
        """Several users may share an environment that is ready; only who may write it can make it so.

        Raises:
            SetupError: this user may not.
        """
        folder = next(each for each in (self.state, self.venv, self.root) if os.access(each, os.F_OK))
        if os.access(folder, os.W_OK | os.X_OK):
            return
        owner, own, root = _owner(folder), f"~/{shlex.quote(self.root.name)}", shlex.quote(str(self.root))
        copy = f"tar -C {root} --exclude=./.venv --exclude=./runs -cf - . | tar -C {own} -xf -"
        raise SetupError(
            f"{self.venv} {lack}, and {_user()} may not write {folder}, which belongs to {owner}.\n"
            f"When {owner} has run ./launch.sh --setup_only there, it serves all users. "
            f"Or start a copy of your own:\n  mkdir {own} && {copy}\n  {own}/launch.sh"
        )

    def _refuse_a_link_to_others(self) -> None:
        """Making the environment empties the folder: one that a link leads to must be empty, or this
        project's.

        Raises:
            SetupError: it is not; nothing in it has been touched.
        """
        target = self.venv.resolve()
        if not target.is_dir():
            what, remedy = "which is no folder", "Make that folder, or remove the link"
        else:
            try:
                owner = (self.state / "project").read_text(encoding="utf-8")
            except FileNotFoundError:
                owner = ""
            if owner == str(self.root) or not any(target.iterdir()):
                return
            what = "which is not an environment of this project" + (f" but of {owner}" if owner else "")
            remedy = f"Nothing there was changed. Remove the link (rm {self.venv})"
        raise SetupError(f"{self.venv} is a link to {target}, {what}. {remedy}, and start again.")

    def _python_version(self) -> str | None:
        """Minor version of the environment's Python; None if it does not run."""
        command = [str(self.python), "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Held by one process at a time; the system releases it when that process dies."""
        with (self.state / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Another start is setting up this environment; waiting for it.")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _make(self) -> None:
        began = time.monotonic()
        only_tests = Setup(self.root).is_ready()
        # A set-up that is interrupted is done again from nothing, with the tools that were asked for.
        (self.state / "stamp").unlink(missing_ok=True)
        if self.for_tests:
            self.tests.touch()
        if only_tests:
            say(f"Adding the tools for tests to {self.venv}. Log: {self.log}")
        else:
            say(f"Setting up {self.venv} (once; a few minutes, mostly torch). Log: {self.log}")
            self._create()
        self._install()
        (self.state / "stamp").write_text(self.stamp(self._python_version() or ""), encoding="utf-8")
        say(f"Set up in {time.monotonic() - began:.0f} s.")

    def _create(self) -> None:
        """Start from nothing: a package that was half written when pip died would count as installed."""
        for entry in self.venv.iterdir():
            if entry == self.state:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        try:
            venv.create(self.venv, with_pip=True, symlinks=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SetupError(f"The virtual environment cannot be made: {error}") from error

    def _install(self) -> None:
        command = [
            str(self.python),
            "-I",
            "-m",
            "pip",
            "install",
            "--no-input",
            "--disable-pip-version-check",
        ]
        command += [
            "--progress-bar",
            "off",
            "-c",
            str(self.root / "constraints.txt"),
            "-e",
            f"{self.root}[{'dev' if self.tests.exists() else 'tensorboard'}]",
        ]
        with self.log.open("w", encoding="utf-8", buffering=1) as log:  # by lines, for tail -f
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            try:
                _show_progress(process, log)
            except BaseException:
                process.kill()
                raise
            finally:
                process.wait()
        if process.returncode != 0:
            raise SetupError(explain_failure(self.log))


def _show_progress(process: subprocess.Popen[str], log: TextIO) -> None:
    """Copy pip's output to the log; show its phases on one line of a terminal, elsewhere now and then."""
    on_terminal = sys.stderr.isatty()
    began = shown = time.monotonic()
    for line in process.stdout:
        log.write(line)
        phase = phase_of(line)
        now = time.monotonic()
        if phase is None:
            continue
        if on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(
                f"\r\033[K{f'  {now - began:4.0f} s  {phase}'[:width]}", end="", file=sys.stderr, flush=True
            )
        elif phase == _INSTALLING or now - shown >= _SHOW_EVERY_SECONDS:
            shown = now
            say(f"  {now - began:4.0f} s  {phase}")
    if on_terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def phase_of(line: str) -> str | None:
    """What pip is doing, from one line of its output; None for a line that does not tell."""
    for pattern, text in _PHASES:
        if match := pattern.match(line):
            return text.format(*match.groups())
    return None


def explain_failure(log: Path) -> str:
    """Pip's error lines, what they mean where that is known, and where the rest is."""
    text = log.read_text(encoding="utf-8", errors="replace")
    causes = [cause for sign, cause in _CAUSES if sign in text][:1]
    conflict = re.search(r"^The conflict is caused by:\n((?:[ \t]+\S.*\n)+)", text, re.MULTILINE)
    if conflict:
        errors = [line.strip() for line in conflict[1].splitlines()]
    else:
        errors = [line for line in text.splitlines() if line.startswith("ERROR")] or text.splitlines()[-5:]
    lines = ["Installing failed.", *causes, *(f"  {line}" for line in errors[-5:]), f"The whole log: {log}"]
    return "\n".join([*lines, "The next start begins the set-up again."])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        return f"user {os.getuid()}"


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Make the environment of the project this file belongs to."""
    parser = argparse.ArgumentParser(description="Make the project's virtual environment, once.")
    parser.add_argument("root", type=Path, help="the project's folder")
    parser.add_argument("--tests", action="store_true", help="with the tools for tests")
    given = parser.parse_args()
    root = given.root.resolve()
    try:
        Setup(root, given.tests).ensure()
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:
        say(f"error: {error.filename or root}: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        say("\nSet-up interrupted; the next start begins it again.")
        return EXIT_STOPPED
    return 0


if __name__ == "__main__":
    # launch.sh runs it beside itself, where a shell ignores SIGINT, and passes a request to stop on as this.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
