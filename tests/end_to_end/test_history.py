"""history.jsonl: a start and an end for each start, whatever ended it, from which goodput follows."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.history import HISTORY_FILE, read_history, record_end, record_start
from pipeline.cluster.outcome import Outcome, write_outcome
from tests.checkpoints.saved_runs import job_in
from tests.end_to_end.jobs import Workshop, raise_on_call, run_faulty_job, signal_after_step
from tests.harness import run_job


def goodput(history: list[dict[str, Any]]) -> float:
    """As docs/checkpoints.md says it."""
    starts = [line for line in history if line["event"] == "start"]
    ends = [line for line in history if line["event"] == "end"]
    kept = sum(end["step_seconds"] for end in ends) - sum(start["lost_seconds"] for start in starts)
    return kept / (ends[-1]["time"] - starts[0]["time"])


def test_goodput_of_a_run_that_was_killed_and_resumed(tmp_path: Path):
    """Killed in step 4 with everything that could tell; step 3 is taken again."""
    shop = Workshop(tmp_path)
    arguments = shop.arguments("run", shop.config(), "--save_interval", "2", steps=5)
    run_faulty_job(arguments, 1, signal_after_step, 4, 0, signal.SIGKILL)
    assert [line["event"] for line in shop.history("run")] == ["start"]
    killed = shop.lines("run")
    run_job(arguments, 1).check()

    first, end, second, last = shop.history("run")
    assert (first["why"], first["step"], first["lost_steps"]) == ("from step 0", 0, 0)
    assert first["layout"]["data"] == 1 and first["hosts"] == [{"name": "localhost", "slots": 1}]
    assert (end["status"], end["exit_code"], end["step"], end["steps"]) == ("unknown", None, 3, 3)
    assert (end["loss"], end["tokens"]) == (killed[2]["loss"], killed[2]["tokens"])
    assert end["start"] == first["start"] and last["start"] == second["start"] != first["start"]
    assert second["why"] == f"resumed from {shop.folder}/run/checkpoints/global_step2"
    assert (second["step"], second["lost_steps"], second["tokens"]) == (2, 1, killed[1]["tokens"])
    assert second["lost_tokens"] == killed[2]["tokens"] - killed[1]["tokens"]
    assert (last["status"], last["exit_code"], last["step"], last["steps"]) == ("finished", 0, 5, 3)
    assert last["eval_seconds"] > 0 and last["save_seconds"] > 0
    assert first["time"] < end["time"] < second["time"] < last["time"]

    lines = shop.lines("run")
    taken = sum(line["step_time"] for line in lines if "loss" in line)
    expected = taken / (last["time"] - first["time"])
    assert goodput(shop.history("run")) == pytest.approx(expected, abs=1e-3)
    assert 0 < expected < 1
    outcome = shop.outcome("run")
    steps = [line for line in lines if "loss" in line]
    assert (outcome["loss"], outcome["tokens"]) == (steps[-1]["loss"], steps[-1]["tokens"])
    assert outcome["time"] == pytest.approx(last["time"], abs=5)


def test_what_fails_in_the_first_step_has_taken_none(tmp_path: Path):
    """Nor has it where DeepSpeed is at work already, as when memory runs out."""
    shop = Workshop(tmp_path)
    arguments = shop.arguments("run", shop.config())
    target = "pipeline.engine.engine:SequentialEngine._train"
    result = run_faulty_job(arguments, 1, raise_on_call, target, 0)
    assert "rank 0 failed before the first step:" in result.stderr[0]
    assert shop.outcome("run")["step"] == 0
    start, end = shop.history("run")
    assert (end["status"], end["steps"], end["exit_code"], end["start"]) == ("failed", 0, 1, start["start"])


@pytest.mark.parametrize(
    ("torn", "events"),
    [
        (b'{"event": "end", "time": 1', ["start", "end", "start"]),  # a crash in the middle of an end
        (b"\0\0\0\0", ["start", "end", "start"]),
        (b"[1]\nno JSON\n", ["start", "end", "start"]),  # somebody's notes
        (
            b'{"event": "end", "time": 9, "step": 0}',
            ["start", "end", "start"],
        ),  # only its end is missing
    ],
)
def test_a_torn_line_is_mended_by_the_next(torn: bytes, events: list[str], tmp_path: Path):
    job = job_in(tmp_path)
    folder = Path(job.output_dir)
    record_start(job, 0, 0, None)
    with (folder / HISTORY_FILE).open("ab") as file:
        file.write(torn)
    record_start(job, 0, 0, None)
    assert [line["event"] for line in read_history(folder)] == events
    lines = (folder / HISTORY_FILE).read_bytes().splitlines()
    if b"no JSON" not in torn:
        assert [json.loads(line)["event"] for line in lines] == events


def test_a_start_has_one_end_the_first_that_is_told(tmp_path: Path):
    job = job_in(tmp_path)
    folder = Path(job.output_dir)
    record_end(folder, "failed", "no start", 1)  # there is none
    assert not (folder / HISTORY_FILE).exists()
    record_start(job, 7, 448, Path("global_step7"))
    write_outcome(folder, Outcome("failed", 7, message="OSError: no"), ends_start=False)
    assert len(read_history(folder)) == 1
    write_outcome(folder, Outcome("stopped", 7, message="SIGTERM on rank 0"), is_final=True)
    write_outcome(folder, Outcome("failed", 7), is_final=True)
    (end,) = read_history(folder)[1:]
    assert (end["status"], end["reason"], end["exit_code"]) == ("stopped", "SIGTERM on rank 0", 3)
    assert (end["step"], end["steps"], end["tokens"], end["loss"]) == (7, 0, 448, None)


def test_a_history_that_cannot_be_written_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    job = job_in(tmp_path)
    (Path(job.output_dir) / HISTORY_FILE).mkdir(parents=True)
    record_start(job, 0, 0, None)
    assert "history.jsonl cannot be written" in caplog.text
