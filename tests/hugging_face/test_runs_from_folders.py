"""Whole runs that begin with a folder's weights, and go on without the folder; the page's commands."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from pipeline.data.tokenizer import ByteTokenizer
from pipeline.export import main as export
from pipeline.generate import main as generate
from tests.end_to_end.jobs import TIMES, write_text
from tests.harness import run_job
from tests.hugging_face.folders import logits_of_transformers, only_config, write_folder

PAGE = Path(__file__).parents[2] / "docs" / "hugging_face.md"
CONFIG = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": None,
}


def arguments(base: Path, run: str, model: Path, steps: int) -> list[str]:
    (base / "ds.json").write_text(json.dumps(CONFIG))
    text = base / "text"
    return [
        *("--deepspeed_config", str(base / "ds.json"), "--model", str(model)),
        *("--data", str(text if text.exists() else write_text(text)), "--output_dir", str(base / run)),
        *("--seq_length", "16", "--train_steps", str(steps), "--eval_samples", "0", "--sample_tokens", "0"),
    ]


def steps(run: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


@pytest.mark.slow
def test_a_run_goes_on_without_the_folder_it_began_with(tmp_path: Path):
    folder = write_folder(tmp_path / "model", "llama")
    said = run_job(arguments(tmp_path, "whole", folder, 4), 2).check().stdout[0]
    assert f"starting at step 0 with the weights in {folder}" in said
    run_job(arguments(tmp_path, "stopped", folder, 2), 2).check()
    assert (tmp_path / "stopped" / "tokenizer" / "tokenizer.json").exists()
    shutil.rmtree(folder)
    said = run_job(arguments(tmp_path, "stopped", folder, 4), 2).check().stdout[0]
    assert "resumed from" in said and "weights in" not in said
    assert steps(tmp_path / "stopped") == steps(tmp_path / "whole")
    # Nothing but a run of that model goes on without it.
    refused = run_job(arguments(tmp_path, "another", folder, 4), 1)
    assert refused.exit_codes == (2,)
    assert "there is no such file or folder" in refused.stderr[0]


def test_random_weights_are_said_to_be_random(tmp_path: Path):
    """And their sample has no ids but those of the tokenizer, which are fewer."""
    folder = write_folder(tmp_path / "model", "gpt2")
    bare = only_config(folder, tmp_path / "bare")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "vocab_size": 2 * ByteTokenizer.vocab_size}))
    job = [*arguments(tmp_path, "run", bare, 1), "--sample_tokens", "20"]
    said = run_job(job, 1).check().stdout[0]
    assert f"starting at step 0 from random weights: no weights in {bare}" in said
    assert "sample:" in said


# The page ----------------------------------------------------------------------------------------------


def blocks(language: str) -> Iterator[str]:
    text = PAGE.read_text(encoding="utf-8")
    return (match[1] for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@pytest.mark.slow
def test_the_pages_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the order in which one needs them; jobs of two steps. Those of lm_eval run below."""
    monkeypatch.chdir(tmp_path)
    short = ("--eval_samples", "4", "--sample_tokens", "0")
    run_job(["--output_dir", "runs/tiny", "--train_steps", "2", *short], 2, cwd=tmp_path).check()
    assert export(["runs/tiny", "exported/tiny"]) == 0  # as README.md does
    lines = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    for entry in (export, generate):
        found = [words[3:] for words in lines if words[:3] == ["python", "-m", entry.__module__]]
        assert found and [entry(arguments) for arguments in found] == [0] * len(found)
    for code in blocks("python"):
        exec(code, {})
    (tmp_path / "finetune.json").write_text(next(blocks("json")))
    (words,) = (words for words in lines if words[0] == "./launch.sh")
    assert "--train_steps" in words
    # By default not in runs/tiny, where it would go on with the run that was exported.
    first, again = (
        run_job([*words[1:], "--train_steps", "2", *short], 2, cwd=tmp_path).check() for _ in "12"
    )
    assert "starting at step 0 with the weights in exported/tiny" in first.stdout[0]
    assert "resumed from runs/from_tiny/checkpoints/global_step2" in again.stdout[0]
    assert "its weights are used; those in exported/tiny were for step 0" in again.stdout[0]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install lm_eval==0.4.13"
)
def test_the_harness_finds_the_loss_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The page's pair of lines, on the page's task."""
    monkeypatch.chdir(tmp_path)
    words = "a layer adds what the layers before it did not say, na\u00efve"
    (tmp_path / "own_text.yaml").write_text(next(blocks("yaml")))
    (tmp_path / "own_text.jsonl").write_text(json.dumps({"text": words}) + "\n")
    short = ("--eval_samples", "0", "--sample_tokens", "0", "--train_steps", "2")
    run_job(["--output_dir", "runs/tiny", *short], 1, cwd=tmp_path).check()
    exporting, evaluating = map(shlex.split, next(blocks("sh")).splitlines())
    assert exporting[:3] == ["python", "-m", "pipeline.export"] and evaluating[0] == "lm_eval"
    assert export(exporting[3:]) == 0
    harness = [sys.executable, "-m", *evaluating]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    ended = subprocess.run(harness, capture_output=True, text=True, check=False, env=offline, timeout=300)
    assert ended.returncode == 0, ended.stderr
    (results,) = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["own_text"]["bits_per_byte,none"]
    text = words.encode()
    logits = logits_of_transformers(tmp_path / "exported" / "tiny", torch.tensor([[256, *text]]))[0, :-1]
    nats = functional.cross_entropy(logits, torch.tensor(list(text))).item()
    assert found == pytest.approx(nats / math.log(2), rel=1e-5)
