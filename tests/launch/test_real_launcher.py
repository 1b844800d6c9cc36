"""DeepSpeed's launcher with stand-in ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.cluster.outcome import read_outcome
from tests.processes import is_running

ROOT = Path(__file__).parents[2]


STAND_IN = ROOT / "tests" / "launch" / "start_stand_in.py"


@pytest.fixture
def drive(tmp_path: Path):
    """Starts stand-in ranks through the real launcher: `drive("--num_gpus", "2", steps=10)`."""
    started: list[subprocess.Popen] = []

    def run(*arguments: str, steps: int, more: tuple[str, ...] = ()) -> subprocess.Popen:
        line = [
            sys.executable,
            str(STAND_IN),
            *arguments,
            "--failure_timeout",
            "20",
            str(tmp_path),
            str(steps),
        ]
        environment = os.environ | {"DS_ACCELERATOR": "cpu"}
        started.append(subprocess.Popen([*line, "0.05", *more], env=environment, cwd=tmp_path))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def wait_for_ranks(folder: Path, count: int) -> list[dict]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        files = sorted((folder / "ranks").glob("[0-9]*.json"))
        if len(files) == count:
            return [json.loads(file.read_text()) for file in files]
        time.sleep(0.1)
    raise TimeoutError(f"{count} ranks did not start within 120 s")


@pytest.mark.slow
# Whatever else is started here is started without a hostfile.
@pytest.mark.parametrize("hostfile", [pytest.param(False, marks=pytest.mark.repeats), True])
def test_two_ranks_start_through_deepspeed(tmp_path: Path, drive, hostfile: bool) -> None:
    where = ("--hostfile", str(ROOT / "hostfiles" / "localhost")) if hostfile else ("--num_gpus", "2")
    assert drive(*where, steps=2, more=("--text", "a b 'c' $HOME")).wait(150) == 0
    for rank, found in enumerate(wait_for_ranks(tmp_path, 2)):
        environment = found["environment"]
        assert (environment["RANK"], environment["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (environment["WORLD_SIZE"], environment["LOCAL_SIZE"]) == ("2", "2")
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert found["arguments"][-2:] == ["--text", "a b 'c' $HOME"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGTERM,
        # Handled as SIGTERM is; test_endings.py sends all four.
        *(pytest.param(each, marks=pytest.mark.repeats) for each in (signal.SIGUSR1, signal.SIGHUP)),
    ],
)
def test_a_signal_ends_every_rank_in_seconds(tmp_path: Path, drive, number: signal.Signals) -> None:
    process = drive("--num_gpus", "2", steps=6000)
    ranks = wait_for_ranks(tmp_path, 2)
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(60) == 3
    assert time.monotonic() - began < 15
    assert not any(is_running(rank["pid"]) for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["deepspeed launch", "launch.sh"])
def test_a_killed_launcher_is_a_failure_and_leaves_nothing(tmp_path: Path, drive, victim: str) -> None:
    process = drive("--num_gpus", "2", steps=6000)
    ranks = wait_for_ranks(tmp_path, 2)
    launcher = ranks[0]["launcher"]
    pids = [rank[who] for rank in ranks for who in ("pid", "agent", "launcher")]
    assert launcher in [child.pid for child in psutil.Process(process.pid).children()]
    os.kill(launcher if victim == "deepspeed launch" else process.pid, signal.SIGKILL)
    assert process.wait(60) == (-signal.SIGKILL if victim == "launch.sh" else 1)
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if is_running(pid)]
        time.sleep(0.1)
    assert read_outcome(tmp_path, int(ranks[0]["environment"]["MASTER_PORT"])).status == "failed"
