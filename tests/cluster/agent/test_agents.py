"""Agents and coordinator, with stand-in ranks on this host: the first failure is named, nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cluster.memory import memory_group
from pipeline.cluster.rank_environment import free_port
from tests.cluster.agent.agents import TIMEOUT, Start, start
from tests.covering import first_fast
from tests.processes import is_running

__all__ = ["start"]

# Of a failure on the console, with what the launch says below.
MOST_LINES = 8
LIMIT = 256 * 2**20
# A parent of agents that is no launcher: it waits.
PARENT = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"


def test_ranks_that_finish(start: Start) -> None:
    stop = ("--stop_file", str(start.folder / "STOP"))
    start.all("3", "0.01", *stop)
    first, *others = [rank["arguments"] for rank in start.ranks()]
    assert first == [*others[0], "--stop_stamp", first[-1]] and others[0] == others[1]
    assert first[-1].endswith(f":none:{stop[1]}")
    outcome = start.outcome()
    assert (outcome.status, outcome.step) == ("finished", 3)
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


def test_the_jobs_arguments_come_from_the_coordinator_however_long_they_are(tmp_path: Path) -> None:
    """They are more than the 128 KiB of one argument, which pdsh makes of a whole command line."""
    odd = ("", "a b", "'", '"', "$HOME", "`id`", "%n", "\n", "ü", "\udcff")
    many = (f"{number:060d}" for number in range(3000))
    job = (str(tmp_path), "1", "0", *odd, *many, "--output_dir", str(tmp_path))
    start = Start(tmp_path, world_size=1, arguments=job)
    try:
        start.agent(0)
        (rank,) = start.ranks()
        *given, option, stamp = rank["arguments"]
        assert given == ["--local_rank=0", *job]
        # The launch may be on another system than rank 0, whose agent has looked for the file that stops it.
        assert option == "--stop_stamp" and stamp.endswith(f":none:{tmp_path}/STOP")
        assert start.outcome().status == "finished"
    finally:
        start.coordinator.close()
    assert start.codes() == [0]


def test_ranks_get_the_rendezvous_that_is_free_where_rank_0_is(start: Start) -> None:
    start.all("1", "0.01")
    places = [rank["environment"] for rank in start.ranks()]
    assert {place["MASTER_ADDR"] for place in places} == {"127.0.0.1"}
    (port,) = {int(place["MASTER_PORT"]) for place in places}
    assert (port, start.outcome().status) == (start.coordinator.master[1], "finished")
    assert port > 1


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message", "text"),
    [
        ("exit=7", "left with exit code 7 before the job's end", "rank 1 writes on its standard error"),
        ("exit=0", "left with exit code 0 before the job's end", ""),
        ("signal=SIGKILL", r"was killed by SIGKILL \(out of memory\?\)", ""),
        (
            "signal=SIGSEGV",
            r"was killed by SIGSEGV in misbehave \(.*\)",
            "Fatal Python error: Segmentation fault",
        ),
        ("raise", "OSError: no space left on rank 1", "in misbehave"),
        ("rant=7", "left with exit code 7 before the job's end", "line 99 of its last words"),
    ],
)
def test_the_first_rank_that_fails_is_named_in_few_lines_and_its_log_has_all(
    start: Start, fault: str, message: str, text: str
) -> None:
    # The others report that they have lost a peer, rank 0 before rank 1 can say a word.
    # Slow steps: on a busy machine all ranks are there before one goes.
    history = start.folder / "history.jsonl"
    history.write_text('{"event": "start", "start": "s", "time": 0.5, "step": 0}\n')
    start.all("100", "0.5", f"1:3:{fault}", "0:3:peer")
    pids = [rank["pid"] for rank in start.ranks()]
    began = time.monotonic()
    outcome = start.outcome()
    assert time.monotonic() - began < TIMEOUT + 2
    assert (outcome.status, outcome.rank, outcome.step) == ("failed", 1, 2)
    first, *more = "\n".join(start.said[1:]).splitlines()  # [0]: where rank 0 is
    assert re.fullmatch(rf"rank 1 on \S+: {message}", first) and first.endswith(outcome.message)
    assert len(more) < MOST_LINES and more[-1].endswith("/rank_00001.log")
    assert "Traceback" not in start.console(0)
    assert text in start.log(1)
    assert not any(code == 0 for code in start.codes())
    assert not any(is_running(pid) for pid in pids)
    assert json.loads((start.folder / "outcome.json").read_text())["rank"] == 1
    _, end = map(json.loads, history.read_text().splitlines())  # one, of however many agents
    assert (end["start"], end["status"], end["reason"], end["exit_code"]) == (
        "s",
        "failed",
        outcome.message,
        1,
    )


@pytest.mark.alone
def test_what_rank_0_writes_after_its_failure_is_in_its_log_only(start: Start) -> None:
    start.all("100", "0.2", "0:2:rant=raise")
    assert start.outcome().message == "OSError: no space left on rank 0"
    assert start.codes() == [1, 1, 1]
    assert "after its failure" in start.log(0)
    assert "after its failure" not in start.console(0)
    assert start.said[-1].endswith("/rank_00000.log")


@pytest.mark.slow
def test_a_failure_that_no_log_can_take_is_on_the_console(start: Start) -> None:
    (start.folder / "logs").touch()
    start.all("100", "0.2", "1:2:raise")
    assert start.outcome().status == "failed"
    said = "\n".join(start.said[1:])
    assert "logs cannot be written in" in said
    assert "in misbehave\n" in said and said.endswith("OSError: no space left on rank 1")
    assert len(said.splitlines()) <= MOST_LINES + 2


@pytest.mark.slow
def test_the_kernels_word_on_a_rank_that_it_killed_for_memory(start: Start) -> None:
    """A real control group with a limit, and a rank that takes more."""
    group = memory_group()
    folder = group.folder / f"test-{os.getpid()}" if group is not None else Path()
    limit = "memory.limit_in_bytes" if group is not None and group.version == 1 else "memory.max"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"needs a control group of its own: {error}")
    enter = ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")
    try:
        for rank in range(3):
            start.agent(rank, "100", "0.2", "1:2:eat=2000", before=enter if rank == 1 else ())
        message = start.outcome().message
        assert message == "was killed by the kernel: out of memory (its control group has 256 MiB). Eat less"
        assert len(start.said) == 2 and start.said[-1].endswith("/rank_00001.log")
        start.codes()
    finally:
        folder.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 3)])
def test_a_rank_that_dies_after_its_final_report_is_reported_and_fails_nothing(
    start: Start, status: str, code: int
) -> None:
    start.all("1000" if status == "stopped" else "3", "0.05", "1:end:signal=SIGABRT")
    if status == "stopped":
        start.ranks()
        start.coordinator.stop("SIGTERM")
    assert start.outcome().status == status
    assert start.codes() == [code] * 3
    (word,) = [line for line in start.said if "SIGABRT" in line]
    assert word.startswith("rank 1 on ")
    assert word.endswith(f": was killed by SIGABRT after the run had {status}; nothing of it is lost")


@pytest.mark.slow
def test_a_refusal_is_no_failure_and_is_said_once(start: Start) -> None:
    start.all("100", "0.1", "1:1:refuse", "2:1:refuse")
    outcome = start.outcome()
    assert (outcome.status, outcome.exit_code) == ("wrong_job", 2)
    assert start.codes()[1:] == [2, 2]
    assert sum("lacks a file" in line for line in start.said) == 1


@pytest.mark.slow
def test_every_rank_stops_when_it_is_asked_to_and_leaves_with_its_code(start: Start) -> None:
    start.all("1000", "0.05")
    start.ranks()
    assert start.coordinator.stop("SIGUSR1")
    outcome = start.outcome()
    assert (outcome.status, outcome.message) == ("stopped", "SIGUSR1")
    assert start.codes() == [3, 3, 3]


def test_a_signal_to_an_agent_is_its_ranks(start: Start) -> None:
    """What a launcher or a batch system tells its child processes arrives in the rank."""
    start.all("1000", "0.05")
    start.ranks()
    for agent in start.agents:
        agent.send_signal(signal.SIGTERM)
    assert start.outcome().status == "stopped"
    assert start.codes() == [3, 3, 3]


@pytest.mark.slow
def test_a_hung_step_shows_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    start = Start(tmp_path, step_timeout=1.5)
    start.all("400", "0.2", "0:4:hang", "1:4:hang", "2:4:hang")
    pids = [rank["pid"] for rank in start.ranks()]
    outcome = start.outcome(30)
    assert "no progress for" in outcome.message and "after step 3" in outcome.message
    assert "ranks 0-2 in misbehave (stand_in.py:" in outcome.message
    assert "misbehave" in outcome.failure.text
    assert len(start.said) == 2 and len(start.said[-1].splitlines()) == 2  # all stacks are in the logs
    for rank in range(3):
        assert "misbehave" in start.log(rank)
    assert not any(is_running(pid) for pid in pids)
    assert not any(code == 0 for code in start.codes())


@pytest.mark.parametrize("victim", first_fast(["agent", "coordinator", "parent"], 1))
def test_ranks_end_with_what_owns_them(start: Start, victim: str) -> None:
    start.agent(0, "1000", "0.05")
    start.agent(1, "1000", "0.05", before=(sys.executable, "-c", PARENT))
    start.agent(2, "1000", "0.05")
    ranks = start.ranks()
    if victim == "coordinator":
        start.coordinator.close()
    else:
        os.kill(ranks[1]["agent"] if victim == "agent" else start.agents[1].pid, signal.SIGKILL)
        outcome = start.outcome()
        expected = "connection to its agent" if victim == "agent" else "the launcher that started it is gone"
        assert (outcome.status, outcome.rank) == ("failed", 1) and expected in outcome.message
    assert not any(code == 0 for code in start.codes())
    deadline = time.monotonic() + TIMEOUT
    while any(is_running(pid) for rank in ranks for pid in (rank["pid"], rank["agent"])):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_an_agent_that_falls_silent_is_lost(start: Start) -> None:
    """As when a cable is cut: its connection stands, and nothing comes, its log neither."""
    start.all("1000", "0.05")
    ranks = start.ranks()
    start.until(lambda: list(start.folder.glob("logs/*/rank_00002.log")))
    os.kill(ranks[2]["agent"], signal.SIGSTOP)
    (log,) = start.folder.glob("logs/*/rank_00002.log")
    log.unlink()
    outcome = start.outcome()
    missing = (
        f"No logs were received from rank 2 ({socket.gethostname()}): what was written is in {log.parent}"
    )
    assert f"{missing} there." in start.said
    assert (outcome.status, outcome.rank) == ("failed", 2) and "nothing was heard" in outcome.message
    assert start.agents[0].wait(5) != 0 and start.agents[1].wait(5) != 0
    os.kill(ranks[2]["agent"], signal.SIGCONT)
    assert start.agents[2].wait(10) != 0
    assert not any(is_running(rank["pid"]) for rank in ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_before_ranks_have_begun_is_no_failure(start: Start, number: signal.Signals) -> None:
    """Two agents wait for the third; whatever the order, there is nothing to save."""
    start.agent(1, "1000", "0.05")
    start.agent(2, "1000", "0.05")
    start.until(lambda: len(start.coordinator.table.states) == 2)
    assert start.coordinator.stop(number.name)
    start.agent(0, "1000", "0.05")
    outcome = start.outcome()
    assert (outcome.status, outcome.step, outcome.exit_code) == ("stopped", 0, 3)
    assert outcome.message == f"{number.name} before the first step"
    assert start.codes() == [3, 3, 3]
    assert start.said == [] or "Rank 0 is on" in start.said[0]


@pytest.mark.slow
def test_without_a_launch_rank_0_has_the_coordinator(start: Start) -> None:
    start.coordinator.close()
    for rank in range(3):
        start.agent(rank, "1000", "0.05", "2:9:signal=SIGKILL", address="", port=0, key_file="", hosts=())
    assert not any(agent.wait(30) == 0 for agent in start.agents)
    assert "rank 2 on" in (start.folder / "console0").read_text()
    assert json.loads((start.folder / "outcome.json").read_text())["rank"] == 2


# Stands for `deepspeed`, which starts its launcher on this machine, which starts an agent.
DEEPSPEED = (
    "import subprocess, sys; parent = 'import subprocess, sys; subprocess.run(sys.argv[2:])'; "
    "subprocess.run([sys.executable, '-c', parent, 'deepspeed.launcher.' + 'launch', *sys.argv[2:]])"
)


@pytest.mark.parametrize("gone", first_fast(["deepspeed", "launcher", "terminal"], 1))
def test_ranks_that_nobody_waits_for_save_and_end(start: Start, gone: str) -> None:
    """Without a launch, which would end and perhaps restart the job."""
    start.coordinator.close()
    port = free_port()
    for rank in range(2):
        before = (sys.executable, "-c", DEEPSPEED, "deepspeed") if rank == 1 else ()
        place = {"WORLD_SIZE": 2, "LOCAL_SIZE": 2, "MASTER_PORT": port}
        agent = {"address": "", "port": 0, "key_file": "", "hosts": ()}
        start.agent(rank, "100000", "0.02", before=before, elsewhere=place, **agent)
    files = [start.folder / "ranks" / f"{rank}.json" for rank in range(2)]
    wait_for(lambda: all(file.exists() for file in files))
    rank = json.loads(files[1].read_text())
    time.sleep(2.0)  # the agents have met
    if gone == "terminal":
        os.kill(rank["agent"], signal.SIGHUP)
    else:
        os.kill(start.agents[1].pid if gone == "deepspeed" else rank["launcher"], signal.SIGKILL)
    assert start.agents[0].wait(20) == 3
    assert json.loads((start.folder / "outcome.json").read_text())["status"] == "stopped"
    said = (start.folder / "console0").read_text()
    told = {"deepspeed": "the deepspeed command that started it", "launcher": "the launcher that started it"}
    assert (f"rank 1: {told[gone]} is gone on " if gone in told else "SIGTERM on ") in said
    wait_for(lambda: not is_running(rank["pid"]) and not is_running(rank["agent"]))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
