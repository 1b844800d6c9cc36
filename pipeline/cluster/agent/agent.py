"""The owner of one rank: a small process that starts it, ends it, and reports to the coordinator.

The rank ends when the coordinator is gone or orders it, when what has started its agent is gone, and (by the
system) when the agent itself is gone. The agent exits when the coordinator has heard of every rank: a
launcher ends the other ranks as soon as one process has exited with a code other than 0, and they may be
saving.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.base.command import complete_process, help_asked, say, show_messages, stop_signals
from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_WRONG_JOB, JobError
from pipeline.cluster.agent.connection import Message
from pipeline.cluster.agent.coordinator import LOGS_FOLDER, Coordinator
from pipeline.cluster.agent.coordinator_client import CoordinatorClient, Unreachable, tell_refusal
from pipeline.cluster.agent.handshake import forget_key, read_key
from pipeline.cluster.agent.host_inquiry import ProbeProcess, interface_for, own_facts
from pipeline.cluster.agent.launch_spec import (
    CoordinatorSettings,
    LaunchSpec,
    Limits,
    direct_key,
    direct_ports,
    is_free_port,
    placed,
    split_launch_spec,
)
from pipeline.cluster.agent.owned_process import LaunchLine
from pipeline.cluster.agent.rank_link import OPTION
from pipeline.cluster.agent.rank_output import forget_old_starts, is_start_name
from pipeline.cluster.agent.rank_process import RankProcess
from pipeline.cluster.outcome import Outcome, read_outcome, write_outcome
from pipeline.cluster.rank_environment import RankEnvironment, free_port

_TICK_SECONDS = 0.2
_LOOK_UP_SECONDS = 1.0
# For ranks that nobody waits for to save; as long as `--stop_timeout`.
SAVE_SECONDS = 300.0


def own_rank(argv: Sequence[str]) -> None:
    """Be the agent of a rank that runs the script `argv` names; returns only in that rank.

    A process that has been started by an agent is the rank. Whoever asks for help needs no agent.
    """
    if help_asked(argv) or any(argument.startswith(OPTION) for argument in argv):
        # Until it listens, an interrupt ends it as any other signal does: its agent tells, not a traceback.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its agent asks it to save
        return
    complete_process()
    show_messages(say, "pipeline.cluster.agent")
    try:
        spec, arguments = split_launch_spec(argv[1:])
        key = _key_of_launch(spec)
        environment = placed(spec, os.environ)
        agent = Agent(spec, key, environment, [sys.executable, "-u", argv[0]], arguments)
    except JobError as error:
        text = "\n".join(str(problem) for problem in error.problems)
        if not (spec.port and tell_refusal(spec, key, text)):
            say(text)
        sys.exit(EXIT_WRONG_JOB)
    except (ValueError, Unreachable) as error:
        say(f"error: {error}")
        sys.exit(EXIT_FAILED)
    code = agent.run()
    # Not sys.exit: a thread that cannot write to a stopped terminal would be waited for.
    os._exit(code)


def _key_of_launch(spec: LaunchSpec) -> str:
    """The key that the launch has left here; without a launch nothing.

    Raises:
        Unreachable: it is not here.
    """
    if not spec.port:
        return ""
    try:
        return read_key(spec.key_file)
    except OSError as error:
        where = f"{spec.key_file} on {socket.gethostname()}"
        raise Unreachable(f"the key of this start cannot be read: {where}: {error.strerror}") from error


class Agent:
    """One rank's owner.

    Args:
        key: Of the launch; empty without one.
        command: Starts the rank, before its arguments.

    Raises:
        Unreachable: there is no launch, or rank 0 cannot listen for the other agents.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        key: str,
        environment: RankEnvironment,
        command: Sequence[str],
        arguments: Sequence[str],
    ) -> None:
        self._spec = spec
        self._key = key or direct_key(environment)
        self._environment = environment
        self._arguments = [*arguments]
        self._limits = Limits.of(spec.failure_timeout)
        self._signals: list[int] = []
        self._parent = os.getppid()
        # A launch looks at its own launcher. What of that is on other hosts only their agents see.
        self._line = LaunchLine(self._parent, has_launch=bool(spec.port))
        self._next_look_up = 0.0
        self._is_left = False  # nobody waits for this rank any more
        self._selector = selectors.DefaultSelector()
        self._coordinator = self._own_coordinator()
        self._client = CoordinatorClient(spec, self._key, environment, self._hello(), self._limits)
        pause = min(1.0, self._limits.beat)
        self._rank = RankProcess(spec, command, environment.rank, pause, self._selector)
        self._output = self._rank.output
        self._probe: ProbeProcess | None = None
        self._kill_at: float | None = None
        self._reported: float | None = None  # when the rank's end was reported
        self._outcome: Outcome | None = None
        self._released = False
        self._mark = ""
        self._folder: Path | None = None  # where the rank's job writes
        self._log_order: Message | None = None

    def run(self) -> int:
        """Start the rank, watch it until its end and that of all others; its exit code."""
        self._take_signals()
        try:
            while not self._is_done():
                self._turn()
        finally:
            self._end_probe()
            self._rank.end_descendants()
        self._farewell()
        return self._exit_code()

    # Start ----------------------------------------------------------------------------------------------

    def _own_coordinator(self) -> Coordinator | None:
        """Where no launch listens, rank 0's agent does, where the others look."""
        place, spec = self._environment, self._spec
        if spec.port or place.rank != 0:
            return None
        settings = CoordinatorSettings(
            place.world_size,
            self._key,
            spec.failure_timeout,
            spec.step_timeout,
            start_seconds=None,
            key_is_public=True,
        )
        ports = direct_ports(place.master_port)
        for port in ports:
            with contextlib.suppress(OSError):
                return Coordinator(settings, port, everywhere=place.world_size > place.local_size)
        raise Unreachable(
            f"other ranks' agents look at the ports {ports[0]} to {ports[-1]}, and none is free"
        )

    def _hello(self) -> Message:
        place, spec = self._environment, self._spec
        host = spec.place(place.rank)[0] if spec.hosts else place.rank // place.local_size
        hello: Message = {
            "world_size": place.world_size,
            "rank": place.rank,
            "host": socket.gethostname(),
            "host_number": host,
        }
        if not spec.port and place.local_rank == 0 and place.local_size < place.world_size:
            hello["facts"] = own_facts(os.environ)
        if place.rank == 0:
            direct = not spec.port
            hello["port"] = place.master_port if direct else free_port()
            hello["address"] = place.master_addr if direct else ""
        return hello

    def _take_signals(self) -> None:
        for number in stop_signals():  # the rank gets what its agent gets
            signal.signal(number, lambda number, _: self._signals.append(number))
        # A child's end, and every other signal, ends the wait for messages.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ)
        self._wakeup = (reader, writer)

    def _start_rank(self, order: Message) -> None:
        """Start the rank at the rendezvous that the coordinator has named."""
        self._end_probe()
        place = self._environment
        if self._spec.port:
            address, port = order["address"], order["port"]
            self._environment = place = replace(place, master_addr=address, master_port=port)
            if place.rank == 0 and not is_free_port(port):
                self._give_up(f"port {port} of the rendezvous is in use on {socket.gethostname()}", "error")
                return
        variables = order["environment"]
        if not self._spec.port and (told := interface_for(place, os.environ)):
            text = "the host's own name leads to itself alone: gloo is told to use "
            self._client.send(text=text + ", ".join(told.values()), **{"is": "trouble"})
            variables = variables | told
        self._rank.start(place, [*self._arguments, *order["arguments"]], variables)
        if order["logs"]:
            self._log_to(order)

    # One turn of the loop -------------------------------------------------------------------------------

    def _turn(self) -> None:
        watched = [each for each in (self._coordinator, self._client.connection) if each is not None]
        for item in watched:
            self._selector.register(item.fileno(), selectors.EVENT_READ)
        ready = self._selector.select(_TICK_SECONDS)
        for item in watched:
            self._selector.unregister(item.fileno())
        if any(key.fileobj is self._wakeup[0] for key, _ in ready):
            with contextlib.suppress(BlockingIOError):
                self._wakeup[0].recv(4096)
        if self._coordinator is not None:
            self._coordinator.poll()
        self._pass_signals_on()
        self._listen_to_rank()
        self._listen_to_coordinator()
        self._look_after_rank()

    def _pass_signals_on(self) -> None:
        while self._signals:  # one may arrive at any time
            number = self._signals.pop(0)
            if number == signal.SIGHUP:  # of a terminal; ranks do not take it
                number = signal.SIGTERM
            self._stop(number)
            if number in (signal.SIGTERM, signal.SIGUSR1):  # this host may be taken away: all are to save
                self._client.send(signal=signal.Signals(number).name, **{"is": "signal"})

    def _listen_to_rank(self, all_of_it: bool = False) -> None:
        for message in self._rank.reports(all_of_it):
            if message["is"] == "folder":
                self._folder = Path(message["path"])
                if self._log_order is not None:
                    self._log_to(self._log_order)
            self._client.send(**message)

    def _listen_to_coordinator(self) -> None:
        for order in self._client.receive():
            self._obey(order)
        if self._client.lost and not self._released and self._reported is None:
            is_wrong = self._client.is_wrong_job
            if is_wrong and self._environment.local_rank == 0:  # on another host the coordinator prints it
                say(self._client.lost)
            self._give_up(self._client.lost, "refused" if is_wrong else "lost")

    def _obey(self, order: Message) -> None:
        what = order["do"]
        if what == "start" and not self._rank.is_started and self._reported is None:
            self._start_rank(order)
        elif what == "ask" and self._spec.port:
            self._probe = self._probe or ProbeProcess(self._selector)
            self._probe.ask(order["line"])
        elif what == "stop":
            self._stop(signal.Signals[order["signal"]])
        elif what == "stacks":
            self._rank.ask_for_stacks()
        elif what == "end":
            self._output.leave_console()  # the cause has been said: what follows are its consequences
            kill_at = time.monotonic() + order["grace"]
            self._kill_at = min(self._kill_at or kill_at, kill_at)
        elif what == "log":
            self._log_to(order)
        elif what == "together":  # nobody needs it any more
            forget_key(self._spec.key_file)
        elif what == "keep":
            self._output.add_log_of(order["rank"], order["text"])
        elif what == "release":
            if self._environment.rank == 0 and (missing := self._output.missing_logs(order["lost"])):
                self._client.send(ranks=missing, **{"is": "missing"})
            self._outcome = Outcome(**order["outcome"])
            self._released = True
            if self._reported is None:  # the others have waited long enough
                self._kill()

    def _stop(self, number: int) -> None:
        if self._rank.is_started:
            self._rank.send_signal(number)
        elif self._reported is None:
            self._give_up(f"{signal.Signals(number).name} before the first step", "early")

    def _log_to(self, order: Message) -> None:
        folder, self._mark = Path(order["logs"]), order["mark"]
        if not self._spec.port:  # the coordinator may be anybody's; this rank knows where its job writes
            self._log_order = order
            if self._folder is None or not is_start_name(folder.name):
                return
            folder = self._folder / LOGS_FOLDER / folder.name
        self._output.log_to(folder)
        if self._environment.rank == 0:
            self._output.write_mark(self._mark)
        if self._environment.local_rank == 0:
            forget_old_starts(folder.parent)

    def _look_after_rank(self) -> None:
        now = time.monotonic()
        self._client.beat(now)
        if not self._is_left and self._reported is None:
            self._look_up(now)
        if trouble := self._output.new_trouble():
            self._client.send(text=trouble, **{"is": "trouble"})
        for line in self._probe.answers() if self._probe is not None else ():
            self._client.send(line=line, **{"is": "answer"})
        if (text := self._rank.take_stacks(now)) is not None:
            self._client.send(text=text, **{"is": "stacks"})
        if self._kill_at is not None and now >= self._kill_at and self._reported is None:
            self._kill()
        if self._rank.has_ended() and self._reported is None:
            self._report_end()

    def _look_up(self, now: float) -> None:
        """See whether all is there that has started this. A launch ends the job then, and may start it again;
        without one there is nobody who would, and ranks save first."""
        if os.getppid() != self._parent:
            gone = "the launcher that started it is gone"
        elif now < self._next_look_up:
            return
        elif origin := self._line.broken():
            gone = f"{origin} is gone"
        else:
            self._next_look_up = now + _LOOK_UP_SECONDS
            return
        self._is_left = True
        if self._spec.port:
            self._give_up(gone, "launcher")
            return
        self._output.log(f"[agent] {gone}; the rank is asked to save and end\n".encode())
        self._stop(signal.SIGTERM)
        text = f"rank {self._environment.rank}: {gone}"
        self._client.send(signal=signal.SIGTERM.name, text=text, **{"is": "signal"})
        self._kill_at = now + SAVE_SECONDS

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.end()

    def _kill(self) -> None:
        self._rank.kill()
        self._report_end()

    def _give_up(self, reason: str, kind: str) -> None:
        """Something that the rank needs is gone: report it, if there is a coordinator, and end the rank."""
        self._client.send(kind=kind, step=self._rank.step, message=reason, **{"is": "failure"})
        self._output.log(f"[agent] {reason}; the rank is ended\n".encode())
        self._kill()

    def _report_end(self) -> None:
        """The rank has ended: end what it has left behind, and take the rest of its reports and output."""
        self._rank.end_descendants()
        self._listen_to_rank(all_of_it=True)
        if self._environment.rank != 0 and (text := self._output.kept_elsewhere(self._mark)):
            self._client.send(text=text, **{"is": "log"})
        how = {"code": self._rank.status, "by_agent": self._rank.is_killed, "tail": self._output.tail()}
        self._client.send(text=self._rank.end_in_words, **how, **{"is": "ended"})
        self._reported = time.monotonic()

    # End ------------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        if self._reported is None:
            return False
        if self._coordinator is not None:
            # Another process may have come as rank 0, so that this one was refused.
            is_over = self._released or bool(self._client.lost)
            return self._coordinator.outcome is not None and is_over
        if self._client.connection is None:  # it has never found a coordinator
            return time.monotonic() - self._reported > self._limits.silence
        return self._released or bool(self._client.lost)

    def _farewell(self) -> None:
        """The last things, when all ranks have ended: the outcome for the host's folder, the log's end."""
        folder = self._output.folder
        if folder is not None and self._environment.local_rank == 0:
            with contextlib.suppress(OSError):  # a full disk: the launch has it from the coordinator
                self._write_outcome(folder.parents[1])
        forget_key(self._spec.key_file)
        self._output.close()  # first: once the coordinator is left, this process may be killed
        self._client.close()
        if self._coordinator is not None:
            self._coordinator.linger()

    def _write_outcome(self, folder: Path) -> None:
        port, is_first = self._environment.master_port, self._environment.rank == 0
        if self._outcome is not None:
            outcome = replace(self._outcome, master_port=port)
            write_outcome(folder, outcome, is_final=True, ends_start=is_first)
        elif read_outcome(folder, port) is None:  # no coordinator has concluded how it ended
            outcome = Outcome("failed", self._rank.step, port, self._environment.rank, self._client.lost)
            write_outcome(folder, outcome, ends_start=is_first)

    def _exit_code(self) -> int:
        outcome = self._outcome
        if outcome is not None and outcome.status == "stopped":
            return EXIT_STOPPED  # before it had begun, too
        if outcome is not None and outcome.status == "finished" and self._rank.said_ending:
            return EXIT_FINISHED  # whatever it died of after its final report, which the coordinator prints
        if self._client.is_wrong_job or (outcome is not None and outcome.status == "wrong_job"):
            return EXIT_WRONG_JOB
        return self._rank.exit_code
