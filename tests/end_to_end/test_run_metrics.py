"""What runs report is the same in every layout: metrics.jsonl, monitors, the generated text."""

from __future__ import annotations

import csv
import json
import math
import shlex
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from pipeline.export import main as export_main
from pipeline.job.models import PRESETS
from pipeline.model.counts import training_flops_per_token
from tests.end_to_end.jobs import SEQUENCE, Workshop
from tests.harness import run_job

STEP_FIELDS = [
    *("step", "loss", "grad_norm", "lr", "tokens", "step_time", "tokens_per_second"),
    *("tflops_per_device", "mfu", "data_time", "skipped", "time", "save_time"),
]
EVALUATION_FIELDS = ["step", "eval_loss", "eval_time", "time"]
STEPS = 3
BATCH = 8

TENSOR = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCE_PARALLEL = {"sequence_parallel_size": 2}
PIPELINE = {"pipeline": {"stages": 2}}
# name: ranks, changes to the JSON
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "zero 3": (2, {"zero_optimization": {"stage": 3}}),
    "tensor": (2, TENSOR),
    "sequence": (2, SEQUENCE_PARALLEL),
    "pipeline": (2, PIPELINE),
    "dualpipev": (2, {"pipeline": {"stages": 2, "schedule": "dualpipev"}}),
    "tensor, sequence, pipeline": (8, {**TENSOR, **SEQUENCE_PARALLEL, **PIPELINE}),
    "accumulation": (1, {"train_micro_batch_size_per_gpu": 1}),
}


class Report:
    """What one run of `STEPS` steps left: its lines, its monitor's files, its text."""

    def __init__(self, folder: Path, ranks: int, config: dict[str, Any]) -> None:
        self.shop, self.ranks = Workshop(folder), ranks
        monitor = {"csv_monitor": {"enabled": True, "job_name": "job"}}
        arguments = self.shop.arguments("run", self.shop.config(**config, **monitor), steps=STEPS)
        options = ("--eval_interval", "2", "--sample_tokens", "40", "--sample_prompt", "a layer ")
        self.stdout = run_job([*arguments, *options], ranks).check().stdout
        self.lines = self.shop.lines("run")

    @property
    def sample(self) -> str:
        return self.stdout[0].partition("sample:\n")[2].partition("\nfinished")[0]

    def monitor(self, name: str) -> list[tuple[int, float]]:
        """(step, value) rows of a file of the CSV monitor."""
        with (self.shop.folder / "run" / "csv_monitor" / "job" / f"{name}.csv").open(newline="") as file:
            return [(int(float(step)), float(value)) for step, value in list(csv.reader(file))[1:]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """With the monitor that nobody has asked for."""
    return Report(tmp_path_factory.mktemp("alone"), 1, {"tensorboard": None})


def test_lines_are_as_documented(alone: Report):
    steps = [line for line in alone.lines if "loss" in line]
    assert [list(line) for line in steps] == [STEP_FIELDS] * STEPS
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["tokens"] for line in steps] == [BATCH * SEQUENCE * step for step in (1, 2, 3)]
    assert [list(line) for line in alone.lines if "loss" not in line] == [EVALUATION_FIELDS] * 2
    assert [line["step"] for line in alone.lines] == [1, 2, 2, 3, 3]
    times = [line["time"] for line in alone.lines]
    assert times == sorted(times) and 0 <= time.time() - times[-1] < 600
    assert all(line["eval_time"] > 0 for line in alone.lines if "eval_loss" in line)
    flops = training_flops_per_token(PRESETS["tiny"].model, SEQUENCE)
    for line in steps:
        assert line["mfu"] is None  # a CPU's peak is not known
        assert line["skipped"] is False
        assert 0 <= line["data_time"] <= line["step_time"]
        assert line["tokens_per_second"] == pytest.approx(BATCH * SEQUENCE / line["step_time"])
        assert line["tflops_per_device"] == pytest.approx(line["tokens_per_second"] * flops / 1e12)


def test_run_file_holds_the_job(alone: Report):
    saved = json.loads((alone.shop.folder / "run" / "run.json").read_text(encoding="utf-8"))
    assert saved["options"]["train_steps"] == STEPS
    assert saved["deepspeed_json"]["train_batch_size"] == BATCH
    assert saved["deepspeed"]["train_micro_batch_size_per_gpu"] == saved["batch"]["micro_batch_size"]
    assert saved["train_steps"] == STEPS
    assert saved["versions"]["torch"] == version("torch") and saved["versions"]["deepspeed"]
    assert saved["hosts"] == [{"name": "localhost", "slots": 1, "devices": [0]}]
    assert saved["device"] == {"kind": "cpu", "name": None, "memory": None}
    assert saved["arguments"][:2] == ["--deepspeed_config", str(alone.shop.folder / "config.json")]
    assert saved["folder"] == str(Path.cwd())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if ranks > 2 else ()) for name, (ranks, _) in LAYOUTS.items()],
)
def test_a_layout_reports_what_one_rank_does(name: str, alone: Report, tmp_path: Path):
    ranks, config = LAYOUTS[name]
    report = Report(tmp_path, ranks, config)
    assert [list(line) for line in report.lines] == [list(line) for line in alone.lines]
    for line, expected in zip(report.lines, alone.lines, strict=True):
        assert line["step"] == expected["step"]
        assert line.get("tokens") == expected.get("tokens")  # once, whatever peers read them
        for key in line.keys() & {"loss", "eval_loss", "grad_norm", "lr"}:
            assert line[key] == pytest.approx(expected[key], rel=1e-5), key
    flops = training_flops_per_token(PRESETS["tiny"].model, SEQUENCE)
    rate = report.lines[0]["tokens_per_second"] * flops / 1e12 / ranks
    assert report.lines[0]["tflops_per_device"] == pytest.approx(rate)
    _monitors_agree(report)
    assert report.sample == alone.sample
    assert report.sample.startswith("a layer ")
    # Ranks but the first are quiet, except for the one that happens to tokenize.
    others = [line for text in report.stdout[1:] for line in text.splitlines()]
    assert [line for line in others if not line.startswith(("tokenizing ", "tokenized "))] == []


def test_the_monitor_has_the_numbers_of_the_file(alone: Report):
    _monitors_agree(alone)


def test_tensorboard_is_written_where_the_json_says_nothing_of_it(alone: Report):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = alone.shop.folder / "run" / "tensorboard"
    events = EventAccumulator(str(folder), {"scalars": 0})
    events.Reload()
    expected = [(line["step"], pytest.approx(line["loss"])) for line in alone.lines if "loss" in line]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == expected
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 3]
    (said,) = (line for line in alone.stdout[0].splitlines() if "tensorboard" in line)
    command = shlex.split(said.partition("to watch it: ")[2])
    assert shutil.which(command[0]) and command[1:] == ["--logdir", str(folder)]


@pytest.mark.slow
def test_the_printed_command_exports_the_best_checkpoint(alone: Report):
    (said,) = (line for line in alone.stdout[0].splitlines() if "pipeline.export" in line)
    python, *words = shlex.split(said.partition("folder: ")[2])
    assert shutil.which(python) and words[:2] == ["-m", "pipeline.export"]
    assert export_main(words[2:]) == 0
    folder = alone.shop.folder / "run" / "exported" / alone.shop.latest("run").name
    assert (folder / "config.json").exists()


def _monitors_agree(report: Report) -> None:
    """The CSV monitor's loss is that of metrics.jsonl, to the digits that DeepSpeed writes."""
    losses = [(line["step"], line["loss"]) for line in report.lines if "loss" in line]
    rows = report.monitor("train_loss")
    assert [step for step, _ in rows] == [step for step, _ in losses]
    for (_, shown), (_, loss) in zip(rows, losses, strict=True):
        assert math.isclose(shown, loss, rel_tol=1e-6)
