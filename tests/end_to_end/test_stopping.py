"""Signals at bad moments, finished runs started again, and checkpoints of elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import Workshop, before_call, run_faulty_job, signal_after_step, signal_on_call
from tests.end_to_end.shards import differing_files
from tests.harness import run_job, run_ranks

SIGTERM = signal.SIGTERM


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.mark.slow
def test_a_signal_to_ranks_of_which_one_has_met_the_others_stops_before_the_first_step(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), steps=3)
    result = run_faulty_job(arguments, 2, signalled_while_meeting)
    assert result.exit_codes == (3, 3), result.stderr[0]
    assert shop.steps("run") == []
    assert shop.latest("run").name == "global_step0"
    assert shop.outcome("run")["status"] == "stopped"
    run_job(arguments, 2).check()
    assert [line["step"] for line in shop.steps("run")] == [1, 2, 3]


def signalled_while_meeting(_: list[str], rank: int) -> None:
    """Both ranks get a signal when rank 0 has met rank 1, which does not know it yet."""
    from pipeline.training import preparing

    meet = preparing.meet

    def met(*args: Any) -> Any:
        parallel = meet(*args)
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), SIGTERM)
            time.sleep(0.1)
        return parallel

    preparing.meet = met
    if rank == 0:
        before_call("pipeline.training.preparing:agree_on_checkpoint", lambda: os.kill(os.getpid(), SIGTERM))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("pipeline.checkpoints.saver:plan_shards", ("--save_interval", "1")),
        ("pipeline.checkpoints.saver:plan_shards", ("--save_interval", "1", "--async_save")),
        ("pipeline.checkpoints.saver:gather_objects", ("--save_interval", "1", "--async_save")),
    ],
)
def test_a_signal_during_a_save_stops_after_it(target: str, options: tuple, shop: Workshop):
    """The last of them arrives while the checkpoint's folder is looked for, before the first step."""
    arguments = shop.arguments("run", shop.config(), *options, steps=3)
    result = run_faulty_job(arguments, 2, signal_on_call, target, 1, SIGTERM)
    assert result.exit_codes == (3, 3), result.stderr[0]
    assert [line["step"] for line in shop.steps("run")] == [1]
    assert shop.latest("run").name == "global_step1"
    run_job(arguments, 2).check()
    assert [line["step"] for line in shop.steps("run")] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"pipeline": {"stages": 2}}], ids=["plain", "pipeline"])
def test_an_evaluation_is_given_up_for_a_stop_and_done_by_the_next_start(config: dict, shop: Workshop):
    """The signal comes between its parts: all ranks stop there, and nothing of it is reported."""
    config = shop.config(**config, train_micro_batch_size_per_gpu=1)
    whole, parts = (
        shop.arguments(run, config, "--eval_interval", "1", "--eval_samples", "40", steps=3)
        for run in ("whole", "parts")
    )
    run_job(whole, 2).check()
    target = "pipeline.engine.engine:TrainEngine.eval_step"
    result = run_faulty_job(parts, 2, signal_on_call, target, 1, SIGTERM)
    assert result.exit_codes == (3, 3), result.stderr[0]
    assert "stopped after step 1 of 3 (SIGTERM on rank 1)" in result.stdout[0]
    assert shop.evaluations("parts") == {}
    assert shop.latest("parts").name == "global_step1"
    run_job(parts, 2).check()
    assert shop.steps("parts") == shop.steps("whole")
    assert shop.evaluations("parts") == shop.evaluations("whole")
    assert run_ranks(differing_files, 1, shop.latest("whole"), shop.latest("parts")) == [[]]


@pytest.mark.slow
def test_a_signal_at_the_last_step_stops_before_the_last_evaluation(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), "--eval_interval", "1", steps=2)
    result = run_faulty_job(arguments, 2, signal_after_step, 2, 0, SIGTERM)
    assert result.exit_codes == (3, 3), result.stderr[0]
    assert list(shop.evaluations("run")) == [1]
    run_job(arguments, 2).check()
    assert list(shop.evaluations("run")) == [1, 2]
    assert shop.outcome("run")["status"] == "finished"


def test_a_signal_at_the_last_step_lets_a_run_without_evaluation_finish(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), "--eval_samples", "0", steps=2)
    result = run_faulty_job(arguments, 2, signal_after_step, 2, 0, SIGTERM)
    assert result.exit_codes == (0, 0), result.stderr[0]
    assert shop.outcome("run")["status"] == "finished"


@pytest.mark.slow
def test_the_console_says_how_to_resume(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), steps=3)
    result = run_faulty_job(arguments, 1, signal_after_step, 1, 0, signal.SIGINT)
    assert result.exit_codes == (3,)
    folder = shop.folder / "run"
    # How this test has started the ranks cannot be seen; starts that can are in tests/test_readme.py.
    line = f"to resume: start it as before, with --config {folder}/run.json --output_dir {folder}"
    assert line in result.stdout[0]
    assert "SIGINT: stopping after this step" in result.stderr[0]
    run_job(line.partition("with ")[2].split(), 1).check()
    assert [line["step"] for line in shop.steps("run")] == [1, 2, 3]


@pytest.mark.slow
def test_a_finished_run_started_again_trains_nothing(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), "--sample_tokens", "5")
    first = run_job(arguments, 2).check()
    lines, saved = shop.lines("run"), (shop.latest("run") / "manifest.json").stat().st_mtime_ns
    again = run_job(arguments, 2).check()
    assert "the run had finished at step 2 before" in again.stdout[0]
    assert "--train_steps 4" in again.stdout[0]
    assert _sample(again.stdout[0]) == _sample(first.stdout[0])
    assert f"validation loss {lines[-1]['eval_loss']:.4f}" in again.stdout[0]
    assert [line["step"] for line in shop.lines("run")] == [line["step"] for line in lines]
    assert shop.evaluations("run") == {2: lines[-1]["eval_loss"]}
    assert (shop.latest("run") / "manifest.json").stat().st_mtime_ns == saved


def test_fewer_steps_than_done_leave_the_run_alone(shop: Workshop):
    run_job(shop.arguments("run", shop.config(), steps=3), 1).check()
    result = run_job(shop.arguments("run", shop.config(), steps=2), 1).check()
    assert "the run had finished at step 3 before" in result.stdout[0]
    assert "--train_steps 6" in result.stdout[0]
    assert [line["step"] for line in shop.steps("run")] == [1, 2, 3]
    assert shop.latest("run").name == "global_step3"


@pytest.mark.slow
def test_resume_of_a_named_checkpoint_in_another_folder(shop: Workshop):
    config = shop.config()
    run_job(shop.arguments("run", config, "--save_interval", "2", steps=4), 2).check()
    path = shop.folder / "run" / "checkpoints" / "global_step2"
    moved = shutil.copytree(path, shop.folder / "moved" / "global_step2")
    result = run_job(shop.arguments("other", config, "--resume", str(moved), steps=4), 2).check()
    assert f"resumed from {moved}" in result.stdout[0]
    assert "metrics.jsonl lacks 2 of the steps before this start" in result.stdout[0]
    assert shop.steps("other") == shop.steps("run")[2:]
    assert run_ranks(differing_files, 1, shop.latest("run"), shop.latest("other")) == [[]]


@pytest.mark.slow
def test_a_stop_before_a_named_checkpoint_is_read_does_not_lose_it(shop: Workshop):
    """The next start, which names none, must not begin at step 0, nor where the run was before. Before it is
    verified, the run does not go back to it: the next start must name it again."""
    config = shop.config()
    run_job(shop.arguments("run", config, "--save_interval", "1", steps=3), 2).check()
    path = str(shop.folder / "run" / "checkpoints" / "global_step1")
    verification, build = "pipeline.checkpoints.verification:_advance", "pipeline.training.run:build_engine"
    for run, target, before in (("other", build, "read"), ("run", verification, "verified")):
        arguments = shop.arguments(run, config, steps=3)
        named = [*arguments, "--resume", path]
        stopped = run_faulty_job(named, 2, stopped_in, target)
        assert stopped.exit_codes == (3, 3), stopped.stderr[0]
        said = stopped.stdout[0]
        assert f"stopped at step 1 before its checkpoint was {before} (SIGTERM on rank" in said
        folder, again = shop.folder / run, f" --resume {path}\n" if target == verification else "\n"
        assert f"with --config {folder}/run.json --output_dir {folder}{again}" in said
        assert (folder / "checkpoints" / "lineage.json").exists() == (target == build)
        arguments = named if target == verification else arguments
        assert f"resumed from {path}" in run_job(arguments, 2).check().stdout[0]


def stopped_in(args: list[str], rank: int, target: str) -> None:
    """Rank 1 gets a signal while it calls `target`; a verification takes a round for each block of a file."""
    from pipeline.checkpoints import verification

    verification.ROUND_SECONDS = -1.0
    signal_on_call(args, rank, target, 1, SIGTERM)


@pytest.mark.slow
def test_going_back_to_an_earlier_checkpoint_moves_the_later_one_aside(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), "--save_interval", "2", steps=4)
    run_job(arguments, 2).check()
    whole = shop.steps("run")
    later = shop.latest("run")
    (later / "stale.pt").write_bytes(b"of the first time")
    run_job([*arguments, "--resume", str(later.with_name("global_step2"))], 2).check()
    assert shop.steps("run") == whole
    names = ["global_step2", "global_step4", "global_step4.left_behind", "latest", "lineage.json"]
    assert sorted(path.name for path in later.parent.iterdir()) == names
    assert (later.with_name("global_step4.left_behind") / "stale.pt").exists()
    assert not (later / "stale.pt").exists()
    assert "stale.pt" not in json.loads((later / "manifest.json").read_text(encoding="utf-8"))["files"]


@pytest.mark.slow
def test_a_crash_in_the_middle_of_a_save_costs_nothing_saved_before(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), "--save_interval", "2", steps=4)
    run_job(arguments, 2).check()
    whole, folder = shop.steps("run"), shop.folder / "run" / "checkpoints"
    # What a crash at step 4, before the manifest, leaves behind.
    (folder / "global_step4").rename(folder / "global_step4.partial")
    (folder / "global_step4.partial" / "manifest.json").unlink()
    (folder / "latest").write_text("global_step2\n", encoding="utf-8")
    result = run_job(arguments, 2).check()
    assert f"resumed from {folder}/global_step2" in result.stdout[0]
    assert shop.steps("run") == whole
    assert sorted(path.name for path in folder.iterdir()) == ["global_step2", "global_step4", "latest"]


def _sample(stdout: str) -> str:
    return stdout.partition("sample:\n")[2].partition("\nfinished")[0]
