"""How ranks leave a run."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pipeline import pretrain
from pipeline.checkpoints.manifest import TrainState
from pipeline.cluster import outcome
from pipeline.cluster.outcome import Outcome
from pipeline.training import run
from pipeline.training.run import RunFailed
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
# A collective whose tensors gloo's worker thread continues to free for seconds after this returns.
SLOW_TO_FREE = """
import resource, sys, time

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def leave_work():
    import torch
    import torch.distributed as dist

    class Slow(torch.Tensor):
        def __del__(self):
            time.sleep(0.01)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = [torch.ones(30_000_000), *(torch.ones(1).as_subclass(Slow) for _ in range(500))]
    dist.group.WORLD.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
    del tensors
    time.sleep(0.5)
"""
OPTIONS = ("--model", "tiny", "--seq_length", "16", "--train_steps", "1", "--sample_tokens", "0")


@pytest.mark.slow
def test_no_rank_leaves_before_the_outcome_is_written(tmp_path: Path):
    """The exit code 3 of the first to leave makes launchers end the others at once. That the disk is full
    then makes no failure of the run."""
    arguments, output = command_line(tmp_path)
    assert run_ranks(outcome_is_there_when_leaving, 2, arguments, output) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("from pipeline.training.signals import end_process; end_process(0)", 0),
        # Once this is 0, torch has mended it and `end_process` can go.
        ("sys.exit(0)", -signal.SIGABRT),
    ],
)
def test_a_process_ends_while_gloo_frees_tensors(end: str, code: int):
    script = f"{SLOW_TO_FREE}\nleave_work()\n{end}"
    command = [sys.executable, "-c", script]
    for _ in range(1 if code == 0 else 3):  # on a busy machine the threads may be done in time
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        if done.returncode == code:
            return
    assert done.returncode == code, done.stderr


def test_an_executor_that_nobody_has_shut_down_keeps_no_process(tmp_path: Path):
    """As libraries have them; an interpreter that ends wakes their threads."""
    script = (
        "import atexit, concurrent.futures\n"
        "from pipeline.training.signals import end_process\n"
        f"atexit.register(open, {str(tmp_path / 'asked')!r}, 'w')\n"
        "executor = concurrent.futures.ThreadPoolExecutor(1)\n"
        "executor.submit(int).result()\n"
        "end_process(3)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=30).returncode == 3
    assert (tmp_path / "asked").exists()


@pytest.mark.slow
def test_a_finished_rank_ends_with_0_while_gloo_frees_tensors(tmp_path: Path):
    """What the interpreter runs at the end is run, and then no thread can abort the process any more."""
    arguments, _ = command_line(tmp_path)
    began = tmp_path / "began"
    last = f"if 'torch' in sys.modules: leave_work(), open({str(began)!r}, 'w').close()"  # not in the agent
    site = tmp_path / "site"
    site.mkdir()
    at_exit = f"import atexit\n@atexit.register\ndef last():\n    {last}\n"
    (site / "sitecustomize.py").write_text(f"{SLOW_TO_FREE}\n{at_exit}", encoding="utf-8")
    command = [sys.executable, "pipeline/pretrain.py", *arguments]
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert began.exists()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fails", ["_build", "_load", "_leave"])
def test_a_failure_is_one_after_the_steps_that_the_run_has(fails: str, monkeypatch: pytest.MonkeyPatch):
    """Also while its engine is built, and when all is done."""
    prepared = SimpleNamespace(state=TrainState(step=5))
    steps = {"prepare": prepared, "_build": None, "_load": Outcome("stopped", 7), "_leave": None}
    for name, value in steps.items():
        monkeypatch.setattr(run, name, Mock(return_value=value))
    monkeypatch.setattr(run, fails, Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(RunFailed) as caught:
        run.run(*[Mock()] * 5)
    assert (caught.value.step, str(caught.value.error)) == (
        7 if fails == "_leave" else 5,
        "No space left on device",
    )


def command_line(folder: Path) -> tuple[list[str], Path]:
    """Of a small job, and its output folder."""
    (folder / "text.txt").write_text("what is read, and read again. " * 100, encoding="utf-8")
    (folder / "more.txt").write_text("what is held out of the reading. " * 10, encoding="utf-8")
    config = folder / "ds.json"
    config.write_text('{"train_batch_size": 4, "gradient_clipping": 1.0}', encoding="utf-8")
    output = folder / "run"
    arguments = [*OPTIONS, "--data", str(folder), "--deepspeed_config", str(config)]
    return [*arguments, "--output_dir", str(output)], output


def outcome_is_there_when_leaving(arguments: list[str], output: Path) -> bool:
    write_outcome = outcome.write_outcome

    def slow(*args: object) -> None:
        time.sleep(1.0)
        write_outcome(*args)
        raise OSError(errno.ENOSPC, "No space left on device")

    outcome.write_outcome = slow
    assert pretrain.main(arguments) == 0
    return (output / "outcome.json").exists()
