"""Runs the launcher as one group of processes, and sees to it that all of them end.

The group has a session of its own, so that the terminal's Ctrl-C reaches this process only. It passes the
request on to the ranks alone: the launcher's own way is to end one rank after the other with 30 seconds
for each, data workers first, and a rank needs its peers to reach the end of a step and save.

    launch.sh ── deepspeed runner ── deepspeed launch ─┬─ rank 0 ── data workers
                 └────────── one process group ────────┴─ rank 1 ── data workers
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import psutil

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The process of the deepspeed launcher whose children are the ranks of this host.
_RANKS_PARENT = "deepspeed.launcher.launch"
_POLL_SECONDS = 0.1
# A killed process may need this long to leave a driver's call.
_KILL_SECONDS = 10.0


@dataclass(frozen=True)
class Ended:
    """How a group of processes ended.

    Attributes:
        return_code: Of the command; negative for a signal.
        stopped_by: The first signal that asked for the end, None without one.
        killed: Whether the processes had to be killed after that.
    """

    return_code: int
    stopped_by: signal.Signals | None
    killed: bool


class Supervisor:
    """One run of a command, from its start to the end of its last process.

    Args:
        stop_timeout: Seconds between a first signal and the end by force; a second signal is the end at once.
        say: Prints one line for the user.
    """

    def __init__(self, stop_timeout: float, say: Callable[[str], None]) -> None:
        self._stop_timeout = stop_timeout
        self._say = say
        self._signals: list[signal.Signals] = []

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> Ended:
        """Run to the end. Signals that arrive meanwhile ask for a stop.

        Raises:
            OSError: the command cannot be started.
        """
        previous = {number: signal.signal(number, self._note) for number in _signals_to_take()}
        try:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            try:
                killed = self._wait(process)
            finally:
                left_behind = kill_group(process.pid)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if left_behind and not self._signals:
            self._say("The launcher ended before its processes did; they have been ended, too.")
        return Ended(process.wait(), self._signals[0] if self._signals else None, killed)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the command, passing a stop on; True if it had to be killed."""
        deadline = None
        while process.poll() is None:
            if self._signals and deadline is None:
                deadline = time.monotonic() + self._stop_timeout
                if self._signals[0] == signal.SIGINT:
                    self._say("\nStopping after this step. Ctrl-C again: stop at once, without saving.")
                request_stop(process.pid)
            elif len(self._signals) > 1:
                self._say(f"{self._signals[1].name}: ending every process now, nothing more is saved.")
                return True
            elif deadline is not None and time.monotonic() > deadline:
                self._say(f"Not at an end {self._stop_timeout:g} s after {self._signals[0].name}: killed.")
                return True
            time.sleep(_POLL_SECONDS)
        return False


def _signals_to_take() -> tuple[signal.Signals, ...]:
    """A job started with nohup must outlive its terminal, so an ignored SIGHUP stays ignored."""
    hang_up_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return STOP_SIGNALS[:2] if hang_up_ignored else STOP_SIGNALS


def request_stop(launcher: int) -> None:
    """Ask the ranks below process `launcher` to save and end.

    Where none of them is on this host, the launcher passes the request on to the others. Before the ranks
    exist there is nothing to save, and the launcher ends.
    """
    ranks = local_ranks(launcher)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGTERM)
    if not ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher, signal.SIGTERM)


def local_ranks(launcher: int) -> list[psutil.Process]:
    """The ranks that the deepspeed launcher with process id `launcher` runs on this host."""
    try:
        below = psutil.Process(launcher).children(recursive=True)
        return [rank for parent in below if _starts_ranks(parent) for rank in parent.children()]
    except psutil.NoSuchProcess:
        return []


def _starts_ranks(process: psutil.Process) -> bool:
    try:
        return _RANKS_PARENT in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def kill_group(group: int) -> bool:
    """Kill what is left of a process group and wait for its end; True if something was still running."""
    running = [process for process in psutil.process_iter() if _runs_in(process, group)]
    if running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        # Their GPUs, ports and files are free only when they are gone.
        deadline = time.monotonic() + _KILL_SECONDS
        while any(_runs_in(process, group) for process in running) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
    return bool(running)


def _runs_in(process: psutil.Process, group: int) -> bool:
    """A zombie does not count: it holds nothing, and only its parent can remove it."""
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def say(line: str) -> None:
    """One line for the user, beside the job's own output."""
    print(line, file=sys.stderr, flush=True)
