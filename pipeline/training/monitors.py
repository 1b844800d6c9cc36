"""DeepSpeed's monitors (TensorBoard, Weights & Biases, CSV, Comet), fed with the job's own numbers.

The x axis is the step. Names are `train/<field of StepMetrics>` and `eval/loss`, or
`eval/<name>/loss` where validation sets have names. A start that resumes continues what earlier ones have
recorded, with each step once. Files of CSV and TensorBoard are written with DeepSpeed's own writers; W&B and
Comet, which these begin anew at every start, by `pipeline.training.tracked_runs`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster

from pipeline.base.files import replaced_atomically
from pipeline.cluster.history import METRICS_FILE
from pipeline.training.metrics import EvalMetrics, StepMetrics
from pipeline.training.tracked_runs import TRACKED, Row, Start, tracked_runs


class Monitors:
    """Rank 0's writers, as the JSON's blocks ask for them; a context, which ends them.

    Args:
        blocks: The enabled monitors, from `pipeline.job.deepspeed_dict.resolved_monitors`.
        start: What monitors hold of later steps than its `step` is removed from CSV files and marked as
            superseded for TensorBoard; W&B and Comet keep it, and do not get these steps again.

    Raises:
        ImportError: the package of an enabled monitor is missing.
        RuntimeError: `deepspeed.init_distributed` was not called yet.
        ValueError: `monitors.json` cannot be read.
    """

    def __init__(self, blocks: Mapping[str, Mapping[str, Any]], start: Start) -> None:
        self._start = start
        files = {key: dict(block) for key, block in blocks.items() if key not in TRACKED}
        self._files = MonitorMaster(get_monitor_config(files))
        if self._files.csv_monitor is not None:
            self._continue_csv()
        if self._files.tb_monitor is not None:
            self._continue_tensorboard()
        self._tracked = tracked_runs(blocks, start, recorded_rows(start.folder))

    def step(self, metrics: StepMetrics) -> None:
        self._write(metrics.step, step_row(asdict(metrics)))

    def evaluation(self, metrics: EvalMetrics) -> None:
        due = self._start.evaluation_due and metrics.step == self._start.step
        self._write(metrics.step, evaluation_row(metrics.name, metrics.eval_loss), late=due)

    def __enter__(self) -> Monitors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write and send what is buffered. DeepSpeed's writers have no close, except TensorBoard's."""
        if self._files.tb_monitor is not None:
            self._files.tb_monitor.summary_writer.close()
        for run in self._tracked:
            run.close(failed=kind is not None)

    def _write(self, step: int, row: Row, *, late: bool = False) -> None:
        events = [(name, value, step) for name, value in row.items()]
        if self._files.csv_monitor is not None:
            self._files.csv_monitor.write_events(events)
        if self._files.tb_monitor is not None:
            self._write_tensorboard(step, row)
        for run in self._tracked:
            run.log(step, row, late=late)

    def _write_tensorboard(self, step: int, row: Row) -> None:
        """One event for the row: DeepSpeed's writer, which makes one of each number, takes four times as
        long."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        writer = self._files.tb_monitor.summary_writer
        writer.file_writer.add_summary(Summary(value=values), step)
        writer.flush()

    def _continue_csv(self) -> None:
        """DeepSpeed's writer starts each run with a header line, also in the middle of a file."""
        monitor, start = self._files.csv_monitor, self._start
        for kind in ("train", "eval"):
            again = kind == "eval" and start.evaluation_due
            for path in sorted(Path(monitor.log_dir).glob(f"{kind}_*.csv")):
                trim_csv(path, start.step - again)
                monitor.filenames.append(path.stem)

    def _continue_tensorboard(self) -> None:
        """Tell readers that events from the next step on replace those of earlier files."""
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog

        start = SessionLog(status=SessionLog.START)
        writer = self._files.tb_monitor.summary_writer
        writer.file_writer.add_event(Record(session_log=start), step=self._start.step + 1)


def step_row(fields: Mapping[str, Any]) -> Row:
    """What is known of a step, from the fields of `StepMetrics`; `skipped` is 0 or 1."""
    left_out = ("step", "time", "nonfinite")
    return {f"train/{k}": float(v) for k, v in fields.items() if k not in left_out and v is not None}


def evaluation_row(name: str | None, loss: float) -> Row:
    return {"eval/loss" if name is None else f"eval/{name}/loss": loss}


def recorded_rows(folder: Path) -> Iterator[tuple[int, Row]]:
    """(step, row) of each line in the run's metrics.jsonl, in its order."""
    path = folder / METRICS_FILE
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for fields in map(json.loads, lines):
            if "eval_loss" not in fields:
                yield fields["step"], step_row(fields)
            elif fields["eval_loss"] is not None:
                yield fields["step"], evaluation_row(fields.get("name"), fields["eval_loss"])


def trim_csv(path: Path, last_step: int) -> None:
    """Drop the rows of steps after `last_step`, and a row that a crash left torn.

    Rows are ``step,value`` under one header, as DeepSpeed's CSV monitor writes them.
    """
    with path.open("rb") as old, replaced_atomically(path) as new:
        for number, line in enumerate(old):
            if not line.endswith(b"\n"):
                return
            if number == 0 or int(line.split(b",")[0]) <= last_step:
                new.write(line)
