"""DeepSpeed's monitors (TensorBoard, Weights & Biases, CSV, Comet), fed with the job's own numbers.

The x axis is the step. Names are `train/<field of StepMetrics>` and `eval/loss`, or
`eval/<name>/loss` where validation sets have names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster

from pipeline.base.files import replaced_atomically
from pipeline.training.metrics import EvalMetrics, StepMetrics

# One event: name, value, step.
Event = tuple[str, float, int]


class Monitors:
    """Rank 0's writers, as the JSON's blocks ask for them.

    Args:
        blocks: The enabled monitors, from `pipeline.job.deepspeed_dict.resolved_monitors`.
        resume_step: Steps taken before this start; what a monitor holds of later steps is removed
            from CSV files and marked as superseded for TensorBoard. Weights & Biases and Comet
            begin a new run.

    Raises:
        ImportError: the package of an enabled monitor is missing.
        RuntimeError: `deepspeed.init_distributed` was not called yet.
    """

    def __init__(self, blocks: Mapping[str, Mapping[str, object]], resume_step: int = 0) -> None:
        self._master = MonitorMaster(get_monitor_config(dict(blocks)))
        if self._master.csv_monitor is not None:
            self._continue_csv(resume_step)
        if self._master.tb_monitor is not None and resume_step > 0:
            self._continue_tensorboard(resume_step)

    def step(self, metrics: StepMetrics) -> None:
        self._master.write_events(step_events(metrics))

    def evaluation(self, metrics: EvalMetrics) -> None:
        name = "eval/loss" if metrics.name is None else f"eval/{metrics.name}/loss"
        self._master.write_events([(name, metrics.eval_loss, metrics.step)])

    def close(self) -> None:
        """Write what is buffered. The monitors themselves have no close, except TensorBoard's writer."""
        if self._master.tb_monitor is not None:
            self._master.tb_monitor.summary_writer.close()

    def _continue_csv(self, resume_step: int) -> None:
        """DeepSpeed's writer starts each run with a header line, also in the middle of a file."""
        monitor = self._master.csv_monitor
        for path in sorted(Path(monitor.log_dir).glob("*.csv")):
            trim_csv(path, resume_step)
            monitor.filenames.append(path.stem)

    def _continue_tensorboard(self, resume_step: int) -> None:
        """Tell readers that events from the next step on replace those of earlier files."""
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog

        start = SessionLog(status=SessionLog.START)
        writer = self._master.tb_monitor.summary_writer
        writer.file_writer.add_event(Record(session_log=start), step=resume_step + 1)


def step_events(metrics: StepMetrics) -> list[Event]:
    """One event per field that has a value; `skipped` is 0 or 1."""
    fields = asdict(metrics)
    step = fields.pop("step")
    return [(f"train/{name}", float(value), step) for name, value in fields.items() if value is not None]


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
