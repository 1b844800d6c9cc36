"""Who is none of a start's agents: another job's, another world's, a stranger. It learns and ends nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from pipeline.cluster.agent.connection import Connection
from tests.cluster.agent.agents import Start, start

__all__ = ["start"]


def test_another_jobs_agent_is_turned_away(start: Start) -> None:
    start.write_key("another")
    start.agent(0, "5", "0.01")
    start.until(lambda: start.agents[0].poll() is not None)
    assert start.agents[0].returncode == 1
    assert start.coordinator.table.states == {}
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
    start.agent(0, "5", "0.01", **change)
    outcome = start.outcome()
    assert (outcome.status, outcome.exit_code) == ("wrong_job", 2)
    assert said in outcome.message and sum(said in line for line in start.said) == 1
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
        {"port": "1"},
    ],
)
def test_a_stranger_learns_nothing_and_ends_nothing(start: Start, words: bytes | dict) -> None:
    if isinstance(words, dict):
        words = start.hello(**words) + b'{"is": "signal", "signal": "SIGTERM"}\n'
    with socket.create_connection(("127.0.0.1", start.coordinator.port)) as stranger:
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
    assert (start.coordinator.table.states, start.coordinator.table.failures, start.coordinator.outcome) == (
        {},
        [],
        None,
    )


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


def test_what_was_sent_before_the_other_end_left_is_received() -> None:
    """Also where this end has noticed first that it cannot send."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    theirs.sendall(b'{"is": "failure"}\n')
    theirs.close()
    connection.send(do="beat")
    assert connection.receive() == [{"is": "failure"}] and connection.closed
    connection.close()


@pytest.mark.slow
def test_an_agent_whose_place_is_taken_ends() -> None:
    """Without a launch, a process of another host may come as rank 0 before rank 0's own agent does."""
    program = """if True:
        import json, socket, sys
        from pipeline.cluster.agent.agent import Agent
        from pipeline.cluster.agent.handshake import introduce
        from pipeline.cluster.agent.launch_spec import LaunchSpec, direct_key
        from pipeline.cluster.rank_environment import RankEnvironment, free_port

        place = RankEnvironment(0, 1, 0, 1, "127.0.0.1", free_port())
        rank = [sys.executable, "-c", "import time; time.sleep(60)"]
        agent = Agent(LaunchSpec(failure_timeout=6.0), "", place, rank, [])
        hello = {"rank": 0, "host_number": 0, "host": "x", "world_size": 1} | introduce(direct_key(place))
        other = socket.create_connection(("127.0.0.1", agent._coordinator.port))
        other.sendall(json.dumps(hello).encode() + b"\\n")
        while not agent._coordinator.world_is_here:
            agent._coordinator.poll(0.1)
        sys.exit(agent.run())
    """
    done = subprocess.run([sys.executable, "-c", program], timeout=40, check=False)
    assert done.returncode == 1


def test_without_a_launch_hosts_of_two_worlds_are_a_wrong_job(start: Start) -> None:
    """As when each host is started by hand (--no_ssh), and one was given another hostfile."""
    start.coordinator.close()
    direct = {"address": "", "port": 0, "key_file": "", "hosts": ()}
    for rank, size in ((0, 2), (1, 3)):
        here = {"WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "MASTER_ADDR": socket.gethostname()}
        start.agent(rank, "2000", "0.05", elsewhere=here, **direct)
    assert [agent.wait(90) for agent in start.agents] == [2, 2]
    said = (
        f"error: {socket.gethostname()} was started for 3 ranks, and rank 0 for 2; give every host the same"
    )
    for rank in range(2):
        assert (start.folder / f"console{rank}").read_text().count(said) == 1
