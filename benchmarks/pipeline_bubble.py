"""Step time of pipelines against the ideal: p stages and m micro-batches take (m + p - 1) / m of the work.

    python benchmarks/pipeline_bubble.py
    python benchmarks/pipeline_bubble.py --stages 4 --micro_batches 4 8 16 32 --json result.json

The work is measured, not estimated: one process does the same step (same micro-batches, same optimizer), in
turn with the pipelines, each rank on a core or GPU of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the project is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.contenders import Task, this_pipeline
from benchmarks.report import Report, paired_ratio
from benchmarks.setting import Setting, choose_device, choose_model, require_positive, run_comparison
from benchmarks.workers import WorkerGroup
from pipeline.job.job import Job
from pipeline.model.config import ModelConfig
from pipeline.model.counts import block_flops_per_token

SCHEDULES = ("1f1b", "dualpipev")


@dataclass(frozen=True)
class Arguments:
    """Compare pipelines with their ideal."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if there are any."""
    model: str = "auto"
    """Preset or file. auto: benchmarks/gpt-6m.json on CPU, gpt2-124m on GPU."""
    stages: int = 2
    """p; as many ranks."""
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    """m, one after the other. DualPipeV needs 2 p at least and is left out below."""
    micro_batch_size: int = 1
    """Sequences of one micro-batch."""
    seq_length: int = 256
    """Tokens per sequence."""
    rounds: int = 8
    """Steps of each measurement, after one of warm-up."""
    json: str | None = None
    """File for the results."""


def ideal_over_work(shares: Sequence[float], micro_batches: int) -> float:
    """Step time of a pipeline over the time of its work in one process, without cost of communication.

    The first micro-batch passes every stage, the others follow at the pace of the slowest one:
    (sum of shares + (m - 1) * largest share) / m. With equal shares 1 / p that is (m + p - 1) / m, over p
    (Narayanan et al. 2019, section 3: the idle time of 1F1B is p - 1 slots of a forward and backward pass).

    Args:
        shares: Of the work, by stage; their sum is 1.
        micro_batches: m.
    """
    return (sum(shares) + (micro_batches - 1) * max(shares)) / micro_batches


def stage_shares(model: ModelConfig, boundaries: Sequence[int], seq_length: int, stages: int) -> list[float]:
    """Each rank's share of the FLOPs; with two chunks per rank, rank r holds chunks r and 2 p - 1 - r."""
    block = block_flops_per_token(model, seq_length)
    output = 2.0 * model.hidden_size * model.padded_vocab_size
    layers = [0.0, 0.0, *[block] * model.num_layers, 0.0, output]
    chunks = [sum(layers[a:b]) for a, b in pairwise(boundaries)]
    ranks = chunks
    if len(chunks) == 2 * stages:
        ranks = [chunks[rank] + chunks[-1 - rank] for rank in range(stages)]
    return [work / sum(ranks) for work in ranks]


def main(arguments: Sequence[str]) -> int:
    """0, or 2 for a setting that cannot run."""
    return run_comparison("pipeline_bubble", Arguments, compare, arguments)


def compare(given: Arguments, folder: str) -> None:
    """Measure, print, write.

    Raises:
        JobError: a layout that cannot run.
        WorkerFailed: one that failed.
    """
    require_positive(rounds=given.rounds, stages=given.stages, micro_batches=min(given.micro_batches))
    device = choose_device(given.device)
    model = choose_model(given.model, device)
    # fp32 everywhere: ZeRO 0 sums bf16 gradients in bf16, which no one would train with.
    setting = Setting(model, device, "fp32", 1, 1, given.seq_length, 1, folder)
    report = Report("pipeline bubble", device, asdict(given))
    setting.load_data(setting.job("zero0", 1))
    rows = [row for count in given.micro_batches for row in _rows(given, setting, count)]
    report.say("idle: share of the ranks' time that is not the work. ideal: that of 1F1B.")
    report.table(
        ("", "p", "m", "work s", "step s", "ideal s", "step / ideal", "idle", "ideal idle"),
        [
            (
                row["schedule"],
                given.stages,
                row["micro_batches"],
                f"{row['work']:.3f}",
                f"{row['step']:.3f}",
                f"{row['ideal']:.3f}",
                f"{row['step_over_ideal']:.3f}",
                f"{row['idle']:.1%}",
                f"{row['ideal_idle']:.1%}",
            )
            for row in rows
        ],
    )
    report.write(given.json, rows=rows)


def _rows(given: Arguments, setting: Setting, count: int) -> list[dict[str, Any]]:
    """All schedules at m = `count`, measured in turn with the process that does all the work."""
    setting = replace(setting, batch=count * given.micro_batch_size, accumulation=count)
    schedules = [name for name in SCHEDULES if name == "1f1b" or count >= 2 * given.stages]
    tasks = {"work": Task(setting)}
    for name in schedules:
        changes = (("pipeline", {"stages": given.stages, "schedule": name}),)
        tasks[name] = Task(setting, "zero0", changes)
    times = _take_turns(given, tasks)
    return [_row(given, tasks[name].job(given.stages), name, count, times) for name in schedules]


def _take_turns(given: Arguments, tasks: dict[str, Task]) -> dict[str, list[float]]:
    groups: dict[str, WorkerGroup] = {}
    try:
        for name, task in tasks.items():
            size = 1 if name == "work" else given.stages
            groups[name] = WorkerGroup(
                name, this_pipeline, task, world_size=size, device=task.setting.device, threads=1
            )
        for group in groups.values():
            group.wait_until_ready()
            group.run(1)
        times: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(given.rounds):
            for name, group in groups.items():
                times[name].append(group.run(1).seconds)
    finally:
        for group in groups.values():
            group.stop()
    return times


def _row(
    given: Arguments, job: Job, schedule: str, count: int, times: dict[str, list[float]]
) -> dict[str, Any]:
    shares = stage_shares(job.model, job.stages, given.seq_length, given.stages)
    ideal = ideal_over_work(shares, count)
    measured = paired_ratio(times[schedule], times["work"])
    work = median(times["work"])
    return {
        "schedule": schedule,
        "micro_batches": count,
        "shares": shares,
        "work": work,
        "step": median(times[schedule]),
        "ideal": ideal * work,
        "step_over_ideal": measured / ideal,
        "idle": 1 - 1 / (given.stages * measured),
        "ideal_idle": 1 - 1 / (given.stages * ideal),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
