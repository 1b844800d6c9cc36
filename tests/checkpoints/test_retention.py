"""What a run keeps; a removal never comes first, and one that is cut short leaves nothing half."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.base import files
from pipeline.checkpoints.folder import remove_leftovers, retain
from pipeline.checkpoints.manifest import TrainState
from pipeline.checkpoints.resume import select_checkpoint
from tests.checkpoints.saved_runs import job_in, saved
from tests.checkpoints.test_resume import resume_from
from tests.job.drafts import draft, found


@pytest.fixture(autouse=True)
def no_other_warning(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What a test does not expect to be logged fails it."""
    yield
    assert caplog.messages == []


def run_of(folder: Path, steps: int, **options: Any) -> tuple[Path, list[str]]:
    """A run that has saved after every step, retaining after each; its folder and what is in it."""
    job = job_in(folder, **options)
    for step in range(1, steps + 1):
        path = saved(folder, TrainState(step=step))
        retain(path.parent, step, job.saves)
    return path.parent, kept(path.parent)


def kept(folder: Path) -> list[int]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return sorted(int(name.removeprefix("global_step")) for name in names)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_last": 1}, [7]),
        ({"keep_last": 3}, [5, 6, 7]),
        ({"keep_last": 99}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_last": 2, "keep_every": 3}, [3, 6, 7]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6, 7]),
    ],
)
def test_the_last_and_every_so_many_are_kept(options: dict[str, int], expected: list[int], tmp_path: Path):
    assert run_of(tmp_path, 7, **options)[1] == expected


def test_the_lowest_losses_are_kept_beside_the_last(tmp_path: Path):
    """What the newest checkpoint lists; of a list that was longer, the first."""
    lowest: list[list[float]] = []
    rules = job_in(tmp_path, keep_last=1, keep_best=2).saves
    for step, loss in enumerate((5.0, 3.0, 4.0, 2.0, 6.0, 7.0), start=1):
        lowest = sorted([*lowest, [step, loss]], key=lambda each: each[1])[:2]
        path = saved(tmp_path, TrainState(step=step, best_eval_loss={"lowest": lowest}))
        retain(path.parent, step, rules)
    assert kept(path.parent) == [2, 4, 6]
    retain(path.parent, 6, job_in(tmp_path, keep_last=1, keep_best=1).saves)
    assert kept(path.parent) == [4, 6]


def test_nothing_is_removed_before_the_newest_is_complete(tmp_path: Path):
    folder, _ = run_of(tmp_path, 3)
    (folder / "global_step3" / "sub" / "shard.pt").write_bytes(b"")
    retain(folder, 3, job_in(tmp_path, keep_last=1).saves)
    assert kept(folder) == [1, 2, 3]


def test_what_is_not_the_runs_own_stays(tmp_path: Path):
    folder, _ = run_of(tmp_path, 4)
    (folder / "mine").mkdir()
    (folder / "global_step2" / "manifest.json").unlink()
    retain(folder, 4, job_in(tmp_path, keep_last=1).saves)
    assert sorted(path.name for path in folder.iterdir()) == [
        "global_step2",
        "global_step4",
        "latest",
        "mine",
    ]


def test_what_a_run_left_behind_stays(tmp_path: Path):
    folder, _ = run_of(tmp_path, 4)
    resume_from(folder, folder / "global_step2")
    shutil.rmtree(folder / "global_step3")
    saved(tmp_path, TrainState(step=3))
    retain(folder, 3, job_in(tmp_path, keep_last=1).saves)
    assert kept(folder) == [3, 4]
    assert select_checkpoint(job_in(tmp_path)).checkpoint.state.step == 3


def test_a_kill_in_the_middle_of_a_removal_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, _ = run_of(tmp_path, 3)

    class Killed(BaseException):
        pass

    def kill_after_one_file(path: Path) -> None:
        next(file for file in sorted(path.rglob("*")) if file.is_file()).unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", kill_after_one_file)
        with pytest.raises(Killed):
            retain(folder, 3, job_in(tmp_path, keep_last=1).saves)
    selection = select_checkpoint(job_in(tmp_path))
    assert selection.checkpoint.state.step == 3 and selection.notes == ()
    assert [path.name for path in folder.glob("*.deleted")] == ["global_step2.deleted"]
    remove_leftovers(folder)  # at the next start
    assert kept(folder) == [1, 3]
    retain(folder, 3, job_in(tmp_path, keep_last=1).saves)
    assert kept(folder) == [3]


def test_of_a_link_only_the_link_is_removed_and_later_saves_continue(tmp_path: Path):
    folder, _ = run_of(tmp_path, 3)
    archive = tmp_path / "archive"
    (folder / "global_step2").rename(archive)
    (folder / "global_step2").symlink_to(archive)
    retain(folder, 3, job_in(tmp_path, keep_last=1).saves)
    assert kept(folder) == [3] and not (folder / "global_step2").is_symlink()
    assert (archive / "manifest.json").exists()
    (folder / "global_step4.deleted").symlink_to(archive)
    (folder / "global_step4.partial").write_text("a file")
    remove_leftovers(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["global_step3", "latest"]
    assert (archive / "manifest.json").exists()


def test_what_cannot_be_removed_is_reported_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder, _ = run_of(tmp_path, 3)
    monkeypatch.setattr(Path, "rename", _refuse)
    retain(folder, 3, job_in(tmp_path, keep_last=1).saves)
    assert len(caplog.messages) == 2 and "read-only" in caplog.messages[0]
    caplog.clear()
    assert kept(folder) == [1, 2, 3]


def _refuse(path: Path, target: Path) -> None:
    raise OSError(30, "read-only file system", str(path))


def test_keep_every_needs_keep_last(tmp_path: Path):
    (problem,) = found(draft(tmp_path, {}, keep_every=5).problems, "keep_every")
    assert "--keep_last" in problem.remedy
    assert found(draft(tmp_path, {}, keep_last=0).problems, "keep_last")
    assert draft(tmp_path, {}, keep_last=1, keep_every=5).job is not None


def test_which_checkpoint_to_take_is_no_matter_of_the_run(tmp_path: Path):
    """Or a start from its run.json would go back to that checkpoint again."""
    options = job_in(tmp_path, keep_last=2).options
    saved_options = json.loads(json.dumps(options.to_json()))
    assert saved_options["keep_last"] == 2
    assert not {"resume", "allow_pickle"} & saved_options.keys()
