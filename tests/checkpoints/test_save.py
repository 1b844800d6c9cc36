"""What a save leaves on the disk: all of its own files, nothing of others, and `latest` never astray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.folder import PARTIAL
from pipeline.checkpoints.load import load_checkpoint
from pipeline.checkpoints.manifest import TrainState, read_checkpoint
from pipeline.checkpoints.saver import SaveFailed
from pipeline.checkpoints.torch_file import PickledObject
from pipeline.job.job import Job
from tests.checkpoints.saved_runs import find_checkpoint
from tests.checkpoints.small import job, save_checkpoint, start, train
from tests.harness import run_ranks

STAGES = {"pipeline": {"stages": 2}}


def test_files_of_a_failed_save_in_another_layout_are_gone(tmp_path: Path):
    """DeepSpeed merges all files of a pipeline's layer: a tensor slice of the failed save would count."""
    partial = tmp_path / "run" / "checkpoints" / f"global_step1{PARTIAL}"
    partial.mkdir(parents=True)
    stale = "layer_00-model_01-model_states.pt"
    (partial / stale).write_bytes(b"of two tensor ranks")
    run_ranks(save_one_step, 2, job(tmp_path, **STAGES))
    checkpoint = find_checkpoint(str(tmp_path / "run"), "auto")
    assert not partial.exists()
    assert not (checkpoint.path / stale).exists()
    assert stale not in json.loads((checkpoint.path / "manifest.json").read_text())["files"]


def save_one_step(job: Job) -> None:
    engine = start(job)
    train(engine, 1)
    save_checkpoint(engine, job, TrainState(step=1))


def test_a_run_that_went_back_never_loses_its_checkpoint(tmp_path: Path):
    """It comes to the steps of the later checkpoints again, and fails while it writes the first of them."""
    description = job(tmp_path)
    run_ranks(save_three_steps, 2, description)
    folder = tmp_path / "run" / "checkpoints"
    assert (folder / "latest").read_text() == "global_step3\n"
    assert run_ranks(go_back_and_fail, 2, description, folder / "global_step1") == [True, True]
    assert (folder / "latest").read_text() == "global_step1\n"
    for step in (1, 2, 3):  # the old one of step 2 is still whole
        assert read_checkpoint(folder / f"global_step{step}").state.step == step
    # The second attempt takes its name.
    run_ranks(go_back_and_save, 2, description)
    assert find_checkpoint(str(tmp_path / "run"), "auto").state == TrainState(step=2, tokens=99)
    names = {path.name for path in folder.iterdir()}
    steps = {"global_step1", "global_step2", "global_step2.left_behind", "global_step3"}
    assert names == {"latest", "lineage.json", *steps}


def save_three_steps(job: Job) -> None:
    engine = start(job)
    for step in (1, 2, 3):
        train(engine, step)
        save_checkpoint(engine, job, TrainState(step=step))


def go_back_and_fail(job: Job, path: Path) -> bool:
    engine = start(job)
    load_checkpoint(engine, read_checkpoint(path))
    train(engine, 2)
    write = PickledObject.write

    def run_out_of_space(*args: Any) -> None:
        write(*args)
        raise OSError("no space left")

    PickledObject.write = run_out_of_space
    with pytest.raises(SaveFailed, match="no space"):
        save_checkpoint(engine, job, TrainState(step=2))
    return True


def go_back_and_save(job: Job) -> None:
    engine = start(job)
    load_checkpoint(engine, find_checkpoint(job.output_dir, "auto"))
    train(engine, 2)
    save_checkpoint(engine, job, TrainState(step=2, tokens=99))
