"""Ranges of the options that are numbers, and of `resume`."""

from __future__ import annotations

from pathlib import Path

from pipeline.job.options import Options
from pipeline.job.problems import Problem

# Smallest value of each whole-number option; None stays None.
LOWEST = {
    "seq_length": 1,
    "train_steps": 1,
    "train_tokens": 1,
    "eval_interval": 0,
    "eval_samples": 0,
    "save_interval": 0,
    "log_interval": 1,
    "seed": 0,
    "sample_tokens": 0,
}
# Options from 0 to below 1.
SHARES = ("dropout", "eval_fraction")


def option_problems(options: Options) -> list[Problem]:
    """Options out of range, each by itself."""
    problems = []
    for name, lowest in LOWEST.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            problems.append(Problem(name, value, f"must be at least {lowest}", f"Raise --{name}"))
    for name in SHARES:
        value = getattr(options, name)
        if value is not None and not 0 <= value < 1:
            rule = "must be at least 0 and below 1"
            problems.append(Problem(name, value, rule, f"Correct --{name}"))
    if options.resume not in ("auto", "never") and not Path(options.resume).exists():
        rule = "is neither auto, never nor an existing checkpoint"
        problems.append(Problem("resume", options.resume, rule, "Correct the path"))
    return problems
