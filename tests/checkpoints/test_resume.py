"""Which checkpoint a run resumes from, and that it never starts anew beside some that it cannot use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline import check
from pipeline.base.problems import JobError
from pipeline.checkpoints.folder import point_latest
from pipeline.checkpoints.lineage import read_lineage, write_lineage
from pipeline.checkpoints.manifest import TrainState, read_checkpoint
from pipeline.checkpoints.resume import examine_resume, lineage_after, select_checkpoint
from tests.checkpoints.saved_runs import edit_manifest, job_in, saved


def three(folder: Path) -> Path:
    """Checkpoints after steps 1, 2 and 3; their folder."""
    for step in (1, 2, 3):
        path = saved(folder, TrainState(step=step))
    return path.parent


def chosen(folder: Path, **options: str) -> tuple[int, str]:
    """The step that a job in `folder` resumes from, and what is printed of it."""
    selection = select_checkpoint(job_in(folder, **options))
    assert selection.checkpoint is not None
    return selection.checkpoint.state.step, "\n".join(selection.notes)


def resume_from(folder: Path, path: Path, name: str = "new") -> None:
    """Be a run in `folder` that has loaded the checkpoint at `path`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lineage(folder, lineage_after(folder, read_checkpoint(path), name))


def test_the_newest_is_taken_and_nothing_is_said(tmp_path: Path):
    three(tmp_path)
    assert chosen(tmp_path) == (3, "")


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe", b"global_step77\n", b"global_step1\n"])
def test_latest_does_not_decide(content: bytes | None, tmp_path: Path):
    """Missing, empty, garbage, leading nowhere, or older than a crash let it become."""
    folder = three(tmp_path)
    (folder / "latest").unlink()
    if content is not None:
        (folder / "latest").write_bytes(content)
    step, said = chosen(tmp_path)
    assert step == 3
    assert str(folder / "latest") in said


def test_times_of_files_do_not_decide(tmp_path: Path):
    """A clock that jumped: the newest looks oldest."""
    folder = three(tmp_path)
    for path in (folder / "global_step3", *(folder / "global_step3").rglob("*")):
        os.utime(path, (0, 0))
    assert chosen(tmp_path) == (3, "")


def _truncate(path: Path) -> None:
    (path / "sub" / "shard.pt").write_bytes(b"1234")


def _empty(path: Path) -> None:
    (path / "sub" / "shard.pt").write_bytes(b"")


def _remove_shard(path: Path) -> None:
    (path / "sub" / "shard.pt").unlink()


def _remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _manifest_of_an_older_one(path: Path) -> None:
    shutil.copy(path.with_name("global_step1") / "manifest.json", path / "manifest.json")


def _edit(path: Path) -> None:
    edit_manifest(path, lambda manifest: manifest["state"].update(tokens=1))


DAMAGES = {
    _truncate: "sub/shard.pt",
    _empty: "sub/shard.pt",
    _remove_shard: "sub/shard.pt",
    _remove_manifest: "manifest.json cannot be read (FileNotFoundError",
    _manifest_of_an_older_one: "its manifest is that of step 1",
    _edit: "it was changed since it was written",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_one_is_passed_over_and_named(damage, tmp_path: Path):
    folder = three(tmp_path)
    damage(folder / "global_step3")
    step, said = chosen(tmp_path)
    assert step == 2
    assert f"skipped {folder / 'global_step3'}: it " in said and DAMAGES[damage] in said
    lines = examine_resume(job_in(tmp_path)).lines
    assert any(str(folder / "global_step3") in line for line in lines)
    assert f"a start resumes from {folder / 'global_step2'}" in lines
    # Named, it is that one or nothing.
    if damage is not _manifest_of_an_older_one:
        with pytest.raises(JobError, match="is no complete checkpoint"):
            select_checkpoint(job_in(tmp_path, resume=str(folder / "global_step3")))


@pytest.mark.parametrize("damage", DAMAGES)
def test_where_none_is_usable_the_run_does_not_start_anew(damage, tmp_path: Path):
    folder = three(tmp_path)
    for step in (3, 2, 1):
        (damage if step > 1 else _remove_manifest)(folder / f"global_step{step}")
    assert len(examine_resume(job_in(tmp_path)).problems) == 3


def test_a_latest_without_any_checkpoint_is_no_new_start(tmp_path: Path):
    folder = three(tmp_path)
    for step in (1, 2, 3):
        shutil.rmtree(folder / f"global_step{step}")
    (problem,) = examine_resume(job_in(tmp_path)).problems
    assert problem.value == str(folder / "latest")


def test_leftovers_of_a_first_save_are_a_new_start(tmp_path: Path):
    (tmp_path / "run" / "checkpoints" / "global_step1.partial").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "global_step2.deleted").mkdir()
    assert select_checkpoint(job_in(tmp_path)).checkpoint is None


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path: Path):
    folder = three(tmp_path)
    other = (
        saved(tmp_path / "other", TrainState(step=9), seed=7)
        if (tmp_path / "other").mkdir() is None
        else None
    )
    shutil.copytree(other, folder / "global_step9")
    step, said = chosen(tmp_path)
    assert step == 3
    assert "belongs to another run: seed 7 there, 1234 here" in said


def test_a_run_that_went_back_resumes_from_there(tmp_path: Path):
    folder = three(tmp_path)
    resume_from(folder, folder / "global_step1")
    step, said = chosen(tmp_path)
    assert step == 1
    assert "was left behind" in said
    resume_from(folder, folder / "global_step1", "another")  # a crash before the first save changes nothing
    assert read_lineage(folder).branches == (("new", 1),)
    shutil.rmtree(folder / "global_step2")
    saved(tmp_path, TrainState(step=2))
    assert chosen(tmp_path)[0] == 2


def test_a_run_may_change_its_mind(tmp_path: Path):
    """Back to 1, on to another 2, then to the 3 that was left behind: the other 2 is none of its past."""
    folder = three(tmp_path)
    resume_from(folder, folder / "global_step1")
    shutil.rmtree(folder / "global_step2")
    saved(tmp_path, TrainState(step=2))
    resume_from(folder, folder / "global_step3", "third")
    assert chosen(tmp_path)[0] == 3
    _truncate(folder / "global_step3")
    assert chosen(tmp_path)[0] == 1


@pytest.mark.parametrize("lost", ["sub/shard.pt", "manifest.json", ""])
def test_what_was_passed_over_does_not_count_when_it_comes_back(lost: str, tmp_path: Path):
    """A mount was away, or somebody has brought a backup."""
    folder = three(tmp_path)
    away = tmp_path / "away"
    (folder / "global_step3" / lost).rename(away)
    if not lost:
        (folder / "global_step3").mkdir()
    assert chosen(tmp_path)[0] == 2
    resume_from(folder, folder / "global_step2")
    if not lost:
        (folder / "global_step3").rmdir()
    away.rename(folder / "global_step3" / lost)
    step, said = chosen(tmp_path)
    assert step == 2
    assert "global_step3: it was left behind" in said


def test_a_checkpoint_that_was_moved_aside_can_be_returned_to(tmp_path: Path):
    """Back to 1, on to another 2, then to the first 2 by its new name."""
    folder = three(tmp_path)
    resume_from(folder, folder / "global_step1")
    (folder / "global_step2").rename(aside := folder / "global_step2.left_behind")
    saved(tmp_path, TrainState(step=2))
    assert select_checkpoint(job_in(tmp_path)).checkpoint.path == folder / "global_step2"
    resume_from(folder, aside, "third")
    assert select_checkpoint(job_in(tmp_path)).checkpoint.path == aside


def test_going_on_from_the_newest_is_no_branch(tmp_path: Path):
    folder = three(tmp_path)
    resume_from(folder, folder / "global_step3")
    assert read_lineage(folder).branches == ()


def test_a_run_that_came_from_another_folder_remembers_it(tmp_path: Path):
    source = three(tmp_path)
    here = tmp_path / "here"
    here.mkdir()
    own = saved(here, TrainState(step=5)).parent
    resume_from(own, source / "global_step2")
    step, said = chosen(here)
    assert step == 2
    assert "global_step5: it was left behind" in said
    shutil.rmtree(own / "global_step5")
    saved(here, TrainState(step=4))
    assert chosen(here)[0] == 4
    shutil.rmtree(own / "global_step4")
    assert chosen(here)[0] == 2
    shutil.rmtree(source / "global_step2")
    assert examine_resume(job_in(here)).problems


def test_a_lineage_that_cannot_be_read_is_a_problem_until_a_checkpoint_is_named(tmp_path: Path):
    folder = three(tmp_path)
    (folder / "lineage.json").write_text("{", encoding="utf-8")
    (problem,) = examine_resume(job_in(tmp_path)).problems
    assert "lineage.json" in str(problem.value) and "--resume PATH" in problem.remedy
    resume_from(folder, folder / "global_step2")
    assert chosen(tmp_path)[0] == 2


def test_what_changed_is_told_setting_by_setting(tmp_path: Path):
    saved(tmp_path)
    config = {
        "train_batch_size": 32,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
        "zero_optimization": {"stage": 1},
    }
    found = examine_resume(job_in(tmp_path, config, train_steps=999))
    assert not found.problems
    said = "\n".join(found.lines)
    for change in ("zero_stage 0 -> 1", "gradient_clipping: ", "-> 0.5", "train_batch_size: ", "-> 32"):
        assert change in said
    assert "-> 0.25" in said and "-> 999" in said
    assert not any("settings changed" in line for line in examine_resume(job_in(tmp_path)).lines)


def test_latest_is_no_longer_needed_for_an_older_choice(tmp_path: Path):
    folder = three(tmp_path)
    point_latest(folder, "global_step2")
    assert chosen(tmp_path)[0] == 3


def test_the_check_shows_what_the_start_would_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = three(tmp_path)
    _truncate(folder / "global_step3")
    arguments = ["--deepspeed_config", str(tmp_path / "ds.json"), "--model", "tiny"]
    arguments += ["--output_dir", str(tmp_path / "run"), "--world_size", "4", "--train_steps", "77"]
    assert check.main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"skipped {folder}/global_step3: it is no complete checkpoint" in shown
    assert f"a start resumes from {folder}/global_step2; layout changed: data 2 -> 4" in shown
    assert "settings changed since it was saved: " in shown and "-> 77" in shown


@pytest.mark.parametrize("inside", [False, True])
def test_the_folder_around_checkpoints_is_none_of_them(inside: bool, tmp_path: Path):
    folder = three(tmp_path)
    with pytest.raises(JobError) as caught:
        select_checkpoint(job_in(tmp_path, resume=str(folder if inside else folder.parent)))
    assert f"{folder}/global_stepN" in caught.value.problems[0].remedy
