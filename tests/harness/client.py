"""The test's side: send a call to the fork server, return the ranks' results or raise with their story."""

from __future__ import annotations

import functools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.protocol import (
    OUTCOMES_FILE,
    REQUEST_FILE,
    SUPERVISOR_LOG,
    Outcome,
    Request,
    read_pickle,
    write_pickle,
)
from tests.harness.report import describe

# Seconds that the fork server gets on top of a call's own time limit: its imports, the report of a hang.
SERVER_MARGIN = 60.0

# Ranks are CPU ranks over the loopback interface with one thread each, whatever the machine has.
CPU_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class RankFailure(AssertionError):
    """A rank raised, died, hung or was refused. `outcomes` has every rank's story."""

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


@dataclass(frozen=True)
class Call:
    """One finished call, for the summary of a test session."""

    name: str
    world_size: int
    seconds: float


@dataclass
class ForkServer:
    """The server process and the connection to it. Starts with the first call, and again after a loss."""

    calls: list[Call] = field(default_factory=list)
    process: subprocess.Popen | None = None
    connection: socket.socket | None = None

    def execute(self, request: Request, name: str) -> list[Outcome]:
        """Run one request to its end.

        Raises:
            RankFailure: the server or the call's supervisor failed before there were outcomes.
        """
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            write_pickle(Path(folder, REQUEST_FILE), request)
            self._exchange(folder, request.timeout + SERVER_MARGIN, name)
            outcomes = Path(folder, OUTCOMES_FILE)
            if not outcomes.exists():
                log = Path(folder, SUPERVISOR_LOG).read_text(errors="replace")
                raise RankFailure(f"{name}: the ranks could not be run\n{log}", [])
            self.calls.append(Call(name, request.world_size, time.monotonic() - started))
            return read_pickle(outcomes)

    def stop(self) -> None:
        """End the server and everything below it."""
        if self.process is None:
            return
        self.connection.close()  # the server kills what runs, then leaves
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = self.connection = None

    def _exchange(self, folder: str, timeout: float, name: str) -> None:
        """Send the request, wait for the answer. Whatever interrupts the wait also ends the ranks."""
        if self.process is None:
            self._start()
        try:
            self.connection.settimeout(timeout)
            self.connection.sendall(f"{folder}\n".encode())
            if self.connection.recv(16) != b"done\n":
                raise RankFailure(f"{name}: the fork server has gone; its last words are on stderr", [])
        except BaseException:  # Ctrl-C and the outer time limit of a test included
            self.stop()
            raise

    def _start(self) -> None:
        self.connection, theirs = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **CPU_ENVIRONMENT, "PYTHONPATH": path},
                # Ctrl-C in a terminal reaches pytest alone, which then ends the ranks through us.
                start_new_session=True,
            )


@functools.cache
def _server() -> ForkServer:
    """The one server of this process; it starts nothing until the first call."""
    return ForkServer()


def stop_server() -> None:
    """End the fork server; a later call starts a new one."""
    _server().stop()


def statistics() -> tuple[Call, ...]:
    """All calls made so far, with their wall time."""
    return tuple(_server().calls)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    group_timeout: float = 30,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on `world_size` forked ranks and return what each returned, by rank.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in each rank; the
    process group is the function's to make (`init_deepspeed_distributed`, or torch's own).

    Args:
        function: Top-level function of a test module. It, its arguments and its result get pickled.
        world_size: Number of ranks.
        timeout: Seconds until ranks that still run are stopped and their stacks shown.
        group_timeout: Seconds that a collective waits, in groups made without a timeout of their own.
        env: Additional environment variables.

    Raises:
        RankFailure: a rank raised, died by a signal, left without a result, or hung. The message has the
            first failing rank's traceback and what the ranks printed.
    """
    __tracebackhide__ = True
    started = time.monotonic()
    outcomes = execute(
        function.__qualname__,
        function,
        world_size,
        args,
        timeout=timeout,
        group_timeout=group_timeout,
        grace=0.2,
        hold=True,
        env=env,
    )
    if any(outcome.state != "returned" for outcome in outcomes):
        raise RankFailure(describe(function.__qualname__, outcomes, time.monotonic() - started), outcomes)
    return [pickle.loads(outcome.result) for outcome in outcomes]


def execute(
    name: str,
    function: Callable[..., Any],
    world_size: int,
    args: tuple,
    *,
    timeout: float,
    group_timeout: float,
    grace: float,
    hold: bool,
    env: Mapping[str, str] | None,
    cwd: str | Path | None = None,
) -> list[Outcome]:
    """Run a function on ranks and return how each ended, failures included; arguments as in `Request`."""
    request = Request(
        call=pickle.dumps((function, args)),
        world_size=world_size,
        timeout=timeout,
        group_timeout=group_timeout,
        grace=grace,
        hold=hold,
        environment={**os.environ, **CPU_ENVIRONMENT, **(env or {})},
        sys_path=list(sys.path),
        cwd=str(cwd or Path.cwd()),
    )
    return _server().execute(request, name)
