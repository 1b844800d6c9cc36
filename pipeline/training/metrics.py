"""What a run reports about itself: the numbers of each step, and the file that keeps them.

`metrics.jsonl` holds one JSON object per line. Step objects carry every field of `StepMetrics`;
evaluation objects carry `step` and `eval_loss`, which is how a reader tells them apart, and beside them the
`name` of their set where sets have names.

JSON has no NaN and no infinity, yet a step that fp16 loss scaling skipped has an infinite gradient
norm. Such a value is written as ``null`` and named under an extra key that other lines do not have:
``{"grad_norm": null, ..., "nonfinite": {"grad_norm": "inf"}}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from pipeline.base.files import LineFile, remove_unfinished, replaced_atomically
from pipeline.training.best_losses import Best

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step of the whole job; equal on every rank but for the times.

    Attributes:
        step: Optimizer steps taken, counted from 1.
        loss: Mean over the step's unmasked tokens, natural logarithm.
        grad_norm: Global 2-norm of the gradient, before clipping.
        lr: Learning rate that this step was taken with.
        tokens: Tokens consumed since step 1, each counted once (sequence, tensor and pipeline peers
            read the same ones).
        step_time: Seconds for data, forward, backward and update; not for evaluation and saving.
        tokens_per_second: Of the whole job, in this step.
        tflops_per_device: 10^12 model floating-point operations per second and device.
        mfu: Share of the device's dense peak, 0 to 1; None where the peak is not known.
        data_time: Seconds of `step_time` spent waiting for data.
        skipped: The update was not applied (overflow under fp16 loss scaling).
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_time: float
    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None
    data_time: float
    skipped: bool


@dataclass(frozen=True)
class EvalMetrics:
    """Loss on held-out documents after `step` optimizer steps, mean per unmasked token.

    Attributes:
        name: Of the validation set, or of the source that the documents were held out of; None where a single
            source is trained on, whose held-out part needs no name.
        best: The lowest of this set so far, this one included; for the console. None: not known.
    """

    step: int
    eval_loss: float
    name: str | None = None
    best: Best | None = None


class MetricsSink(Protocol):
    """Anything that takes the numbers as they come: the file, the console, the monitors.

    Only rank 0 has sinks, so the loop runs over a tuple that is empty on the other ranks.
    """

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluation(self, metrics: EvalMetrics) -> None: ...


@dataclass(frozen=True)
class Speedometer:
    """Turns a step's duration into rates.

    Attributes:
        tokens_per_step: Of the whole job, each counted once.
        flops_per_token: Model operations, forward and backward, recomputation excluded.
        num_devices: Ranks of the job.
        peak_flops: Dense peak of one device at the job's precision, operations per second; None if
            it is not known, and then there is no MFU.
    """

    tokens_per_step: int
    flops_per_token: float
    num_devices: int
    peak_flops: float | None = None

    def measure(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        step_time: float,
        data_time: float,
        skipped: bool,
    ) -> StepMetrics:
        """The metrics of a step that took `step_time` seconds; arguments as `StepMetrics` has them."""
        rate = self.tokens_per_step / step_time
        flops = rate * self.flops_per_token / self.num_devices
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            step_time=step_time,
            tokens_per_second=rate,
            tflops_per_device=flops / 1e12,
            mfu=flops / self.peak_flops if self.peak_flops else None,
            data_time=data_time,
            skipped=skipped,
        )


def to_json(metrics: StepMetrics | EvalMetrics) -> str:
    """One line of strict JSON, without its line end; non-finite values as the module text says."""
    fields = asdict(metrics)
    if isinstance(metrics, EvalMetrics):
        del fields["best"]  # it follows from the lines before
        if metrics.name is None:
            del fields["name"]
    nonfinite = {k: str(v) for k, v in fields.items() if isinstance(v, float) and not math.isfinite(v)}
    fields.update(dict.fromkeys(nonfinite))
    if nonfinite:
        fields["nonfinite"] = nonfinite
    return json.dumps(fields, allow_nan=False)


def _kind(name: str | None) -> str:
    """What the evaluations of a set are counted under: each set has one per step."""
    return "eval" if name is None else f"eval {name}"


class MetricsFile(LineFile):
    """`metrics.jsonl`, appended to by rank 0 alone, one flushed line per call.

    Opening it for a run that continues after `resume_step` steps (0 for a new run) removes the lines
    of later steps, which will be taken again, and a last line that a crash left torn. The file is
    replaced as a whole, so a crash while opening leaves the old one.

    A file has each step once if the loop calls `sync` before it writes a checkpoint (so that the
    lines up to the checkpoint outlive the host) and evaluates before it does.

    Args:
        evaluation_due: The evaluations of `resume_step` will be done again.

    Attributes:
        missing_steps: Steps up to `resume_step` that have no line, because the file was deleted or
            the host crashed before `sync`: 0 unless something was lost.

    Raises:
        ValueError: a line other than the last is not a metrics object, or a step comes twice;
            `unusable_metrics` says it beforehand.
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: str | Path, resume_step: int = 0, *, evaluation_due: bool = False) -> None:
        path = Path(path)
        remove_unfinished(path)
        self._order = _Order(path)
        kept_steps = self._repair(path, resume_step, evaluation_due) if path.exists() else 0
        self.missing_steps = resume_step - kept_steps
        super().__init__(path)

    def step(self, metrics: StepMetrics) -> None:
        self._add("step", metrics)

    def evaluation(self, metrics: EvalMetrics) -> None:
        self._add(_kind(metrics.name), metrics)

    def _add(self, kind: str, metrics: StepMetrics | EvalMetrics) -> None:
        self._order.advance(kind, metrics.step)
        self.append(to_json(metrics).encode())

    def _repair(self, path: Path, resume_step: int, evaluation_due: bool) -> int:
        """Keep the objects of steps 1 .. resume_step; returns how many steps are kept."""
        kept_steps = 0
        with path.open("rb") as old, replaced_atomically(path) as new:
            for line, kind in _kept(path, old, resume_step, evaluation_due, self._order):
                kept_steps += kind == "step"
                new.write(line.rstrip(b"\r\n") + b"\n")
        return kept_steps


class _Order:
    """The last step of each kind of metrics in a file, which later ones must come after."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: dict[str, int] = {}

    def advance(self, kind: str, step: int) -> None:
        last = self._last.get(kind, 0)
        if step <= last:
            raise ValueError(f"{self._path}: {kind} metrics of step {step} after those of {last}")
        self._last[kind] = step


def unusable_metrics(path: Path, resume_step: int, *, evaluation_due: bool = False) -> str | None:
    """Why `MetricsFile` could not go on with the file at `path`; None if it can, or there is none."""
    return reading_failure(path, lambda lines: _kept(path, lines, resume_step, evaluation_due, _Order(path)))


def reading_failure(path: Path, read: Callable[[IO[bytes]], Iterable[object]]) -> str | None:
    """What keeps `read` from going through the file at `path`; None if nothing does, or there is no file."""
    try:
        with path.open("rb") as lines:
            for _ in read(lines):
                pass
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _kept(
    path: Path, lines: IO[bytes], resume_step: int, evaluation_due: bool, order: _Order
) -> Iterator[tuple[bytes, str]]:
    """The lines, each with its kind, up to the step that a run goes on from; of that step no evaluation that
    will be done again."""
    last_evaluation = resume_step - 1 if evaluation_due else resume_step
    for line, record in _records(path, lines):
        evaluation = "eval_loss" in record
        if record["step"] <= (last_evaluation if evaluation else resume_step):
            kind = _kind(record.get("name")) if evaluation else "step"
            order.advance(kind, record["step"])
            yield line, kind


def _records(path: Path, lines: IO[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line with its object. Only the last line can be torn: it ends without a line end."""
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError("'step' is not an integer")
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith(b"\n"):
                return
            raise ValueError(f"{path}, line {number}: not a metrics object ({error})") from error
        yield line, record
