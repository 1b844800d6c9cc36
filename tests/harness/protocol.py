"""What the processes of the harness tell each other: a request, and one outcome per rank. No torch."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

REQUEST_FILE = "request.pkl"
OUTCOMES_FILE = "outcomes.pkl"
SUPERVISOR_LOG = "supervisor.log"


@dataclass(frozen=True)
class Request:
    """One call of a function on `world_size` ranks.

    Attributes:
        call: Pickled ``(function, args)``; unpickled after `sys_path` and `environment` are in place.
        world_size: Number of ranks.
        timeout: Seconds from the first fork until ranks that still run count as hung.
        group_timeout: Seconds that a collective waits, in groups made without a timeout of their own.
        grace: Seconds that the other ranks get to end by themselves once one has failed.
        hold: Ranks that have their result or error stay alive until all have. Sockets then close
            after the last collective, and a rank that raises is not drowned in its peers' "connection
            closed". Off where ranks should leave as real processes do.
        environment: The whole environment of the ranks, but for the rank's own variables.
        sys_path: Import path of the calling process.
        cwd: Working directory of the ranks.
    """

    call: bytes
    world_size: int
    timeout: float
    group_timeout: float
    grace: float
    hold: bool
    environment: dict[str, str]
    sys_path: list[str]
    cwd: str


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        rank: Global rank.
        state: ``returned``; ``raised``; ``died`` (left by a signal, or without a result or error);
            ``ended`` (stopped because another rank had failed); ``hung`` (stopped by the time limit).
        exit_code: As of `subprocess`: negative for a signal.
        result: What the function returned, pickled.
        failed_at: Of the exception, if it raised; on the machine-wide monotonic clock, so ranks compare.
        traceback: Of the exception, if it raised.
        stacks: Python stacks of all threads, if it hung.
        stdout, stderr: Everything written to file descriptors 1 and 2.
    """

    rank: int
    state: Literal["returned", "raised", "died", "ended", "hung"]
    exit_code: int | None
    result: bytes = b""
    failed_at: float | None = None
    traceback: str = ""
    stacks: str = ""
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class RankError:
    """An exception in a rank; `time` is of the monotonic clock."""

    time: float
    traceback: str


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank in the folder of a call."""

    folder: Path
    rank: int
    result: Path = field(init=False)
    error: Path = field(init=False)
    stdout: Path = field(init=False)
    stderr: Path = field(init=False)
    stacks: Path = field(init=False)

    def __post_init__(self) -> None:
        for name in ("result", "error", "stdout", "stderr", "stacks"):
            object.__setattr__(self, name, self.folder / f"rank{self.rank}.{name}")


def write_pickle(path: Path, value: Any) -> None:
    """Pickle `value` to `path` in one piece: a reader finds the whole file or none."""
    data = pickle.dumps(value)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def read_pickle(path: Path) -> Any:
    """Unpickle what `write_pickle` wrote."""
    return pickle.loads(path.read_bytes())
