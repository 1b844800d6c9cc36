"""The place of an export: one process at a time, and no crash takes a folder away."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipeline.base.problems import JobError
from pipeline.checkpoints.export.export_folder import StagingFolder
from tests.checkpoints.kills import kill_at_call

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def fill(folder: Path, content: str) -> None:
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(content)


def content(folder: Path) -> set[str]:
    """What its files hold; all of them are there."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    return {path.read_text() for path in folder.iterdir()}


def replaced_in_a_child(place: StagingFolder, kill_at: int) -> bool:
    """Whether a child process that replaced the folder was killed at its n-th change on the disk."""
    child = os.fork()
    if child == 0:
        try:
            kill_at_call(kill_at)
            with place.held():
                fill(place.content, "new")
                place.publish()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("empty_meanwhile", [False, True])
def test_a_crash_at_any_moment_leaves_the_old_folder_or_the_new_one(empty_meanwhile: bool, tmp_path: Path):
    seen = []
    for number in range(1, 100):
        folder = tmp_path / str(number) / "out"
        folder.parent.mkdir()
        fill(folder, "old")
        place = StagingFolder(folder)
        killed = replaced_in_a_child(place, number)
        if empty_meanwhile and not folder.exists():
            folder.mkdir()  # by somebody who misses it
        with place.held():
            seen.append(content(folder))
        assert [path.name for path in folder.parent.iterdir()] == ["out"]
        if not killed:
            break
    assert not killed and number > 8
    assert seen == [{"old"}] * seen.count({"old"}) + [{"new"}] * seen.count({"new"})
    assert seen.count({"old"}) > 3 and seen.count({"new"}) > 3


def test_one_process_at_a_time(tmp_path: Path):
    place = StagingFolder(tmp_path / "out")
    with place.held():
        fill(place.content, "first")
        with pytest.raises(JobError, match="another process is exporting into it"), place.held():
            pass
        assert content(place.content) == {"first"}
        place.publish()
    assert content(tmp_path / "out") == {"first"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_timeout_of_the_disk_is_no_other_process(tmp_path: Path):
    with pytest.raises(TimeoutError), StagingFolder(tmp_path / "out").held():
        raise TimeoutError(110, "Connection timed out")
    assert [path.name for path in tmp_path.iterdir()] == []


def test_an_old_folder_that_cannot_be_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    place = StagingFolder(tmp_path / "out")
    fill(tmp_path / "out", "old")
    with place.held():
        fill(place.content, "new")
        monkeypatch.setattr("pipeline.checkpoints.export.export_folder.remove_tree", refuse)
        place.publish()
    assert content(tmp_path / "out") == {"new"}
    assert ".out.export-replaced, which was replaced, cannot be removed: " in caplog.messages[0]
