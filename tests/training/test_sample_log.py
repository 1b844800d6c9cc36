"""The log of samples on a disk that is full; what it holds is tested with whole runs on blends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.manifest import TrainState
from pipeline.training.run_files import SampleLog
from tests.training.test_metrics import metrics


class Order:
    """Of samples that are named by their places."""

    def names(self, places: Sequence[int]) -> list[str]:
        return [f"books {place}" for place in places]


def log_in(folder: Path) -> SampleLog:
    return SampleLog(folder / "samples.jsonl", Order(), 2, TrainState())  # type: ignore[arg-type]


def on_a_full_disk(log: SampleLog) -> Any:
    """From now on; the file on the disk as it was before."""
    real, log._file = log._file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115, PTH123
    return real


def test_a_full_disk_costs_no_line(tmp_path: Path):
    with log_in(tmp_path) as log:
        log.step(metrics(1))
        real = on_a_full_disk(log)
        log.step(metrics(2))
        with pytest.raises(OSError, match=r"No space left on device: .*samples\.jsonl"):
            log.sync()
        log._file.close()
        log._file = real
        log.step(metrics(3))
        log.sync()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["first"]) for line in lines] == [(1, 0), (2, 2), (3, 4)]
    assert lines[1]["samples"] == ["books 2", "books 3"]


def test_a_full_disk_does_not_hide_what_ended_the_run(tmp_path: Path):
    with pytest.raises(RuntimeError, match="the loss is nan"), log_in(tmp_path) as log:
        on_a_full_disk(log).close()
        log.step(metrics(1))
        raise RuntimeError("the loss is nan")
    assert log._file.closed
