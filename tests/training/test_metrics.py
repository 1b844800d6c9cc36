"""The metrics file: strict JSON, one line per step, whatever happened between two starts."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.training.metrics import EvalMetrics, StepMetrics
from pipeline.training.run_files import MetricsFile, to_json, unusable_metrics
from pipeline.training.throughput import Speedometer

SPEEDOMETER = Speedometer(tokens_per_step=4096, flops_per_token=6e9, num_devices=8, peak_flops=312e12)


def metrics(step: int, loss: float = 2.5, grad_norm: float = 1.0, skipped: bool = False) -> StepMetrics:
    result = SimpleNamespace(loss=loss, grad_norm=grad_norm, lr=1e-3, skipped=skipped)
    return SPEEDOMETER.measure(step, result, tokens=4096 * step, step_time=0.5, data_time=0.01)


def write(path: Path, steps: range, resume_step: int = 0, evaluate_every: int = 2) -> MetricsFile:
    with MetricsFile(path, resume_step) as file:
        for step in steps:
            file.step(metrics(step))
            if step % evaluate_every == 0:
                file.evaluation(EvalMetrics(step, 2.0))
    return file


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rates_are_worked_out_from_the_step_time():
    result = metrics(3)
    assert result.tokens_per_second == 8192  # 4096 tokens in half a second
    assert result.tflops_per_device == 8192 * 6e9 / 8 / 1e12 == 6.144
    assert result.mfu == pytest.approx(6.144 / 312)


def test_mfu_is_null_without_a_known_peak():
    unknown = Speedometer(tokens_per_step=4096, flops_per_token=6e9, num_devices=8)
    step = SimpleNamespace(loss=1.0, grad_norm=1.0, lr=1.0, skipped=False)
    result = unknown.measure(1, step, tokens=4096, step_time=1.0, data_time=0.0)
    assert result.mfu is None
    assert json.loads(to_json(result))["mfu"] is None


def test_a_step_object_has_every_documented_field(tmp_path):
    write(tmp_path / "run" / "metrics.jsonl", range(1, 2))
    (record,) = read(tmp_path / "run" / "metrics.jsonl")
    assert list(record) == [field.name for field in fields(StepMetrics)]
    assert StepMetrics(**record) == metrics(1)


def test_each_line_can_be_read_before_the_file_is_closed(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.step(metrics(1))
    file.evaluation(EvalMetrics(1, 2.0))
    assert read(file.path)[1] == {"step": 1, "eval_loss": 2.0}
    file.close()


def test_evaluations_of_named_sets_stand_beside_each_other_and_outlive_a_resume(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        for step in (1, 2):
            file.step(metrics(step))
            for name in ("books", "code"):
                file.evaluation(EvalMetrics(step, 2.0, name))
        with pytest.raises(ValueError, match="eval code metrics of step 2 after those of 2"):
            file.evaluation(EvalMetrics(2, 2.0, "code"))
    with MetricsFile(tmp_path / "metrics.jsonl", resume_step=1) as file:
        assert [line.get("name") for line in read(file.path)] == [None, "books", "code"]
        assert read(file.path)[1] == {"step": 1, "eval_loss": 2.0, "name": "books"}
        file.step(metrics(2))
        file.evaluation(EvalMetrics(2, 2.0, "books"))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nonfinite_values_are_null_and_named(value):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(to_json(metrics(1, grad_norm=value, skipped=True)), parse_constant=refuse)
    assert record["grad_norm"] is None
    assert record["nonfinite"] == {"grad_norm": str(value)}
    assert record["loss"] == 2.5


def test_resume_drops_later_steps_and_continues_to_the_uninterrupted_file(tmp_path):
    write(tmp_path / "whole", range(1, 11))
    write(tmp_path / "resumed", range(1, 8))
    file = write(tmp_path / "resumed", range(5, 11), resume_step=4)
    assert file.missing_steps == 0
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed", "whole"]


@pytest.mark.parametrize("kept_bytes", [1, 40, -2, -1])
def test_a_torn_last_line_is_completed_or_taken_again(tmp_path, kept_bytes):
    """A crash in step 5's line, wherever it tears; -1 lacks the line end alone."""
    write(tmp_path / "whole", range(1, 8), evaluate_every=100)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    torn = tmp_path / "torn"
    torn.write_bytes(b"".join(lines[:4]) + lines[4][:kept_bytes])
    write(torn, range(5, 8), resume_step=4, evaluate_every=100)
    assert torn.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_line_that_lacks_only_its_end_still_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4), evaluate_every=100)
    path.write_bytes(path.read_bytes()[:-1])
    assert write(path, range(4, 5), resume_step=3, evaluate_every=100).missing_steps == 0
    assert [record["step"] for record in read(path)] == [1, 2, 3, 4]


def test_zeros_that_a_host_crash_leaves_at_the_end_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4), evaluate_every=100)
    path.write_bytes(path.read_bytes() + bytes(512))
    write(path, range(4, 5), resume_step=3, evaluate_every=100)
    assert [record["step"] for record in read(path)] == [1, 2, 3, 4]


def test_what_a_killed_start_left_beside_it_goes(tmp_path):
    (tmp_path / "metrics.jsonl.tmp12").write_bytes(b"half")
    (tmp_path / "metrics.jsonl.tmpfile").write_bytes(b"somebody's")
    write(tmp_path / "metrics.jsonl", range(1, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.tmpfile"]


def test_lost_lines_are_counted(tmp_path):
    write(tmp_path / "metrics.jsonl", range(1, 4))
    assert write(tmp_path / "metrics.jsonl", range(7, 8), resume_step=6).missing_steps == 3
    assert write(tmp_path / "deleted.jsonl", range(7, 8), resume_step=6).missing_steps == 6


def test_a_damaged_line_inside_is_an_error_that_names_it_and_keeps_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4), evaluate_every=100)
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + lines[1][:30] + b"\n" + lines[2]
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a metrics object"):
        MetricsFile(path, resume_step=3)
    assert path.read_bytes() == damaged
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("line", [b"[1, 2]\n", b'{"loss": 1.0}\n', b'{"step": "1"}\n', b"\xff\xfe\n", b"\n"])
def test_foreign_lines_are_refused(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match="line 1"):
        MetricsFile(tmp_path / "metrics.jsonl", resume_step=3)


def test_a_step_cannot_be_written_twice(tmp_path):
    write(tmp_path / "metrics.jsonl", range(1, 5))
    with MetricsFile(tmp_path / "metrics.jsonl", resume_step=4) as file:
        with pytest.raises(ValueError, match="step metrics of step 4 after those of 4"):
            file.step(metrics(4))
        with pytest.raises(ValueError, match="eval metrics of step 4"):
            file.evaluation(EvalMetrics(4, 2.0))
        file.step(metrics(5))


def test_a_crash_while_repairing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    before = path.read_bytes()

    def crash(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="no space"):
        MetricsFile(path, resume_step=4)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_full_for_a_while_costs_no_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        real = file._file

        class Disk:
            """Takes ten bytes, then nothing."""

            left = 10

            def write(self, data: bytes) -> int:
                if not self.left:
                    raise OSError(errno.ENOSPC, "No space left on device")
                taken, self.left = data[: self.left], 0
                return real.write(taken)

        file.step(metrics(1))
        file._file = Disk()
        file.step(metrics(2))
        file.step(metrics(3))
        with pytest.raises(OSError, match="No space"):
            file.sync()
        file._file = real
        file.step(metrics(4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_lines_that_never_fit_are_an_error_in_the_end(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    real, file._file = file._file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115, PTH123
    file.step(metrics(1))
    with pytest.raises(OSError, match="No space"):
        file.close()
    real.close()


def test_a_full_disk_does_not_hide_what_ended_the_run(tmp_path: Path):
    full = open("/dev/full", "ab", buffering=0)  # noqa: SIM115, PTH123
    with (
        pytest.raises(RuntimeError, match="the loss is nan"),
        MetricsFile(tmp_path / "metrics.jsonl") as file,
    ):
        file._file.close()
        file._file = full
        file.step(metrics(1))
        raise RuntimeError("the loss is nan")
    assert full.closed


def test_an_evaluation_that_is_due_again_is_taken_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for number in (1, 2):
            file.step(metrics(number))
            file.evaluation(EvalMetrics(number, 2.0))
    with MetricsFile(path, 2, evaluation_due=True) as file:
        file.evaluation(EvalMetrics(2, 1.5))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("eval_loss") for line in lines] == [None, 2.0, None, 1.5]


def test_a_last_evaluation_done_again_takes_the_place_of_its_own_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.evaluation(EvalMetrics(0, 9.0, "a"))
        for number in (1, 2):
            file.step(metrics(number))
            file.evaluation(EvalMetrics(number, 2.0, "a"))
            file.evaluation(EvalMetrics(number, 3.0, "b"))
    with MetricsFile(path, 2) as file:
        for name, loss in (("a", 1.5), ("c", 4.0), ("c", 5.0)):
            file.evaluation_again(EvalMetrics(2, loss, name))
        with pytest.raises(ValueError, match="eval b metrics of step 2 after those of 2"):
            file.evaluation(EvalMetrics(2, 3.0, "b"))
    found = [(line["step"], line["name"], line["eval_loss"]) for line in read(path) if "name" in line]
    last = [(2, "a", 1.5), (2, "b", 3.0), (2, "c", 5.0)]
    assert found == [(0, "a", 9.0), (1, "a", 2.0), (1, "b", 3.0), *last]
    assert not unusable_metrics(path, 2)
