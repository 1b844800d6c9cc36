"""--help and --help_all of every command: whole, short, and true."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeline import check, evaluate, export, generate, prepare, reshard
from pipeline.base.fields import fields_of
from pipeline.base.option_help import example_command, groups_of, is_positional
from pipeline.checkpoints.export.arguments import GenerateOptions
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.job.models import PRESETS
from pipeline.job.options import JOB_GROUPS, RECIPES, CheckOptions, EvaluateOptions, Options, parse_options
from pipeline.job.resolve import resolve
from pipeline.job.run_file import run_json
from pipeline.launch import launch
from pipeline.launch.preflight import Lists
from pipeline.training import rank
from tests.job.drafts import world

ROOT = Path(__file__).parents[1]
INTERNAL = JOB_GROUPS[-1].rest.split()


class Command(NamedTuple):
    main: Callable[[list[str]], object]
    records: tuple[type, ...]
    lines: int  # that its --help may have: two screens of a high window

    def shown(self, asked: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
        with pytest.raises(SystemExit) as stop:
            self.main([asked])
        assert stop.value.code == 0
        return capsys.readouterr().out.splitlines()


COMMANDS = {
    "launch": Command(launch.main, (Options, LauncherOptions, Lists), 100),
    "pretrain": Command(lambda asked: parse_options(asked, prog=rank.PROGRAM), (Options,), 80),
    "check": Command(check.main, (CheckOptions, LauncherOptions, Lists), 105),
    "evaluate": Command(evaluate.main, (EvaluateOptions, LauncherOptions, Lists), 105),
    "reshard": Command(reshard.main, (reshard.ReshardOptions, LauncherOptions, Lists), 105),
    "prepare": Command(prepare.main, (prepare.PrepareOptions,), 50),
    "export": Command(export.main, (export.ExportOptions,), 50),
    "generate": Command(generate.main, (GenerateOptions,), 60),
}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    return COMMANDS[request.param]


def options_in(lines: list[str]) -> set[str]:
    """The names that begin a line of a group, with all that they are called."""
    heads = [line.split("  ")[1].replace(",", " ") for line in lines if line.startswith("  -")]
    return {word.removeprefix("--") for head in heads for word in head.split() if word.startswith("--")}


def test_help_is_short_and_help_all_is_whole(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = command.shown("--help", capsys), command.shown("--help_all", capsys)
    groups = groups_of(command.records)
    frequent = {name for group in groups for name in group.frequent.split()}
    every = {name for record in command.records for name in fields_of(record)}
    grouped = [name for group in groups for name in f"{group.frequent} {group.rest}".split()]
    assert sorted(grouped) == sorted(every), "each option is in one group"
    fields = [field for record in command.records for field in fields_of(record).values()]
    positional = {field.name for field in fields if is_positional(field)}
    assert every - positional <= options_in(whole)
    asking = {"help", "help_all"} if len(groups) > 2 else {"help"}
    assert options_in(short) == (frequent - positional) | asking
    assert not options_in(short) & set(INTERNAL)
    assert len(short) <= command.lines
    for lines in (short, whole):
        assert [line for line in lines if len(line) > 80 or "\0" in line] == []
        assert [line[:7] for line in lines if "usage" in line] == ["usage: "]
    titles = [[line for line in lines if re.fullmatch(r"\w.*:", line)] for lines in (short, whole)]
    assert titles[0] == [title for title in titles[1] if title != "set by launchers:"]


def test_help_names_choices_defaults_presets_and_recipes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = COMMANDS["launch"].shown("--help", capsys)
    text = " ".join(" ".join(lines).split())
    for name in [*PRESETS, *(path.stem for path in RECIPES)]:
        assert name in text
    assert "--launcher {pdsh,openmpi,mpich,impi,mvapich,slurm}" in text
    assert "--seed N Seed of the initial weights, the sample order and dropout (default: 1234)" in text
    assert "(default: tiny on CPU, gpt2-124m on GPU)" in text and "-H, --hostfile FILE" in text
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, COMMANDS["launch"].shown("--help", capsys))) <= 50


@pytest.mark.parametrize("example", Options.HELP.examples, ids=lambda example: example[2])
def test_an_example_of_the_help_can_start(
    example: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as it is written, by the check, where its files are; on hosts where it names some."""
    (tmp_path / "corpus.txt").write_text("a text of some words\n" * 50_000)
    shutil.copytree(ROOT / "hostfiles", tmp_path / "hostfiles")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    launcher, options, _ = example
    if "run.json" in options:
        job = resolve(Options(output_dir="runs/mine"), world(2))
        Path("runs/mine/run.json").write_text(json.dumps(run_json(job)))
    assert check.main(shlex.split(f"{launcher} {options}")) == 0
    assert example_command("./launch.sh", launcher, options).split()[0] == "./launch.sh"
    started = example_command(rank.PROGRAM, launcher, options)
    assert started == " ".join(f"deepspeed {launcher} pipeline/pretrain.py {options}".split())
