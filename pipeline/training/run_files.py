"""The files that rank 0 keeps while it trains: metrics.jsonl and samples.jsonl. No torch.

`metrics.jsonl` holds one JSON object per line. Step objects carry every field of `StepMetrics`;
evaluation objects carry `step` and `eval_loss`, which is how a reader tells them apart, and beside them the
`name` of their set where sets have names, `eval_time` and `time`.

JSON has no NaN and no infinity, yet a step that fp16 loss scaling skipped has an infinite gradient
norm. Such a value is written as ``null`` and named under an extra key that other lines do not have:
``{"grad_norm": null, ..., "nonfinite": {"grad_norm": "inf"}}``.

`samples.jsonl` says which samples each step was taken with, one object per step:
``{"step": 3, "first": 16, "samples": ["books 12", "code 7", ...]}``. `first` is the position in the order,
and a sample is its source's name and its number there, epoch * samples per epoch + number in the epoch.

The lines of a run that was stopped and resumed are those of a run that was not, but for times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from pipeline.base.files import LineFile, remove_unfinished, replaced_atomically
from pipeline.base.json_reader import parse_saved
from pipeline.base.user_input import open_regular
from pipeline.checkpoints.manifest import TrainState
from pipeline.data.blend import Blend
from pipeline.training.metrics import EvalMetrics, StepMetrics

SAMPLES_FILE = "samples.jsonl"


def to_json(metrics: StepMetrics | EvalMetrics) -> str:
    """One line of strict JSON, without its line end; non-finite values as the module text says."""
    fields = asdict(metrics)
    if isinstance(metrics, EvalMetrics):
        del fields["best"]  # it follows from the lines before
        fields = {key: value for key, value in fields.items() if value is not None}
    return json.dumps(finite(fields), allow_nan=False)


def finite(fields: dict[str, Any]) -> dict[str, Any]:
    """The same for strict JSON, with non-finite values as the module text says."""
    nonfinite = {k: str(v) for k, v in fields.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**fields, **dict.fromkeys(nonfinite), **({"nonfinite": nonfinite} if nonfinite else {})}


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
        last_step: The last step that an earlier start has recorded; 0 if none has.

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
        self.last_step = self._order.last_seen
        super().__init__(path)

    def step(self, metrics: StepMetrics) -> None:
        self._add("step", metrics)

    def evaluation(self, metrics: EvalMetrics) -> None:
        self._add(_kind(metrics.name), metrics)

    def evaluation_again(self, metrics: EvalMetrics) -> None:
        """Of the last step, once more: in the place of the line that the set has there, if it has one. The
        file is replaced as a whole."""
        kind = _kind(metrics.name)
        if not self._order.ends_with(kind, metrics.step):
            self._add(kind, metrics)
            return
        self.close()
        with self.path.open("rb") as old, replaced_atomically(self.path) as new:
            for line, record in _records(self.path, old):
                same = "eval_loss" in record and _kind(record.get("name")) == kind
                again = same and record["step"] == metrics.step
                new.write(to_json(metrics).encode() + b"\n" if again else line)
        super().__init__(self.path)  # the file that has the name now

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
    """The last step of each kind of metrics in a file, which later ones must come after.

    Attributes:
        last_seen: The last step in the file, also of lines that are not kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: dict[str, int] = {}
        self.last_seen = 0

    def ends_with(self, kind: str, step: int) -> bool:
        """Whether the last step of a kind is this one."""
        return self._last.get(kind) == step

    def advance(self, kind: str, step: int) -> None:
        """The next step of a kind. Steps begin at 1; weights of a folder are evaluated before, at 0.

        Raises:
            ValueError: it does not come after the last one.
        """
        last = self._last.get(kind, 0 if kind == "step" else -1)
        if step <= last:
            raise ValueError(f"{self._path}: {kind} metrics of step {step} after those of {last}")
        self._last[kind] = step


def unusable_metrics(path: Path, resume_step: int, *, evaluation_due: bool = False) -> str | None:
    """Why `MetricsFile` could not continue the file at `path`; None if it can, or there is none."""
    return reading_failure(path, lambda lines: _kept(path, lines, resume_step, evaluation_due, _Order(path)))


def reading_failure(path: Path, read: Callable[[IO[bytes]], Iterable[object]]) -> str | None:
    """What keeps `read` from going through the file at `path`; None if nothing does, or there is no file."""
    try:
        with open_regular(path) as lines:
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
    """The lines, each with its kind, up to the step that a run resumes from; of that step no evaluation that
    will be done again."""
    last_evaluation = resume_step - 1 if evaluation_due else resume_step
    for line, record in _records(path, lines):
        order.last_seen = max(order.last_seen, record["step"])
        evaluation = "eval_loss" in record
        if record["step"] <= (last_evaluation if evaluation else resume_step):
            kind = _kind(record.get("name")) if evaluation else "step"
            order.advance(kind, record["step"])
            yield line, kind


def _records(path: Path, lines: IO[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line with its object. Only the last line can be torn: it ends without a line end."""
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_saved(line)
            if not isinstance(record["step"], int):
                raise TypeError("'step' is not an integer")
            if not isinstance(record.get("name"), str | None):
                raise TypeError("'name' is no text")
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith(b"\n"):
                return
            raise ValueError(f"{path}, line {number}: not a metrics object ({error})") from error
        yield line, record


class SampleLog(LineFile):
    """A metrics sink of rank 0 that writes samples instead of numbers.

    Args:
        path: The file; lines of steps after `state` are removed, and a last one that a crash left torn.
        blend: The order. Its tokens are not read.
        batch_size: Samples per step of the whole job.
        state: Where the run starts or resumes.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: a line other than the last is no object of this kind; `unusable_samples` says it
            beforehand.
    """

    def __init__(self, path: Path, blend: Blend, batch_size: int, state: TrainState) -> None:
        self._blend, self._batch_size, self._start = blend, batch_size, state
        remove_unfinished(path)
        if path.exists():
            _trim(path, state.step)
        super().__init__(path)

    def step(self, metrics: StepMetrics) -> None:
        """Write the samples of this step, which are known from its number."""
        first = self._start.consumed_samples + (metrics.step - self._start.step - 1) * self._batch_size
        names = self._blend.names(np.arange(first, first + self._batch_size))
        self.append(json.dumps({"step": metrics.step, "first": first, "samples": names}).encode())

    def evaluation(self, metrics: EvalMetrics) -> None:
        """Evaluation reads the same samples each time."""


def unusable_samples(path: Path) -> str | None:
    """Why `SampleLog` could not continue the file at `path`; None if it can, or there is none."""
    return reading_failure(path, lambda lines: _whole_lines(path, lines))


def _trim(path: Path, last_step: int) -> None:
    with path.open("rb") as old, replaced_atomically(path) as new:
        for line, step in _whole_lines(path, old):
            if step <= last_step:
                new.write(line)


def _whole_lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Each line with its step. Only the last can be torn: it ends without a line end."""
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            step = parse_saved(line)["step"]
            if not isinstance(step, int):
                raise TypeError("'step' is not an integer")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not the samples of a step ({error})") from error
        yield line, step
