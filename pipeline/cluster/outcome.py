"""How a run ends, and what went wrong in it; ``<output_dir>/outcome.json``.

The launcher's exit code does not tell: when a process of its own is killed by a signal, it returns 0.
The ranks therefore say how the run ended, to the launch and in this file on every host.

A file of an earlier start is removed before ranks start. What is found afterwards must carry the port of
this start's rendezvous, which no other job on the host can hold at the same time.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.base.files import replaced_atomically
from pipeline.base.json_reader import saved_json
from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_WRONG_JOB
from pipeline.base.words import after_step
from pipeline.cluster.history import last_step, record_end

OUTCOME_FILE = "outcome.json"
Status = Literal["finished", "stopped", "failed", "wrong_job"]
# error: raised and reported. died: exited without a report. lost: no connection to its host. hung: no
# progress. launcher: what started it is gone. refused: the job is wrong there. ended: the user asked for the
# end. early: the same, before the rank took signals, when there was nothing to save.
# peer: an error that says that another rank is gone.
Kind = Literal["error", "died", "lost", "hung", "launcher", "refused", "ended", "early", "peer"]
_WRITTEN = ("status", "step", "master_port", "rank", "message")

_EXIT_CODES: dict[str, int] = {
    "finished": EXIT_FINISHED,
    "failed": EXIT_FAILED,
    "wrong_job": EXIT_WRONG_JOB,
    "stopped": EXIT_STOPPED,
}


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong.

    Attributes:
        rank: Where; None: no rank's.
        step: Optimizer steps done by then.
        message: One line.
        text: A traceback, the last lines of a rank's output, or the problems of a job; may be empty.
        at: When the coordinator heard of it.
    """

    kind: Kind
    rank: int | None
    step: int
    message: str
    text: str = ""
    at: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How a run, or one start of it, ended. The first five fields are written to the file, and beside them
    when that was (`time`) and the last step's `loss` and `tokens`.

    Attributes:
        status: ``finished``: all steps are done and saved. ``stopped``: by a signal or a time limit, with a
            checkpoint saved. ``wrong_job``: refused before the first step. ``failed``: anything else.
        step: Optimizer steps done, those of resumed runs included.
        master_port: Port of the rendezvous of the start that wrote it; 0: not known yet.
        rank: Who wrote it: 0, or the first rank that failed.
        message: Why, in one line; empty when finished, of an evaluation its result as JSON.
        failure: The first, where a coordinator has heard of one.
        lost_hosts: Numbers of the hosts to which the connection was lost.
        saved: Step of the newest checkpoint that this start completed; None if it completed none.
        on_request: The user has asked for the end.
    """

    status: Status
    step: int
    master_port: int = 0
    rank: int = 0
    message: str = ""
    failure: Failure | None = None
    lost_hosts: tuple[int, ...] = ()
    saved: int | None = None
    on_request: bool = False

    def written(self) -> dict[str, object]:
        """The fields of the file."""
        return {name: getattr(self, name) for name in _WRITTEN}

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self.status]

    @property
    def words(self) -> str:
        """``failed after step 5``, ``job refused``."""
        return "job refused" if self.status == "wrong_job" else f"{self.status} {after_step(self.step)}"


def write_outcome(
    output_dir: str | Path, outcome: Outcome, is_final: bool = False, ends_start: bool = True
) -> None:
    """Say how the run ended, here and in history.jsonl; atomic, so that a reader sees all of it or nothing.

    Rank 0 calls it when every rank has finished, stopped or refused; a rank without an agent that fails calls
    it for itself. The first failure of a start stays, because those that follow are its consequences.

    Args:
        is_final: All ranks have been heard: it replaces what is there.
        ends_start: The start is over, and no other process says so at the same time.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(output_dir) / OUTCOME_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = read_outcome(output_dir, outcome.master_port)
    if earlier is not None and earlier.status == "failed" and not is_final:
        return
    numbers = (last_step(path.parent) if outcome.status != "wrong_job" else None) or {}
    content = outcome.written() | {
        "time": round(time.time(), 3),
        "loss": numbers.get("loss"),
        "tokens": numbers.get("tokens"),
    }
    with replaced_atomically(path) as file:
        file.write(json.dumps(content).encode() + b"\n")
    if ends_start:
        record_end(path.parent, outcome.status, outcome.message, outcome.exit_code)


def record_outcome(output_dir: str | Path, outcome: Outcome) -> None:
    """`write_outcome` of a rank that leaves: a file that cannot be written changes nothing about how the run
    ended, which the exit code shows, and the agent reports."""
    try:
        write_outcome(output_dir, outcome)
    except OSError as error:
        warning = f"WARNING: {Path(output_dir) / OUTCOME_FILE} cannot be written ({error}): {outcome.words}"
        print(warning, file=sys.stderr, flush=True)


def clear_outcome(output_dir: str | Path) -> None:
    """Remove the outcome of an earlier start."""
    (Path(output_dir) / OUTCOME_FILE).unlink(missing_ok=True)


def read_outcome(output_dir: str | Path, master_port: int) -> Outcome | None:
    """The outcome of the start with this rendezvous port; None where there is no readable one."""
    try:
        values = saved_json(Path(output_dir) / OUTCOME_FILE)
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or set(_WRITTEN) - set(values) or not isinstance(values["status"], str):
        return None
    outcome = Outcome(**{name: values[name] for name in _WRITTEN})
    return outcome if outcome.status in _EXIT_CODES and outcome.master_port == master_port else None
