"""The command line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from pipeline.job.option_ranges import LOWEST, SHARES, option_problems
from pipeline.job.options import CheckOptions, Options, from_json, parse_options
from pipeline.job.problems import JobError


def test_defaults() -> None:
    assert parse_options([]) == Options()


def test_takes_underscores_lists_and_deepspeeds_own() -> None:
    arguments = ["--deepspeed", "--local_rank=3", "--data", "a", "b", "--seq_length", "64", "--print_config"]
    options = parse_options(arguments)
    assert (options.deepspeed, options.local_rank, options.data) == (True, 3, ("a", "b"))
    assert (options.seq_length, options.print_config) == (64, True)
    assert parse_options(["--local_rank", "0"]).local_rank == 0


def test_the_world_size_belongs_to_the_check() -> None:
    assert parse_options(["--world_size", "4"], CheckOptions).world_size == 4
    for arguments in (["--world_size", "4"], ["--hostfile", "f"]):
        with pytest.raises(SystemExit) as stop:
            parse_options(arguments)
        assert stop.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--train_step", "3"], "--train_steps"),
        (["--seed", "many"], "--seed"),
        (["--seed"], "--seed"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_command_line_exits_with_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_options(arguments)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


def test_help_describes_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_options(["--help"], CheckOptions)
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for field in fields(CheckOptions):
        assert f"--{field.name}" in shown


def test_json_round_trip() -> None:
    options = Options(data=("a", "b"), seed=5, dropout=0.1)
    assert from_json(options.to_json()) == options
    with pytest.raises(JobError, match="The nearest name is seed"):
        from_json({"seeed": 1})
    for name, value in {"seed": "1", "dropout": True, "data": "a", "model": None, "train_steps": 1.5}.items():
        with pytest.raises(JobError, match=f"options.{name}"):
            from_json({name: value})


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"options": {"sed": 1}}', '{"options": 3}'])
def test_an_unusable_run_file_is_a_problem(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(JobError):
        parse_options(["--config", str(path)])


def test_ranges() -> None:
    for name, lowest in LOWEST.items():
        assert option_problems(Options(**{name: lowest})) == []
        (problem,) = option_problems(Options(**{name: lowest - 1}))
        assert problem.key == name
    for name in SHARES:
        for value in (-0.1, 1.0, float("nan")):
            (problem,) = option_problems(Options(**{name: value}))
            assert problem.key == name


def test_resume_names_a_checkpoint(tmp_path: Path) -> None:
    assert option_problems(Options(resume=str(tmp_path))) == []
    (problem,) = option_problems(Options(resume="alway"))
    assert problem.key == "resume"
