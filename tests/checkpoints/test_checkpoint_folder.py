"""Which checkpoint counts, when it is complete, and who may continue from it."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.problems import JobError
from pipeline.checkpoints.files import digest_of
from pipeline.checkpoints.folder import publish, remove_leftovers
from pipeline.checkpoints.manifest import FileEntry, TrainState, read_checkpoint, write_manifest
from pipeline.checkpoints.resume import layout_changes, resume_problems, select_checkpoint
from tests.checkpoints.saved_runs import STATE, edit_manifest, find_checkpoint, job_in, saved
from tests.end_to_end.jobs import write_text


@pytest.fixture(autouse=True)
def no_other_warning(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What a test does not expect to be logged fails it."""
    yield
    assert caplog.messages == []


def refusal(path: Path) -> str:
    with pytest.raises(JobError) as caught:
        read_checkpoint(path)
    (problem,) = caught.value.problems
    assert problem.key == "resume" and problem.value == str(path)
    assert "--resume PATH" in problem.remedy
    return problem.rule


def test_what_was_written_is_read(tmp_path: Path):
    path = saved(tmp_path)
    for found in (
        find_checkpoint(str(tmp_path / "run"), "auto"),
        find_checkpoint(str(tmp_path / "elsewhere"), str(path)),
    ):
        assert found is not None
        assert (found.state, found.path, found.folder) == (STATE, path, path.parent)
    assert find_checkpoint(str(tmp_path / "run"), "never") is None
    assert find_checkpoint(str(tmp_path / "elsewhere"), "auto") is None


def test_a_checkpoint_without_manifest_is_incomplete(tmp_path: Path):
    path = saved(tmp_path)
    (path / "manifest.json").unlink()
    assert "manifest.json cannot be read (FileNotFoundError" in refusal(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"state": {"steps": 3}}',
        '{"state": {}, "layout": {}, "identity": {}, "files": []}',
    ],
)
def test_a_broken_manifest_is_a_problem(text: str, tmp_path: Path):
    path = saved(tmp_path)
    (path / "manifest.json").write_text(text, encoding="utf-8")
    assert "manifest.json cannot be read" in refusal(path)


@pytest.mark.parametrize("content", [b"1234", b"123456", None])
def test_a_shard_of_another_size_is_named(content: bytes | None, tmp_path: Path):
    path = saved(tmp_path)
    shard = path / "sub" / "shard.pt"
    shard.unlink() if content is None else shard.write_bytes(content)
    assert "sub/shard.pt" in refusal(path)


def test_the_same_job_may_continue_and_be_longer(tmp_path: Path):
    saved(tmp_path)
    assert resume_problems(job_in(tmp_path)) == []
    assert resume_problems(job_in(tmp_path, train_steps=99)) == []
    assert resume_problems(job_in(tmp_path, {"gradient_clipping": 0.5, "train_batch_size": 32})) == []


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
NVME = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
}
CHANGES = [
    ({"zero_optimization": {"stage": 2}}, 2, "zero_stage 0 -> 2"),
    ({"pipeline": {"stages": 2}}, 2, "pipeline 1 -> 2, data 2 -> 1"),
    ({}, 4, "data 2 -> 4"),
    ({"sequence_parallel_size": 2}, 4, "sequence 1 -> 2"),
    ({"tensor_parallel": {"autotp_size": 2}}, 4, "tensor 1 -> 2"),
    (BF16, 2, "zero_stage 0 -> 1, compute fp32 -> bf16"),
]


@pytest.mark.parametrize(("config", "ranks", "says"), CHANGES)
def test_another_layout_is_named_and_may_continue(
    config: dict[str, Any], ranks: int, says: str, tmp_path: Path
):
    path = saved(tmp_path)
    job = job_in(tmp_path, config, ranks)
    assert resume_problems(job) == []
    assert says in ", ".join(layout_changes(read_checkpoint(path), job))
    assert layout_changes(read_checkpoint(path), job_in(tmp_path)) == []


@pytest.mark.parametrize(("config", "ranks", "says"), CHANGES)
def test_without_an_index_another_layout_is_refused(
    config: dict[str, Any], ranks: int, says: str, tmp_path: Path
):
    """As earlier versions saved them."""

    def as_before(manifest: dict[str, Any]) -> None:
        del manifest["files"]["shards.json"], manifest["layout"]["nvme"]
        formats = {key: manifest["layout"].pop(key) for key in ("compute", "accumulation")}
        manifest["layout"]["precision"] = {**formats, "reason": ""}

    edit_manifest(saved(tmp_path), as_before, format_2=False)
    assert resume_problems(job_in(tmp_path)) == []
    (problem,) = resume_problems(job_in(tmp_path, config, ranks))
    assert "was saved in another layout" in problem.rule and "it has no shards.json" in problem.rule
    assert says.split(", ")[0] in problem.rule


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({}, SGD, "(optimizer AdamW -> SGD), and SGD cannot use the optimizer state of AdamW"),
        ({}, NVME, "state on NVMe drives is not converted"),
        (NVME, {}, "state on NVMe drives is not converted"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    before: dict[str, Any], after: dict[str, Any], says: str, tmp_path: Path
):
    saved(tmp_path, config=before)
    assert resume_problems(job_in(tmp_path, before)) == []
    (problem,) = resume_problems(job_in(tmp_path, after))
    assert says in problem.rule


@pytest.mark.parametrize("change", [{"seed": 7}, {"seq_length": 32}, {"dropout": 0.1}])
def test_another_run_is_named(change: dict[str, Any], tmp_path: Path):
    path = saved(tmp_path)
    elsewhere = {"output_dir": str(tmp_path / "elsewhere"), "resume": str(path)}
    assert resume_problems(job_in(tmp_path, **elsewhere)) == []
    (problem,) = resume_problems(job_in(tmp_path, **elsewhere, **change))
    assert "belongs to another run" in problem.rule
    assert next(iter(change)) in problem.rule


def test_moved_data_is_left_to_its_fingerprint(tmp_path: Path):
    path = saved(tmp_path)
    moved = write_text(tmp_path / "moved")
    options = {"output_dir": str(tmp_path / "elsewhere"), "resume": str(path), "data": (str(moved),)}
    assert resume_problems(job_in(tmp_path, **options)) == []


@pytest.mark.parametrize("keeps", [False, True])
def test_publishing_replaces_the_whole_folder(keeps: bool, tmp_path: Path):
    old, partial = tmp_path / "global_step3", tmp_path / "global_step3.partial"
    for folder, name in ((old, "old.pt"), (partial, "new.pt")):
        folder.mkdir()
        (folder / name).write_bytes(b"")
    (tmp_path / "global_step3.left_behind").mkdir()
    assert publish(partial, keeps) == old
    remove_leftovers(tmp_path)
    expected = {"global_step3", "global_step3/new.pt", "global_step3.left_behind"}
    if keeps:
        expected |= {"global_step3.left_behind1", "global_step3.left_behind1/old.pt"}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == expected


def test_a_crash_while_a_newer_state_of_a_step_is_published_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after a stop in the middle of an evaluation, which the next start has done."""
    path = saved(tmp_path, TrainState(step=3, evaluation_due=True))
    shutil.copytree(path, partial := path.with_name("global_step3.partial"))
    rename = Path.rename

    def crash(this: Path, target: Path) -> None:
        if this == partial:
            raise KeyboardInterrupt
        rename(this, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        publish(partial)
    monkeypatch.undo()
    assert not path.exists()
    chosen = select_checkpoint(job_in(tmp_path)).checkpoint
    assert chosen is not None
    assert chosen.state == TrainState(step=3, evaluation_due=True)
    remove_leftovers(path.parent)  # before the next save
    assert sorted(each.name for each in path.parent.iterdir()) == ["global_step3", "latest"]
    assert read_checkpoint(path).state == chosen.state


def test_of_two_states_of_a_step_the_one_with_the_name_counts(tmp_path: Path):
    """A crash came before the older one was removed."""
    path = saved(tmp_path, TrainState(step=3))
    shutil.copytree(path, path.with_name("global_step3.partial.replaced"))
    assert select_checkpoint(job_in(tmp_path)).checkpoint.path == path


def test_only_leftovers_of_crashes_are_removed(tmp_path: Path):
    kept = {
        "global_step1", "global_step3", "global_step3.left_behind", "global_step4_zero3.partial",
        "global_step4.partial-mine", "global_step4_old.deleted", "global_step_notes.partial",
    }  # fmt: skip
    removed = (
        "global_step2.partial", "global_step1.partial.replaced", "global_step7.deleted",
        "global_step3.left_behind2.deleted", "global_step8.partial.replaced.deleted",
    )  # fmt: skip
    for name in (*kept - {"global_step3"}, *removed, "global_step3.partial.replaced"):
        (tmp_path / name / "sub").mkdir(parents=True)
    for name in (".seen-e8b7-0", "latest", "latest.tmp7", "lineage.json.tmp8", "latest.tmpl"):
        (tmp_path / name).write_text("global_step1\n", encoding="utf-8")
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "latest", "latest.tmpl"}


def test_a_leftover_that_cannot_be_removed_is_told_and_keeps_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name in ("global_step1.deleted", "global_step2.partial"):
        (tmp_path / name).mkdir()
    remove = shutil.rmtree

    def busy(path: Path) -> None:
        if path.name == "global_step1.deleted":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", busy)
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step1.deleted"]
    assert (
        "global_step1.deleted could not be removed: [Errno 16] Device or resource busy" in caplog.messages[0]
    )
    caplog.clear()


def test_the_manifest_lists_every_file_but_itself(tmp_path: Path):
    path = saved(tmp_path)
    files = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["files"]
    assert {name: entry["bytes"] for name, entry in files.items()} == {"shards.json": 3, "sub/shard.pt": 5}
    assert read_checkpoint(path).files["sub/shard.pt"] == FileEntry(5, digest_of(path / "sub" / "shard.pt"))


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["state"].update(consumed_samples=49),
        lambda manifest: manifest["files"].pop("sub/shard.pt"),
        lambda manifest: manifest.pop("digest"),
        lambda manifest: manifest.update(format=3),
    ],
)
def test_a_manifest_that_was_edited_is_not_taken(change: Callable[[dict], object], tmp_path: Path):
    path = saved(tmp_path)
    edit_manifest(path, change)
    assert "manifest.json cannot be read" in refusal(path)


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_manifest_that_was_truncated_is_not_taken(length: int, tmp_path: Path):
    path = saved(tmp_path)
    content = (path / "manifest.json").read_bytes().rstrip()
    (path / "manifest.json").write_bytes(content[:length])
    assert "manifest.json cannot be read" in refusal(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "sub/../../outside"])
def test_a_manifest_names_no_file_outside_its_folder(name: str, tmp_path: Path):
    path = saved(tmp_path)
    edit_manifest(path, lambda manifest: manifest["files"].update({name: 1}), format_2=False)
    assert "is outside of the checkpoint" in refusal(path)


def test_a_manifest_says_what_it_was_made_with(tmp_path: Path):
    manifest = json.loads((saved(tmp_path) / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["format"] == 2 and manifest["hosts"] == 1 and manifest["shared"] is True
    assert manifest["versions"]["torch"] == version("torch")
    assert manifest["config_digest"].startswith("sha256:")
    assert manifest["settings"]["batch.train_batch_size"] == job_in(tmp_path).batch.train_batch_size


def test_where_hosts_share_no_file_system_the_others_files_may_be_missing_but_not_wrong(tmp_path: Path):
    path = saved(tmp_path)
    write_manifest(job_in(tmp_path), STATE, path, read_checkpoint(path).files, hosts=2, shared=False)
    shard = path / "sub" / "shard.pt"
    shard.unlink()
    assert not read_checkpoint(path).shared
    shard.write_bytes(b"1234")
    assert "sub/shard.pt" in refusal(path)
