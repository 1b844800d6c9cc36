"""The command line of DeepSpeed's launcher, and what ranks get with it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pipeline.cluster.agent.launch_spec import OPTION, LaunchSpec, encode, split_launch_spec
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.job.options import Options, parse_options
from pipeline.job.world import Host, World
from pipeline.launch import launcher_command, start
from pipeline.launch.launcher_command import LAUNCH, RUNNER, Launch, plan_launch
from pipeline.launch.restart_loop import prepare
from pipeline.launch.start import rank_variables

CPU = World((Host("localhost", 2),), "cpu")
GPUS = World((Host("localhost", 2, (2, 3)),), "cuda", "NVIDIA A100-SXM4-80GB", True)
LOCAL_FILE = World((Host("localhost", 2),), "cpu", hostfile="hosts")
REMOTE = World((Host("h1", 8), Host("h2", 8)), "cuda", None, True, "hosts")
ONE_REMOTE = World((Host("h2", 8),), "cuda", None, True, "hosts")


def command(options: LauncherOptions, world: World) -> str:
    job = ("--text", "a b")
    plan = plan_launch(options, world, LaunchSpec(), {}, job, script="job.py")
    *line, spec = plan.command[:-2] if options.no_ssh else plan.command
    assert spec == encode(LaunchSpec())
    assert ("a b" in plan.command) == options.no_ssh and (not options.no_ssh or plan.command[-2:] == job)
    return " ".join(line).replace(str(plan.master_port), "PORT")


@pytest.mark.parametrize(
    ("options", "world", "slots", "where"),
    [
        ({}, CPU, {"localhost": [0, 1]}, "--node_rank=0 --master_addr=127.0.0.1"),
        ({"num_gpus": 2}, CPU, {"localhost": [0, 1]}, "--node_rank=0 --master_addr=127.0.0.1"),
        ({}, GPUS, {"localhost": [2, 3]}, "--node_rank=0 --master_addr=127.0.0.1"),
        ({}, LOCAL_FILE, {"localhost": [0, 1]}, "--node_rank=0 --master_addr=127.0.0.1"),
        (
            {"no_ssh": True, "node_rank": 1, "master_addr": "h1"},
            REMOTE,
            {"h1": [*range(8)], "h2": [*range(8)]},
            "--node_rank=1 --master_addr=h1",
        ),
    ],
)
def test_ranks_of_this_machine_are_started_by_launch(
    options: dict, world: World, slots: dict[str, list[int]], where: str
) -> None:
    from deepspeed.launcher.runner import encode_world_info

    line = f"{' '.join(LAUNCH)} --world_info={encode_world_info(slots)} {where}"
    expected = f"{line} --master_port=PORT --log_level=critical job.py"
    assert command(LauncherOptions(**options), world) == expected


@pytest.mark.parametrize(
    ("options", "world", "expected"),
    [
        (
            {"num_nodes": 2, "num_gpus": 8, "ssh_port": 2222, "launcher": "openmpi", "launcher_args": "-x A"},
            REMOTE,
            "--num_nodes 2 --num_gpus 8 --launcher openmpi --ssh_port 2222 --launcher_args=-x A"
            " --no_ssh_check --master_addr=h1",
        ),
        (
            {"include": "h2", "master_addr": "10.0.0.2"},
            ONE_REMOTE,
            "--include h2 --force_multi --enable_each_rank_log None --log_level=critical"
            " --no_ssh_check --master_addr=10.0.0.2",
        ),
    ],
)
def test_everything_the_runner_would_guess_is_said(options: dict, world: World, expected: str) -> None:
    line = f"{' '.join(RUNNER)} --hostfile hosts {expected} --master_port=PORT --log_level=critical job.py"
    assert command(LauncherOptions(**options), world) == line


HARD_TO_PASS = ("a b", "'", '"', "$HOME", "`id`", "x;true", "a&b", "%n %h", '{"a": 1}', "\\", "\n", "ü")


def test_a_launch_spec_survives_every_shell(tmp_path: Path) -> None:
    """As pdsh does it: the words joined by blanks, through two shells."""
    sent = LaunchSpec(hosts=tuple((word, 2) for word in HARD_TO_PASS), key_file="", batch=(4, 2, 2))
    argument = encode(sent)
    line = f"sh -c 'echo {argument}'"
    arrived = subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout.strip()
    assert split_launch_spec(["--local_rank=3", arrived, "--seed", "1"]) == (
        sent,
        ["--local_rank=3", "--seed", "1"],
    )


def test_a_launch_spec_that_was_cut_is_none() -> None:
    with pytest.raises(ValueError, match="did not arrive whole"):
        split_launch_spec([encode(LaunchSpec())[:-4]])
    assert split_launch_spec(["--seed", "1"]) == (LaunchSpec(), ["--seed", "1"])
    assert not any(character in OPTION for character in "$'\" %;&")


def test_a_given_port_is_used_and_remote_hosts_get_deepspeeds() -> None:
    assert plan_launch(LauncherOptions(master_port=1234), CPU, LaunchSpec(), {}).master_port == 1234
    assert plan_launch(LauncherOptions(), REMOTE, LaunchSpec(), {}).master_port == 29500


def test_cpu_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_command, "available_cores", lambda: 8)
    assert plan_launch(LauncherOptions(), CPU, LaunchSpec(), {"A": "b"}).environment == {
        "A": "b", "OMP_NUM_THREADS": "4", "DS_ACCELERATOR": "cpu", "DS_ENV_FILE": os.devnull,
    }  # fmt: skip
    kept = plan_launch(LauncherOptions(), CPU, LaunchSpec(), {"OMP_NUM_THREADS": "1"}).environment
    assert kept["OMP_NUM_THREADS"] == "1"
    assert plan_launch(LauncherOptions(), GPUS, LaunchSpec(), {"A": "b"}).environment == {
        "A": "b",
        "DS_ENV_FILE": os.devnull,
    }


def exported(environment: dict[str, str]) -> dict[str, str]:
    """What DeepSpeed's launcher would write onto the command lines of other hosts."""
    from deepspeed.launcher.runner import EXPORT_ENVS

    prefixes = (*EXPORT_ENVS, "NCCL")  # the latter where there are GPUs
    return {name: value for name, value in environment.items() if name.startswith(prefixes)}


@pytest.mark.slow
def test_nothing_that_a_shell_would_read_is_exported() -> None:
    read = "x $(id) %n"
    names = ("MLFLOW_EXPERIMENT_NAME", "MLFLOWX", "UCX_TLS", "MV2_X", "NCCL_DEBUG", "PYTHONWARNINGS")
    given = dict.fromkeys(names, read) | {"PYTHON x": "1", "PYTHONPATH": "/a:/b", "PYTHONX": "%n"}
    environment = plan_launch(LauncherOptions(), REMOTE, LaunchSpec(), given).environment
    assert exported(environment) == {"PYTHONPATH": "/a:/b"}
    assert dict(rank_variables(given, is_local=False)) == given
    here = LauncherOptions(no_ssh=True, node_rank=0, master_addr="h1")
    for options, world in ((LauncherOptions(), CPU), (here, REMOTE)):  # whose ranks inherit it
        assert exported(plan_launch(options, world, LaunchSpec(), given).environment) == given


def test_hosts_that_are_started_alone_get_their_files_of_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Launch] = []
    monkeypatch.setattr(start, "run_launch", lambda launch, *_: started.append(launch))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n")
    here = LauncherOptions(no_ssh=True, node_rank=0, master_addr="h1")
    start.start_once(REMOTE, str(tmp_path), here, [])
    got = started[0].environment
    assert (got["NCCL_DEBUG"], got["WANDB_API_KEY"]) == ("INFO", "abc")


def test_no_secret_is_on_a_command_line() -> None:
    given = {"UCX_TLS": "tcp", "MLFLOW_TRACKING_TOKEN": "abc", "AWS_SECRET_ACCESS_KEY": "def", "HOME": "/"}
    environment = plan_launch(LauncherOptions(), REMOTE, LaunchSpec(), given).environment
    assert "abc" not in environment.values() and "def" not in environment.values()
    # They reach the ranks through the coordinator.
    assert dict(rank_variables(given, is_local=False)) == {k: v for k, v in given.items() if k != "HOME"}
    assert "BatchMode=yes" in environment["PDSH_SSH_ARGS_APPEND"]


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{"include": "me@h1:0@h3:1"}, {"exclude": "h2@me@h1:1@h3:0"}])
def test_the_launcher_gets_no_filter_that_names_a_user(tmp_path: Path, filters: dict[str, str]) -> None:
    from deepspeed.launcher.runner import fetch_hostfile, parse_args, parse_inclusion_exclusion

    hosts = "me@h1 slots=2\nh2 slots=2\nh3 slots=2\n"
    (tmp_path / "hosts").write_text(hosts)
    given = LauncherOptions(hostfile=str(tmp_path / "hosts"), no_ssh_check=True, **filters)
    ready = prepare(parse_options(["--output_dir", str(tmp_path), "--model", "tiny"], Options), given)
    assert ready is not None
    arguments = plan_launch(ready.launcher, ready.job.world, LaunchSpec(), {}).command
    theirs = parse_args([*arguments[3:]])
    pool = parse_inclusion_exclusion(fetch_hostfile(theirs.hostfile), theirs.include, theirs.exclude)
    assert dict(pool) == {"me@h1": [0], "h3": [1]}
