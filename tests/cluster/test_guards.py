"""Guards and hub, with stand-in ranks on this host: whoever goes first is named, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from pipeline.cluster.credential import introduce
from pipeline.cluster.hub import Hub
from pipeline.cluster.hub_settings import HubSettings
from pipeline.cluster.outlet import MAX_LINE, Outlet, PlainLines, Tail
from pipeline.cluster.rank_output import KEPT_STARTS, RankOutput, forget_old_starts
from pipeline.cluster.roster import Verdict
from pipeline.cluster.ticket import Ticket, encode
from pipeline.cluster.wire import Connection

STAND_IN = Path(__file__).with_name("stand_in.py")
# A parent of guards that is no launcher: it waits.
PARENT = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
TIMEOUT = 6.0
KEY = "a key that nobody guesses"


class Start:
    """A hub in this process, and guards beside it."""

    def __init__(self, folder: Path, step_timeout: float | None = None, world_size: int = 3) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.world_size = world_size
        self.key_file = folder / "key"
        self.write_key(KEY)
        settings = HubSettings(world_size, KEY, TIMEOUT, step_timeout)
        self.hub = Hub(settings, self.said.append)
        self.guards: list[subprocess.Popen] = []

    def guard(
        self,
        rank: int,
        *job: str,
        before: tuple[str, ...] = (),
        elsewhere: Mapping[str, object] = MappingProxyType({}),
        **changes: object,
    ) -> None:
        """Start the guard of `rank`. `elsewhere`: another place; `changes`: other values in its ticket."""
        values = {
            "arguments": (str(self.folder), *job),
            "hosts": (("here", self.world_size),),
            "address": "127.0.0.1",
            "port": self.hub.port,
            "key_file": str(self.key_file),
            "failure_timeout": TIMEOUT,
        }
        ticket = Ticket(**values | changes)  # type: ignore[arg-type]
        place = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank,
            "LOCAL_SIZE": self.world_size,
        }
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "CROSS_RANK": "0"}
        environment |= {name: str(value) for name, value in elsewhere.items()}
        command = [*before, sys.executable, str(STAND_IN), "--local_rank=0", encode(ticket)]
        with (self.folder / f"console{rank}").open("w") as out:
            self.guards.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))

    def write_key(self, key: str) -> None:
        self.key_file.touch(0o600)
        self.key_file.write_text(key)

    def hello(self, **changes: object) -> bytes:
        """What a guard says first. `changes`: other fields; None leaves one out."""
        values = {"rank": 0, "host_number": 0, "host": "x", "world_size": self.world_size, "port": 1}
        values |= introduce(KEY) | changes
        return (
            json.dumps({name: value for name, value in values.items() if value is not None}).encode() + b"\n"
        )

    def all(self, *job: str) -> None:
        for rank in range(self.world_size):
            self.guard(rank, *job)

    def ranks(self) -> list[dict]:
        """What each rank has written about itself; waits for all of them."""
        files = [self.folder / "ranks" / f"{rank}.json" for rank in range(self.world_size)]
        self.until(lambda: all(file.exists() for file in files))
        return [json.loads(file.read_text()) for file in files]

    def until(self, condition, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.said, self.hub.roster)
            self.hub.poll(0.05)

    def verdict(self, seconds: float = 20) -> Verdict:
        self.until(lambda: self.hub.verdict is not None, seconds)
        self.hub.linger(3)
        return self.hub.verdict

    def codes(self) -> list[int]:
        return [guard.wait(5) for guard in self.guards]

    def log(self, rank: int) -> str:
        (file,) = self.folder.glob(f"logs/*/rank_{rank:05}.log")
        return file.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made = Start(tmp_path)
    yield made
    made.hub.close()
    for guard in made.guards:
        guard.kill()
        guard.wait()


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_ranks_that_finish(start: Start) -> None:
    start.all("3", "0.01")
    verdict = start.verdict()
    assert (verdict.status, verdict.step) == ("finished", 3)
    assert start.codes() == [0, 0, 0]
    outcome = json.loads((start.folder / "outcome.json").read_text())
    assert outcome["status"] == "finished"
    for rank in range(3):
        assert f"rank {rank} of 3" in start.log(rank)
        assert f"rank {rank} writes on its standard error" in start.log(rank)
    # The console speaks once.
    consoles = [(start.folder / f"console{rank}").read_text() for rank in range(3)]
    assert "step 3\n" in consoles[0] and "standard error" in consoles[0]
    assert consoles[1:] == ["", ""]


def test_ranks_get_the_rendezvous_that_is_free_where_rank_0_is(start: Start) -> None:
    start.all("1", "0.01")
    places = [rank["environment"] for rank in start.ranks()]
    assert {place["MASTER_ADDR"] for place in places} == {"127.0.0.1"}
    (port,) = {int(place["MASTER_PORT"]) for place in places}
    assert (port, start.verdict().status) == (start.hub.master[1], "finished")
    assert port > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message", "text"),
    [
        ("exit=7", "left with exit code 7 before the job's end", "rank 1 writes on its standard error"),
        ("exit=0", "left with exit code 0 before the job's end", ""),
        ("signal=SIGKILL", "was killed by SIGKILL (out of memory?)", ""),
        ("signal=SIGSEGV", "was killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("raise", "OSError: no space left on rank 1", "in misbehave"),
    ],
)
def test_the_first_rank_that_fails_is_named(start: Start, fault: str, message: str, text: str) -> None:
    # The others report that they have lost a peer, rank 0 before rank 1 can say a word.
    # Slow steps: on a busy machine all ranks are there before one goes.
    start.all("100", "0.5", f"1:3:{fault}", "0:3:peer")
    pids = [rank["pid"] for rank in start.ranks()]
    began = time.monotonic()
    verdict = start.verdict()
    assert time.monotonic() - began < TIMEOUT + 2
    assert (verdict.status, verdict.rank, verdict.step, verdict.message) == ("failed", 1, 2, message)
    assert text in verdict.failure.text
    assert any("rank 1 on" in line and message in line for line in start.said)
    assert not any(code == 0 for code in start.codes())
    assert not any(is_running(pid) for pid in pids)
    assert json.loads((start.folder / "outcome.json").read_text())["rank"] == 1


@pytest.mark.slow
def test_a_refusal_is_no_failure_and_is_said_once(start: Start) -> None:
    start.all("100", "0.1", "1:1:refuse", "2:1:refuse")
    verdict = start.verdict()
    assert (verdict.status, verdict.outcome(1).exit_code) == ("wrong_job", 2)
    assert start.codes()[1:] == [2, 2]
    assert sum("lacks a file" in line for line in start.said) == 1


@pytest.mark.slow
def test_every_rank_stops_when_it_is_asked_to_and_leaves_with_its_code(start: Start) -> None:
    start.all("1000", "0.05")
    start.ranks()
    assert start.hub.stop("SIGUSR1")
    verdict = start.verdict()
    assert (verdict.status, verdict.message) == ("stopped", "SIGUSR1")
    assert start.codes() == [3, 3, 3]


def test_a_signal_to_a_guard_is_its_ranks(start: Start) -> None:
    """What a launcher or a batch system tells its child processes arrives in the rank."""
    start.all("1000", "0.05")
    start.ranks()
    for guard in start.guards:
        guard.send_signal(signal.SIGTERM)
    assert start.verdict().status == "stopped"
    assert start.codes() == [3, 3, 3]


@pytest.mark.slow
def test_a_hung_step_shows_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    start = Start(tmp_path, step_timeout=1.5)
    start.all("400", "0.2", "0:4:hang", "1:4:hang", "2:4:hang")
    pids = [rank["pid"] for rank in start.ranks()]
    verdict = start.verdict(30)
    assert "no progress for" in verdict.message and "after step 3" in verdict.message
    assert "ranks 0-2 in misbehave (stand_in.py:" in verdict.message
    assert "misbehave" in verdict.failure.text
    for rank in range(3):
        assert "misbehave" in start.log(rank)
    assert not any(is_running(pid) for pid in pids)
    assert not any(code == 0 for code in start.codes())


@pytest.mark.parametrize("victim", ["guard", "hub", "parent"])
def test_ranks_end_with_what_owns_them(start: Start, victim: str) -> None:
    start.guard(0, "1000", "0.05")
    start.guard(1, "1000", "0.05", before=(sys.executable, "-c", PARENT))
    start.guard(2, "1000", "0.05")
    ranks = start.ranks()
    if victim == "hub":
        start.hub.close()
    else:
        os.kill(ranks[1]["guard"] if victim == "guard" else start.guards[1].pid, signal.SIGKILL)
        verdict = start.verdict()
        expected = "contact with its guard" if victim == "guard" else "the launcher that started it is gone"
        assert (verdict.status, verdict.rank) == ("failed", 1) and expected in verdict.message
    assert not any(code == 0 for code in start.codes())
    deadline = time.monotonic() + TIMEOUT
    while any(is_running(pid) for rank in ranks for pid in (rank["pid"], rank["guard"])):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_guard_that_falls_silent_is_lost(start: Start) -> None:
    """As when a cable is cut: its connection stands, and nothing comes, its log neither."""
    start.all("1000", "0.05")
    ranks = start.ranks()
    start.until(lambda: list(start.folder.glob("logs/*/rank_00002.log")))
    os.kill(ranks[2]["guard"], signal.SIGSTOP)
    (log,) = start.folder.glob("logs/*/rank_00002.log")
    log.unlink()
    verdict = start.verdict()
    missing = (
        f"No logs have come of rank 2 ({socket.gethostname()}): what there is of them is in {log.parent}"
    )
    assert f"{missing} there." in start.said
    assert (verdict.status, verdict.rank) == ("failed", 2) and "nothing was heard" in verdict.message
    assert start.guards[0].wait(5) != 0 and start.guards[1].wait(5) != 0
    os.kill(ranks[2]["guard"], signal.SIGCONT)
    assert start.guards[2].wait(10) != 0
    assert not any(is_running(rank["pid"]) for rank in ranks)


def test_another_jobs_guard_is_turned_away(start: Start) -> None:
    start.write_key("another")
    start.guard(0, "5", "0.01")
    start.until(lambda: start.guards[0].poll() is not None)
    assert start.guards[0].returncode == 1
    assert start.hub.roster.states == {}
    assert not (start.folder / "ranks").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hosts": (("here", 4),)}, "the world that was checked has 4 ranks"),
        ({"hosts": (("here", 1), ("there", 2))}, "belongs to host here, which was checked with 1 ranks"),
    ],
)
def test_a_world_other_than_the_checked_one_is_refused(start: Start, change: dict, said: str) -> None:
    """The launch hears of it, too: launchers lose exit codes."""
    start.guard(0, "5", "0.01", **change)
    verdict = start.verdict()
    assert (verdict.status, verdict.outcome(1).exit_code) == ("wrong_job", 2)
    assert said in verdict.message and sum(said in line for line in start.said) == 1
    assert start.codes() == [2] and not (start.folder / "ranks").exists()


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\n",
        b"[" * 200_000 + b"\n",
        b"{}\n",
        b'{"nonce": "1", "proof": "2", "wrong_world": "end"}\n',
        b'{"nonce": 1, "proof": ["2"]}\n',
        {"proof": "0" * 64},
        {"nonce": "0" * 32},
        {"nonce": None},
        {"rank": 3},
        {"rank": -1},
        {"rank": True},
        {"host_number": None},
    ],
)
def test_a_stranger_learns_nothing_and_ends_nothing(start: Start, words: bytes | dict) -> None:
    if isinstance(words, dict):
        words = start.hello(**words) + b'{"is": "signal", "signal": "SIGTERM"}\n'
    with socket.create_connection(("127.0.0.1", start.hub.port)) as stranger:
        stranger.sendall(words)
        stranger.settimeout(0.0)
        answer = b""

        def is_let_go() -> bool:
            nonlocal answer
            try:
                piece = stranger.recv(4096)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            answer += piece
            return not piece

        start.until(is_let_go)
    assert not answer or json.loads(answer.splitlines()[-1])["do"] == "refuse"
    assert (start.hub.roster.states, start.hub.roster.failures, start.hub.verdict) == ({}, [], None)


def test_a_stranger_who_never_pauses_holds_nobody_up() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)

    def flood() -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs.sendall(b"x" * 2**20)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not connection.closed:
        assert connection.receive() == [] and time.monotonic() < deadline
    connection.close()
    theirs.close()
    thread.join(5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_before_ranks_have_begun_is_no_failure(start: Start, number: signal.Signals) -> None:
    """Two guards wait for the third; whatever the order, there is nothing to save."""
    start.guard(1, "1000", "0.05")
    start.guard(2, "1000", "0.05")
    start.until(lambda: len(start.hub.roster.states) == 2)
    assert start.hub.stop(number.name)
    start.guard(0, "1000", "0.05")
    verdict = start.verdict()
    assert (verdict.status, verdict.step, verdict.outcome(1).exit_code) == ("stopped", 0, 3)
    assert verdict.message == f"{number.name} before the first step"
    assert start.codes() == [3, 3, 3]
    assert start.said == [] or "Rank 0 is on" in start.said[0]


def test_without_a_launch_hosts_of_two_worlds_are_a_wrong_job(start: Start) -> None:
    """As when each host is started by hand (--no_ssh), and one was given another hostfile."""
    start.hub.close()
    direct = {"address": "", "port": 0, "key_file": "", "hosts": ()}
    for rank, size in ((0, 2), (1, 3)):
        here = {"WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "MASTER_ADDR": socket.gethostname()}
        start.guard(rank, "2000", "0.05", elsewhere=here, **direct)
    assert [guard.wait(90) for guard in start.guards] == [2, 2]
    said = (
        f"error: {socket.gethostname()} was started for 3 ranks, and rank 0 for 2; give every host the same"
    )
    for rank in range(2):
        assert (start.folder / f"console{rank}").read_text().count(said) == 1


@pytest.mark.slow
def test_without_a_launch_rank_0_has_the_hub(start: Start) -> None:
    start.hub.close()
    for rank in range(3):
        start.guard(rank, "1000", "0.05", "2:9:signal=SIGKILL", address="", port=0, key_file="", hosts=())
    assert not any(guard.wait(30) == 0 for guard in start.guards)
    assert "rank 2 on" in (start.folder / "console0").read_text()
    assert json.loads((start.folder / "outcome.json").read_text())["rank"] == 2


def test_nothing_is_kept_twice_where_hosts_share_a_folder(tmp_path: Path) -> None:
    output = RankOutput(1)
    output.log(b"a line\n")
    assert output.kept_elsewhere("mark") == ""  # no folder yet
    output.log_to(tmp_path / "logs")
    assert output.kept_elsewhere("mark") == "a line\n"
    first = RankOutput(0)
    first.log_to(tmp_path / "logs")
    first.write_mark("mark")
    assert output.kept_elsewhere("mark") == ""
    assert output.kept_elsewhere("another start's") == "a line\n"
    first.add_log_of(2, "from afar\n")
    output.close()
    first.close()
    assert (tmp_path / "logs" / "rank_00002.log").read_text() == "from afar\n"


def test_logs_stay_where_they_are_when_the_first_host_is_gone(tmp_path: Path) -> None:
    start = Start(tmp_path, world_size=2)

    def guard(rank: int) -> socket.socket:
        stream = socket.create_connection(("127.0.0.1", start.hub.port))
        stream.sendall(start.hello(rank=rank, host_number=rank, host=f"h{rank + 1}"))
        return stream

    def say(stream: socket.socket, what: str, **fields: object) -> None:
        stream.sendall(json.dumps({"is": what, **fields}).encode() + b"\n")

    with guard(0) as first, guard(1) as second, contextlib.closing(start.hub):
        start.until(lambda: start.hub.world_is_here)
        say(first, "folder", path="/run")
        for _ in range(2):
            say(second, "trouble", text="logs cannot be written")
        start.until(lambda: "h2: logs cannot be written" in start.said)
        first.close()
        start.until(lambda: start.hub.roster.failures)
        say(second, "log", text="its last words")
        say(second, "ended", code=1, by_guard=True, tail="")
        start.until(lambda: start.hub.verdict is not None)
    assert start.said.count("h2: logs cannot be written") == 1
    assert (
        "The first host, which gathers the logs, is gone: those of rank 1 (h2) stay in /run/logs/"
        in start.said[-1]
    )


def test_a_log_that_cannot_be_written_is_said_once_and_goes_on_when_it_can(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    output, deadline, said = RankOutput(1), time.monotonic() + 10, ""
    output.log(b"lost\n")
    output.log_to(tmp_path / "logs" / "start")
    while not said and time.monotonic() < deadline:
        said = output.new_trouble()
    assert said.startswith(f"logs cannot be written in {tmp_path}/logs/start: ")
    assert output.new_trouble() == ""
    (tmp_path / "logs").unlink()
    output.log(b"later\n")
    output.close()
    log = (tmp_path / "logs" / "start" / "rank_00001.log").read_text()
    assert log == "[5 bytes could not be written]\nlater\n"
    first = RankOutput(0)
    first.log_to(tmp_path / "logs" / "start")
    (tmp_path / "logs" / "start" / "rank_00007.log").mkdir()
    first.add_log_of(7, "from afar\n")
    assert "Is a directory" in first.new_trouble()


def test_logs_have_lines_without_the_drawing_of_a_terminal() -> None:
    lines = PlainLines()
    drawn = b"\x1b[?25lbar 1\r\x1b[2Kstep 1 \x1b[1mbold\x1b[0m\nbar 2\r\x1b[2Kstep"
    assert lines.feed(drawn) == b"step 1 bold\n"
    assert lines.feed(b" 2\r\n") == b"step 2\n"
    lines.feed(b"\x1b[2K\rlast")
    assert lines.rest() == b"last\n"


def test_a_line_that_never_ends_does_not_grow() -> None:
    """A progress bar without line ends, and bytes without any sense."""
    bar = PlainLines()
    for step in range(10_000):
        assert bar.feed(f"\r{step:,} of many {'#' * 50}".encode()) == b""
    assert len(bar._line) < MAX_LINE + 100
    assert bar.feed(b"\r\x1b[2Kdone\n") == b"done\n"
    noise = PlainLines()
    fed = b"".join(noise.feed(b"x" * 1000) for _ in range(200))
    assert len(noise._line) < MAX_LINE + 1000
    assert (fed + noise.rest()).replace(b"\n", b"") == b"x" * 200_000


def test_the_last_bytes_of_a_stream() -> None:
    tail = Tail(8)
    for piece in (b"abc\n", b"defgh\n", b"ij\n"):
        tail.feed(piece)
    assert tail.text == "efgh\nij\n"
    assert tail.lines(1) == "ij"


def test_an_outlet_that_nobody_reads_holds_nobody_up(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    began = time.monotonic()
    for _ in range(100):
        outlet.write(b"x" * 10**5)
    outlet.close(0.1)
    assert time.monotonic() - began < 2
    os.close(reader)


def test_only_the_last_starts_are_kept(tmp_path: Path) -> None:
    for number in range(KEPT_STARTS + 3):
        (tmp_path / f"20261130-0000{number:02}").mkdir()
    forget_old_starts(tmp_path)
    assert sorted(path.name[-2:] for path in tmp_path.iterdir())[0] == "03"
    assert len(list(tmp_path.iterdir())) == KEPT_STARTS
