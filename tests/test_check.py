"""The check as users run it: its text, its exit codes, its speed, and that it imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.check import main
from pipeline.job.models import PRESETS

PROJECT = Path(__file__).resolve().parents[1]
RECIPES = PROJECT / "ds_configs"
CLUSTER = "".join(f"node{index} slots=8\n" for index in range(1, 5))
# What takes seconds to import, or drags it in.
HEAVY = {"torch", "deepspeed", "transformers", "datasets", "pandas", "scipy"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "pipeline.check", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=60)


def imported(stderr: str) -> set[str]:
    """Top-level modules in the output of -X importtime."""
    lines = [line for line in stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


def test_no_credentials_of_the_environment_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "hush-hush")
    job = ("--output_dir", str(tmp_path), "--world_size", "2", "--model", "tiny", "--print_config")
    done = run(*job, "--data", "s3://bucket/text.txt")
    assert "train_micro_batch_size_per_gpu" in done.stdout
    assert "hush-hush" not in done.stdout + done.stderr


def test_a_good_job_exits_with_0_and_imports_no_torch(tmp_path: Path) -> None:
    done = run("--output_dir", str(tmp_path), "--world_size", "2", "--model", "tiny")
    assert done.returncode == 0, done.stderr
    assert "This job can start." in done.stdout
    names = imported(done.stderr)
    assert "rich" in names  # the list is a list
    assert not names & HEAVY


@pytest.mark.alone
def test_is_quick(tmp_path: Path) -> None:
    """Under a second of processor time; wall-clock time on a busy machine says little."""
    job = ["--output_dir", str(tmp_path), "--model", "gpt3-175b", "--world_size", "2"]
    command = [sys.executable, "-m", "pipeline.check", *job]
    before, start = os.times(), time.monotonic()
    subprocess.run(command, cwd=PROJECT, capture_output=True, check=True, timeout=60)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert min(used, time.monotonic() - start) < 1.0


def test_prints_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text(CLUSTER, encoding="utf-8")
    config = str(PROJECT / "ds_configs" / "four_way.json")
    arguments = ["--hostfile", str(tmp_path / "hosts"), "--deepspeed_config", config, "--model", "gpt2-124m"]
    assert main([*arguments, "--output_dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "32 on node1 x 8, node2 x 8, node3 x 8, node4 x 8; cuda, bf16 native",
        "32 = 2 pipeline x 4 data x 2 sequence x 2 tensor",
        "node1, stage 0  [0 1 | 2 3] [4 5 | 6 7]",
        "node4, stage 1  [24 25 | 26 27] [28 29 | 30 31]",
        "124,439,808 parameters",
        "512 sequences = 16 micro-batch x 8 accumulation x 4 data; x 1024 tokens = 524,288 tokens",
        "bf16 (cuda computes bf16 natively), gradients summed in fp32",
        "WarmupCosineLR(lr=0.0006, total_num_steps=4747",
    ):
        assert text in shown, shown
    rows = [line.split() for line in shown.splitlines() if "blocks" in line]
    assert [row[0] for row in rows] == ["0", "1"]
    # Both stages hold the tied embedding.
    assert sum(int(row[-1].replace(",", "")) for row in rows) == 124_475_904 + 50304 * 768


def test_prints_all_problems_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    config.write_text(
        '{"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}, "x": 1}', encoding="utf-8"
    )
    arguments = ["--deepspeed_config", str(config), "--hostfile", "/no/such/hostfile", "--model", "tiny"]
    assert main([*arguments, "--seq_length", "4096", "--output_dir", str(tmp_path)]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "hostfile = '/no/such/hostfile'",
        f"x ({config}:1) = 1: there is no such key",
        f"zero_optimization.stage ({config}:1) = 2: must be 0 or 1 with 2 pipeline stages",
        "seq_length = 4096: is longer than the 1024 positions",
        "This job cannot start: 4 errors.",
    ):
        assert text in shown, shown


def test_print_config_prints_what_deepspeed_receives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["--print_config", "--world_size", "2", "--model", "tiny", "--output_dir", str(tmp_path)]) == 0
    )
    shown = capsys.readouterr().out
    printed = shown[shown.index("{\n") : shown.rindex("}\n") + 1]
    assert json.loads(printed)["train_micro_batch_size_per_gpu"] == 8


def test_a_broken_run_file_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "run.json")]) == 2
    assert "there is no such file" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "run.json").write_text("{")
    assert main(["--config", str(tmp_path / "run.json")]) == 2
    assert "cannot be read as a run.json" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    arguments = ["--model", "tiny", "--world_size", "2", "--output_dir", str(tmp_path / "run")]
    assert main([*arguments, "--resume", str(tmp_path / "empty")]) == 2
    shown = capsys.readouterr().out
    assert "error: resume = " in shown and "This job cannot start: 1 error." in shown


def test_takes_every_option_of_the_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text(CLUSTER, encoding="utf-8")
    arguments = [
        "-H",
        str(tmp_path / "hosts"),
        "--num_nodes",
        "2",
        "--num_accelerators",
        "4",
        "--master_port",
    ]
    assert main([*arguments, "29500", "--no_ssh_check", "--output_dir", str(tmp_path)]) == 0
    assert "8 on node1 x 4, node2 x 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "names"),
    [("--list_models", list(PRESETS)), ("--list_recipes", [path.name for path in RECIPES.glob("*.json")])],
)
def test_what_there_is_to_choose_from(
    option: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([option])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert names and [name for name in names if name not in shown] == []
    assert main([option, "--modle", "tiny"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "error: --modle = 'tiny': there is no such option" in shown.err


def test_a_name_that_the_terminal_cannot_show_is_no_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline.check", "--model", "tiny", "--data", str(tmp_path / "n\u00f6")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert done.returncode == 2 and "n\\xf6" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ("--hosts --world_size 4", "hosts = True: asks hosts, and --world_size describes"),
        ("--fabric --world_size 4", "fabric = True: asks hosts, and --world_size describes"),
        ("--environment --world_size 4", "environment = True: looks at this machine alone"),
        ("--environment --hosts", "--hosts asks for more"),
        ("--environment --hostfile hosts", "--hostfile asks for more"),
        ("--environment --num_gpus 5", "--num_gpus asks for more"),
        ("--model gpt2-xl --environment", "--model asks for more"),
    ],
)
def test_what_cannot_be_looked_at_together(
    arguments: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert rule in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("arguments", ["--seeed 3", "--seed x", "--num_gpu 2", "--hostfil hosts"])
def test_wrong_options_are_problems(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_files_of_variables_that_the_launcher_breaks_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".deepspeed_env").write_text("# NCCL_DEBUG=hunter2\n")
    assert main(["--world_size", "2", "--model", "tiny", "--output_dir", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr().out
    assert f"{tmp_path}/.deepspeed_env line 1" in shown and "hunter2" not in shown


def test_a_user_without_a_home_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 4_242_424)
    job = ("--output_dir", str(tmp_path), "--world_size", "2", "--model", "tiny")
    assert main(job) == 2
    assert "HOME = None: is not set, and user id 4242424 has no home folder" in capsys.readouterr().out
    assert main(["--environment"]) == 2


HOSTS = [f"node{index:04d}" for index in range(2048)]


@pytest.mark.parametrize(
    ("line", "config", "arguments", "shows"),
    [
        ("{} slots=8", {}, "--world_size 16384", "[0] [1] [2] [3]"),
        ("{} slots=8", {}, "--world_size 16384", "[16382] [16383] Model"),
        ("{} slots=8", {}, "--include nowhere", "The hosts are node0000 (slots 0-7), "),
        ("{} slots=8", {}, "--include nowhere", "2,043 more and node2047 (slots 0-7)."),
        ("{} slots=8", {}, "--include " + "@".join(f"{name}x" for name in HOSTS), "no host 'node0000x'"),
        ("{} slots=8", {}, "--include node0000:" + ",".join(map(str, range(8, 3000))), "more and 2999"),
        ("{} slot=8", {}, "", "... and 2,038 errors more like it, then:"),
        ("{} slot=8", {}, "", "hosts line 2048 = 'node2047 slot=8': unknown key 'slot'"),
        ("{} slot=8", {"x": 1}, "", "x ({}:1) = 1: there is no such key"),
        ("u@{} slots=8", {}, "--num_gpus 4 --launcher slurm", "knows hosts by their names alone"),
        ("{} slots=8", {f"key{n}": n for n in range(500)}, "", "... and 490 errors more like it, then:"),
        ("{} slots=8", {f"_comment{n}": n for n in range(500)}, "", "notes more like it, then:"),
        ("{} slots=8", {"x": list(range(50_000))}, "", "characters)"),
        ("{} slots=8", {"x" * 100_000: 1}, "", "characters)"),
        ("{} slots=8", {}, "--data " + " ".join(f"no/such{n}" for n in range(3000)), "data = 'no/such2999'"),
    ],
)  # fmt: skip
def test_the_output_does_not_grow_with_what_is_looked_at(
    line: str, config: dict, arguments: str, shows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what is as many as the ranks, hosts, lines or keys, the ends are shown."""
    hosts, json_file = tmp_path / "hosts", tmp_path / "ds.json"
    hosts.write_text("".join(line.format(name) + "\n" for name in HOSTS))
    json_file.write_text(json.dumps(config))
    job = ["--output_dir", str(tmp_path / "run"), "--model", "tiny", "--deepspeed_config", str(json_file)]
    where = [] if "--world_size" in arguments else ["--hostfile", str(hosts)]
    main([*job, *where, *arguments.split()])
    shown = capsys.readouterr().out
    assert shows.replace("{}", str(json_file)) in " ".join(shown.split())
    assert len(shown) < 14_000


@pytest.mark.parametrize("launcher", [[], ["--no_ssh"]])
def test_a_full_disk_is_found_where_a_start_would_refuse_it(
    launcher: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert main(["--model", "tiny", "--output_dir", str(tmp_path / "run"), *launcher]) == 2
    assert "no space left" in capsys.readouterr().out
