"""Ranges of the options that are numbers, and what texts and paths must be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.base.problems import Problem
from pipeline.base.user_input import exists, is_text, parse_duration
from pipeline.job.options import Options
from pipeline.job.stop_file import STAMP

# Smallest value of each whole-number option; None stays None.
LOWEST = {
    "seq_length": 1,
    "train_steps": 1,
    "train_tokens": 1,
    "eval_interval": 0,
    "eval_samples": 0,
    "save_interval": 0,
    "keep_last": 1,
    "keep_every": 1,
    "log_interval": 1,
    "seed": 0,
    "sample_tokens": 0,
}
# All of them fit 64 bits.
HIGHEST = 2**63 - 1
LONGEST_DAYS = 36500  # of --time_limit
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
# Options from 0 to below 1.
SHARES = ("dropout", "eval_fraction")
# Options that name something, and are not empty.
NAMES = (
    "deepspeed_config", "model", "data", "data_blend", "validation", "cache_dir", "output_dir", "resume",
    "config", "time_limit", "stop_file",
)  # fmt: skip
TEXTS = (*NAMES, "sample_prompt")


def option_problems(options: Options) -> list[Problem]:
    """Options out of range, each by itself."""
    problems = []
    for name, lowest in LOWEST.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            problems.append(Problem(name, value, f"must be at least {lowest}", f"Raise --{name}"))
        elif value is not None and value > HIGHEST:
            problems.append(Problem(name, value, f"must be at most {HIGHEST}", f"Lower --{name}"))
    for name in SHARES:
        value = getattr(options, name)
        if value is not None and not 0 <= value < 1:
            rule = "must be at least 0 and below 1"
            problems.append(Problem(name, value, rule, f"Correct --{name}"))
    problems += _text_problems(options)
    problems += cache_problems(options.cache_size)
    if options.on_bad_record not in ("stop", "skip"):
        rule = "is neither stop nor skip"
        problems.append(Problem("on_bad_record", options.on_bad_record, rule, "Correct --on_bad_record"))
    if options.save_failure not in ("continue", "stop"):
        rule = "is neither continue nor stop"
        problems.append(Problem("save_failure", options.save_failure, rule, "Correct --save_failure"))
    problems += _time_problems(options)
    for name in options.allow_pickle:
        if not _DOTTED.fullmatch(name):
            rule = "is not MODULE.NAME"
            problems.append(Problem("allow_pickle", name, rule, "Write it as the refusal did"))
    if options.resume not in ("auto", "never") and not exists(options.resume):
        rule = "is neither auto, never nor an existing checkpoint"
        problems.append(Problem("resume", options.resume, rule, "Correct the path"))
    return problems


def _time_problems(options: Options) -> list[Problem]:
    """Whether the time limit is one, and the launch was at some time, with a stamp of the stop file."""
    problems = []
    if options.time_limit:
        try:
            legal = 0 < parse_duration(options.time_limit) <= LONGEST_DAYS * 86400
            rule = None if legal else f"must be above 0 and at most {LONGEST_DAYS}d"
        except ValueError as error:
            rule = str(error)
        if rule is not None:
            problems.append(Problem("time_limit", options.time_limit, rule, "Correct --time_limit"))
    if options.started_at is not None and not 0 <= options.started_at < float("inf"):
        rule = "must be in seconds since 1970"
        problems.append(Problem("started_at", options.started_at, rule, "Leave --started_at out"))
    if options.stop_stamp is not None and not STAMP.fullmatch(options.stop_stamp):
        rule = "must be SYSTEM:PROCESSES:INODE:NANOSECONDS:PATH, or none for inode and time"
        problems.append(Problem("stop_stamp", options.stop_stamp, rule, "Leave --stop_stamp out"))
    return problems


def cache_problems(cache_size: float) -> list[Problem]:
    """Whether no file would fit."""
    if 0 < cache_size < float("inf"):
        return []
    rule = "must be above 0, in gigabytes"
    return [Problem("cache_size", cache_size, rule, "Correct --cache_size")]


def _text_problems(options: Options) -> Iterator[Problem]:
    for name in TEXTS:
        value = getattr(options, name)
        for text in value if isinstance(value, tuple) else (value,):
            if text == "" and name in NAMES:
                yield Problem(name, text, "is empty", f"Give a value, or leave --{name} out")
            elif text is not None and not is_text(text):
                yield Problem(name, text, "is not UTF-8 text", "Use UTF-8")
