"""samples.jsonl: which samples each step was taken with, for whoever must be able to say so later. No torch.

One object per step: ``{"step": 3, "first": 16, "samples": ["books 12", "code 7", ...]}``. `first` is the
position in the order, and a sample is its source's name and its number there, epoch * samples per epoch +
number in the epoch. The lines of a run that was stopped and resumed are those of a run that was not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from pipeline.base.files import LineFile, remove_unfinished, replaced_atomically
from pipeline.checkpoints.manifest import TrainState
from pipeline.data.blend import Blend
from pipeline.training.metrics import EvalMetrics, StepMetrics, reading_failure

SAMPLES_FILE = "samples.jsonl"


class SampleLog(LineFile):
    """A metrics sink of rank 0 that writes samples instead of numbers.

    Args:
        path: The file; lines of steps after `state` are removed, and a last one that a crash left torn.
        blend: The order. Its tokens are not read.
        batch_size: Samples per step of the whole job.
        state: Where the run starts or goes on.

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
    """Why `SampleLog` could not go on with the file at `path`; None if it can, or there is none."""
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
            step = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not the samples of a step ({error})") from error
        yield line, step
