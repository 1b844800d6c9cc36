"""Folders that a command may make, those that are a run's, and the disk that a checkpoint must fit on."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from pipeline.checkpoints import output
from pipeline.checkpoints.output import output_problems
from tests.checkpoints.saved_runs import job_in

Usage = namedtuple("Usage", "free")


@pytest.mark.parametrize(
    "mark", ["run.json", "checkpoints/latest", "checkpoints/lineage.json", "a checkpoint"]
)
@pytest.mark.parametrize("inside", ["global_step9", "model", "global_step4/model", "."])
def test_what_lies_among_the_checkpoints_of_a_run_is_refused(mark: str, inside: str, tmp_path: Path):
    (tmp_path / "checkpoints" / "global_step4").mkdir(parents=True)
    if mark != "a checkpoint":
        (tmp_path / "checkpoints" / "global_step4").rmdir()
        (tmp_path / mark).touch()
    (problem,) = output_problems("FOLDER", str(tmp_path / "checkpoints" / inside))
    assert problem.rule == f"is in {tmp_path / 'checkpoints'}, whose content belongs to that run"


def test_other_folders_are_not(tmp_path: Path):
    (tmp_path / "run" / "checkpoints" / "global_step4").mkdir(parents=True)
    (tmp_path / "exports" / "checkpoints").mkdir(parents=True)
    for folder in ("run/model", "model", "exports/checkpoints/model"):
        assert output_problems("folder", str(tmp_path / folder)) == []


def test_a_folder_that_was_made_before_is_no_runs(tmp_path: Path):
    """The same conversion again, whose result has the name of a checkpoint."""
    folder = tmp_path / "checkpoints" / "global_step4"
    folder.mkdir(parents=True)
    assert output_problems("FOLDER", str(folder)) == []
    (tmp_path / "run.json").touch()
    assert output_problems("FOLDER", str(folder)) != []


def test_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The checkpoints of a run on another disk, a link to a run, and a path from here."""
    (tmp_path / "disk" / "global_step4").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoints")
    assert output_problems("folder", str(tmp_path / "run" / "checkpoints" / "model"))
    (tmp_path / "here" / "checkpoints" / "global_step1").mkdir(parents=True)
    (tmp_path / "to").symlink_to(tmp_path / "here" / "checkpoints")
    assert output_problems("folder", str(tmp_path / "to" / "model"))
    monkeypatch.chdir(tmp_path / "here" / "checkpoints")
    assert output_problems("folder", "model")


@pytest.mark.parametrize("small", ["run", "large"])
def test_checkpoints_may_be_a_link_to_another_disk(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = job_in(tmp_path)
    Path(job.output_dir).mkdir(exist_ok=True)
    (tmp_path / "large").mkdir()
    (Path(job.output_dir) / "checkpoints").symlink_to(tmp_path / "large")

    def usage(path: Path) -> Usage:
        on = "large" if Path(path).resolve() == (tmp_path / "large").resolve() else "run"
        return Usage(0 if on == small else 10**12)

    monkeypatch.setattr(output.shutil, "disk_usage", usage)
    assert bool(output.space_problems(job)) == (small == "large")
