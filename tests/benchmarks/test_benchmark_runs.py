"""Each benchmark, as a user starts it, at sizes that take seconds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint, copies, memory, throughput
from benchmarks.workers import Clock, WorkerFailed, WorkerGroup
from pipeline.cluster.rank_environment import RankEnvironment

ROOT = Path(__file__).parents[2]
MODEL = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "ffn_hidden_size": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Options that every benchmark takes: a model and sequences that cost nothing."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL), encoding="utf-8")
    return ["--model", str(path), "--seq_length", "32"]


def run_benchmark(name: str, tmp_path: Path, arguments: list[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of ``python benchmarks/<name>.py``."""
    result = tmp_path / "results" / f"{name}.json"
    command = [sys.executable, f"benchmarks/{name}.py", *arguments, "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert result.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(result.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.repeats
def test_throughput_measures_every_contender_at_the_same_losses(tmp_path: Path, small: list[str]):
    arguments = "--device cpu --batch 4 --accumulation 2 --rounds 2 --warmup 2 --data".split()
    code, values = run_benchmark("throughput", tmp_path, [*small, *arguments, str(ROOT / "pipeline")])
    assert code == 0
    assert set(values["contenders"]) == set(throughput.CONTENDERS)
    assert {(r["contender"], r["against"]) for r in values["ratios"]} == {
        (name, other) for name, other, _ in throughput.TARGETS
    }
    assert all(math.isfinite(r["ratio"]) and r["ratio"] > 0 for r in values["ratios"])
    assert values["loss_differences"] == []
    assert values["machine"]["torch"]


@pytest.mark.slow
@pytest.mark.repeats
def test_memory_is_what_the_paper_says(tmp_path: Path):
    # Large enough that padding to equal shards is below the tolerance.
    code, values = run_benchmark("memory", tmp_path, ["--device", "cpu"])
    assert [row["case"] for row in values["rows"]] == [case.label for case in memory.CASES]
    assert values["largest_deviation"] <= memory.TOLERANCE
    assert code == 0


@pytest.mark.slow
@pytest.mark.repeats
def test_memory_that_deviates_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: list[str]):
    monkeypatch.setattr(memory, "TOLERANCE", -1.0)
    given = memory.Arguments(device="cpu", model=small[1])
    assert memory.compare(given, str(tmp_path), memory.CASES[:1]) == 1


@pytest.mark.slow
@pytest.mark.repeats
def test_pipeline_bubble_measures_both_schedules(tmp_path: Path, small: list[str]):
    arguments = "--device cpu --micro_batches 2 4 --rounds 2".split()
    code, values = run_benchmark("pipeline_bubble", tmp_path, [*small, *arguments])
    assert code == 0
    measured = [(row["schedule"], row["micro_batches"]) for row in values["rows"]]
    assert measured == [("1f1b", 2), ("1f1b", 4), ("dualpipev", 4)]
    assert all(math.isfinite(row["step_over_ideal"]) for row in values["rows"])


@pytest.mark.slow
@pytest.mark.repeats
def test_loss_curves_of_one_precision_are_equal(tmp_path: Path, small: list[str]):
    arguments = "--second cpu-fp32 --steps 4 --batch 4".split()
    code, values = run_benchmark("loss_curves", tmp_path, [*small, *arguments])
    assert code == 0
    assert values["differences"] == {"first step": 0.0, "second half": 0.0, "largest": 0.0}
    assert len(values["curves"]["cpu-fp32"]) == 4


@pytest.mark.slow
@pytest.mark.repeats
def test_checkpoints_are_measured_beside_their_bare_equivalents(tmp_path: Path, small: list[str]):
    (tmp_path / "disk").mkdir()
    arguments = f"--device cpu --rounds 1 --only bf16-zero1 --folder {tmp_path / 'disk'}".split()
    code, values = run_benchmark("checkpoint", tmp_path, [*small, *arguments])
    assert code == 0
    (case,) = values["cases"]
    assert set(case["ratios"]) == set(checkpoint.TARGETS)
    timed = {name: seconds for name, seconds in case["seconds"].items() if name != "slowed"}
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in timed.values())
    # What is beside the shards weighs as much as those of a model this small.
    formula = 14 * case["parameters"]
    assert formula < case["bytes"] < formula + 2**20
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.slow
@pytest.mark.repeats
def test_comparing_copies_is_measured_beside_steps(tmp_path: Path, small: list[str]):
    code, values = run_benchmark("copies", tmp_path, [*small, *"--device cpu --rounds 2".split()])
    assert code == 0
    assert [row["case"] for row in values["cases"]] == list(copies.CASES)
    assert all(row["ratio"] > 0 and row["steps_between"] > 0 for row in values["cases"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--batch 3", "train_batch_size"),
        ("--rounds 0 --steps 0", "steps"),
        ("--only plain triner", "trainer"),
        ("--model no-such-model", "no-such-model"),
    ],
)
def test_a_comparison_that_cannot_run_is_refused(
    arguments: str, named: str, small: list[str], capsys: pytest.CaptureFixture[str]
):
    assert throughput.main([*small, "--device", "cpu", *arguments.split()]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "named"), [("--rounds 0", "rounds"), ("--only zero9", "zero9")])
def test_checkpoints_that_cannot_be_measured_are_refused(
    arguments: str, named: str, capsys: pytest.CaptureFixture[str]
):
    assert checkpoint.main(["--device", "cpu", *arguments.split()]) == 2
    assert named in capsys.readouterr().err


def refuse(argument: str, environment: RankEnvironment, clock: Clock) -> None:
    """A contender that cannot be built on rank 1."""
    if environment.rank == 1:
        raise ValueError(argument)
    clock.begin()


@pytest.mark.slow
def test_a_contender_that_fails_ends_the_comparison_with_its_traceback():
    group = WorkerGroup("broken", refuse, "no such model", world_size=2, device="cpu", threads=1)
    with pytest.raises(WorkerFailed, match=r"(?s)broken, rank 1: failure.*ValueError: no such model"):
        group.wait_until_ready()
