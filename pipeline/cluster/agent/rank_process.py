"""The rank that an agent has started: its process, what it reports, what it writes."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from pipeline.base.problems import EXIT_FAILED
from pipeline.base.words import size
from pipeline.cluster.agent.connection import Connection, Message
from pipeline.cluster.agent.launch_spec import LaunchSpec
from pipeline.cluster.agent.owned_process import descendants, kill_all, start_owned
from pipeline.cluster.agent.progress import innermost
from pipeline.cluster.agent.rank_link import STACKS_SIGNAL, Inherited
from pipeline.cluster.agent.rank_output import RankOutput
from pipeline.cluster.agent.rank_table import describe_exit
from pipeline.cluster.memory import memory_group
from pipeline.cluster.rank_environment import RankEnvironment, without_managers
from pipeline.job.stop_file import stamped

_STACKS_SECONDS = 1.0


class RankProcess:
    """One rank, from before its start to its end.

    Args:
        command: Starts it, before its arguments.
        progress_seconds: Between two reports of its progress within a phase, of which a tiny model makes a
            hundred a second.
        selector: Where everything that it may be heard on is registered.

    Attributes:
        output: Its streams, and its log.
        step: Optimizer steps done, as far as it has reported.
        is_killed: It was not left to end by itself.
        said_ending: It has reported a good end.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        command: Sequence[str],
        rank: int,
        progress_seconds: float,
        selector: selectors.BaseSelector,
    ) -> None:
        self._spec = spec
        self._command = [*command]
        self._progress_seconds = progress_seconds
        self._selector = selector
        self.output = RankOutput(rank)
        self.step = 0
        self.is_killed = False
        self.said_ending = False
        self._advice = ""  # should memory run out
        self._kills: int | None = None  # in its control group, before its start
        self._crash = ""  # where Python was when it crashed
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None
        self._phase = ""
        self._has_stepped = False
        self._progress: Message | None = None
        self._progress_sent = 0.0
        self._stacks_at: float | None = None

    def start(self, place: RankEnvironment, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it at its place. `environment`: variables beside those of this process.

        Raises:
            OSError: the command cannot be started.
        """
        mine, its = socket.socketpair()
        stacks = self.output.stacks
        spec = self._spec
        inherited = Inherited(its.fileno(), stacks.fileno(), spec.hosts, spec.batch, spec.command)
        given = stamped(arguments) if place.rank == 0 else arguments
        command = [*self._command, inherited.argument(), *given]
        variables = without_managers(os.environ) | environment | place.variables()
        stdout, stderr = self.output.open()
        self._kills = _kills_here()
        self._process = start_owned(command, variables, stdout, stderr, (its.fileno(), stacks.fileno()))
        its.close()
        self.output.started()
        pid, host = self._process.pid, socket.gethostname()
        where = f"rank {place.rank} of {place.world_size} on {host}, process {pid}"
        self.output.log(f"[agent] {where}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode())
        self._link = Connection(mine)
        for item in (self._link, *self.output.readers):
            self._selector.register(item, selectors.EVENT_READ)

    @property
    def is_started(self) -> bool:
        """Whether there is, or was, a process."""
        return self._process is not None

    def has_ended(self) -> bool:
        """Whether it was started and is gone. Also reaps adopted children."""
        if self._process is None:
            return False
        with contextlib.suppress(ChildProcessError):  # there is no child any more
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._process.pid:
                    self._process.returncode = os.waitstatus_to_exitcode(ended[1])
        return self._process.returncode is not None

    def send_signal(self, number: int) -> None:
        """Signal it, if it is there."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it, and whatever it has started."""
        self.is_killed = True
        self.end_descendants()

    def end_descendants(self) -> None:
        """Kill what there still is of it and of all that it has started, and wait for the end."""

        def left() -> list[int]:
            self.has_ended()
            return descendants(os.getpid())

        if self._process is not None:
            kill_all(left)

    # Reports ------------------------------------------------------------------------------------------

    def reports(self, all_of_them: bool = False) -> list[Message]:
        """The messages to pass on now, and with `all_of_them` those that would have waited for a while. Its
        output goes to the console and the log."""
        for ended in self.output.pump(at_end=all_of_them):
            self._selector.unregister(ended)
        if all_of_them and self.status not in (0, None):
            self._crash = self.output.take_stacks()
            self.output.log(self._crash.encode())
        due: list[Message] = []
        if self._link is not None:
            for message in self._link.receive():
                due += self._take(message)
            if self._link.closed and self._link.fileno() >= 0:
                self._selector.unregister(self._link)
                self._link.close()
        now = time.monotonic()
        if all_of_them or now - self._progress_sent >= self._progress_seconds:
            if waiting := self._take_progress():
                self._progress_sent = now
            due += waiting
        return due

    def _take(self, message: Message) -> list[Message]:
        """What of this message, and of what waits, is reported at once: progress within a phase is not."""
        what = message.get("is")
        if what == "progress":
            is_first = (
                message["phase"] == "training" and message["step"] > self.step and not self._has_stepped
            )
            self._has_stepped |= is_first  # who shows how long it takes is told at once
            self._progress, self.step = message, message["step"]
            if message["phase"] == self._phase and not is_first:
                return []
            self._phase = message["phase"]
            return self._take_progress()
        if what == "advice":
            self._advice = message["text"]
            return []
        if what == "failure":
            self.output.log((message["text"].rstrip() + "\n").encode())
            self.output.leave_console()
        if what == "ending":
            self.said_ending = True
        return [*self._take_progress(), message]

    def _take_progress(self) -> list[Message]:
        waiting, self._progress = self._progress, None
        return [] if waiting is None else [waiting]

    def ask_for_stacks(self) -> None:
        """Let it write where it is."""
        if self._process is not None:
            self.send_signal(STACKS_SIGNAL)
            self._stacks_at = time.monotonic() + _STACKS_SECONDS

    def take_stacks(self, now: float) -> str | None:
        """What it has written, once, when it has had its time; it may be nothing."""
        if self._stacks_at is None or now < self._stacks_at:
            return None
        self._stacks_at = None
        text = self.output.take_stacks()
        self.output.log(text.encode())
        return text

    # How it ended ---------------------------------------------------------------------------------------

    @property
    def status(self) -> int | None:
        """How it ended, in `subprocess` convention; None while it runs."""
        if self._process is None:
            return EXIT_FAILED if self.is_killed else None
        # A process that is held in a driver's call ends as soon as that returns.
        code = self._process.returncode
        return -signal.SIGKILL if code is None and self.is_killed else code

    @property
    def end_in_words(self) -> str:
        """How it was ended by a signal, as far as this can be seen here only; else nothing."""
        code = self.status
        if self.is_killed or code is None or code >= 0:
            return ""
        if -code == signal.SIGKILL and (self._kills or 0) < (_kills_here() or 0):
            group = memory_group()
            limit = group.limit if group is not None else None
            most = f" (its control group has {size(limit)})" if limit is not None else ""
            return f"was killed by the kernel: out of memory{most}. {self._advice}".rstrip()
        place = f" in {innermost(self._crash)}" if self._crash.strip() else ""
        return f"{describe_exit(code)}{place}"

    @property
    def exit_code(self) -> int:
        """The agent's, where only the rank's end determines it."""
        code = None if self._process is None else self._process.returncode
        if code is None or self.is_killed or (code == 0 and not self.said_ending):
            return EXIT_FAILED
        return code if code >= 0 else 128 - code


def _kills_here() -> int | None:
    """Processes of this control group that the kernel has killed for memory; None: not visible."""
    group = memory_group()
    return None if group is None else group.kills
