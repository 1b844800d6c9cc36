"""Whole validation sets: the plain loss of the weights, in every layout, and nothing of a run changed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from pipeline.base.problems import JobError
from pipeline.checkpoints.export.load_model import from_checkpoint
from pipeline.checkpoints.resume import checkpoint_at
from pipeline.cluster.agent.rank_link import RankLink
from pipeline.cluster.outcome import Outcome
from pipeline.evaluate import evaluate_rank, read_request
from pipeline.training.rank import live
from tests.checkpoints.layouts import CONFIG, OPTIMIZERS, SEQUENCE, arguments, find
from tests.covering import first_fast
from tests.end_to_end.jobs import PROJECT, write_text
from tests.harness import run_job, run_ranks
from tests.hugging_face.folders import logits_of_transformers, write_folder
from tests.parity import mutations

# Beside the sums' rounding nothing differs, as in the parity of training.
TOLERANCE = 1e-5
TEXT = "".join(f"{number} times {number} is {number * number}; " for number in range(60))
LABELS = len(TEXT)  # one token a byte, and the document's end
assert LABELS % SEQUENCE, "the last sample is not full"


class Recorder(RankLink):
    """A link to an agent that keeps the outcome."""

    outcome: Outcome | None = None

    def ended(self, outcome: Outcome) -> None:
        self.outcome = outcome


def evaluated(args: list[str], mutation: Callable[..., None] | None = None) -> dict[str, Any]:
    """What a rank finds."""
    link = Recorder()
    if mutation is not None:
        mutation(lambda: None)
    assert live(evaluate_rank, args, link) == 0
    assert link.outcome is not None
    return json.loads(link.outcome.message)


def evaluate(args: list[str], ranks: int = 1, mutation: Callable[..., None] | None = None) -> dict[str, Any]:
    """What all ranks find, which is the same."""
    found = run_ranks(evaluated, ranks, args, mutation)
    assert all(each == found[0] for each in found)
    return found[0]


def plain_loss(logits: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Of `TEXT` cut into samples; what fills the last one up stands behind all that counts."""
    stream = torch.tensor([*TEXT.encode(), 256, *[0] * SEQUENCE])
    rows = torch.stack([stream[begin : begin + SEQUENCE + 1] for begin in range(0, LABELS, SEQUENCE)])
    found = logits(rows[:, :-1]).flatten(0, 1)[:LABELS]
    return functional.cross_entropy(found, rows[:, 1:].flatten()[:LABELS]).item()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the llama model on one rank, with two checkpoints, and a set that it has not seen."""
    base = tmp_path_factory.mktemp("evaluation")
    (base / "set.txt").write_text(TEXT)
    (base / "alone").mkdir()
    (base / "alone" / "global_step2").symlink_to(base / "run" / "checkpoints" / "global_step2")
    more = ("--eval_samples", "1000", "--save_interval", "1")
    run_job(arguments(base, "run", "one", *more, steps=2, model="llama"), 1).check()
    return base


def call(base: Path, layout: str, *more: str) -> list[str]:
    """The command line for the run in another layout."""
    config = arguments(base, "run", layout, steps=2, model="llama")[1]
    return [str(base / "run"), "--deepspeed_config", config, *more]


LAYOUTS = ["dp2 zero3", "pp2 tp2 zero1", "sp2", "dualpipev2", "dp2", "tp2 zero2 offload", "dp2 tp2 zero3"]


@pytest.mark.parametrize("layout", first_fast(LAYOUTS, 1))
def test_the_loss_is_the_plain_one_in_every_layout(base: Path, layout: str) -> None:
    named = f"--validation=set={base / 'set.txt'}"
    found = evaluate(call(base, layout, named), find(layout).ranks)["sets"][0]
    checkpoint = checkpoint_at(base / "run").checkpoint
    assert checkpoint is not None
    model = from_checkpoint(checkpoint, None, torch.float32).model
    with torch.no_grad():
        expected = plain_loss(lambda rows: model(rows).logits)
    assert found["loss"] == pytest.approx(expected, rel=TOLERANCE)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(expected / math.log(2), rel=TOLERANCE)
    assert (found["name"], found["tokens"], found["bytes"], found["documents"]) == ("set", LABELS, LABELS, 1)


def padding_counts(calls: Callable[[], None]) -> None:
    """Rows of padding are taken for text."""
    from pipeline.data import loader

    padded = loader._padded

    def counted(*args: Any) -> Any:
        calls()
        batch = padded(*args)
        return loader.replace(batch, mask=torch.ones_like(batch.mask))

    import dataclasses

    loader.replace, loader._padded = dataclasses.replace, counted


@pytest.mark.parametrize(
    ("mutation", "layout"),
    first_fast([(mutations.mean_of_rank_means, "dp2 zero3"), (padding_counts, "dp2"),
                (mutations.no_sum_after_row_parallel, "tp2 zero2 offload")], 1),
)  # fmt: skip
def test_the_comparison_notices_a_wrong_sum(base: Path, mutation: Callable[..., None], layout: str) -> None:
    args = call(base, layout, f"--validation=set={base / 'set.txt'}")
    right = evaluate(call(base, "one", args[-1]))["sets"][0]["loss"]
    assert evaluate(args, find(layout).ranks, mutation)["sets"][0]["loss"] != pytest.approx(right, rel=1e-3)


def test_what_a_run_holds_out_is_evaluated_whole(base: Path) -> None:
    """The losses that the run itself found, which it evaluated whole, and of an earlier checkpoint."""
    lines = [json.loads(line) for line in (base / "run" / "metrics.jsonl").read_text().splitlines()]
    before = {path: path.stat().st_mtime_ns for path in (base / "run").rglob("*") if "data" not in path.parts}
    last = evaluate([str(base / "run")])
    first = evaluate([str(base / "run"), "--step", "1"])
    assert (last["step"], first["step"]) == (2, 1)
    assert last["sets"][0]["loss"] == next(line["eval_loss"] for line in lines if "eval_loss" in line)
    assert first["sets"][0]["loss"] > last["sets"][0]["loss"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "set.txt").write_text(TEXT)
    folder = write_folder(tmp_path / "gpt2", "gpt2")
    options = ("--seq_length", str(SEQUENCE), "--output_dir", str(tmp_path / "made"))
    found = evaluate([str(folder), "--validation", f"set={tmp_path / 'set.txt'}", *options])
    expected = plain_loss(lambda rows: logits_of_transformers(folder, rows))
    assert found["sets"][0]["loss"] == pytest.approx(expected, rel=TOLERANCE)
    assert (found["step"], found["folder"]) == (None, str(folder))


def test_a_run_records_the_loss_of_the_weights_it_begins_with(tmp_path: Path) -> None:
    """Before step 1, and again where a start was killed before it saved; started when it had finished, it
    replaces the line of its last step."""
    (tmp_path / "set.txt").write_text(TEXT)
    folder, run = write_folder(tmp_path / "gpt2", "gpt2"), tmp_path / "run"
    (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, "optimizer": OPTIMIZERS["SGD"]}))
    args = [
        *("--model", str(folder), "--deepspeed_config", str(tmp_path / "ds.json"), "--train_steps", "1"),
        *("--data", str(write_text(tmp_path / "text")), "--validation", f"set={tmp_path / 'set.txt'}"),
        *("--seq_length", str(SEQUENCE), "--sample_tokens", "0", "--output_dir", str(run), "--eval_samples"),
    ]

    def recorded() -> list[tuple[int, float]]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 1, 1]
        return [(line["step"], line["eval_loss"]) for line in lines if line.get("name") == "set"]

    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 9.9, "name": "set"}\n')
    run_job([*args, "1000"], 1).check()
    (_, before), (_, after) = recorded()
    expected = plain_loss(lambda rows: logits_of_transformers(folder, rows))
    assert before == pytest.approx(expected, rel=TOLERANCE)
    said = run_job([*args, "2"], 1).check().stdout[0]
    (_, same), (_, again) = recorded()
    assert same == before and again not in (before, after)
    assert f"{again:.4f}" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "source: is neither a run nor"),
        (["run", "--step", "7"], "step: run has no such checkpoint"),
        (["run", "--data", "text", "--validation", "a=set.txt"], "validation: names the sets, and the train"),
        (["alone/global_step2"], "config: a checkpoint is read with"),
    ],
)
def test_what_cannot_be_evaluated(
    base: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], said: str
) -> None:
    monkeypatch.chdir(base)
    with pytest.raises(JobError) as error:
        read_request(args)
    (problem,) = error.value.problems
    assert f"{problem.key}: {problem.rule}".startswith(said)


@pytest.mark.slow
def test_the_command_gives_json_alone(base: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline.evaluate", *call(base, "dp2 zero3", "--num_gpus", "2")]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    ended = subprocess.run(
        [*command, "--output", str(tmp_path / "losses.json")],
        capture_output=True, text=True, check=False, timeout=300, cwd=PROJECT, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == json.loads((tmp_path / "losses.json").read_text())
    assert json.loads(ended.stdout)["layout"]["data"] == 2
