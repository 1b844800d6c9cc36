"""Runs the launcher, and sees to it that all processes it starts on this machine end.

It has a session of its own, so that the terminal's Ctrl-C reaches this process only. This passes the request
on to the ranks, on every host, through the coordinator: the launcher's own way is to end one rank after the
other with 30 seconds for each, data workers first, and a rank needs its peers to reach the end of a step and
save.

    launch.sh ─┬─ deepspeed launch ─┬─ agent ── rank 0 ── data workers
               │                    └─ agent ── rank 1 ── data workers
               └─ coordinator, to which every agent is connected

On several hosts deepspeed's runner, pdsh and ssh stand between launch.sh and deepspeed launch.

pdsh gives each of its ssh clients a session of its own, in which they outlive it where a host is gone. This
process therefore adopts what the launcher leaves behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import psutil

from pipeline.base.command import say, stop_signals
from pipeline.cluster.agent.coordinator import Coordinator
from pipeline.cluster.agent.owned_process import KILL_SECONDS, adopting_orphans, descendants, kill_all
from pipeline.cluster.agent.rank_table import signal_name

# The process of the deepspeed launcher whose children are the ranks of this host.
_RANKS_PARENT = "deepspeed.launcher.launch"
_POLL_SECONDS = 0.1
# The launcher's processes on all hosts need so long to notice that their ranks have ended. One that cannot be
# reached holds up pdsh until ssh gives it up.
_LEAVE_SECONDS = 20.0
# Where it has gone first: once a second they look, and a busy host takes its time to end a process.
_ORPHANS_SECONDS = 6.0
# A launcher that ends at once has reached nobody; an agent that it has started is heard of within this time.
_FIRST_WORD_SECONDS = 2.0


@dataclass(frozen=True)
class LauncherExit:
    """How the launcher's process exited.

    Attributes:
        return_code: Of the command; negative for a signal. 0 where it was ended because all ranks had left.
        stopped_by: The first signal that asked for the end, None without one.
        killed: Whether the processes had to be killed after that.
        before_ranks: No rank was there yet when that signal came.
    """

    return_code: int
    stopped_by: signal.Signals | None
    killed: bool
    before_ranks: bool = False


class LauncherProcess:
    """One run of a command, from its start to the end of its last process.

    Args:
        stop_timeout: Seconds between a first signal and the end by force; a second one (SIGUSR1, a batch
            system's warning, does not count) is the end at once.
        coordinator: Where the ranks' agents are connected; None where this host is started alone.
    """

    def __init__(self, stop_timeout: float, coordinator: Coordinator | None = None) -> None:
        self._stop_timeout = stop_timeout
        self._coordinator = coordinator
        self._signals: list[signal.Signals] = []
        self._deadline: float | None = None
        self._launcher_gone: float | None = None
        self._outcome_at: float | None = None
        self._all_left = False
        self._before_ranks = False

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> LauncherExit:
        """Run to the end. Signals that arrive meanwhile ask for a stop.

        Raises:
            OSError: the command cannot be started.
        """
        previous = {number: signal.signal(number, self._note) for number in stop_signals()}
        # Ranks whose launch stands still are ended: Ctrl-Z is not for this.
        previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        try:
            with adopting_orphans():
                besides = set(descendants(os.getpid()))
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
                )
                try:
                    killed = self._wait(process)
                finally:
                    left_behind = end_descendants(process.pid, besides)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if left_behind and not self._signals and self._coordinator is None:
            say("The launcher ended before its processes did; they have been ended, too.")
        code = process.wait()
        stopped_by = self._signals[0] if self._signals else None
        return LauncherExit(0 if self._all_left else code, stopped_by, killed, self._before_ranks)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the end, passing a stop on; True if it had to be by force."""
        while not self._is_over(process):
            if self._must_kill(process):
                self._end_at_once()
                return True
            if self._coordinator is None:
                time.sleep(_POLL_SECONDS)
            else:
                self._coordinator.poll(_POLL_SECONDS)
        return False

    def _is_over(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether nothing is left to wait for: the command, and with a coordinator the ranks."""
        code = process.poll()
        if self._coordinator is None:
            return code is not None
        now = time.monotonic()
        if self._coordinator.outcome is not None:
            self._outcome_at = self._outcome_at or now
            if not self._coordinator.everywhere and self._coordinator.is_alone:
                # The launcher looks once a second, and takes another one or two to leave.
                self._all_left = True
                return True
            if self._launcher_gone is not None:  # its processes on other hosts notice by themselves
                return now - self._outcome_at > _ORPHANS_SECONDS
            return code is not None or now - self._outcome_at > _LEAVE_SECONDS
        if code is None:
            return False
        if self._launcher_gone is None:
            self._launcher_gone = now
            if self._coordinator.table.running:
                self._coordinator.end(
                    "launcher", f"the launcher {describe_return(code)} while ranks were running"
                )
        if self._coordinator.table.states or self._coordinator.table.failures:
            return False
        # Ranks that it had started on their way here may still report; those of this host end with its group.
        self._before_ranks = bool(self._signals)
        at_once = self._before_ranks and not self._coordinator.everywhere
        return at_once or now - self._launcher_gone > _FIRST_WORD_SECONDS

    def _must_kill(self, process: subprocess.Popen[bytes]) -> bool:
        """Pass a first signal on to the ranks; whether a second one, or time, asks for more."""
        if not self._signals:
            return False
        if self._deadline is None:
            self._deadline = time.monotonic() + self._stop_timeout
            self._request_stop(process.pid)
        elif len(urgent := [each for each in self._signals if each != signal.SIGUSR1]) > 1:
            say(f"{urgent[1].name}: ending every process now, nothing more is saved.")
            return True
        elif time.monotonic() > self._deadline:
            say(f"Not at an end {self._stop_timeout:g} s after {self._signals[0].name}: killed.")
            return True
        return False

    def _request_stop(self, launcher: int) -> None:
        """Rank 0 says that it has heard, and of what; nobody else does."""
        hung_up = self._signals[0] == signal.SIGHUP  # which ranks do not take
        number = signal.SIGTERM if hung_up else self._signals[0]
        if self._coordinator is None:
            self._before_ranks = not request_stop(launcher, number)
        elif not self._coordinator.stop(number.name):
            # Nothing to save yet. At a SIGTERM DeepSpeed's launcher would end by name, on all hosts, the
            # launchers of this user's other jobs, too; agents end where they find no key or no coordinator.
            with contextlib.suppress(ProcessLookupError):
                os.kill(launcher, signal.SIGKILL if self._coordinator.everywhere else signal.SIGTERM)

    def _end_at_once(self) -> None:
        """Kill the ranks of every host."""
        if self._coordinator is None:
            return
        self._coordinator.end("ended", f"{self._signals[0].name}, and no time to save", at_once=True)
        deadline = time.monotonic() + KILL_SECONDS
        while (
            self._coordinator.outcome is None
            and self._coordinator.table.states
            and time.monotonic() < deadline
        ):
            self._coordinator.poll(_POLL_SECONDS)


def describe_return(code: int) -> str:
    """The exit code of the launcher in words."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended (exit code {code})"


def request_stop(launcher: int, number: signal.Signals = signal.SIGTERM) -> bool:
    """Ask the ranks below process `launcher` to save and end. Before they exist there is nothing to save, and
    the launcher ends; False then."""
    ranks = local_ranks(launcher)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    if not ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher, signal.SIGTERM)
    return bool(ranks)


def local_ranks(launcher: int) -> list[psutil.Process]:
    """The agents of ranks that the deepspeed launcher with process id `launcher` runs on this host."""
    try:
        process = psutil.Process(launcher)
        line = [process, *process.children(recursive=True)]
        return [rank for parent in line if _starts_ranks(parent) for rank in parent.children()]
    except psutil.NoSuchProcess:
        return []


def _starts_ranks(process: psutil.Process) -> bool:
    try:
        return _RANKS_PARENT in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def end_descendants(launcher: int, besides: Collection[int]) -> bool:
    """Kill what is left of this process's descendants, but for those `besides` and for connections that the
    user's ssh shares and keeps, and wait for their end; True if something was still running."""
    had_to = kill_all(lambda: _left(besides))  # GPUs, ports and files are free only when they are gone
    for child in psutil.Process().children():  # adopted ones, which nobody else buries
        if child.pid != launcher and child.pid not in besides:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
    return had_to


def _left(besides: Collection[int]) -> list[int]:
    below = set(descendants(os.getpid()))
    for pid in below & set(besides):
        below -= {pid, *descendants(pid)}
    return [pid for pid in below if not _is_shared_connection(pid)]


def _is_shared_connection(pid: int) -> bool:
    """Whether it is ssh's master of a shared connection (ControlPersist), so called by itself."""
    try:
        title = " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return False
    return title.startswith("ssh: ") and title.endswith("[mux]")
