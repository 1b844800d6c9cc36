"""history.jsonl: when a run was started, and how each start ended. No torch.

    {"event": "start", "start": "9f3c...", "time": 1764764160.1, "why": "resumed from ...", "step": 50, ...}
    {"event": "end", "start": "9f3c...", "time": 1764764901.7, "status": "failed", "step": 93, ...}

Rank 0 appends the start when ranks have met and know what they resume from. The end is appended by the first
that hears of it: rank 0, its agent, the launch. Where all of them were killed, the next start does it, from
what metrics.jsonl has. Times are seconds since 1970 (UTC). The fields are in docs/checkpoints.md.

A line that a crash left torn is removed before the next is appended. What is no line of this file is passed
over: nothing depends on it but what people work out of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from uuid import uuid4

import psutil

from pipeline.base.files import LineFile
from pipeline.base.json_reader import parse_saved
from pipeline.base.user_input import open_regular

if TYPE_CHECKING:
    from pipeline.job.job import Job

logger = logging.getLogger(__name__)

HISTORY_FILE = "history.jsonl"
# Written by rank 0 (`pipeline.training.run_files`).
METRICS_FILE = "metrics.jsonl"
UNKNOWN = "unknown"
# What is read of a long file first, from its end.
_REACH = 1 << 16


def record_start(job: Job, step: int, tokens: int, checkpoint: Path | None) -> None:
    """Append this start; for rank 0, when it is known what is resumed from. A file that cannot be written is
    a warning: the run does not depend on it.

    Args:
        step: Optimizer steps taken before.
        tokens: Tokens consumed by them.
        checkpoint: What is resumed from; None at step 0.
    """
    folder = Path(job.output_dir)
    try:
        _close(folder, UNKNOWN, "nobody lived to tell, and the next start has found it so", None)
        lost = _lost(folder, step, tokens)
        why = "from step 0" if checkpoint is None else f"resumed from {checkpoint}"
        start = {
            "event": "start",
            "start": uuid4().hex,
            "time": round(psutil.Process().create_time(), 3),
            "why": why,
            "step": step,
            "tokens": tokens,
            **lost,
            "train_steps": job.train_steps,
            "layout": {**asdict(job.mesh), "zero_stage": job.zero_stage, "stages": list(job.stages)},
            "hosts": [{"name": host.name, "slots": host.slots} for host in job.world.hosts],
            "device": job.world.device_name or job.world.device,
        }
        _append(folder / HISTORY_FILE, start)
    except OSError as error:
        logger.warning(f"WARNING: {folder / HISTORY_FILE} cannot be written: {error}")


def record_end(folder: Path, status: str, reason: str, exit_code: int) -> None:
    """Append the end of the last start, unless it has one or there is none.

    Raises:
        OSError: the file cannot be read or written.
    """
    _close(folder, status, reason, exit_code)


def last_step(folder: Path) -> dict[str, Any] | None:
    """The newest step in the run's metrics.jsonl; None where there is none, or none that can be read."""
    newest = None
    with contextlib.suppress(OSError):
        for record in _recorded(folder, math.inf):
            newest = record if "loss" in record else newest
    return newest


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Every start and end in the run's history, in their order.

    Raises:
        OSError: it cannot be read.
    """
    file = _opened(folder / HISTORY_FILE)
    with file or contextlib.nullcontext(()) as lines:
        found = [_parsed(line, "time") for line in lines]
    return [record for record in found if record and isinstance(record.get("step"), int)]


def _close(folder: Path, status: str, reason: str, exit_code: int | None) -> None:
    history = read_history(folder)
    if not history or history[-1].get("event") != "start":
        return
    start = history[-1]
    totals = {"step_seconds": 0.0, "eval_seconds": 0.0, "save_seconds": 0.0}
    last = {"time": start["time"], "step": start["step"], "tokens": start.get("tokens"), "loss": None}
    for record in _recorded(folder, start["step"]):
        # Steps that are to be taken again lie in the file until this start has come so far.
        if _number(record, "time") < start["time"]:
            continue
        last["time"] = record["time"]
        if "eval_loss" in record:
            totals["eval_seconds"] += _number(record, "eval_time")
        elif record["step"] > start["step"]:
            totals["step_seconds"] += _number(record, "step_time")
            totals["save_seconds"] += _number(record, "save_time")
            last |= {key: record.get(key) for key in ("step", "tokens", "loss")}
    over = last["time"] if status == UNKNOWN else time.time()
    end = {
        "event": "end",
        "start": start.get("start"),
        **last,
        "time": round(over, 3),
        "status": status,
        "reason": reason,
        "exit_code": exit_code,
        "steps": last["step"] - start["step"],
        "seconds": round(over - start["time"], 3),
        **{key: round(value, 3) for key, value in totals.items()},
    }
    _append(folder / HISTORY_FILE, end)


def _lost(folder: Path, step: int, tokens: int) -> dict[str, Any]:
    """What the last start had done beyond `step`, and this one does again: steps, tokens, seconds."""
    ends = [record for record in read_history(folder) if record.get("event") == "end"]
    reached = ends[-1]["step"] if ends else math.inf  # a run older than its history
    again = [
        record for record in _recorded(folder, step) if "loss" in record and step < record["step"] <= reached
    ]
    return {
        "lost_steps": again[-1]["step"] - step if again else 0,
        "lost_tokens": int(_number(again[-1], "tokens")) - tokens if again else 0,
        "lost_seconds": round(sum(_number(record, "step_time") for record in again), 3),
    }


def _recorded(folder: Path, step: float) -> Iterator[dict[str, Any]]:
    """What metrics.jsonl has from `step` on, and perhaps of some steps before; read from its end.

    Raises:
        OSError: it cannot be read.
    """
    file = _opened(folder / METRICS_FILE)
    if file is None:
        return
    with file:
        size, reach = file.seek(0, 2), _REACH
        while True:
            file.seek(max(0, size - reach))
            if size > reach:
                file.readline()  # the rest of a line
            begin = file.tell()
            first = _parsed(file.readline(), "step")
            if size <= reach or (first is not None and first["step"] < step):
                break
            reach *= 8
        file.seek(begin)
        yield from (record for line in file if (record := _parsed(line, "step")) is not None)


def _opened(path: Path) -> IO[bytes] | None:
    """A file to read; None where there is none. Raises OSError."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OSError(str(error)) from error


def _parsed(line: bytes, number: str) -> dict[str, Any] | None:
    """The object in a line; None for what is none, or has no such number."""
    try:
        record = parse_saved(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get(number), int | float) else None


def _number(record: dict[str, Any], key: str) -> float:
    value = record.get(key)
    return value if isinstance(value, int | float) else 0.0


def _append(path: Path, record: dict[str, Any]) -> None:
    """Add a line, which is on the disk then; before that, mend the last one if a crash has torn it."""
    torn = b""
    if (old := _opened(path)) is not None:
        with old:
            torn = old.read().rpartition(b"\n")[2]
    if torn and _parsed(torn, "time") is None:
        os.truncate(path, path.stat().st_size - len(torn))
    with LineFile(path) as file:
        if torn and _parsed(torn, "time") is not None:  # it lacks its end alone
            file.append(b"")
        file.append(json.dumps(record, allow_nan=False).encode())
        file.sync()
