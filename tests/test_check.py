"""The check as users run it: its text, its exit codes, its speed, and that it imports no torch."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.check import main
from pipeline.cluster.world import local_world
from pipeline.data.token_file import write_index
from pipeline.data.tokenizer_folder import byte_tokenizer_json, write_tokenizer_folder
from pipeline.job.models import PRESETS
from pipeline.job.options import Options
from pipeline.job.resolve import resolve
from pipeline.job.run_file import write_run_file
from pipeline.launch.launch import main as launch

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


@dataclass
class Job:
    """A wrong job, and what both commands must say of it.

    Attributes:
        arguments: With {} for the folder of the files.
        says: The first error.
        others: Further errors; one cause has one.
    """

    arguments: str
    says: str
    others: int = 0


def make_wrong_files(folder: Path) -> None:
    """Data, tokenizers and files of which each is wrong in one way."""
    text = "to be or not to be\n" * 200
    (folder / "text.txt").write_text(text)
    (folder / "short.txt").write_text("hi")
    (folder / "empty.txt").write_text("")
    (folder / "late.txt").write_bytes(b"a" * 100_000 + b"\xff")
    (folder / "far.txt").write_bytes(b"a b\n" * 500_000 + "\u4f60\n".encode() * 500_000)
    (folder / "field.jsonl").write_text('{"txt": "a"}\n' * 9)
    (folder / "broken.jsonl").write_text('{"text": "a"\n' * 9)
    (folder / "x.pdf").write_bytes(b"%PDF")
    for name in ("half", "cut", "other", "high"):
        (folder / f"{name}.bin").write_bytes(np.arange(4, dtype="<u2").tobytes())
    with (folder / "cut.idx").open("wb") as file:
        write_index(file, np.dtype("<u2"), np.array([4]))
        file.truncate(40)
    for name, tokens in (("other", 7), ("high", 4)):
        with (folder / f"{name}.idx").open("wb") as file:
            write_index(file, np.dtype("<u2"), np.array([tokens]))
    (folder / "high.bin").write_bytes(np.array([1, 2, 3, 999], dtype="<u2").tobytes())
    (folder / "hosts").write_text("# mine\nnode1 slots=8\n")
    (folder / "ds.json").write_text('// mine\n{"bf16": {"enabled": false}}')
    (folder / "comet.json").write_text('{"comet": {"enabled": true}}')
    content = json.loads(byte_tokenizer_json())
    large = copy.deepcopy(content)
    large["model"]["vocab"] |= {f"word{number}": 257 + number for number in range(9)}
    words = {**content, "pre_tokenizer": {"type": "Whitespace"}, "decoder": None}
    words["model"] = {"type": "WordLevel", "vocab": {"to": 0, "[U]": 1}, "unk_token": "[U]"}
    broken = {**content, "model": {"type": "WordLevel", "vocab": {"to": 0}}}
    for name, each in (("large", large), ("words", words), ("broken", broken)):
        write_tokenizer_folder(folder / name, json.dumps(each), "<|endoftext|>")


WRONG_JOBS = (
    Job("--data {}/no.txt", "data = '{}/no.txt': does not exist"),
    Job("--data {}/empty.txt", "there is no text in it"),
    Job("--data {}/short.txt", "1 tokens do not fill one sample of 64 + 1 tokens"),
    Job("--data {}/late.txt", "data = '{}/late.txt': is not UTF-8 at byte 100000"),
    Job("--data {}/field.jsonl", "no field 'text'; it has 'txt'"),
    Job("--data {}/broken.jsonl", "data = '{}/broken.jsonl:1': not JSON"),
    Job("--data {}/x.pdf", "the suffix .pdf is not one of those that are read"),
    Job("--data {}/half", "{}/half.idx is missing; token files are PREFIX.bin and PREFIX.idx"),
    Job("--data {}/cut", "cut.idx has 40 bytes, and 62 by its own counts"),
    Job("--data {}/other", "the .bin file has 8 bytes, and its index says 14"),
    Job("--data {}/high", "holds the token id 999, and the tokenizer has ids 0 .. 256"),
    Job("--data {}/text.txt --validation a={}/text.txt", "holds the same tokens as the training source"),
    Job("--data {}/text.txt {}/field.jsonl --validation a={}/no.txt", "validation = '{}/no.txt'"),
    Job("--tokenizer {}/none --data {}/text.txt", "tokenizer = '{}/none': is neither bytes nor a folder"),
    Job("--tokenizer {}/large --data {}/text.txt", "tiny has 257 token ids, and the tokenizer {}/large"),
    Job("--tokenizer {}/broken --data {}/text.txt", "tokenizer.json cannot be read"),
    Job("--tokenizer {}/words --data {}/text.txt", "from 20% on that is refused"),
    Job("--tokenizer {}/words --data {}/far.txt", "of the first 65,536 characters looked at, the tokenizer"),
    Job("--deepspeed_config {}/hosts", "a DeepSpeed JSON is read here. Give it as --hostfile {}/hosts"),
    Job("--hostfile {}/ds.json", "is JSON, and a hostfile has a line for each host"),
    Job("--hostfile {}/ds.json --deepspeed_config {}/hosts", "give it as --deepspeed_config {}/ds.json", 1),
    Job("--model {}/none", "model = '{}/none': there is no such file or folder"),
    Job("--model {}/none --tokenizer {}/none --data {}/no", "model = '{}/none'", 2),
    Job("--deepspeed_config {}/comet.json", "the monitor needs the Python package comet_ml"),
)  # fmt: skip


def errors_of(shown: str) -> list[str]:
    """Each error with its remedy, on one line."""
    text = shown[shown.index("error: ") :] if "error: " in shown else ""
    parts = re.split(r"^(error|warning|note): ", text, flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return sorted(
        " ".join(said.partition("\nThis job")[0].split()) for kind, said in pairs if kind == "error"
    )


def test_what_is_wrong_with_a_job_is_said_by_the_check_and_by_the_start_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wrong_files(tmp_path)
    monkeypatch.setattr("pipeline.launch.restart_loop.start_once", pytest.fail)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for job in WRONG_JOBS:
        arguments = job.arguments.replace("{}", str(tmp_path)).split()
        arguments += [] if "--model" in arguments else ["--model", "tiny"]
        arguments += ["--output_dir", str(tmp_path / "run")]
        assert main(arguments) == 2, job
        checked = errors_of(capsys.readouterr().out)
        assert launch(arguments) == 2, job
        assert errors_of(capsys.readouterr().err) == checked
        assert len(checked) == 1 + job.others, (job, checked)
        assert any(job.says.replace("{}", str(tmp_path)) in each for each in checked), checked
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "free", "shows"),
    [
        ("", 10**12, "9,001 tokens, counted; 0.24 passes"),
        ("--train_steps 20", 10**12, "2.4 passes"),
        ("--train_steps 200", 10**12, "24 passes, of which 4 are nearly as good as new data"),
        ("--train_steps 400", 10**12, "48 passes over {}/text.txt (9,001 tokens, counted): up to 4"),
        ("--train_steps 400", 10**12, "Give more data (with 107,789 tokens, 4 passes), or --train_steps 33"),
        ("--data {}/large.txt", 10**12, "2,000,000 tokens, estimated from 1.91 MiB of text by a sample"),
        ("--data hub:a/b", 10**12, "at an address, from which ranks read it when they start"),
        ("--model gpt2", 10**12, "has 257 ids, and gpt2-124m has rows for 50,257: 38,400,000"),
        ("--train_steps 9", 10**12, "checkpoints 5.96 MB each on this host; 1 TB are free"),
        ("--train_steps 9 --save_interval 2", 10**12, "5.96 MB each on this host, 5 at most: 29.8 MB; 1 TB"),
        ("--train_steps 9 --save_interval 2", 25 * 10**6, "--keep_last 3, or choose another --output_dir"),
        ("--train_steps 9 --save_interval 2 --keep_last 3", 25 * 10**6, "4 at most: 23.8 MB; 25 MB are free"),
        ("--train_steps 9 --save_interval 2 --keep_last 4", 25 * 10**6, "saves up to 5 checkpoints of 5.96"),
        ("--train_steps 9 --save_interval 2", 8 * 10**6, "Make room, or choose another --output_dir"),
    ],
)  # fmt: skip
def test_what_is_to_be_expected(
    arguments: str,
    free: int,
    shows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text.txt").write_text("x\n" * 4500)
    (tmp_path / "large.txt").write_text("x\n" * 1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    given = ["--train_steps", "2", *arguments.split()]
    given += [] if "--data" in given else ["--data", "{}/text.txt"]
    given = ["--model", "tiny", "--output_dir", "{}/run", *given]
    assert main([word.replace("{}", str(tmp_path)) for word in given]) == 0
    assert shows.replace("{}", str(tmp_path)) in " ".join(capsys.readouterr().out.split())


def test_the_time_that_is_left_is_that_of_the_last_steps_of_the_same_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    options = Options(model="tiny", output_dir=str(tmp_path), train_steps=4000)
    write_run_file(resolve(options, local_world(num_gpus=2)))
    steps = [{"step": step, "tokens_per_second": 1000.0 * step} for step in range(1, 401)]
    lines = [*steps, {"step": 400, "eval_loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = ["--model", "tiny", "--output_dir", str(tmp_path), "--train_steps", "4000"]
    assert main([*job, "--num_gpus", "2"]) == 0
    assert "for the 3,600 steps left, at 201,000 tokens/s" in " ".join(capsys.readouterr().out.split())
    assert main([*job, "--num_gpus", "4"]) == 0
    assert "steps left" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("monitor", "block", "variables", "file", "lacks"),
    [
        ("wandb", {}, {}, None, "wandb.enabled = True: the service needs a key"),
        ("wandb", {}, {"WANDB_API_KEY": "hush-hush"}, None, ""),
        ("wandb", {}, {"WANDB_MODE": "offline"}, None, ""),
        ("wandb", {}, {"WANDB_MODE": "online"}, None, "WANDB_MODE=offline records without a key"),
        ("wandb", {}, {}, (".netrc", "machine api.wandb.ai login user password hush-hush"), ""),
        ("wandb", {}, {}, (".netrc", "machine other login user password hush-hush"), "needs a key"),
        ("wandb", {}, {"WANDB_BASE_URL": "https://track.here/x"}, (".netrc", "machine track.here"), ""),
        ("wandb", {}, {}, (".deepspeed_env", "WANDB_API_KEY=hush-hush"), ""),
        ("comet", {}, {}, None, "comet.enabled = True: the service needs a key"),
        ("comet", {"online": False}, {}, None, ""),
        ("comet", {"api_key": "hush-hush"}, {}, None, ""),
        ("comet", {}, {}, (".comet.config", "[comet]\napi_key = hush-hush"), ""),
    ],
)
def test_a_service_without_a_key_is_refused(
    monitor: str, block: dict, variables: dict[str, str], file: tuple[str, str] | None, lacks: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("pipeline.job.training_rules.find_spec", lambda name: SimpleNamespace(origin="there"))
    for name in (*(name for name in os.environ if name.startswith(("WANDB_", "COMET_"))), "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), "DS_ACCELERATOR": "cpu", **variables}.items():
        monkeypatch.setenv(name, value)
    if file is not None:
        (tmp_path / file[0]).write_text(file[1])
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({monitor: {"enabled": True, **block}}))
    job = ["--model", "tiny", "--output_dir", str(tmp_path / "run"), "--deepspeed_config", str(config)]
    assert main(job) == (2 if lacks else 0)
    shown = " ".join(capsys.readouterr().out.split())
    assert lacks in shown and ("needs a key" in shown) == bool(lacks) and "hush-hush" not in shown
