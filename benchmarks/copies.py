"""Comparing what ranks must have alike: what it takes beside a step, and how rarely it is done for that.

python benchmarks/copies.py
python benchmarks/copies.py --model gpt2-124m --rounds 5 --json result.json
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the project is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.checkpoint_work import Work, compare_in_turn
from benchmarks.contenders import Task
from benchmarks.report import Report, paired_ratio, spread
from benchmarks.setting import Setting, choose_device, choose_model, require_positive, run_comparison
from benchmarks.workers import WorkerGroup
from pipeline.checkpoints.copies import SHARE

RANKS = 2
# Recipe in ds_configs, and what is changed of it.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "replicas, ZeRO 0": ("zero0", {}),
    "replicas, ZeRO 1": ("zero1", {}),
    "replicas, ZeRO 3": ("zero3", {}),
    "sequence, ZeRO 1": ("zero1", {"sequence_parallel_size": RANKS}),
    "tensor, ZeRO 1": ("zero1", {"tensor_parallel": {"autotp_size": RANKS}}),
    "tied, ZeRO 1": ("zero1", {"pipeline": {"stages": RANKS}}),
}


@dataclass(frozen=True)
class Arguments:
    """Measure comparisons of copies."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if there are any."""
    model: str = "auto"
    """Preset or file. auto: benchmarks/gpt-6m.json on CPU, gpt2-124m on GPU."""
    seq_length: int = 256
    """Tokens per sequence."""
    batch: int = 8
    """Sequences per step."""
    rounds: int = 10
    """Steps, each with a comparison after it; one more comes before."""
    json: str | None = None
    """File for the results."""


def main(arguments: Sequence[str]) -> int:
    """0, or 2 for a setting that cannot run."""
    return run_comparison("copies", Arguments, compare, arguments)


def compare(given: Arguments, folder: str) -> None:
    """Measure, print, write.

    Raises:
        JobError: a layout cannot run.
        WorkerFailed: a rank failed.
    """
    require_positive(rounds=given.rounds, seq_length=given.seq_length, batch=given.batch)
    device = choose_device(given.device)
    model = choose_model(given.model, device)
    setting = Setting(model, device, "fp32", given.batch, 2, given.seq_length, 1, folder)
    report = Report("copies", device, {**asdict(given), "model": model, "ranks": RANKS})
    setting.load_data(setting.job("zero0", RANKS))
    rows = [_measure(name, setting, given.rounds) for name in CASES]
    report.table(
        ("", "step s", "comparison s", "+-", "comparison / step", "steps between"),
        [
            (
                row["case"],
                f"{median(row['seconds']['step']):.3f}",
                f"{median(row['seconds']['comparison']):.4f}",
                f"{spread(row['seconds']['comparison']):.0%}",
                f"{row['ratio']:.4f}",
                row["steps_between"],
            )
            for row in rows
        ],
    )
    report.write(given.json, cases=rows)


def _measure(name: str, setting: Setting, rounds: int) -> dict[str, Any]:
    recipe, changes = CASES[name]
    task = Task(setting, recipe, tuple(changes.items()))
    group = WorkerGroup(
        name,
        compare_in_turn,
        Work(task, rounds),
        world_size=RANKS,
        device=setting.device,
        threads=setting.threads,
    )
    seconds = group.result()[0]  # of the slowest rank: every rank has the same
    ratio = paired_ratio(seconds["comparison"], seconds["step"])
    return {"case": name, "seconds": seconds, "ratio": ratio, "steps_between": math.ceil(ratio / SHARE)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
