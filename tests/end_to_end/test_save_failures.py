"""Saves that fail in a run, its time limit and its stop file."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import Workshop, before_call, run_faulty_job, signal_on_call
from tests.harness import run_job

SIGTERM = signal.SIGTERM


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def saves_fail(_: list[str], rank: int, victim: int, steps: tuple[int, ...], stop: bool = False) -> None:
    """Rank `victim` cannot write the checkpoints of `steps`; with `stop`, it is asked to stop then."""
    from pipeline.checkpoints.snapshot import PlannedFiles

    write = PlannedFiles.write

    def fail(self: PlannedFiles, folder: Path) -> Any:
        if rank == victim and any(folder.name.startswith(f"global_step{step}.") for step in steps):
            if stop:
                os.kill(os.getpid(), SIGTERM)
            raise OSError(28, "No space left on device", str(folder / "shard.pt"))
        return write(self, folder)

    PlannedFiles.write = fail


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param((), id="at once", marks=pytest.mark.slow),
        pytest.param(("--async_save",), id="in the background"),
    ],
)
def test_a_run_goes_on_without_a_checkpoint_that_failed(mode: tuple, shop: Workshop):
    arguments = shop.arguments("run", shop.config(), "--save_interval", "1", *mode, steps=4)
    result = run_faulty_job(arguments, 2, saves_fail, 1, (2, 3))
    result.check()
    for step in (2, 3):
        assert (
            f"WARNING: global_step{step} could not be saved: rank 1 on {os.uname().nodename}: "
            f"OSError: [Errno 28] No space left on device: "
        ) in result.stdout[0]
    assert "The run continues without this checkpoint; the last is global_step1" in result.stdout[0]
    assert [line["step"] for line in shop.steps("run")] == [1, 2, 3, 4]
    names = sorted(path.name for path in shop.latest("run").parent.iterdir())
    assert names == ["global_step1", "global_step4", "latest"]


@pytest.mark.parametrize("mode", [(), ("--async_save",)], ids=["at once", "in the background"])
@pytest.mark.parametrize(
    ("options", "steps", "stop"),
    [(("--save_failure", "stop"), (2,), False), ((), (4,), False), ((), (2,), True)],
    ids=["asked for", "the last", "before a stop"],
)
@pytest.mark.slow
def test_a_run_that_cannot_save_its_end_fails(
    options: tuple, steps: tuple, stop: bool, mode: tuple, shop: Workshop
):
    """The exit code says so, and what was saved before counts. A stop tries once more what has failed."""
    arguments = shop.arguments("run", shop.config(), "--save_interval", "1", *options, *mode, steps=4)
    result = run_faulty_job(arguments, 2, saves_fail, 1, (*steps, 3) if stop else steps, stop)
    assert result.exit_codes == (1, 1)
    for stderr in result.stderr:
        assert "SaveFailed: global_step" in stderr
    assert shop.latest("run").name == f"global_step{steps[0] - 1}"
    assert shop.outcome("run")["status"] == "failed"
    assert "could not be saved: rank 1" in shop.outcome("run")["message"]
    run_job(arguments, 2).check()
    assert [line["step"] for line in shop.steps("run")] == [1, 2, 3, 4]


def slow_steps(_: list[str], rank: int, seconds: float, after: Callable[[int], None] | None = None) -> None:
    """Each step takes so long."""
    from pipeline.engine.engine import TrainEngine
    from pipeline.training import stopping

    stopping.FILE_SECONDS = 0.0
    stopping.LEAVING_SECONDS = 1.0
    train_step = TrainEngine.train_step

    def slow(engine: TrainEngine, *args: Any) -> Any:
        result = train_step(engine, *args)
        time.sleep(seconds)
        if after is not None and rank == 1:
            after(engine.step)
        return result

    TrainEngine.train_step = slow


@pytest.mark.slow
def test_a_time_limit_counts_from_the_launch_and_is_kept(shop: Workshop):
    begin = time.time()
    arguments = shop.arguments("run", shop.config(), "--time_limit", "60", steps=10_000)
    # Launched 50 seconds ago: 10 are left, of which the start takes some.
    result = run_faulty_job([*arguments, "--started_at", str(begin - 50)], 2, slow_steps, 0.2)
    assert time.time() - begin < 10
    assert result.exit_codes == (3, 3), result.stderr[0]
    steps = len(shop.steps("run"))
    assert f"stopped after step {steps} of 10000 (time limit)" in result.stdout[0]
    assert shop.latest("run").name == f"global_step{steps}"
    assert shop.outcome("run")["message"] == "time limit"


class Touch:
    """Touches a file at a step; a class, because it goes to another process."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def __call__(self, step: int) -> None:
        if step == self.step:
            self.path.touch()


@pytest.mark.slow
def test_a_stop_file_stops_and_is_gone_for_the_next_start(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), steps=4)
    touch = Touch(shop.folder / "run" / "STOP", 2)
    result = run_faulty_job(arguments, 2, slow_steps, 0.0, touch)
    assert result.exit_codes == (3, 3), result.stderr[0]
    done = len(shop.steps("run"))
    assert done in (2, 3)  # rank 1 touches it while rank 0 may be a step ahead
    assert f"stopped after step {done} of 4 (stop file)" in result.stdout[0]
    assert not touch.path.exists()
    run_job(arguments, 2).check()
    assert len(shop.steps("run")) == 4


@pytest.mark.slow
def test_a_stop_file_of_several_jobs_stays_and_does_not_stop_the_next_start(shop: Workshop):
    path = shop.folder / "STOP_ALL"
    arguments = shop.arguments("run", shop.config(), "--stop_file", str(path), steps=4)
    path.touch()
    result = run_faulty_job(arguments, 2, slow_steps, 0.0, Touch(path, 2))
    assert result.exit_codes == (3, 3), result.stderr[0]
    assert path.exists()
    run_job(arguments, 2).check()
    assert len(shop.steps("run")) == 4


def stop_early(_: list[str], rank: int, target: str, victims: tuple[int, ...], stuck: float) -> None:
    """Ranks get a signal while they start, and then stay in C code for a while."""

    def signalled() -> None:
        if rank in victims:
            libc = ctypes.CDLL(None)
            os.kill(os.getpid(), SIGTERM) if not stuck else libc.kill(os.getpid(), SIGTERM)
            if stuck:
                libc.usleep(int(stuck * 1e6))

    before_call(target, signalled)


STARTING = ("pipeline.training.rank:read_job", "pipeline.training.preparing:load_data")


@pytest.mark.slow
@pytest.mark.parametrize("target", STARTING)
def test_a_signal_before_the_ranks_have_met_ends_each_at_once(target: str, shop: Workshop):
    begin = time.monotonic()
    result = run_faulty_job(
        shop.arguments("run", shop.config()), 2, stop_early, target, (0, 1), 0.0, timeout=30
    )
    assert result.exit_codes == (3, 3), result.stderr[0]
    assert "SIGTERM: stopping before the first step." in result.stderr[0]
    assert time.monotonic() - begin < 10
    if target.endswith("load_data"):
        assert shop.outcome("run")["status"] == "stopped"
        assert shop.outcome("run")["message"].startswith("SIGTERM on rank")
    run_job(shop.arguments("run", shop.config()), 2).check()


@pytest.mark.slow
def test_a_rank_that_waits_for_others_in_c_code_is_ended(shop: Workshop):
    """As in the rendezvous, which may wait for half an hour."""
    target = "pipeline.training.preparing:start_distributed"
    arguments = shop.arguments("run", shop.config())
    begin = time.monotonic()
    result = run_faulty_job(arguments, 2, stop_early, target, (0, 1), 20.0, timeout=30)
    assert result.exit_codes == (3, 3), result.stderr[0]
    assert time.monotonic() - begin < 12
    assert shop.outcome("run")["status"] == "stopped"


@pytest.mark.slow
def test_a_resume_that_is_stopped_does_not_read_the_checkpoint(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), steps=1)
    run_job(arguments, 2).check()
    arguments = shop.arguments("run", shop.config(), steps=2)
    result = run_faulty_job(arguments, 2, signal_on_call, "pipeline.training.run:build_engine", 1, SIGTERM)
    assert result.exit_codes == (3, 3), result.stderr[0]
    assert "resumed" not in result.stdout[0]
    assert shop.outcome("run")["step"] == 1
    run_job(arguments, 2).check()
