"""The run at Weights & Biases and at Comet: one for each run of the job, however often the job starts.

What makes several starts one run lies in `monitors.json` beside run.json:

    {"id": "9b2f...", "last_step": 600, "sent_step": 400}

`id` is the W&B run's and the Comet experiment's; `last_step` the last step that an earlier start has taken;
`sent_step` the last that W&B may have of them. A run that starts from its first step gets another id: in the
old one the steps of the earlier attempt would stay.

Both services are asked for their own environment variables, which win: WANDB_RUN_ID, WANDB_DIR, WANDB_MODE,
COMET_EXPERIMENT_KEY, COMET_OFFLINE_DIRECTORY. A service that cannot be reached ends no run: the start is
recorded offline then, in files that are sent later. This module does not know how steps become events.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from uuid import uuid4

from pipeline.base.files import replaced_atomically
from pipeline.base.json_reader import saved_json

logger = logging.getLogger(__name__)

RECORDS_FILE = "monitors.json"
# Ends the name of the marker that `wandb sync` leaves beside a record that it has sent.
SENT = ".synced"

# Seconds that a run waits at its end for what W&B has not sent. Without a limit, a network that is gone holds
# the job's devices for good, and a job that is told to stop has a minute or two. The next start sends the
# rest, or `wandb sync --include-online`.
LONGEST_FAREWELL = 60

TRACKED = ("wandb", "comet")
# The numbers of one step: name and value.
Row = Mapping[str, float]


@dataclass(frozen=True)
class Start:
    """Where a start continues what the run's earlier ones have recorded.

    Attributes:
        folder: Of the run, whose metrics.jsonl ends at `step`.
        step: Steps taken before.
        recorded: The last step that an earlier start has taken, at least `step` where nothing was lost.
        evaluation_due: The evaluations of `step` will be done again.
        samples_per_step: Of the whole job.
    """

    folder: Path
    step: int = 0
    recorded: int = 0
    evaluation_due: bool = False
    samples_per_step: int = 1


@dataclass(frozen=True)
class Record:
    """The content of `monitors.json`; its fields are those of the module text."""

    id: str
    last_step: int = 0
    sent_step: int = 0


def continued_record(start: Start) -> Record:
    """The record of the run as this start goes on with it, which is written; a new one where there is none.

    Raises:
        ValueError: the file is not a record.
    """
    path = start.folder / RECORDS_FILE
    record = Record(uuid4().hex)
    if start.step > 0 and path.exists():
        try:
            record = Record(**saved_json(path))
        except (ValueError, TypeError) as error:
            remedy = "remove it, and W&B and Comet begin a new run"
            raise ValueError(f"{path} cannot be read ({error}); {remedy}") from error
        record = replace(record, last_step=max(record.last_step, start.recorded))
        record = replace(record, sent_step=_sent_step(start.folder, record))
    with replaced_atomically(path) as file:
        file.write((json.dumps(asdict(record)) + "\n").encode())
    return record


class TrackedRun(Protocol):
    """A run at a service."""

    def log(self, step: int, row: Row, *, late: bool = False) -> None:
        """Record a row, unless the service has this step from an earlier start. `late`: it has the step, but
        not this row."""

    def close(self, failed: bool) -> None:
        """Send what is buffered."""


def tracked_runs(
    blocks: Mapping[str, Mapping[str, Any]], start: Start, history: Iterable[tuple[int, Row]]
) -> list[TrackedRun]:
    """The runs at the services among `blocks`. `history`: (step, row) of what metrics.jsonl has, in order.

    Raises:
        ValueError: as `continued_record`.
        ImportError: the package of an enabled service is missing.
    """
    if not any(name in blocks for name in TRACKED):
        return []
    record, runs = continued_record(start), []
    if "wandb" in blocks:
        runs.append(WandbRun(blocks["wandb"], start.folder, record, history))
    if "comet" in blocks:
        runs.append(CometExperiment(blocks["comet"], start.folder, record, start.samples_per_step))
    return runs


class WandbRun:
    """A W&B run that all starts share.

    W&B takes each step once, in order: what it holds already is not sent again, and what earlier starts have
    recorded but not sent is sent by this one. So each record on disk that was not sent is superseded by the
    next start's, and is marked as `wandb sync` marks what it has sent.

    Args:
        block: ``wandb`` of the JSON, with its defaults.
        folder: Of the run; the record goes to `wandb` inside it.
        history: (step, row) of the steps before this start, in order.
    """

    def __init__(
        self, block: Mapping[str, Any], folder: Path, record: Record, history: Iterable[tuple[int, Row]]
    ) -> None:
        import wandb

        place = Path(os.environ.get("WANDB_DIR") or folder)
        run_id = os.environ.get("WANDB_RUN_ID") or record.id
        unsent = _unsent_records(place / "wandb", run_id)
        arguments = {"project": block["project"], "group": block["group"], "entity": block["team"]}
        self._run = _begin(wandb, arguments | {"id": run_id, "dir": str(place)})
        # Offline nothing can be asked for, and a later `wandb sync` adds to what was sent.
        self._held = record.sent_step if self._run.offline else self._run.starting_step - 1
        for step, row in history:
            self.log(step, row)
        for path in unsent if not self._run.disabled else ():  # WANDB_MODE=disabled records nothing
            path.with_name(path.name + SENT).touch()

    def log(self, step: int, row: Row, *, late: bool = False) -> None:
        """`late`: comes when W&B may have closed its step, and stands at the next one then."""
        step = max(step, self._held + 1) if late else step
        if step > self._held:
            self._run.log(dict(row), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _begin(wandb: ModuleType, arguments: dict[str, Any]) -> Any:
    """The run, online unless the user or the network says otherwise.

    Offline it must not be said to resume: `wandb sync` would count its steps from the end of what was sent.
    """
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(LONGEST_FAREWELL))  # older versions ignore it
    if wandb.setup().settings.mode in ("offline", "dryrun"):
        return wandb.init(**arguments)
    resume = None if "WANDB_RESUME" in os.environ else "allow"
    try:
        return wandb.init(**arguments, resume=resume)
    except wandb.Error as error:
        reason = str(error).partition("\n")[0]
        logger.warning(f"W&B: {reason}. This start is recorded offline; `wandb sync` sends it later")
        return wandb.init(**arguments, mode="offline")


def _sent_step(folder: Path, record: Record) -> int:
    """The last step that W&B may hold: all that were recorded, once the newest record went there."""
    place = Path(os.environ.get("WANDB_DIR") or folder) / "wandb"
    run_id = os.environ.get("WANDB_RUN_ID") or record.id
    records = _records(place, run_id)
    sent = bool(records) and not _is_unsent(records[-1])
    return record.last_step if sent else record.sent_step


def _records(place: Path, run_id: str) -> list[Path]:
    """The run's records on disk, oldest first: ``[offline-]run-<time>-<id>/run-<id>.wandb``."""
    name = re.compile(rf"(?:offline-)?run-(\d+_\d+)-{re.escape(run_id)}")
    found = [(match[1], path) for path in place.glob("*run-*") if (match := name.fullmatch(path.name))]
    return [path / f"run-{run_id}.wandb" for _, path in sorted(found)]


def _is_unsent(record: Path) -> bool:
    sent = record.with_name(record.name + SENT).exists()
    return record.parent.name.startswith("offline-") and not sent


def _unsent_records(place: Path, run_id: str) -> list[Path]:
    return [path for path in _records(place, run_id) if _is_unsent(path)]


class CometExperiment:
    """A Comet experiment that all starts share, unless ``"mode": "create"`` asks for one per start.

    Comet keeps every point that it is sent, so steps that an earlier start has recorded are left out.

    Args:
        block: ``comet`` of the JSON, with its defaults.
        folder: Of the run; offline archives go to `comet` inside it.
        samples_per_step: Of the whole job: ``samples_log_interval`` counts samples.
    """

    def __init__(self, block: Mapping[str, Any], folder: Path, record: Record, samples_per_step: int) -> None:
        import comet_ml

        separate = block["mode"] == "create"
        named = block["experiment_key"] or os.environ.get("COMET_EXPERIMENT_KEY")
        archives = os.environ.get("COMET_OFFLINE_DIRECTORY") or str(folder / "comet")
        arguments = {name: block[name] for name in ("api_key", "project", "workspace", "mode")}
        arguments["experiment_key"] = named or (None if separate else record.id)
        arguments["experiment_config"] = comet_ml.ExperimentConfig(offline_directory=archives)
        self._experiment = _start_comet(comet_ml, arguments, block["online"])
        if name := block["experiment_name"]:
            self._experiment.set_name(name)
        self._held = 0 if separate else record.last_step
        self._interval = -(-block["samples_log_interval"] // samples_per_step)
        self._logged: dict[str, int] = {}

    def log(self, step: int, row: Row, *, late: bool = False) -> None:
        """Each number at first, and then whenever so many samples have passed, as DeepSpeed does it."""
        for name, value in row.items():
            last = self._logged.get(name)
            held = step <= self._held and not late
            if not held and (last is None or step - last >= self._interval):
                self._logged[name] = step
                self._experiment.log_metric(name, value, step=step)

    def close(self, failed: bool) -> None:
        self._experiment.end()


def _start_comet(comet_ml: ModuleType, arguments: dict[str, Any], online: bool) -> Any:
    try:
        return comet_ml.start(**arguments, online=online)
    except Exception as error:  # of whatever library Comet talks with
        if not online:
            raise
        reason = str(error).partition("\n")[0]
        logger.warning(f"Comet: {reason}. This start is recorded offline; `comet upload` sends it later")
        return comet_ml.start(**arguments, online=False)
