"""Commands inside a host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

HOME = "/run/home"
# What a login there would have; the tests' interpreter comes first, as after activating its environment.
LOGIN = {
    "HOME": HOME,
    "USER": "root",
    "SHELL": "/bin/bash",
    "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
# Compiled modules that are ready stay so: importing torch from source takes several times as long.
_PASSED_ON = ("PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH", "LANG")


def command_inside(
    init: int, command: Sequence[str | Path], env: Mapping[str, str] | None, cwd: str | Path
) -> list[str]:
    """A command line that runs `command` in the namespaces of process `init`, with a login's environment."""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    variables = [f"{name}={value}" for name, value in {**LOGIN, **passed_on, **(env or {})}.items()]
    enter = ["nsenter", "-t", str(init), "-n", "-u", "-i", "-m", "-p", "--"]
    return [*enter, "env", "-i", "-C", str(cwd), *variables, *map(str, command)]


class HostProcess:
    """A command that runs in a host. Its output goes to files, so that it never waits for a reader."""

    def __init__(self, command: Sequence[str]) -> None:
        # Closed with this object: what was printed can be read after the end.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.outside = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, start_new_session=True
        )

    @property
    def stdout(self) -> str:
        """What it has printed up to now."""
        return _read(self._out.fileno())

    @property
    def stderr(self) -> str:
        """What it has printed to standard error up to now."""
        return _read(self._err.fileno())

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.outside.poll()

    def wait(self, timeout: float) -> int:
        """Its exit code.

        Raises:
            AssertionError: it still runs after `timeout` seconds; the message has its output.
        """
        try:
            return self.outside.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {timeout:g} s\n{self.stdout[-4000:]}\n{self.stderr[-4000:]}"
            ) from None

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the command itself, as ``kill`` in that host would."""
        for child in psutil.Process(self.outside.pid).children():
            child.send_signal(number)

    def kill(self) -> None:
        """End the command and what it has started in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.outside.pid, signal.SIGKILL)
        self.outside.wait()


def _read(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode(errors="replace")
