"""run.json: written, read back, and what keeps its folder for one run."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.problems import JobError
from pipeline.checkpoints.folder import steps_in
from pipeline.job.job import Job
from pipeline.job.model_source import starts_anew
from pipeline.job.options import parse_options
from pipeline.job.run_file import code_state, restart_problems, write_run_file
from tests.job.drafts import draft, found, world


def started(folder: Path, **options: Any) -> Job:
    """A job whose run.json lies in folder/run."""
    job = draft(folder, {}, **options).job
    assert job is not None
    write_run_file(job)
    return job


def test_holds_options_and_json(tmp_path: Path) -> None:
    job = started(tmp_path, seed=7)
    saved = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert saved["options"]["seed"] == 7
    assert saved["deepspeed_json"] == {} and saved["deepspeed"] == job.deepspeed
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


def test_gives_the_options_back(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    job = started(tmp_path, seed=7, data=(str(tmp_path),), train_steps=9)
    path = str(tmp_path / "run" / "run.json")
    assert replace(parse_options(["--config", path]), config=None) == job.options
    assert parse_options([f"--config={path}", "--train_steps", "10"]).train_steps == 10


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"seq_length": 32}, {"dropout": 0.1}, {"eval_fraction": 0.1}]
)
def test_a_folder_of_another_run_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    started(tmp_path)
    (problem,) = found(draft(tmp_path, {}, **change).problems, "output_dir")
    (name,) = change
    assert name in problem.rule and "there" in problem.rule and "here" in problem.rule


def test_another_model_names_its_sizes(tmp_path: Path) -> None:
    started(tmp_path)
    (problem,) = found(draft(tmp_path, {}, model="gpt2-124m").problems, "output_dir")
    assert "model.hidden_size 96 there, 768 here" in problem.rule


def test_layout_batch_and_length_may_change(tmp_path: Path) -> None:
    started(tmp_path)
    config = {"pipeline": {"stages": 2}, "train_batch_size": 32, "zero_optimization": {"stage": 1}}
    assert draft(tmp_path, config, world(4), train_steps=3).job is not None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"identity": 3}', '{"identity": null}'])
def test_a_broken_run_file_is_a_problem(text: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(text, encoding="utf-8")
    (problem,) = found(draft(tmp_path, {}).problems, "output_dir")
    assert "cannot be read" in problem.rule


def test_a_file_in_place_of_the_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("", encoding="utf-8")
    (problem,) = found(draft(tmp_path, {}).problems, "output_dir")
    assert problem.rule == "is a file"


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("file/run", "is a file"),
        ("loop", "cannot be reached (Too many levels of symbolic links)"),
        ("nowhere", "is a link that leads nowhere"),
        ("sealed/run", "sealed is not writable"),
        ("occupied", "is a file"),
        ("unlinked", "is a link that leads nowhere"),
    ],
)
def test_a_folder_that_cannot_be_made_is_a_problem(
    path: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for folder in ("sealed", "occupied", "unlinked"):
        (tmp_path / folder).mkdir()
    (tmp_path / "occupied" / "checkpoints").touch()
    (tmp_path / "unlinked" / "checkpoints").symlink_to(tmp_path / "absent")
    # Root may write everywhere, whatever a folder's mode says.
    monkeypatch.setattr("os.access", lambda folder, mode: Path(folder).name != "sealed")
    (problem,) = draft(tmp_path, {}, output_dir=str(tmp_path / path)).problems
    assert problem.key == "output_dir" and rule in problem.rule


def test_what_is_held_out_belongs_to_the_run(tmp_path: Path) -> None:
    started(tmp_path, eval_samples=0)
    assert draft(tmp_path, {}, eval_samples=0, eval_fraction=0.5).job is not None
    (problem,) = draft(tmp_path, {}, eval_samples=8).problems
    assert "eval_fraction 0.0 there, 0.05 here" in problem.rule


def test_a_folder_with_checkpoints_is_not_started_anew(tmp_path: Path) -> None:
    started(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir()
    assert draft(tmp_path, {}, resume="never").job is not None
    (tmp_path / "run" / "checkpoints" / "global_step3").mkdir()
    (problem,) = draft(tmp_path, {}, resume="never").problems
    assert problem.key == "resume" and "holds checkpoints" in problem.rule
    assert draft(tmp_path, {}).job is not None


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_checkpoints_that_cannot_be_listed_are_no_new_start(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a user who may not read them, which root never meets."""
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    listed = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path == checkpoints:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    options = replace(parse_options(["--resume", resume]), output_dir=str(tmp_path / "run"))
    assert starts_anew(options, tmp_path / "run") == (resume == "never")
    problems = restart_problems(tmp_path / "run", resume)
    assert [problem.key for problem in problems] == (["output_dir"] if resume == "never" else [])
    assert all("cannot be listed (Permission denied)" in problem.rule for problem in problems)
    with pytest.raises(JobError, match="cannot be listed"):
        steps_in(checkpoints)


@pytest.mark.parametrize(
    ("saved", "given", "meant"),
    [
        ({"train_tokens": 4096}, "--train_steps 10", {"train_steps": 10, "train_tokens": None}),
        ({"train_steps": 10}, "--train_tokens 4096", {"train_steps": None, "train_tokens": 4096}),
        ({"train_steps": 10}, "--train_steps 20", {"train_steps": 20, "train_tokens": None}),
        ({"data_blend": "b.json"}, "--data a", {"data": ("a",), "data_blend": None}),
        ({"data": ["a"]}, "--data_blend b.json", {"data": (), "data_blend": "b.json"}),
        # Both were given: a contradiction, which the rules tell.
        ({}, "--data a --data_blend b.json", {"data": ("a",), "data_blend": "b.json"}),
    ],
)
def test_what_is_said_replaces_what_a_saved_run_says_in_another_way(
    saved: dict, given: str, meant: dict, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"options": saved}))
    options = parse_options(["--config", str(path), *given.split()])
    assert {name: getattr(options, name) for name in meant} == meant


def test_the_state_of_the_code_is_its_commit_and_whether_it_was_changed(tmp_path: Path):
    assert code_state(tmp_path) is None  # no repository
    code = tmp_path / "pipeline" / "code.py"
    code.parent.mkdir()
    code.write_text("1")
    named = ("-c", "user.name=n", "-c", "user.email=e@localhost")
    for words in (("init", "-q"), ("add", "."), (*named, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    (tmp_path / "notes.txt").write_text("no code")
    state = code_state(tmp_path)
    assert state is not None and re.fullmatch("[0-9a-f]{40}", state["commit"]) and state["dirty"] is False
    code.write_text("2")
    assert code_state(tmp_path) == state | {"dirty": True}
    assert code_state(tmp_path / "away") is None
