"""A newcomer's way: files of three kinds, a BPE trained on them, a run on their blend, stopped, and resumed
in another layout."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from pipeline.data.tokenizer import load_tokenizer
from pipeline.prepare import main as prepare
from tests.end_to_end.jobs import Workshop, run_faulty_job, signal_after_step, write_text
from tests.harness import run_job

VOCABULARY = 280
MODEL = {"model_type": "gpt2", "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}


def texts(seed: int, count: int) -> list[str]:
    dice = random.Random(seed)
    words = "one reads what one has and writes what one will".split()
    return [" ".join(dice.choice(words) for _ in range(300)) for _ in range(count)]


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(1, 8))
    (tmp_path / "lines.jsonl.zst").write_bytes(pa.compress(lines.encode(), codec="zstd", asbytes=True))
    parquet.write_table(pa.table({"text": texts(2, 8)}), tmp_path / "table.parquet")
    write_text(tmp_path / "prose", seed=3)
    (tmp_path / "model.json").write_text(json.dumps({**MODEL, "vocab_size": VOCABULARY}))
    return Workshop(tmp_path)


def arguments(shop: Workshop, run: str, config: str, *more: str) -> list[str]:
    folder = shop.folder
    blend = [f"{folder}/tokens=0.5", f"{folder}/table.parquet=0.25", f"{folder}/prose=0.25"]
    return [
        *("--deepspeed_config", config, "--model", str(folder / "model.json"), "--data", *blend),
        *("--seq_length", "32", "--train_steps", "6", "--sample_tokens", "4", "--eval_samples", "4"),
        *("--output_dir", str(folder / run), "--log_samples", *more),
    ]


def samples(shop: Workshop, run: str) -> list[str]:
    text = (shop.folder / run / "samples.jsonl").read_text()
    return [sample for line in text.splitlines() for sample in json.loads(line)["samples"]]


@pytest.mark.slow
def test_three_files_one_tokenizer_one_blend(shop: Workshop) -> None:
    from transformers import AutoTokenizer

    folder = shop.folder
    inputs = [str(folder / name) for name in ("lines.jsonl.zst", "table.parquet", "prose")]
    assert prepare([*inputs, "--output", str(folder / "all"), "--train_tokenizer", str(VOCABULARY)]) == 0
    bpe = f"{folder}/all.tokenizer"
    assert prepare([inputs[0], "--output", str(folder / "tokens"), "--tokenizer", bpe]) == 0
    one, two = shop.config("one"), shop.config("two", zero_optimization={"stage": 1})
    run_job(arguments(shop, "whole", one, "--tokenizer", bpe), 1).check()

    # The token files bring their tokenizer: it need not be named.
    stopped = run_faulty_job(arguments(shop, "parts", two), 2, signal_after_step, 3, 0, signal.SIGTERM)
    assert stopped.exit_codes == (3, 3), stopped.stderr[0]
    other = shop.config("other", zero_optimization={"stage": 0}, pipeline={"stages": 2})
    resumed = run_job(arguments(shop, "parts", other), 4).check()
    assert "layout changed: pipeline 1 -> 2" in resumed.stdout[0]
    assert samples(shop, "parts") == samples(shop, "whole")
    for line, other in zip(shop.steps("parts"), shop.steps("whole"), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)

    saved = folder / "whole/tokenizer"
    assert load_tokenizer(str(shop.latest("parts") / "tokenizer")).identity == load_tokenizer(bpe).identity
    ours, theirs = load_tokenizer(str(saved)), AutoTokenizer.from_pretrained(saved)
    assert ours.identity == load_tokenizer(bpe).identity
    assert theirs("one reads")["input_ids"] == ours.encode("one reads").tolist()
    refused = run_job(arguments(shop, "whole", one, "--tokenizer", "bytes"), 1)
    assert refused.exit_codes == (2,)
    assert f"tokenizer '{ours.identity}' there, 'bytes' here" in " ".join(refused.stderr[0].split())
