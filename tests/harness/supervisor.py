"""One call of `run_ranks`: fork the ranks, watch them, end them, say how each one ended."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.harness.processes import adopt_orphans, end_descendants, exit_code, num_threads, reserved_port
from tests.harness.protocol import (
    OUTCOMES_FILE,
    REQUEST_FILE,
    Outcome,
    RankFiles,
    Request,
    read_pickle,
    write_pickle,
)
from tests.harness.rank import STACKS_FALLBACK_DELAY, STACKS_SIGNAL, forked_from, run_rank

POLL_INTERVAL = 0.02
# Seconds that ranks get to exit once all have reported; they only have files to flush.
EXIT_TIME = 5.0


def supervise(folder: Path) -> None:
    """Carry out the request in `folder` and leave the ranks' outcomes there."""
    os.setpgid(0, 0)
    adopt_orphans()
    request: Request = read_pickle(folder / REQUEST_FILE)
    function, args = _load_call(request)
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        release_read, release_write = os.pipe()
        watch = _Watch(request, folder)
        for rank in range(request.world_size):
            watch.pids[rank] = forked_from(
                os.getpid(),
                _enter_rank,
                request,
                function,
                args,
                rank,
                folder,
                port,
                (release_read, release_write),
            )
        watch.until_reported()
        os.close(release_write)
        watch.until_gone(EXIT_TIME)
        end_descendants()
    write_pickle(folder / OUTCOMES_FILE, watch.outcomes())


def _enter_rank(
    request: Request,
    function: Callable[..., Any],
    args: tuple,
    rank: int,
    folder: Path,
    port: int,
    release: tuple[int, int],
) -> None:
    # A copy of the write end in a rank would keep the others waiting for the pipe to close.
    os.close(release[1])
    run_rank(request, function, args, rank, folder, port, release[0])


def _load_call(request: Request) -> tuple[Callable[..., Any], tuple]:
    """Import the test module as pytest did, once for all ranks.

    Raises:
        RuntimeError: importing it started threads, which would not survive the fork of the ranks.
    """
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.path[:] = request.sys_path
    function, args = pickle.loads(request.call)
    if num_threads() > 1:
        raise RuntimeError(
            f"{num_threads()} threads after importing {function.__module__}, and a fork copies only one: "
            "do the work that starts them inside the function instead"
        )
    return function, args


class _Watch:
    """The ranks of one call, from fork to exit."""

    def __init__(self, request: Request, folder: Path) -> None:
        self.request = request
        self.files = [RankFiles(folder, rank) for rank in range(request.world_size)]
        self.pids: dict[int, int] = {}
        self.exit_codes: dict[int, int] = {}
        self.stopped: dict[int, str] = {}  # rank -> "ended" | "hung", for those that the harness killed

    def until_reported(self) -> None:
        """Return once every rank has left a result or error, or the rest have been killed."""
        deadline = time.monotonic() + self.request.timeout
        patience = None
        while waiting := self._unreported():
            now = time.monotonic()
            if patience is None and self._failed():
                patience = now + self.request.grace
            if patience is not None and now >= patience:
                self._stop(waiting, "ended")
            elif now >= deadline:
                self._dump_stacks(waiting)
                self._stop(waiting, "hung")
            else:
                time.sleep(POLL_INTERVAL)

    def until_gone(self, seconds: float) -> None:
        """Let the ranks exit; kill those that do not within `seconds`."""
        deadline = time.monotonic() + seconds
        while running := self._running():
            if time.monotonic() >= deadline:
                self._stop(running, "hung")
            else:
                time.sleep(POLL_INTERVAL)

    def outcomes(self) -> list[Outcome]:
        return [self._outcome(rank) for rank in range(self.request.world_size)]

    def _running(self) -> list[int]:
        for rank, pid in self.pids.items():
            if rank not in self.exit_codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.exit_codes[rank] = exit_code(status)
        return [rank for rank in self.pids if rank not in self.exit_codes]

    def _unreported(self) -> list[int]:
        """Ranks that run and have neither a result nor an error yet."""
        running = self._running()
        return [r for r in running if not (self.files[r].result.exists() or self.files[r].error.exists())]

    def _failed(self) -> bool:
        return any(files.error.exists() for files in self.files) or any(
            not self.files[rank].result.exists() for rank in self.exit_codes
        )

    def _stop(self, ranks: list[int], state: str) -> None:
        for rank in ranks:
            self.stopped[rank] = state
            os.kill(self.pids[rank], signal.SIGKILL)
        for rank in ranks:
            self.exit_codes[rank] = exit_code(os.waitpid(self.pids[rank], 0)[1])

    def _dump_stacks(self, ranks: list[int]) -> None:
        """Ask the ranks for their stacks, and wait until they have written them."""
        for rank in ranks:
            os.kill(self.pids[rank], STACKS_SIGNAL)
        deadline = time.monotonic() + STACKS_FALLBACK_DELAY + 1.0
        while time.monotonic() < deadline and not all(_text(self.files[rank].stacks) for rank in ranks):
            time.sleep(POLL_INTERVAL)
        time.sleep(0.2)  # the files are no longer empty; let the last lines arrive

    def _outcome(self, rank: int) -> Outcome:
        files = self.files[rank]
        outcome = Outcome(rank, self._state(rank), self.exit_codes[rank])
        if outcome.state == "returned":
            outcome.result = files.result.read_bytes()
        if files.error.exists():
            error = read_pickle(files.error)
            outcome.failed_at, outcome.traceback = error.time, error.traceback
        if outcome.state == "hung":
            outcome.stacks = _text(files.stacks)
        outcome.stdout, outcome.stderr = _text(files.stdout), _text(files.stderr)
        return outcome

    def _state(self, rank: int) -> str:
        if rank in self.stopped:
            return self.stopped[rank]
        if self.files[rank].error.exists():
            return "raised"
        # A result does not excuse a crash after it, in a background thread say.
        return "returned" if self.files[rank].result.exists() and self.exit_codes[rank] == 0 else "died"


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
