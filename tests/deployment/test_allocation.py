"""The hosts of a Slurm allocation, from what scontrol prints; its real output is below."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline import deploy
from pipeline.base.problems import EXIT_WRONG_JOB, JobError
from pipeline.cluster.hostfile import read_hostfile
from pipeline.deployment.allocation import allocated_hosts, count_gpus, task_counts
from pipeline.job.world import Host

# An excerpt of Slurm 22.05's, for --nodes=2 --gpus=3 on hosts with two GPUs and with one.
UNEQUAL = """\
   TRES=cpu=2,node=2,billing=2
   JOB_GRES=gpu:a100:3
     Nodes=h1 CPU_IDs=1 Mem=0 GRES=gpu:a100:2(IDX:0-1)
     Nodes=h2 CPU_IDs=1 Mem=0 GRES=gpu:a100:1(IDX:0)
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
"""
EQUAL = "     Nodes=h[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:8(IDX:0-7)\n"
NO_GPUS = "     Nodes=h[1-2] CPU_IDs=0-1 Mem=0 GRES=\n"
NAMES = {"h[1-2]": "h1\nh2\n", "h1": "h1\n", "h2": "h2\n", "a$b": "a$b\n", "": ""}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "h[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}


def hosts(details: str, slots: int | None = None, **changes: str) -> list[tuple[str, int]]:
    def ask(arguments: Sequence[str]) -> str:
        if arguments[:2] == ["show", "hostnames"]:
            return NAMES[arguments[2]]
        assert arguments == ["show", "job", "--details", "7"]
        return details

    return [(host.name, host.slots) for host in allocated_hosts(slots, JOB | changes, ask)]


def test_slots_are_the_gpus_that_each_host_was_given() -> None:
    assert hosts(UNEQUAL) == [("h1", 2), ("h2", 1)]
    assert hosts(EQUAL) == [("h1", 8), ("h2", 8)]


def test_without_gpus_slots_are_tasks() -> None:
    assert hosts(NO_GPUS, SLURM_TASKS_PER_NODE="2,1") == [("h1", 2), ("h2", 1)]


def test_slots_can_be_said() -> None:
    assert hosts(UNEQUAL, slots=4) == [("h1", 4), ("h2", 4)]


def test_a_host_without_a_slot_is_refused_by_name() -> None:
    only_first = "     Nodes=h1 CPU_IDs=1 Mem=0 GRES=gpu:2(IDX:0-1)\n"
    with pytest.raises(JobError, match="h2 needs from 1 to"):
        hosts(only_first)
    with pytest.raises(JobError, match="h1 needs") as caught:
        hosts(UNEQUAL, slots=0)
    assert len(caught.value.problems) == 2


def test_names_that_a_shell_could_misread_are_refused() -> None:
    with pytest.raises(JobError, match="safe in a shell"):
        hosts(NO_GPUS, SLURM_JOB_NODELIST="a$b")


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(JobError, match="SLURM_JOB_NODELIST"):
        hosts(NO_GPUS, SLURM_JOB_NODELIST="")


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        ("gpu:a100:2(IDX:0,3)", 2),
        ("gpu:8(IDX:0-7)", 8),
        ("gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2),nic:4(CNT:4)", 3),
        ("nic:4", 0),
        ("gpu", 1),
        ("", 0),
    ],
)
def test_gpus_are_counted_whatever_their_kind(resources: str, gpus: int) -> None:
    assert count_gpus(resources) == gpus


def test_counts_are_expanded() -> None:
    assert task_counts("2(x3),1") == [2, 2, 2, 1]
    assert task_counts("8") == [8]
    assert task_counts("") == []
    with pytest.raises(JobError, match="SLURM_TASKS_PER_NODE"):
        task_counts("2*3")


def fake_scontrol(folder: Path, script: str) -> None:
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run_command(
    monkeypatch: pytest.MonkeyPatch, folder: Path, environment: dict[str, str], *options: str
) -> int:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(folder))
    return deploy.main(["slurm_hosts", *options])


def test_the_command_prints_a_hostfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_scontrol(tmp_path, f'[ "$2" = hostnames ] && printf "h1\\nh2\\n" || echo "  {EQUAL.strip()}"')
    assert run_command(monkeypatch, tmp_path, JOB, "--num_gpus", "4", "--model", "gpt2") == 0
    hostfile = tmp_path / "hosts"
    hostfile.write_text(capsys.readouterr().out)
    assert read_hostfile(hostfile) == ((Host("h1", 8), Host("h2", 8)), ())


def test_options_that_choose_other_hosts_are_refused_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-H", "x", "-i", "h1", "-e", "h2", "--num_nodes", "1", "--node_rank", "0"]
    assert run_command(monkeypatch, tmp_path, JOB, *options) == EXIT_WRONG_JOB
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("error:") == 5


@pytest.mark.parametrize(
    ("script", "environment", "words"),
    [
        (None, JOB, "is not on the PATH"),
        ("echo Invalid job id >&2; exit 1", JOB, "Invalid job id"),
        ("true", {}, "Slurm sets it inside an allocation"),
    ],
)
def test_without_slurm_the_reason_is_said(
    script: str | None,
    environment: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if script is not None:
        fake_scontrol(tmp_path, script)
    assert run_command(monkeypatch, tmp_path, environment) == EXIT_WRONG_JOB
    assert words in " ".join(capsys.readouterr().err.split())
