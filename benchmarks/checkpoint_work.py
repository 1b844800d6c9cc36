"""What ranks do for `benchmarks/checkpoint.py`, save and load, each beside its bare equivalent, and for
`benchmarks/copies.py`.

Every duration is that of the slowest rank, from a barrier on.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Task, start_engine
from benchmarks.workers import Clock
from pipeline.checkpoints.conversion import convert
from pipeline.checkpoints.copies import CopyCheck
from pipeline.checkpoints.folder import remove_checkpoint, tag_of
from pipeline.checkpoints.load import load_checkpoint
from pipeline.checkpoints.manifest import Checkpoint, TrainState, read_checkpoint
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.snapshot import PlannedFiles, plan_shards
from pipeline.checkpoints.verification import Verifier
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.data.loader import read_step
from pipeline.job.run_file import CHECKPOINTS
from pipeline.training.quiet import captured_stdout

_BLOCK = 1 << 24


@dataclass(frozen=True)
class Work:
    """One group's task.

    Attributes:
        rounds: That count; one more comes before, for memory and files that are touched for the first time.
        checkpoint: To load or convert.
        cold: What is read is not in the page cache.
    """

    task: Task
    rounds: int
    checkpoint: str = ""
    cold: bool = True


@dataclass
class Saves:
    """Seconds by round.

    Attributes:
        save: From the call to a checkpoint that counts.
        plain: `torch.save` of the same tensors by every rank into a file of its own, brought to the disk.
        blocked: In the background: while training waits, at the beginning and at the end.
        slowed: What the steps in between took longer than the same number of steps without a save.
        bytes: Of the whole checkpoint.
        path: The last one.
    """

    save: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    slowed: list[float] = field(default_factory=list)
    bytes: int = 0
    path: str = ""

    def add(self, **seconds: float) -> None:
        """Another round."""
        for name, value in seconds.items():
            getattr(self, name).append(value)


def save_in_turn(work: Work, environment: RankEnvironment, clock: Clock) -> Saves:
    """Save at once, save plainly, save in the background, round by round."""
    trainer = _Trainer(work.task, environment)
    engine, job = trainer.engine, trainer.engine.job
    at_once, behind = Saver(engine, job), Saver(engine, job, in_background=True)
    bare = Path(work.task.setting.folder) / f"plain-{environment.rank}.pt"
    result = Saves()
    for number in range(work.rounds + 1):
        planned = plan_shards(engine, trainer.state(), bare)
        actions = [partial(at_once.begin, trainer.state()), partial(_torch_save, planned, bare)]
        # In turn each is the first: what the disk still has to do meets both.
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {which: _on_idle_disk(environment, actions[which]) for which in order}
        _once(environment, lambda: remove_checkpoint(at_once.folder / tag_of(engine.step)))
        trainer.train()
        blocked, slowed = _background(behind, trainer)
        if number:
            result.add(save=seconds[0], plain=seconds[1], blocked=blocked, slowed=slowed)
        (newest,) = at_once.folder.glob("global_step*")
        result.path, result.bytes = str(newest), sum(file.stat().st_size for file in _files(newest))
        if number < work.rounds:
            _once(environment, partial(remove_checkpoint, newest))
            trainer.train()
    return result


def _background(saver: Saver, trainer: _Trainer) -> tuple[float, float]:
    """(seconds while training waited, seconds that the steps meanwhile took longer)."""
    blocked = _seconds(lambda: saver.begin(trainer.state()))
    begin, steps = time.perf_counter(), 0
    while _any(saver.busy):
        trainer.train()
        steps += 1
    during = time.perf_counter() - begin
    blocked += _seconds(saver.finish)

    def without_a_save() -> None:
        for _ in range(steps):
            _any(saver.busy)
            trainer.train()

    return blocked, during - _seconds(without_a_save)


def load_in_turn(work: Work, environment: RankEnvironment, clock: Clock) -> dict[str, list[float]]:
    """Read the bytes of a checkpoint, all ranks together; read the files that `torch.save` made of the same
    tensors; load the checkpoint as a resumed run does: verify the digests, then take the values."""
    trainer = _Trainer(work.task, environment)
    verifier = Verifier(trainer.parallel, environment.local_rank)
    checkpoint = read_checkpoint(Path(work.checkpoint))
    files = _files(checkpoint.path)
    plain = sorted(Path(work.task.setting.folder).glob("plain-*.pt"))
    mine = plain[environment.rank :: environment.world_size]
    result: dict[str, list[float]] = {"read": [], "torch.load": [], "verify": [], "load": []}
    for number in range(work.rounds + 1):
        _once(environment, lambda: forget(files) if work.cold else None)
        read = _seconds(lambda: _read_share(files, environment))
        _once(environment, lambda: forget(plain) if work.cold else None)
        bare = _seconds(lambda: [torch.load(path, weights_only=True) for path in mine])
        _once(environment, lambda: forget(files) if work.cold else None)
        verify = _seconds(lambda: _verify(verifier, checkpoint))
        with captured_stdout():
            take = _seconds(lambda: load_checkpoint(trainer.engine, checkpoint))
        if number:
            result["read"].append(read)
            result["torch.load"].append(bare)
            result["verify"].append(verify)
            result["load"].append(take)
    return result


def convert_in_turn(work: Work, environment: RankEnvironment, clock: Clock) -> dict[str, list[float]]:
    """Copy a checkpoint, file by file and onto the disk, and convert it offline; one process."""
    job = work.task.job(2)
    checkpoint = read_checkpoint(Path(work.checkpoint))
    files = _files(checkpoint.path)
    place = Path(work.task.setting.folder)
    result: dict[str, list[float]] = {"copy": [], "convert": []}
    for number in range(work.rounds + 1):
        forget(files)
        copied = _alone(lambda: _copy(files, place / "copy"))
        shutil.rmtree(place / "copy")
        forget(files)
        converted = _alone(lambda: convert(checkpoint, job, place / "converted", workers=2))
        shutil.rmtree(place / "converted")
        if number:
            result["copy"].append(copied)
            result["convert"].append(converted)
    return result


def compare_in_turn(work: Work, environment: RankEnvironment, clock: Clock) -> dict[str, list[float]]:
    """A step, and a comparison of the copies after it."""
    trainer = _Trainer(work.task, environment)
    check = CopyCheck(trainer.engine)
    result: dict[str, list[float]] = {"step": [], "comparison": []}
    for number in range(work.rounds + 1):
        step = _seconds(trainer.train)
        compared = _seconds(lambda: check.before_save(trainer.engine.step))
        if number:
            result["step"].append(step)
            result["comparison"].append(compared)
    return result


def _verify(verifier: Verifier, checkpoint: Checkpoint) -> None:
    if failure := verifier.failure(checkpoint):
        raise ValueError(f"{checkpoint.path} {failure}")


class _Trainer:
    """A rank's engine and its steps."""

    def __init__(self, task: Task, environment: RankEnvironment) -> None:
        job = task.job(environment.world_size)
        self._data = task.setting.load_data(job).train
        self.parallel, self.engine = start_engine(job, environment)
        if environment.rank == 0:
            (Path(job.output_dir) / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        self.train()  # Adam's moments exist from now on
        dist.barrier()

    def train(self) -> None:
        """One step."""
        engine, here = self.engine, self.parallel.coordinates
        batch = engine.job.batch
        first = engine.step * batch.train_batch_size
        share = read_step(self._data, batch, here.data, self.parallel.mesh.data, first)
        engine.train_step(share.micro_batches, batch.tokens_per_step)

    def state(self) -> TrainState:
        step, batch = self.engine.step, self.engine.job.batch
        return TrainState(step, step * batch.train_batch_size, step * batch.tokens_per_step)


def _torch_save(planned: PlannedFiles, path: Path) -> None:
    """The same bytes as one list of tensors."""
    tensors = [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for file in planned.torch_files.values()
        for storage in file.storages.values()
    ]
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def forget(files: Sequence[Path]) -> None:
    """Take files out of the page cache. What is not on the disk yet stays, so it is brought there first."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_share(files: Sequence[Path], environment: RankEnvironment) -> None:
    """This rank's equal part of each file, into memory that is there already."""
    memory = memoryview(bytearray(_BLOCK))
    for path in files:
        size = path.stat().st_size
        begin, end = (size * (environment.rank + each) // environment.world_size for each in (0, 1))
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            while begin < end:
                begin += file.readinto(memory[: min(_BLOCK, end - begin)])


def _copy(files: Sequence[Path], folder: Path) -> None:
    for number, path in enumerate(files):
        folder.mkdir(exist_ok=True)
        with path.open("rb") as source, (folder / str(number)).open("wb") as target:
            shutil.copyfileobj(source, target, _BLOCK)
            target.flush()
            os.fsync(target.fileno())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _alone(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _seconds(action: Callable[[], object]) -> float:
    """How long the slowest rank takes."""
    dist.barrier()
    elapsed = torch.tensor(_alone(action), dtype=torch.float64)
    return _over_ranks(elapsed, dist.ReduceOp.MAX).item()


def _on_idle_disk(environment: RankEnvironment, action: Callable[[], object]) -> float:
    """The same, when everything written before is on the disk, and what was removed is gone."""
    _once(environment, os.sync)
    return _seconds(action)


def _any(flag: bool) -> bool:
    """Whether it is set on some rank."""
    return bool(_over_ranks(torch.tensor(int(flag)), dist.ReduceOp.MAX).item())


def _over_ranks(value: torch.Tensor, operation: Any) -> torch.Tensor:
    if torch.cuda.is_available():
        value = value.cuda()
    dist.all_reduce(value, operation)
    return value


def _once(environment: RankEnvironment, action: Callable[[], object]) -> None:
    """By rank 0, while the others wait."""
    dist.barrier()
    if environment.rank == 0:
        action()
    dist.barrier()
