"""Connections without the key, to the coordinator and to an agent: real sockets, on this host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.cluster.agent import coordinator as coordinator_module
from pipeline.cluster.agent import handshake
from pipeline.cluster.agent.connection import (
    ORDERS,
    comes_from_another_user,
    is_inside,
    is_order,
    is_report,
    leads_to_another_user,
)
from pipeline.cluster.agent.coordinator import Coordinator
from pipeline.cluster.agent.coordinator_client import CoordinatorClient
from pipeline.cluster.agent.handshake import (
    forget_key,
    introduce,
    is_proven,
    key_in_memory,
    new_key,
    proof,
    read_key,
)
from pipeline.cluster.agent.launch_spec import CoordinatorSettings, LaunchSpec, Limits
from pipeline.cluster.rank_environment import RankEnvironment

KEY = "the key"
TIMEOUT = 6.0
PLACE = RankEnvironment(1, 2, 1, 2, "127.0.0.1", 29500)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator(CoordinatorSettings(2, KEY, TIMEOUT, None))
    yield made
    made.close()


def hello(**changes: object) -> bytes:
    values = {"rank": 1, "host_number": 0, "host": "h", "world_size": 2} | introduce(KEY) | changes
    return json.dumps(values).encode() + b"\n"


def until(coordinator: Coordinator, condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        coordinator.poll(0.02)


def connect(coordinator: Coordinator) -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", coordinator.port), timeout=5)
    stream.settimeout(0.0)
    return stream


def is_let_go(stream: socket.socket) -> bool:
    try:
        return stream.recv(2**16) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_crowd_that_says_nothing_keeps_no_rank_out(coordinator: Coordinator) -> None:
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(contextlib.closing(connect(coordinator)))
            for _ in range(3 * handshake.MORE_UNVERIFIED)
        ]
        until(coordinator, lambda: len(coordinator._listener._unverified) == handshake.MORE_UNVERIFIED + 2)
        agent = stack.enter_context(contextlib.closing(connect(coordinator)))
        agent.sendall(hello())
        until(coordinator, lambda: 1 in coordinator.table.states)
        assert sum(is_let_go(each) for each in crowd) >= 2 * handshake.MORE_UNVERIFIED - 2
        assert coordinator.table.failures == [] and not is_let_go(agent)


def test_a_client_that_is_stuck_is_parted_with(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.3)
    with contextlib.closing(connect(coordinator)) as stuck:
        stuck.sendall(hello()[:20])
        until(coordinator, lambda: len(coordinator._listener._unverified) == 1)
        until(coordinator, lambda: is_let_go(stuck))
    assert len(coordinator._listener._unverified) == 0 and coordinator.table.states == {}


def test_a_first_message_without_an_end_is_not_kept(coordinator: Coordinator) -> None:
    with contextlib.closing(connect(coordinator)) as stranger:
        stranger.setblocking(True)

        def speak() -> None:
            with contextlib.suppress(OSError):
                while True:
                    stranger.sendall(b"x" * 2**16)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        until(coordinator, lambda: not thread.is_alive(), 10)
    assert len(coordinator._listener._unverified) == 0


def test_what_was_said_once_proves_nothing_again(coordinator: Coordinator) -> None:
    words = hello()
    with contextlib.closing(connect(coordinator)) as agent, contextlib.closing(connect(coordinator)) as echo:
        agent.sendall(words)
        until(coordinator, lambda: 1 in coordinator.table.states)
        echo.sendall(words)
        until(coordinator, lambda: is_let_go(echo))
        assert coordinator.table.failures == [] and not is_let_go(agent)


def test_another_world_is_a_wrong_job_on_both_sides(coordinator: Coordinator) -> None:
    """Hosts that are started one by one may have been given different hostfiles."""
    with contextlib.closing(connect(coordinator)) as agent:
        agent.sendall(hello(world_size=3, host="h2"))
        until(coordinator, lambda: coordinator.outcome is not None)
        agent.setblocking(True)
        answers = [json.loads(line) for line in agent.recv(2**16).splitlines()]
    assert coordinator.outcome.exit_code == 2
    assert "h2 was started for 3 ranks, and rank 0 for 2" in coordinator.outcome.message
    assert [answer["do"] for answer in answers] == ["accept", "refuse"] and answers[1]["wrong_job"]


@pytest.mark.parametrize(
    "report",
    [
        {"is": "progress"},
        {"is": "progress", "phase": "dancing", "step": 1},
        {"is": "progress", "phase": "training", "step": "1"},
        {"is": "failure", "kind": "lost", "step": 1, "message": "m", "text": 7},
        {"is": "signal", "signal": "SIGKILL"},
        {"is": "ended", "code": "0", "by_agent": False, "tail": ""},
        {"is": "unheard of"},
        {},
    ],
)
def test_a_report_that_makes_no_sense_ends_its_sender_only(coordinator: Coordinator, report: dict) -> None:
    assert not is_report(report)
    with contextlib.closing(connect(coordinator)) as agent:
        agent.sendall(hello() + json.dumps(report).encode() + b"\n")
        until(coordinator, lambda: bool(coordinator.table.failures))
    assert "connection to its agent on h is lost" in coordinator.table.failures[0].message


def test_only_rank_0_says_where_the_logs_are(coordinator: Coordinator, tmp_path: Path) -> None:
    with contextlib.closing(connect(coordinator)) as agent:
        agent.sendall(hello() + json.dumps({"is": "folder", "path": str(tmp_path)}).encode() + b"\n")
        agent.sendall(b'{"is": "saved", "step": 7}\n{"is": "progress", "phase": "training", "step": 3}\n')
        until(coordinator, lambda: coordinator.table.step == 3)
        assert coordinator._logs is None and coordinator.table.saved is None


def test_logs_of_very_many_ranks_do_not_cut_rank_0_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "MAX_UNSENT", 4 * 2**20)
    coordinator = Coordinator(CoordinatorSettings(2, KEY, TIMEOUT, None))
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(coordinator))
        first = stack.enter_context(contextlib.closing(connect(coordinator)))  # reads nothing
        other = stack.enter_context(contextlib.closing(connect(coordinator)))
        for stream, rank in ((first, 0), (other, 1)):
            stream.sendall(hello(rank=rank, port=1))
            until(coordinator, lambda rank=rank: rank in coordinator.table.states)
        other.setblocking(True)
        log = json.dumps({"is": "log", "text": "x" * 2**20}).encode() + b"\n"
        thread = threading.Thread(target=lambda: other.sendall(20 * log), daemon=True)
        thread.start()
        until(coordinator, lambda: not thread.is_alive(), 20)
        assert coordinator.table.failures == []
        assert coordinator._agents[0].unsent < 4 * 2**20


@pytest.mark.parametrize(
    "answer",
    [
        b'{"do": "accept", "proof": "' + b"0" * 64 + b'"}\n',
        b'{"do": "start", "address": "h", "port": 1, "environment": {"LD_PRELOAD": "x"}, '
        b'"arguments": [], "logs": null, "mark": ""}\n',
        b"SSH-2.0-OpenSSH\n",
    ],
)
def test_a_false_coordinator_is_not_obeyed(answer: bytes) -> None:
    """As when the launch has died, and another user of its host listens at its port."""
    with socket.create_server(("127.0.0.1", 0)) as false:
        spec = LaunchSpec(hosts=(("h", 2),), address="127.0.0.1", port=false.getsockname()[1])
        client = CoordinatorClient(spec, KEY, PLACE, {"rank": 1}, Limits.of(TIMEOUT))
        stream, _ = false.accept()
        with stream:
            assert KEY.encode() not in stream.recv(2**16)
            stream.sendall(answer)
            deadline = time.monotonic() + 5
            while not client.lost and time.monotonic() < deadline:
                assert client.receive() == []
        assert "is not this job's launch" in client.lost
        client.close()


def test_what_waits_for_a_coordinator_does_not_grow() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        spec = LaunchSpec(hosts=(("h", 2),), address="127.0.0.1", port=silent.getsockname()[1])
        client = CoordinatorClient(spec, KEY, PLACE, {"rank": 1}, Limits.of(TIMEOUT))
        client.send(step=1, **{"is": "saved"})
        for step in range(100):
            client.send(phase="training", step=step, **{"is": "progress"})
        kept = [(each["is"], each["step"]) for each in client._unsent]
        assert kept == [("saved", 1), ("progress", 99)]
        client.close()


def test_proofs() -> None:
    """The digest is that of RFC 2104 with SHA-256, computed with OpenSSL."""
    key, words = "key", "agent nonce"
    made = subprocess.run(
        ["openssl", "dgst", "-sha256", "-hmac", key], input=words, capture_output=True, text=True, check=True
    )
    expected = made.stdout.split()[-1]
    assert proof(key, "agent", "nonce") == expected
    assert is_proven({"proof": expected}, key, "agent", "nonce")
    assert not is_proven({"proof": expected}, key, "coordinator", "nonce")
    assert not is_proven({"proof": expected}, "yek", "agent", "nonce")
    assert not is_proven({"proof": expected + "é"}, key, "agent", "nonce")
    assert len({new_key() for _ in range(100)}) == 100


def test_a_key_is_read_from_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o640)
    with pytest.raises(PermissionError, match="not this user's alone"):
        read_key(str(path))
    path.chmod(0o600)
    assert read_key(str(path)) == KEY
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(PermissionError):
            read_key(str(path))
    forget_key(str(path))
    forget_key(str(path))
    assert not path.exists()


def test_a_key_in_memory_is_there_for_this_users_processes(tmp_path: Path) -> None:
    read = "import sys; from pipeline.cluster.agent.handshake import read_key; print(read_key(sys.argv[1]))"
    with key_in_memory(KEY) as path:
        forget_key(path)
        done = subprocess.run([sys.executable, "-c", read, path], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == KEY
    assert not Path(path).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_key_in_memory_is_not_there_for_others() -> None:
    with key_in_memory(KEY) as path:
        done = subprocess.run(["cat", path], user=65534, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "Permission denied" in done.stderr and KEY not in done.stdout


def test_the_other_end_of_a_connection_inside_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as mine:
            theirs, _ = server.accept()
            with theirs:
                assert is_inside(mine) and is_inside(theirs)
                for own, answer in ((os.geteuid(), False), (os.geteuid() + 1, True)):
                    assert comes_from_another_user(theirs, own) is answer
                    assert leads_to_another_user(mine, own) is answer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_without_a_key_another_user_of_the_machine_is_turned_away(address: str) -> None:
    coordinator = Coordinator(CoordinatorSettings(2, KEY, TIMEOUT, None, key_is_public=True), everywhere=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(coordinator))
        os.seteuid(65534)  # a socket belongs to who makes it
        try:
            stranger = stack.enter_context(socket.create_connection((address, coordinator.port)))
        finally:
            os.seteuid(0)
        stranger.settimeout(0.0)
        with contextlib.suppress(OSError):
            stranger.sendall(hello())
        until(coordinator, lambda: is_let_go(stranger))
        assert coordinator.table.states == {}
        agent = stack.enter_context(socket.create_connection((address, coordinator.port)))
        agent.sendall(hello())
        until(coordinator, lambda: 1 in coordinator.table.states)


def test_orders_and_reports_that_are_in_use_make_sense() -> None:
    """The tables know every kind that the code sends."""
    source = Path(handshake.__file__).parent
    coordinator_says = (source / "coordinator.py").read_text() + (source / "handshake.py").read_text()
    kinds = set(re.findall(r'do="(\w+)"', coordinator_says))
    assert "release" in kinds and kinds <= set(ORDERS)
    assert is_order({"do": "beat"}) and not is_order({"do": "dance"})
