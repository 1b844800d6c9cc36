"""deploy/slurm/train.sbatch, run as Slurm runs it, with small scripts for Slurm's commands and the launches.

They behave as Slurm 22.05 was seen to: srun starts one launch per host and returns the largest exit code,
``scancel --signal=TERM JOB`` reaches the launches and not the script.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.cluster.hostfile import read_hostfile
from pipeline.job.world import Host
from tests.covering import first_fast

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
STAND_INS = {
    "scontrol": """
        case "$1 $2" in
        "show hostnames") if [ -n "$SLOW" ] && [ ! -e asked ]; then touch asked; sleep 1; fi
                          echo "$3" | tr , '\\n' ;;
        "show job") echo "     Nodes=h1 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)"
                    echo "     Nodes=h2 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)" ;;
        requeue*) echo "$2" >>requeued; [ ! -e full ] ;;
        esac
        """,
    "srun": """
        while [ "${1#--}" != "$1" ]; do echo "$1" >>srun_options; shift; done
        for id in 0 1; do SLURM_NODEID=$id "$@" & echo $! >>launches; done
        worst=0
        for pid in $(cat launches); do wait $pid; code=$?; [ $code -gt $worst ] && worst=$code; done
        exit $worst
        """,
    "scancel": 'echo "$*" >>scancelled; kill -TERM $(cat launches)',
}
# Says what it was given, and ends with $CODE, or at a TERM with 3 after the time that saving takes.
LAUNCH = """
import json, os, shutil, signal, sys, time
def stop(*_):
    time.sleep(0.3)
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
node = os.environ["SLURM_NODEID"]
shutil.copy(sys.argv[sys.argv.index("--hostfile") + 1], f"hosts{node}")
with open(f"draft{node}", "w") as file:
    json.dump(sys.argv[1:], file)
os.rename(f"draft{node}", f"launch{node}")
if "CODE" in os.environ:
    sys.exit(int(os.environ["CODE"]))
time.sleep(60)
"""


@dataclass(frozen=True)
class Cluster:
    """A project's folder with stand-ins."""

    folder: Path

    def submit(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start the script as a batch job of two hosts."""
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "h1,h2",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_SUBMIT_DIR": str(self.folder),
        }
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return subprocess.Popen(
            ["bash", SCRIPT, *arguments],
            env=clean | slurm | {"PATH": path} | environment,
            cwd="/",
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def launched(self, node: int) -> list[str]:
        """What a host's launch was given; waits for it."""
        self.wait_for(f"launch{node}")
        return json.loads((self.folder / f"launch{node}").read_text())

    def wait_for(self, name: str) -> None:
        """Wait for a file of the folder."""
        deadline = time.monotonic() + 30
        while name not in self:
            assert time.monotonic() < deadline, f"{name} has not come"
            time.sleep(0.02)

    def __contains__(self, name: str) -> bool:
        return (self.folder / name).exists()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    for name in ("pipeline", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for folder in (tmp_path / "bin", tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
    for name, script in STAND_INS.items():
        executable(tmp_path / "bin" / name, f"#!/bin/bash\n{script}")
    executable(tmp_path / ".venv/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    executable(tmp_path / "launch.sh", f"#!{sys.executable}\n{LAUNCH}")
    return Cluster(tmp_path)


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


JOB = ["--output_dir", "runs/a b", "--model", "tiny", "--sample_prompt", "it's $HOME"]


def test_each_host_gets_its_launch_and_the_options_as_they_were_given(cluster: Cluster) -> None:
    job = cluster.submit(*JOB, CODE="0")
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    assert "This job can start." in output
    for node in (0, 1):
        given = cluster.launched(node)
        assert given[:3] == ["--node_rank", str(node), "--no_ssh"]
        assert given[-len(JOB) :] == JOB
        assert given[given.index("--master_addr") + 1] == "h1"
        assert given[given.index("--master_port") + 1] == str(15000 + 7 * 9)
        assert read_hostfile(cluster.folder / f"hosts{node}") == ((Host("h1", 2), Host("h2", 1)), ())
    assert "--kill-on-bad-exit=0" in (cluster.folder / "srun_options").read_text()
    assert list(cluster.folder.glob("*.hosts")) == []
    assert "requeued" not in cluster


def test_a_warning_saves_and_puts_the_job_back_into_the_queue(cluster: Cluster) -> None:
    job = cluster.submit(*JOB)
    for node in (0, 1):
        cluster.launched(node)
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    assert (cluster.folder / "scancelled").read_text() == "--signal=TERM 7\n"
    assert (cluster.folder / "requeued").read_text() == "7\n"
    assert "back into the queue (time 0 of 100)" in output


def test_a_second_warning_is_no_kill(cluster: Cluster) -> None:
    job = cluster.submit(*JOB)
    for node in (0, 1):
        cluster.launched(node)
    job.send_signal(signal.SIGUSR1)
    cluster.wait_for("scancelled")
    job.send_signal(signal.SIGUSR1)
    assert "back into the queue" in job.communicate(timeout=60)[0]
    assert (cluster.folder / "scancelled").read_text() == "--signal=TERM 7\n"


@pytest.mark.slow
def test_a_warning_before_the_start_puts_the_job_back_at_once(cluster: Cluster) -> None:
    job = cluster.submit(*JOB, SLOW="yes")
    cluster.wait_for("asked")
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    assert "Warned before the start; back into the queue" in output
    assert (cluster.folder / "requeued").read_text() == "7\n"
    assert "launches" not in cluster and list(cluster.folder.glob("*.hosts")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "full", "words"),
    [
        ({"SLURM_RESTART_COUNT": "100"}, False, "after 100 returns"),
        ({}, True, "Slurm did not take the job back"),
    ],
)
def test_what_cannot_come_back_ends_with_3_and_says_why(
    cluster: Cluster, environment: dict[str, str], full: bool, words: str
) -> None:
    if full:
        (cluster.folder / "full").touch()
    job = cluster.submit(*JOB, **environment)
    for node in (0, 1):
        cluster.launched(node)
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 3, output
    assert words in output
    assert ("requeued" in cluster) == full


@pytest.mark.parametrize("code", first_fast(["3", "1", "2"], 1))
def test_without_a_warning_the_exit_code_is_the_launches(cluster: Cluster, code: str) -> None:
    job = cluster.submit(*JOB, CODE=code)
    job.communicate(timeout=60)
    assert job.returncode == int(code)
    assert "requeued" not in cluster


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num_nodes", "1"], "sbatch --nodes"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (["--seq_length", "-1"], "seq_length"),
                (["-e", "h2"], "sbatch --nodes"),
                (["--max_restarts", "1"], "max_restarts"),  # which a launch without --no_ssh would take
            )
        ),
    ],
)
def test_a_wrong_job_starts_nothing(cluster: Cluster, arguments: list[str], words: str) -> None:
    job = cluster.submit(*JOB, *arguments)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 2, output
    assert words in " ".join(output.split())
    assert "launches" not in cluster


def test_an_unknown_allocation_starts_nothing(cluster: Cluster) -> None:
    executable(cluster.folder / "bin" / "scontrol", "#!/bin/sh\necho no controller >&2; exit 1\n")
    job = cluster.submit(*JOB)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 2
    assert "no controller" in output
    assert "launches" not in cluster


def test_without_a_set_up_project_it_says_what_to_do(cluster: Cluster) -> None:
    (cluster.folder / ".venv/bin/python").unlink()
    job = cluster.submit(*JOB)
    assert "./launch.sh --setup_only" in job.communicate(timeout=60)[0]
    assert job.returncode == 1


def test_slurms_options_come_before_the_first_command() -> None:
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert [line for line in lines[:first] if line.startswith("#SBATCH")] == options
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:USR1@300", "#SBATCH --ntasks-per-node=1"} <= set(options)
