"""A file of a checkpoint runs nothing when it is read, but by leave."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from pipeline.base.problems import JobError
from pipeline.checkpoints.load import load_checkpoint
from pipeline.checkpoints.manifest import TrainState
from pipeline.checkpoints.torch_file import foreign_names, load_torch_file
from pipeline.engine.build import build_engine
from pipeline.job.job import Job
from tests.checkpoints.saved_runs import find_checkpoint
from tests.checkpoints.small import job, save_checkpoint, start, train
from tests.harness import run_ranks
from tests.job.drafts import draft, found


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.what = (function, arguments)

    def __reduce__(self) -> Any:
        return self.what


def malicious(path: Path, witness: Path) -> Path:
    """A file that creates another one when it is read without care."""
    torch.save({"module": torch.ones(2), "more": Calls(os.system, f"touch {witness}")}, path)
    return path


def test_a_malicious_file_is_refused_and_runs_nothing(tmp_path: Path):
    witness = tmp_path / "witness"
    path = malicious(tmp_path / "shard.pt", witness)
    torch.load(path, weights_only=False)
    assert witness.exists()  # it would have worked
    witness.unlink()
    assert foreign_names(path) == ["posix.system"]
    with pytest.raises(JobError) as caught:
        load_torch_file(path)
    (problem,) = caught.value.problems
    assert "posix.system" in problem.rule and "--allow_pickle posix.system" in problem.remedy
    with pytest.raises(
        JobError, match=r"cannot be read safely \(Trying to load unsupported"
    ):  # torch never allows this one
        load_torch_file(path, allowed=["posix.system"])
    assert not witness.exists()


def test_one_name_is_allowed_at_a_time(tmp_path: Path):
    path = tmp_path / "shard.pt"
    value = {"a": Calls(collections.deque, [1, 2]), "b": Calls(os.getcwd)}
    torch.save(value, path)
    with pytest.raises(JobError, match=r"--allow_pickle collections\.deque posix\.getcwd"):
        load_torch_file(path)
    with pytest.raises(JobError, match=r"--allow_pickle posix\.getcwd"):
        load_torch_file(path, allowed=["collections.deque"])
    torch.save({"a": Calls(collections.deque, [1, 2])}, path)
    assert load_torch_file(path, allowed=["collections.deque"]) == {"a": collections.deque([1, 2])}
    with pytest.raises(JobError, match=r"collections\.deque"):  # and not from then on
        load_torch_file(path)


def test_what_deepspeed_keeps_is_read(tmp_path: Path):
    scaler = DynamicLossScaler(256.0, 2.0, 100, 1.0, 2, False, dtype=torch.float16)
    torch.save({"loss_scaler": scaler, "weights": torch.arange(3)}, tmp_path / "shard.pt")
    for mmap in (False, True):
        content = load_torch_file(tmp_path / "shard.pt", mmap=mmap)
        assert vars(content["loss_scaler"]) == vars(scaler)
        assert content["weights"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"not a file of torch", b"PK\x03\x04" + bytes(100)])
def test_something_else_is_an_error(content: bytes, tmp_path: Path):
    (tmp_path / "shard.pt").write_bytes(content)
    with pytest.raises(ValueError, match="no file that torch wrote"):
        load_torch_file(tmp_path / "shard.pt")


def test_a_name_that_does_not_exist_is_a_problem(tmp_path: Path):
    torch.save({}, tmp_path / "shard.pt")
    with pytest.raises(JobError, match="there is no such thing"):
        load_torch_file(tmp_path / "shard.pt", allowed=["collections.nothing"])
    for name in ("deque", "a b.c", ".x", ""):
        assert found(draft(tmp_path, {}, allow_pickle=(name,)).problems, "allow_pickle"), name
    assert draft(tmp_path, {}, allow_pickle=("collections.deque",)).job is not None


ADAM = {"type": "AdamW", "params": {"lr": 0.1}}
BF16 = {"bf16": {"enabled": True}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 2": {"zero_optimization": {"stage": 2}},
    "zero 3": {"zero_optimization": {"stage": 3}},
    "bf16, zero 0": {**BF16, "data_types": {"grad_accum_dtype": "bf16"}},
    "bf16, zero 1": {**BF16, "zero_optimization": {"stage": 1}},
    "bf16 sums": {**BF16, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "bf16"}},
    "pipeline": {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}},
    "offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
}


def test_all_that_deepspeed_writes_is_on_the_list(tmp_path: Path):
    jobs = []
    for name, config in LAYOUTS.items():
        (tmp_path / name).mkdir()
        jobs.append(job(tmp_path / name, optimizer=ADAM, **config))
    run_ranks(save_and_load, 2, jobs)
    files = list(tmp_path.rglob("*.pt"))
    assert len(files) > 2 * len(LAYOUTS)
    assert {name for file in files for name in foreign_names(file)} == set()


def save_and_load(jobs: list[Job]) -> None:
    engine = start(jobs[0])
    for each in jobs:
        engine = build_engine(each, engine.parallel)
        train(engine, 1)
        save_checkpoint(engine, each, TrainState(step=1))
        load_checkpoint(engine, find_checkpoint(each.output_dir, "auto"))
        assert not hasattr(engine.deepspeed.checkpoint_engine.load, "keywords")  # as it was


@pytest.mark.parametrize("name", ["zero 2", "pipeline"])
def test_deepspeeds_own_loading_and_a_conversion_run_nothing(name: str, tmp_path: Path):
    before = job(tmp_path, optimizer=ADAM, **LAYOUTS[name])
    run_ranks(save_once, 2, before)
    path = find_checkpoint(before.output_dir, "auto").path
    witness = tmp_path / "witness"
    for file in path.glob("*.pt"):
        malicious(file, witness)
    after = job(tmp_path, optimizer=ADAM, zero_optimization={"stage": 3})
    for each in (before, after):
        assert run_ranks(refused, 2, each, path) == [True, True]
    assert not witness.exists()


def save_once(job: Job) -> None:
    engine = start(job)
    train(engine, 1)
    save_checkpoint(engine, job, TrainState(step=1))


def refused(job: Job, path: Path) -> bool:
    """Whether loading a checkpoint, whose files are changed, is refused because of what they would call."""
    with pytest.raises(JobError, match=r"would call posix\.system"):
        load_checkpoint(start(job), _unverified(path))
    return True


def _unverified(path: Path) -> Any:
    """The checkpoint, whatever the sizes of its files are now."""
    from pipeline.checkpoints import manifest

    keep = manifest._wrong_files
    manifest._wrong_files = lambda checkpoint: []
    try:
        return manifest.read_checkpoint(path)
    finally:
        manifest._wrong_files = keep
