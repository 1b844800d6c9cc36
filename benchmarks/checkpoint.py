"""Checkpoints: size beside the formula, saving beside `torch.save`, loading beside reading, in turn.

    python benchmarks/checkpoint.py                       # three ways to train on 2 ranks
    python benchmarks/checkpoint.py --model gpt2-124m --folder /mnt/fast --json result.json

Every file is brought to the disk (fsync) on both sides of a comparison. What is read is not in the page cache
before, on both sides; `--warm` leaves it there. Ratios are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the project is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.checkpoint_work import Saves, Work, convert_in_turn, load_in_turn, save_in_turn
from benchmarks.contenders import Task
from benchmarks.report import Report, paired_ratio, spread
from benchmarks.setting import Setting, choose_device, choose_model, require_positive, run_comparison
from benchmarks.workers import WorkerGroup
from pipeline.base.problems import JobError, Problem
from pipeline.base.words import did_you_mean
from pipeline.model.counts import total_parameters

RANKS = 2
# Bytes of a parameter: fp32 master weight, two moments, and a copy of the model.
FORMULA = {"fp32": 4 + 8 + 4, "bf16": 4 + 8 + 2}
# Ratio: what it is at most to be.
TARGETS = {
    "bytes / formula": 1.05,
    "save / torch.save": 1.2,
    "blocked / save": 0.2,
    "blocked and slowed / save": None,
    "load / read": 2.0,
    "load / torch.load": None,
    "verify and load / read": None,
    "load, other layout / read": 2.0,
    "load, other layout / torch.load": None,
    "verify and load, other layout / read": None,
    "convert / copy": 2.0,
}


@dataclass(frozen=True)
class Case:
    """A way to train, and another one in which its checkpoint is loaded."""

    precision: Literal["fp32", "bf16"]
    recipe: str
    other: str
    other_ranks: int = RANKS


CASES = {
    "bf16-zero1": Case("bf16", "zero1", "zero3"),
    "bf16-zero3": Case("bf16", "zero3", "zero1"),
    "fp32-zero1": Case("fp32", "zero1", "zero1", other_ranks=1),
}


@dataclass(frozen=True)
class Arguments:
    """Measure checkpoints."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if there are any."""
    model: str = "auto"
    """Preset or file. auto: benchmarks/gpt-6m.json on CPU, gpt2-124m on GPU."""
    seq_length: int = 64
    """Tokens per sequence: checkpoints do not depend on it, the steps beside a save in the background do."""
    rounds: int = 5
    """Times that everything is measured."""
    only: tuple[str, ...] = ()
    """Cases: bf16-zero1, bf16-zero3, fp32-zero1. None: all."""
    warm: bool = False
    """Leave what is read in the page cache."""
    folder: str | None = None
    """Folder on the disk to measure. None: one for temporary files."""
    json: str | None = None
    """File for the results."""


def main(arguments: Sequence[str]) -> int:
    """0, or 2 for a setting that cannot run."""
    return run_comparison("checkpoint", Arguments, compare, arguments)


def compare(given: Arguments, folder: str) -> None:
    """Measure, print, write.

    Raises:
        JobError: a case cannot run.
        WorkerFailed: a rank failed.
    """
    require_positive(rounds=given.rounds, seq_length=given.seq_length)
    device = choose_device(given.device)
    model = choose_model(given.model, device)
    names = _chosen(given.only)
    settings = {"model": model, "ranks": RANKS, "rounds": given.rounds, "seq_length": given.seq_length}
    settings |= {"page cache": "warm" if given.warm else "cold", "fsync": "always"}
    report = Report("checkpoint", device, settings)
    rows = []
    for name in names:
        setting = Setting(
            model, device, CASES[name].precision, RANKS, 1, given.seq_length, 1, f"{folder}/{name}"
        )
        setting.load_data(setting.job(CASES[name].recipe, RANKS))
        rows.append(_measure(name, CASES[name], setting, given))
        _print(report, rows[-1])
    report.write(given.json, cases=rows)


def _chosen(only: Sequence[str]) -> list[str]:
    unknown = [name for name in only if name not in CASES]
    if unknown:
        rule = "there is no such case"
        raise JobError([Problem("only", name, rule, did_you_mean(name, CASES)) for name in unknown])
    return list(only) or list(CASES)


def _measure(name: str, case: Case, setting: Setting, given: Arguments) -> dict[str, Any]:
    """Everything about one case; its checkpoint is loaded by new processes."""
    own, other = Task(setting, case.recipe), Task(setting, case.other)
    saves: Saves = _run(name, save_in_turn, Work(own, given.rounds), RANKS)
    load = Work(own, given.rounds, saves.path, not given.warm)
    same = _run(f"{name}, loading", load_in_turn, load, RANKS)
    load = Work(other, given.rounds, saves.path, not given.warm)
    changed = _run(f"{name}, loading as {case.other}", load_in_turn, load, case.other_ranks)
    converted = _run(f"{name}, converting", convert_in_turn, load, 1)
    count = total_parameters(setting.load_model(), padded=True)
    both = [blocked + slowed for blocked, slowed in zip(saves.blocked, saves.slowed, strict=True)]
    ratios = {
        "bytes / formula": saves.bytes / (count * FORMULA[case.precision]),
        "save / torch.save": paired_ratio(saves.save, saves.plain),
        "blocked / save": paired_ratio(saves.blocked, saves.save),
        "blocked and slowed / save": paired_ratio(both, saves.save),
        **_loading(same, ""),
        **_loading(changed, ", other layout"),
        "convert / copy": paired_ratio(converted["convert"], converted["copy"]),
    }
    seconds = {
        **{key: value for key, value in asdict(saves).items() if isinstance(value, list)},
        **{f"{key}, same layout": value for key, value in same.items()},
        **{f"{key}, other layout": value for key, value in changed.items()},
        **converted,
    }
    other_name = f"{case.other} on {case.other_ranks}"
    return {
        "case": name,
        "other": other_name,
        "parameters": count,
        "bytes": saves.bytes,
        "seconds": seconds,
        "ratios": ratios,
    }


def _loading(seconds: dict[str, list[float]], which: str) -> dict[str, float]:
    load, verified = (
        seconds["load"],
        [sum(both) for both in zip(seconds["verify"], seconds["load"], strict=True)],
    )
    return {
        f"load{which} / read": paired_ratio(load, seconds["read"]),
        f"load{which} / torch.load": paired_ratio(load, seconds["torch.load"]),
        f"verify and load{which} / read": paired_ratio(verified, seconds["read"]),
    }


def _run(name: str, work: Callable[..., Any], argument: Work, ranks: int) -> Any:
    """What rank 0 found; every rank has the same."""
    setting = argument.task.setting
    group = WorkerGroup(
        name, work, argument, world_size=ranks, device=setting.device, threads=setting.threads
    )
    return group.result()[0]


def _print(report: Report, row: dict[str, Any]) -> None:
    size, count = row["bytes"], row["parameters"]
    report.say(f"{row['case']}: {count:,} parameters, {size / 1e6:,.1f} MB; other layout: {row['other']}")
    report.table(
        ("", "seconds", "+-", "GB/s"),
        [
            (name, f"{median(values):.3f}", f"{spread(values):.0%}", _speed(name, size, median(values)))
            for name, values in row["seconds"].items()
        ],
    )
    report.table(
        ("", "measured", "at most", ""),
        [(name, f"{value:.3f}", *_verdict(value, TARGETS[name])) for name, value in row["ratios"].items()],
    )


def _speed(name: str, size: int, seconds: float) -> str:
    """Of what moves the whole checkpoint."""
    return "" if name in ("blocked", "slowed") else f"{size / seconds / 1e9:.2f}"


def _verdict(value: float, target: float | None) -> tuple[str, str]:
    if target is None:
        return "", ""
    return f"{target:g}", "reached" if value <= target else "NOT REACHED"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
