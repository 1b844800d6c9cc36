"""Whole jobs on blends: stopped, resumed, changed, and always each sample in its turn."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import Workshop, run_faulty_job, signal_after_step, write_text
from tests.harness import run_job

# A source of two documents of some 1,900 bytes gives about 119 samples of 32 tokens per epoch.
BATCH = 24


def arguments(
    shop: Workshop, run: str, weights: dict[str, float], *more: str, steps: int, **config: Any
) -> list[str]:
    """A command line on a blend of the workshop's texts, with a sample log."""
    folders = {name: write_text(shop.folder / name, seed, 2) for seed, name in enumerate(weights)}
    data = [f"{folders[name]}={weight}" for name, weight in weights.items()]
    keys = {"train_batch_size": BATCH, **config}
    path = shop.config(f"{run}-{len(list(shop.folder.glob('*.json')))}", **keys)
    line = shop.arguments(run, path, "--log_samples", "--eval_interval", "4", *more, steps=steps)
    at = line.index("--data")
    return [*line[: at + 1], *data, *line[at + 2 :]]


def samples(shop: Workshop, run: str) -> list[str]:
    """The joined sample log; its steps and positions must be without gaps."""
    lines = [json.loads(line) for line in (shop.folder / run / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    joined: list[str] = []
    for line in lines:
        assert line["first"] == len(joined)
        joined += line["samples"]
    return [sample.removeprefix(f"{shop.folder}/") for sample in joined]


def state(shop: Workshop, run: str) -> dict[str, Any]:
    return json.loads((shop.latest(run) / "manifest.json").read_text())["state"]


@pytest.mark.slow
def test_a_blend_stopped_and_resumed_is_the_run_that_was_not(tmp_path: Path) -> None:
    """14 steps of 24 samples: at the stop after 9, one source is in its second epoch, at the end both are."""
    shop = Workshop(tmp_path)
    weights = {"books": 0.6, "code": 0.4}
    extra = write_text(tmp_path / "exam", 9, 1)
    more = ("--validation", f"exam={extra}", "--document_mask", "--mask_document_end")
    said = run_job(arguments(shop, "whole", weights, *more, steps=14), 2).check().stdout[0]
    books, code = (int(count) for count in re.findall(r"([\d]+) samples per epoch", said))
    assert 9 * BATCH * 0.4 < code < books < 9 * BATCH * 0.6 + 1
    assert code < 14 * BATCH * 0.4
    parts = arguments(shop, "parts", weights, *more, steps=14)
    stopped = run_faulty_job(parts, 2, signal_after_step, 9, 1, signal.SIGTERM)
    assert stopped.exit_codes == (3, 3), stopped.stderr[0]
    run_job(parts, 2).check()
    assert samples(shop, "parts") == samples(shop, "whole")
    assert shop.steps("parts") == shop.steps("whole")
    log = samples(shop, "whole")
    assert len(set(log)) == len(log) == 14 * BATCH
    for name, count in (("books", books), ("code", code)):
        numbers = [int(sample.split()[1]) for sample in log if sample.startswith(name)]
        assert sorted(numbers[:count]) == list(range(count)), "a whole epoch before the next one"
        assert min(numbers[count:]) >= count
        for end in range(len(log)):
            assert abs(sum(sample.startswith(name) for sample in log[:end]) - weights[name] * end) < 1
    evaluations = [line for line in shop.lines("whole") if "eval_loss" in line]
    assert [(line["step"], line["name"]) for line in evaluations] == [(at, "exam") for at in (4, 8, 12, 14)]
    taken = [each["taken"] for each in state(shop, "parts")["data"]["sources"]]
    assert sum(taken) == 14 * BATCH
    assert abs(taken[0] - 0.6 * 14 * BATCH) < 1


@pytest.mark.slow
def test_another_batch_size_reads_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    weights = {"books": 0.6, "code": 0.4}
    run_job(arguments(shop, "whole", weights, steps=6), 2).check()
    run_job(arguments(shop, "parts", weights, steps=3), 2).check()
    # 3 steps of 24, then 3 of 16 and 1 of 24: in micro-batches of 4 and of 12 on the two ranks.
    run_job(
        arguments(shop, "parts", weights, steps=6, train_batch_size=16, train_micro_batch_size_per_gpu=4), 2
    ).check()
    run_job(arguments(shop, "parts", weights, steps=7), 2).check()
    assert samples(shop, "parts") == samples(shop, "whole")


@pytest.mark.slow
def test_weights_change_and_a_source_joins_on_resume(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    run_job(arguments(shop, "run", {"books": 0.75, "code": 0.25}, steps=4), 1).check()
    changed = arguments(shop, "run", {"books": 0.25, "code": 0.25, "mails": 0.5}, steps=8)
    said = run_job(changed, 1).check().stdout[0]
    assert "other sources or weights from sample 96 on" in said
    assert "weight 0.75 -> 0.25, continues at sample" in said
    assert "mails: new, weight 0.5" in said
    log = samples(shop, "run")
    later = log[96:]
    for name, share in (("books", 0.25), ("code", 0.25), ("mails", 0.5)):
        for end in range(len(later)):
            assert abs(sum(sample.startswith(name) for sample in later[:end]) - share * end) < 1
    assert len(set(log)) == len(log), "every epoch's numbers are its own, so a repeated sample would show"
    # Nothing was changed now, so nothing is said.
    said = (
        run_job(arguments(shop, "run", {"books": 0.25, "code": 0.25, "mails": 0.5}, steps=9), 1)
        .check()
        .stdout[0]
    )
    assert "other sources or weights" not in said


@pytest.mark.slow
def test_data_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    weights = {"books": 0.75, "code": 0.25}
    run_job(arguments(shop, "run", weights, steps=1), 1).check()
    (tmp_path / "code" / "0.txt").write_text("other words")
    again = arguments(shop, "run", weights, steps=2)
    (tmp_path / "code" / "0.txt").write_text("other words")
    refused = run_job(again, 1)
    assert refused.exit_codes == (2,)
    assert "holds other tokens" in refused.stderr[0]
