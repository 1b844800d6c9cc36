"""DeepSpeed's monitors write the job's own numbers, and one row per step over several starts."""

from __future__ import annotations

import csv
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.training.metrics import StepMetrics

ROOT = Path(__file__).parents[2]

# A start takes 6 steps and dies after a save at step 4; the next one continues from there to step 8.
# In a process of its own, because DeepSpeed's communication backend is process-wide.
JOB = """
    import sys
    from pathlib import Path
    import deepspeed, deepspeed.comm.torch
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    from pipeline.base.json_reader import Document
    from pipeline.job.deepspeed_dict import resolved_monitors
    from pipeline.job.facts import Settings
    from pipeline.training.metrics import EvalMetrics, StepMetrics
    from pipeline.training.monitors import Monitors
    from pipeline.training.tracked_runs import Start

    folder = Path(sys.argv[1])
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    config = {key: {"enabled": True, "job_name": "job"} for key in ("tensorboard", "csv_monitor")}
    settings = Settings(Document("ds.json", config))

    def train(first, last, offset):
        blocks = resolved_monitors(settings, str(folder / "run"))
        with Monitors(blocks, Start(folder / "run", first - 1)) as monitors:
            for step in range(first, last + 1):
                loss = step + offset
                numbers = (1.5, 1e-3, 64 * step, 0.5, 128.0, 2.0, None, 0.0)
                monitors.step(StepMetrics(step, loss, *numbers, skipped=step == 3))
                if step % 2 == 0:
                    monitors.evaluation(EvalMetrics(step, loss + 0.25))
                    monitors.evaluation(EvalMetrics(step, loss + 0.5, "books"))

    train(1, 3, offset=300.0)  # dies before its first save
    train(1, 6, offset=100.0)
    with (folder / "run/csv_monitor/job/train_loss.csv").open("a") as file:
        file.write("7,10")  # torn by a crash
    train(5, 8, offset=200.0)
"""

LOSSES = {1: 101.0, 2: 102.0, 3: 103.0, 4: 104.0, 5: 205.0, 6: 206.0, 7: 207.0, 8: 208.0}
EVAL_LOSSES = {2: 102.25, 4: 104.25, 6: 206.25, 8: 208.25}
NAMES = {
    *("loss", "grad_norm", "lr", "tokens", "step_time", "tokens_per_second"),
    *("tflops_per_device", "data_time", "skipped", "save_time"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder in which the two starts have written."""
    folder = tmp_path_factory.mktemp("monitors")
    (folder / "job.py").write_text(textwrap.dedent(JOB))
    subprocess.run(
        [sys.executable, folder / "job.py", folder],
        cwd=folder,
        env={"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=120,
    )
    return folder


def table(path: Path) -> tuple[list[str], dict[int, float]]:
    header, *rows = csv.reader(path.open())
    assert len({row[0] for row in rows}) == len(rows), "a step comes twice"
    return header, {int(step): float(value) for step, value in rows}


@pytest.mark.slow
def test_csv_has_one_header_and_one_row_per_step(folder):
    files = folder / "run/csv_monitor/job"
    assert {path.name for path in files.iterdir()} == {f"train_{n}.csv" for n in NAMES} | {
        "eval_loss.csv",
        "eval_books_loss.csv",
    }
    assert table(files / "train_loss.csv") == (["step", "loss"], LOSSES)
    assert table(files / "eval_loss.csv") == (["step", "loss"], EVAL_LOSSES)
    assert table(files / "train_skipped.csv")[1] == {step: float(step == 3) for step in LOSSES}
    assert table(files / "train_tokens.csv")[1] == {step: 64.0 * step for step in LOSSES}


def test_tensorboard_shows_each_step_once(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run/tensorboard/job"), {"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"train/{name}" for name in NAMES} | {
        "eval/loss",
        "eval/books/loss",
    }
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == list(LOSSES.items())
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == list(EVAL_LOSSES.items())
    assert events.Scalars("eval/books/loss")[-1].value == 208.5


def test_values_that_are_not_known_are_not_written():
    from pipeline.training.monitors import step_row

    row = step_row(asdict(StepMetrics(7, 2.0, 1.0, 1e-3, 64, 0.5, 128.0, 2.0, None, 0.0, skipped=True)))
    assert "train/mfu" not in row and "train/step" not in row
    assert row["train/skipped"] == 1.0
