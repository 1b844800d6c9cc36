"""Where the agents of all ranks meet: it starts the ranks together, hears how they are, ends them together.

The coordinator never waits for an agent, and an agent never for the coordinator: each holds the other for
gone when nothing has come from it for half the failure time-out. What is lost, dies, hangs or refuses is the
end of every rank.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import time
from typing import Any

from pipeline.base.problems import EXIT_WRONG_JOB
from pipeline.base.words import ranges
from pipeline.cluster.agent.connection import MAX_UNSENT, Connection, Message, is_report
from pipeline.cluster.agent.handshake import HandshakeListener
from pipeline.cluster.agent.host_inquiry import Asked, Verdict, differences, elsewhere
from pipeline.cluster.agent.launch_spec import CoordinatorSettings, Limits
from pipeline.cluster.agent.progress import HangDetector, StartPhases
from pipeline.cluster.agent.rank_output import log_name
from pipeline.cluster.agent.rank_table import RankState, RankTable, describe_exit
from pipeline.cluster.outcome import Failure, Kind, Outcome

logger = logging.getLogger(__name__)

# In the output folder: a folder for each start, in it a file for each rank.
LOGS_FOLDER = "logs"
# After a first report, others may come in that were first.
SETTLE_SECONDS = 1.0
# Of what a rank has written at its end, on the console: where a log has all of it, and where none has.
_LAST_LINES, _LAST_LINES_WITHOUT_LOG = 3, 8
_SAME_WORLD = "give every host the same hostfile and the same options for it"


class Coordinator:
    """See the module's text. Call `poll` again and again until `outcome` is there.

    Args:
        port: Where to listen; 0: a free one.
        everywhere: On all addresses of this machine, not on the loopback one.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, settings: CoordinatorSettings, port: int = 0, everywhere: bool = False) -> None:
        self._settings = settings
        self._limits = Limits.of(settings.failure_timeout)
        self.table = RankTable()
        self.outcome: Outcome | None = None
        self.master: tuple[str, int] | None = None
        self._selector = selectors.DefaultSelector()
        key, size, is_public = settings.key, settings.world_size, settings.key_is_public
        self._listener = HandshakeListener(key, is_public, size, self._selector, port, everywhere)
        self.port: int = self._listener.port
        self._agents: dict[int, Connection] = {}  # those that have gone included
        self._ranks: dict[Connection, int] = {}
        self._hang = HangDetector(settings.step_timeout)
        self._phases = StartPhases()
        self._asked: Asked | None = None
        # Without an inquiry there is nothing to wait for.
        self._verdict = None if settings.inquiry else Verdict()
        self._logs: str | None = None
        self._mark = secrets.token_hex(8)
        self.everywhere = everywhere
        self._start_name = time.strftime("%Y%m%d-%H%M%S")
        self._began = self._beat = time.monotonic()
        self._first_hello: float | None = None
        self._stop: str | None = None
        self._settle: float | None = None  # when the first failure is reported
        self._deadline: float | None = None  # when ranks that were to end are given up
        self._troubles: set[str] = set()
        self._homeless: set[int] = set()  # ranks whose logs came when there was no first host any more

    @property
    def key(self) -> str:
        """What an agent must have to be heard."""
        return self._settings.key

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._selector.fileno()  # type: ignore[attr-defined]

    @property
    def world_is_here(self) -> bool:
        """Whether every rank has reported."""
        return len(self.table.states) == self._settings.world_size

    @property
    def is_alone(self) -> bool:
        """Whether no agent is connected."""
        return not self._ranks

    def poll(self, seconds: float = 0.0) -> None:
        """Take what arrives within `seconds`, and do what is due."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener.socket:
                self._listener.accept()
            else:
                self._hear(key.data)
        self._tick(time.monotonic())

    # What others ask for --------------------------------------------------------------------------------

    def stop(self, signal_name: str) -> bool:
        """Ask every rank to save and end; False where no rank is there to be asked."""
        self._stop = signal_name
        self._broadcast(do="stop", signal=signal_name)
        return bool(self.table.running)

    def end(self, kind: Kind, message: str, rank: int | None = None, at_once: bool = False) -> None:
        """End every rank: something is wrong. `at_once`: without a time to end by itself."""
        self._fail(Failure(kind, rank, self.table.step, message, at=time.monotonic()))
        if at_once and self.outcome is None:
            self._tell_failure()
            self._broadcast(do="end", grace=0.0)
            self._deadline = time.monotonic() + self._limits.beat + 1.0

    def linger(self, seconds: float = 2.0) -> None:
        """Serve until the agents have left, which they do when they have heard the outcome, and close."""
        deadline = time.monotonic() + seconds
        while self._ranks and time.monotonic() < deadline:
            self.poll(0.05)
        self.close()

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._ranks):
            connection.flush()
            self._drop(connection)
        self._listener.close()
        self._selector.close()

    # Traffic --------------------------------------------------------------------------------------------

    def _hear(self, connection: Connection) -> None:
        for message in connection.receive():
            if connection in self._listener:
                self._meet(connection, message)
            elif connection in self._ranks:
                if not is_report(message):
                    connection.closed = True
                    return
                self._take(self.table.states[self._ranks[connection]], message)

    def _let_go(self) -> None:
        """Close connections whose other end is gone. An agent that has reported its rank's end may go, others
        may not."""
        for connection in [each for each in self._ranks if each.closed]:
            state = self.table.states[self._ranks[connection]]
            self._drop(connection)
            if not state.gone:
                self._lose(state, f"the connection to its agent on {state.name} is lost (host or agent gone)")

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._ranks[connection]

    def _meet(self, connection: Connection, hello: Message) -> None:
        """An agent's first message. Who does not hold the key is no agent of this job."""
        if not self._listener.is_agent(connection, hello):
            self._listener.refuse(connection, "this is another job's launch")
            return
        name, size = str(hello.get("host"))[:256], self._settings.world_size
        if "wrong_world" in hello:  # it says that it cannot be one of them
            self._listener.drop(connection)
            self._refuse_job(str(hello["wrong_world"]))
            return
        if hello.get("world_size") != size:
            text = f"error: {name} was started for {hello.get('world_size')} ranks, and rank 0 for {size}"
            self._listener.refuse(connection, f"{text}; {_SAME_WORLD}", is_wrong_job=True)
            self._refuse_job(f"{text}; {_SAME_WORLD}")
            return
        rank, number, port = hello.get("rank"), hello.get("host_number"), hello.get("port", 0)
        if any(type(each) is not int for each in (rank, number, port)) or rank not in range(size):
            self._listener.refuse(connection, f"rank {rank} is none of this job's {size}")
            return
        if rank in self._agents:
            self._listener.refuse(connection, f"rank {rank} is here already")
            self.end("error", f"two processes, one on {name}, claim to be rank {rank}", rank)
            return
        self._listener.admit(connection)
        self._agents[rank] = connection
        self._ranks[connection] = rank
        facts = hello.get("facts")
        state = RankState(rank, number, name, time.monotonic(), facts if isinstance(facts, dict) else {})
        self._join(connection, state, hello)

    def _join(self, connection: Connection, state: RankState, hello: Message) -> None:
        """An agent of this job: when rank 0's is there, ranks are started."""
        rank = state.rank
        self.table.states[rank] = state
        self._first_hello = self._first_hello or time.monotonic()
        if self.table.failures or self.outcome:
            connection.send(do="end", grace=0.0)
        if rank == 0:
            # On the host that rank 0 is on, whatever the launcher made of it.
            address = self._settings.master_addr or str(hello.get("address") or connection.peer)
            self.master = address, self._settings.master_port or hello.get("port", 0)
            if self._settings.start_seconds is not None:
                logger.info(f"Rank 0 is on {state.name}; rendezvous at {self.master[0]}:{self.master[1]}.")
        if self.master is not None and self._verdict is not None:
            for each in list(self._agents.values()) if rank == 0 else [connection]:
                self._welcome(each)
        if self.world_is_here:
            self._broadcast(do="together")
            self._compare_hosts()

    def _compare_hosts(self) -> None:
        """All are here: what their hosts have is asked, or has been told."""
        first = self.table.first_of_hosts
        told = {f"{state.name} (rank {state.rank})": state.facts for state in first if state.facts}
        if problems := differences(told) if len(told) > 1 else []:
            self._refuse_job("\n".join(map(str, problems)))
        elif self._settings.inquiry is not None and self.master is not None and not self.table.failures:
            self._asked = Asked(self._settings.inquiry, self.master[0])
            for state, line in zip(first, self._asked.inquiry.questions, strict=True):
                self._agents[state.rank].send(do="ask", line=line)

    def _hear_hosts(self, now: float) -> None:
        """Put the second question when the first has been answered, then start the ranks, or none of them."""
        following = self._asked.next(now) if self._asked is not None and not self.table.failures else None
        if isinstance(following, str):
            for state in self.table.first_of_hosts:
                self._agents[state.rank].send(do="ask", line=following)
        elif following is not None:
            self._asked = None
            if following.problems:
                self._refuse_job(following.problems)
                return
            self._verdict = following
            for connection in self._agents.values():
                self._welcome(connection)

    def _refuse_job(self, text: str) -> None:
        self._fail(Failure("refused", None, 0, text.partition("\n")[0], text, time.monotonic()))

    def _welcome(self, connection: Connection) -> None:
        assert self.master is not None and self._verdict is not None
        place = {"address": self.master[0], "port": self.master[1]}
        variables = dict((*self._settings.environment, *self._verdict.environment))
        arguments = list(self._settings.arguments)
        logs = {"logs": self._logs, "mark": self._mark}
        connection.send(do="start", environment=variables, arguments=arguments, **place, **logs)
        if self._stop:
            connection.send(do="stop", signal=self._stop)

    def _take(self, state: RankState, message: Message) -> None:
        """One report of a rank's agent."""
        what = message.get("is")
        if what == "progress":
            state.phase, state.step, state.moved = message["phase"], message["step"], time.monotonic()
            self._hang.progress(message["phase"], message["step"], state.moved)
        elif what == "saved" and state.rank == 0:
            self.table.saved = max(message["step"], self.table.saved or 0)
        elif what == "folder":
            self._take_folder(state, message["path"])
        elif what == "answer" and self._asked is not None:
            self._asked.take(state.host, message["line"])
        elif what == "ending":
            state.ending, state.step, state.message = message["status"], message["step"], message["message"]
            if message.get("early") and self._stop is None:
                self.stop("SIGTERM")  # the ranks have not met, and cannot agree on it
        elif what == "failure":
            kind, step, text = message["kind"], message["step"], message.get("text", "")
            self._fail(Failure(kind, state.rank, step, message["message"], text, time.monotonic()))
        elif what == "signal" and self._stop is None and state.ending is None:
            why = message.get("text") or message["signal"]
            logger.info(f"{why} on {state.name}: every rank saves and ends.")
            self.stop("SIGTERM")
        elif what == "log":
            self._gather(state.rank, message["text"])
        elif what == "trouble" and (text := f"{state.name}: {message['text']}") not in self._troubles:
            self._troubles.add(text)  # of all ranks there
            logger.info(text)
        elif what == "missing" and state.rank == 0:
            where = self.table.places(rank for rank in message["ranks"] if type(rank) is int)
            logger.info(f"No logs were received from {where}: what was written is in {self._logs} there.")
        elif what == "stacks":
            self._hang.stacks(state.rank, message["text"])
        elif what == "ended":
            self._rank_ended(state, message)

    def _take_folder(self, state: RankState, path: str) -> None:
        """Where a rank's job writes. Rank 0's is the one; without a launch that has seen to it, others may
        have been started elsewhere, and make of the same words another folder."""
        state.folder = path
        if state.rank == 0:
            self._logs = f"{path}/{LOGS_FOLDER}/{self._start_name}"
            self._broadcast(do="log", logs=self._logs, mark=self._mark)
        first = self.table.states.get(0)
        if first is None or not first.folder or not self._settings.key_is_public:
            return
        others = [each for each in self.table.first_of_hosts if each.folder not in ("", first.folder)]
        if problems := [elsewhere(each.name, each.folder, first.folder) for each in others]:
            self._refuse_job("\n".join(map(str, problems)))

    def _rank_ended(self, state: RankState, message: Message) -> None:
        state.code, state.gone = message["code"], True
        reported = any(failure.rank == state.rank for failure in self.table.failures)
        if message["by_agent"] or reported:
            return
        if state.ending is not None:
            if state.code is not None and state.code < 0:
                how = f"{describe_exit(state.code)} after the run had {state.ending}"
                logger.info(f"rank {state.rank} on {state.name}: {how}; nothing of it is lost")
            return
        # 2 is how an option parser ends, after its message.
        kind: Kind = "refused" if state.code == EXIT_WRONG_JOB else "died"
        what = message.get("text") or describe_exit(state.code)
        if self._stop:
            # A rank takes signals before it prepares its data.
            kind = "early" if state.phase == "starting" else "ended"
            what = f"{self._stop} before {'the first step' if kind == 'early' else 'it could save'}"
        self._fail(Failure(kind, state.rank, state.step, what, message["tail"], time.monotonic()))

    def _gather(self, rank: int, text: str) -> None:
        """A log goes to the first host, while that takes them: its agent has messages of its own to send."""
        first = self._agents.get(0)
        if first is None or 0 in self.table.lost:
            self._homeless.add(rank)
        elif first.unsent < MAX_UNSENT // 4:
            first.send(do="keep", rank=rank, text=text)

    def _lose(self, state: RankState, message: str) -> None:
        state.gone = True
        self._fail(Failure("lost", state.rank, state.step, message, at=time.monotonic()))

    def _broadcast(self, **message: Any) -> None:
        for connection in self._agents.values():
            connection.send(**message)

    # Time -----------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for connection in self._ranks:
            connection.flush()
        self._let_go()
        self._listener.sweep(now)
        if now - self._beat >= self._limits.beat:
            self._beat = now
            self._broadcast(do="beat")
        if self.outcome is not None:
            return
        self._check_silence(now)
        self._check_start(now)
        self._hear_hosts(now)
        if self.world_is_here:
            hang = self._hang.look(self.table, now, lambda: self._broadcast(do="stacks"))
            if hang is not None:
                self._fail(hang)
        if not self.table.failures and self.master is not None:
            self._phases.look(self.table.states.get(0), now)
        if self._settle is not None and now >= self._settle:
            self._settle = None
            self._tell_failure()
            self._broadcast(do="end", grace=self._limits.grace)
            # The agents kill after the grace, and report it; a little more for the way.
            self._deadline = now + self._limits.grace + 2 * self._limits.beat
        if self._is_over(now):
            self._conclude()

    def _check_silence(self, now: float) -> None:
        for state in self.table.running:
            silent = now - self._agents[state.rank].heard
            if silent > self._limits.silence:
                self._lose(state, f"nothing was heard from {state.name} for {silent:.0f} s")

    def _check_start(self, now: float) -> None:
        limit = self._settings.start_seconds
        if self.world_is_here or limit is None or self.table.failures:
            return
        since = self._began
        if self._first_hello is not None:
            since, limit = self._first_hello, self._settings.failure_timeout
        if now - since < limit:
            return
        missing = sorted(set(range(self._settings.world_size)) - set(self.table.states))
        after = "the start" if self._first_hello is None else "the first rank"
        message = f"ranks {ranges(missing)} have not reported {limit:.0f} s after {after}"
        self.end("died", message, missing[0])

    def _fail(self, failure: Failure) -> None:
        self.table.failures.append(failure)
        if self._settle is None and self._deadline is None and self.outcome is None:
            self._settle = time.monotonic() + SETTLE_SECONDS

    def _tell_failure(self) -> None:
        failure = self.table.cause
        if failure is None or failure.kind == "early":  # the launch reports that nothing had begun
            return
        if failure.kind == "refused":
            logger.info(failure.text.rstrip())
            return
        state = self.table.states.get(-1 if failure.rank is None else failure.rank)
        where = f"rank {state.rank} on {state.name}: " if state else ""
        logger.info("\n".join([where + failure.message, *self._last_words(failure)]))

    def _last_words(self, failure: Failure) -> list[str]:
        """Where the whole of it stands, and the end of it: longer where no log has it."""
        lines = [line for line in failure.text.splitlines() if line.strip()]
        is_logged = self._logs is not None and not self._troubles
        if is_logged:
            # An error's message is the traceback's last line; a rank that died may have said why.
            lines = lines[-_LAST_LINES:] if failure.kind == "died" and failure.rank != 0 else []
            name = log_name(failure.rank) if failure.rank is not None else ""
            lines.append(
                f"All of it is in {self._logs}/{name}" if failure.text else f"Logs: {self._logs}/{name}"
            )
            return lines
        return lines[-_LAST_LINES_WITHOUT_LOG:]

    def _is_over(self, now: float) -> bool:
        if self._deadline is not None and now > self._deadline:
            return True
        if self.table.running or not (self.table.states or self.table.failures):
            return False
        if self._settle is None and self._deadline is None and not self.world_is_here:
            # Some agents have never reported; they might be about to.
            self._deadline = now + self._limits.silence
            return False
        return self._settle is None

    def _conclude(self) -> None:
        port = self.master[1] if self.master else 0
        self.outcome = self.table.outcome(port)
        if lost := self.table.lost:
            logger.info(
                f"The connection to {self.table.places(lost)} was lost: what still runs there holds its "
                f"devices until it ends by itself, within {self._limits.silence:.0f} s, or later if the host "
                "hangs."
            )
        if self._homeless:
            where = self.table.places(sorted(self._homeless))
            logger.info(
                f"The first host, which gathers the logs, is gone: those of {where} stay in {self._logs}."
            )
        self._broadcast(do="release", outcome=self.outcome.written(), lost=self.table.lost)
