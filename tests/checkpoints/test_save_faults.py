"""What goes wrong in a save: it fails on every rank with the reason, leaves nothing, and the next works."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.checkpoints.manifest import TrainState, read_checkpoint
from pipeline.checkpoints.saver import SaveFailed, Saver
from pipeline.job.job import Job
from tests.checkpoints.small import job, start, train
from tests.harness import RankFailure, run_ranks

ZERO_1 = {"zero_optimization": {"stage": 1}}
ZERO_3 = {"zero_optimization": {"stage": 3}}
VICTIM = 1
# Breaks something for the rank whose folder this is; what it returns mends it.
Fault = Callable[[int, Path], Callable[[], None]]


def fail_second_save(
    job: Job, break_it: Callable[[int, Path], Callable[[], None]], in_background: bool
) -> list[str]:
    """Save, save with something broken, save again; what the second save raised, and what lay there then."""
    engine = start(job)
    saver = Saver(engine, job, in_background=in_background)
    save(saver, TrainState(step=1))
    train(engine, 2)
    mend = break_it(engine.parallel.rank, saver.folder)
    with pytest.raises(SaveFailed) as failure:
        save(saver, TrainState(step=2))
    mend()
    train(engine, 3)  # whereby the ranks wait for each other
    left = sorted(path.name for path in saver.folder.iterdir() if path.name.startswith("global"))
    save(saver, TrainState(step=3))
    return [str(failure.value), *left]


def save(saver: Saver, state: TrainState) -> None:
    saver.begin(state)
    saver.finish()


def write_fails(rank: int, _: Path) -> Callable[[], None]:
    """The last file of a rank cannot be written."""
    from pipeline.checkpoints import snapshot

    write = snapshot.write_bytes if rank == 0 else snapshot.PickledObject.write
    holder, name = (snapshot, "write_bytes") if rank == 0 else (snapshot.PickledObject, "write")

    def fail(*args: object) -> None:
        write(*args)
        raise OSError(errno.EIO, "Input/output error", str(args[-1]))

    if rank == VICTIM:
        setattr(holder, name, fail)
    return lambda: setattr(holder, name, write)


def planning_fails(rank: int, _: Path) -> Callable[[], None]:
    """No memory for what DeepSpeed wants to save."""
    from pipeline.checkpoints import snapshot

    made = snapshot.PickledObject

    def fail(value: object) -> None:
        raise MemoryError("no memory for a copy")

    if rank == VICTIM:
        snapshot.PickledObject = fail
    return lambda: setattr(snapshot, "PickledObject", made)


def manifest_fails(rank: int, _: Path) -> Callable[[], None]:
    from pipeline.checkpoints import saver

    write = saver.write_manifest

    def fail(*args: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    saver.write_manifest = fail
    return lambda: setattr(saver, "write_manifest", write)


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize(
    ("config", "fault", "reason"),
    [
        (ZERO_1, write_fails, "rank 1 on {host}: OSError: [Errno 5] Input/output error"),
        (ZERO_3, planning_fails, "rank 1 on {host}: MemoryError: no memory for a copy"),
        (ZERO_1, manifest_fails, "rank 0 on {host}: OSError: [Errno 122] Disk quota exceeded"),
    ],
    ids=["write", "plan, zero 3", "manifest"],
)
def test_a_fault_on_one_rank_fails_the_save_on_all(
    config: dict, fault: Callable, reason: str, in_background: bool, tmp_path: Path
):
    description = job(tmp_path, **config)
    first, second = run_ranks(fail_second_save, 2, description, fault, in_background, timeout=60)
    assert first == second
    message, *left = first
    assert "global_step2 could not be saved: " + reason.format(host=os.uname().nodename) in message
    assert left == ["global_step1"]
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 3):
        assert read_checkpoint(folder / f"global_step{step}").state.step == step
    assert (folder / "latest").read_text() == "global_step3\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(rank: int, folder: Path) -> Callable[[], None]:
    """Leave 20 kB, which the check beforehand sees."""
    ballast = folder.parent / "ballast"
    if rank == 0:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        ballast.write_bytes(b"x" * (free - 20_000))
    return lambda: ballast.unlink(missing_ok=True)


def fill_unseen(rank: int, folder: Path) -> Callable[[], None]:
    """The disk fills up after the check."""
    from pipeline.checkpoints import saver

    mend, look = fill(rank, folder), saver.free_bytes
    saver.free_bytes = lambda folder: 10**12

    def mend_all() -> None:
        saver.free_bytes = look
        mend()

    return mend_all


def make_read_only(rank: int, folder: Path) -> Callable[[], None]:
    place = str(folder.parents[1])
    if rank == 0:
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    return lambda: subprocess.run(["mount", "-o", "remount,rw,size=2m", place], check=True) and None


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (fill, "no space left: {folder} has 16.4 kB free, the checkpoint takes"),
        (fill_unseen, "OSError: [Errno 28] No space left on device"),
        (make_read_only, "OSError: [Errno 30] Read-only file system"),
    ],
    ids=["full", "filling up", "read-only"],
)
def test_a_disk_that_takes_nothing(
    fault: Callable, reason: str, in_background: bool, small_disk: Path, tmp_path: Path
):
    description = job(tmp_path, output=small_disk / "run", **ZERO_1)
    first, second = run_ranks(fail_second_save, 2, description, fault, in_background, timeout=60)
    assert first == second
    folder = small_disk / "run" / "checkpoints"
    assert reason.format(folder=folder) in first[0]
    assert read_checkpoint(folder / "global_step1").state.step == 1
    assert read_checkpoint(folder / "global_step3").state.step == 3


def lose_folder(job: Job) -> str:
    """The mount of the output is gone: its place is an empty folder."""
    engine = start(job)
    saver = Saver(engine, job)
    save(saver, TrainState(step=1))
    if engine.parallel.rank == 0:
        Path(job.output_dir).rename(f"{job.output_dir}.away")
        Path(job.output_dir).mkdir()
    with pytest.raises(SaveFailed) as failure:
        save(saver, TrainState(step=2))
    return str(failure.value)


def test_a_vanished_mount_is_not_written_to(tmp_path: Path):
    first, second = run_ranks(lose_folder, 2, job(tmp_path, **ZERO_1), timeout=60)
    assert first == second
    assert "rank 0" in first
    assert "FileNotFoundError" in first
    assert list((tmp_path / "run").iterdir()) == []
    assert read_checkpoint(tmp_path / "run.away" / "checkpoints" / "global_step1").state.step == 1


def die_while_writing(job: Job, in_background: bool) -> None:
    from pipeline.checkpoints import snapshot

    engine = start(job)
    saver = Saver(engine, job, in_background=in_background)
    save(saver, TrainState(step=1))
    if engine.parallel.rank == VICTIM:
        snapshot.PickledObject.write = lambda *args: os._exit(9)
    save(saver, TrainState(step=2))


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])
def test_a_rank_that_dies_takes_the_others_along(in_background: bool, tmp_path: Path):
    begin = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(die_while_writing, 2, job(tmp_path, **ZERO_1), in_background, timeout=60)
    assert time.monotonic() - begin < 30
    assert [outcome.state for outcome in failure.value.outcomes].count("hung") == 0
    folder = tmp_path / "run" / "checkpoints"
    assert (folder / "latest").read_text() == "global_step1\n"
    assert read_checkpoint(folder / "global_step1").state.step == 1
