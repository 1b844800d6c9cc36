"""Arguments of launch.sh: what is the launcher's and what is the job's; impossible ones are refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipeline.base.problems import Problem
from pipeline.cluster.launcher_options import (
    LauncherOptions,
    launcher_problems,
    split_arguments,
    start_command,
    words_of,
)
from pipeline.cluster.outcome import Outcome
from pipeline.launch import launch, restart_loop


def test_launcher_options_are_taken_out_wherever_they_stand() -> None:
    options, job = split_arguments(
        "--data a b --hostfile=hosts --seed 1 --num_gpus 4 --include_x -e h1 --resume never".split()
    )
    assert options == LauncherOptions(hostfile="hosts", num_gpus=4, exclude="h1")
    assert job == "--data a b --seed 1 --include_x --resume never".split()


def test_job_arguments_arrive_as_they_are() -> None:
    given = ["--sample_prompt", 'it\'s "a b" $X', "--data", "a b"]
    assert split_arguments(given) == (LauncherOptions(), given)


def test_abbreviations_are_left_to_the_job_which_refuses_them() -> None:
    assert split_arguments(["--num_g", "2"])[1] == ["--num_g", "2"]


@pytest.mark.parametrize("arguments", ["--num_gpus two", "--launcher carrier_pigeon", "--hostfile"])
def test_values_of_the_wrong_type_end_with_code_2(arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        split_arguments(arguments.split())
    assert caught.value.code == 2


def problems_of(arguments: str) -> list[Problem]:
    return launcher_problems(split_arguments(arguments.split())[0])


def test_impossible_launcher_options_are_collected() -> None:
    problems = problems_of(
        "--master_port 70000 --ssh_port 0 --stop_timeout -1 --failure_timeout 1 --step_timeout 0 --no_ssh"
    )
    assert [problem.key for problem in problems] == [
        "master_port", "ssh_port", "stop_timeout", "failure_timeout", "step_timeout", "no_ssh",
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["nan", "inf", "0"])
def test_a_time_that_never_comes_is_refused(value: str) -> None:
    assert [problem.key for problem in problems_of(f"--stop_timeout {value}")] == ["stop_timeout"]


@pytest.mark.parametrize("key", ["master_addr", "launch_addr"])
def test_an_address_is_one_and_nothing_that_a_shell_would_read(key: str) -> None:
    users_and_ports = ("me@h1", "me@10.0.0.1", "h1:22", "h:1:2", "[::1]")
    for bad in ("", "h1 h2", "h1;id", "-x", "fe80::1%eth0", *users_and_ports):
        assert [p.key for p in launcher_problems(LauncherOptions(**{key: bad}))] == [key], bad
    for good in ("h1.example.org", "10.0.0.1", "fe80::1"):
        assert launcher_problems(LauncherOptions(**{key: good})) == []


def test_a_place_below_the_first_host_is_refused() -> None:
    (problem,) = problems_of("--no_ssh --node_rank -1 --master_addr h1")
    assert problem.rule == "hosts are counted from 0"


def test_a_wrong_job_starts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(restart_loop, "start_once", lambda *_: pytest.fail("something was started"))
    arguments = "--hostfile no/such/file --master_port 0 --seq_length -3 --train_steps -1"
    assert launch.main(arguments.split()) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "no/such/file" in printed
    assert "master_port" in printed
    assert "seq_length" in printed
    assert "train_steps" in printed


def test_the_dict_for_deepspeed_is_printed_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(restart_loop, "start_once", lambda *_: Outcome("finished", 1))
    assert launch.main(["--print_config", "--output_dir", str(tmp_path)]) == 0
    assert '"train_micro_batch_size_per_gpu"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        LauncherOptions(),
        LauncherOptions(
            hostfile="my hosts", include="h1@h2:0", num_gpus=3, max_restarts=2, allow_fewer_hosts=1
        ),
        LauncherOptions(
            launcher="openmpi", launcher_args="--mca btl tcp", no_ssh_check=True, step_timeout=0.5
        ),
    ],
)
def test_the_words_of_options_give_them_again(options: LauncherOptions) -> None:
    assert split_arguments(words_of(options)) == (options, [])


AGENT = ["python", "-u", "a b/pretrain.py", "--train_steps", "3"]


@pytest.mark.parametrize(
    ("above", "ranks", "command"),
    [
        ([["torchrun", "a b/pretrain.py", "--seed", "1"], ["bash"]], 2, "torchrun 'a b/pretrain.py'"),
        ([["timeout", "60", "torchrun", "a b/pretrain.py"]], 2, "timeout 60 torchrun 'a b/pretrain.py'"),
        # A shell reads its script as one word, and would not hand on what is written behind it.
        (
            [["torchrun", "a b/pretrain.py"], ["bash", "-c", "cd x && torchrun pretrain.py"]],
            2,
            "torchrun 'a b/pretrain.py'",
        ),
        ([["python", "-m", "deepspeed.launcher.launch", "a b/pretrain.py"], ["sshd"]], 2, ""),
        ([["bash"]], 1, "python -u 'a b/pretrain.py'"),
        ([["slurmstepd"]], 2, ""),
    ],
)
def test_a_start_is_told_by_the_processes_above_a_rank(
    above: list[list[str]], ranks: int, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "pretrain.py").touch()
    monkeypatch.chdir(tmp_path)
    processes = [SimpleNamespace(cmdline=lambda words=words: words) for words in (AGENT, *above)]
    monkeypatch.setattr(psutil.Process, "parents", lambda process: processes)
    assert start_command(ranks) == tuple(shlex.split(command))
