"""How a rank tells its agent where it stands. No torch.

The agent hands its rank one argument, `--agent=`, with the numbers of the descriptors that it has opened
for it and what the launch decided. A rank that was started without an agent (a test) has a `NullLink`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.cluster.agent.launch_spec import pack, unpack
from pipeline.cluster.agent.rank_table import Phase, error_kind

OPTION = "--agent="
# Not SIGUSR1, which asks a job to save and end.
STACKS_SIGNAL = signal.SIGUSR2


class RankLink(Protocol):
    """What a rank has to say while it lives."""

    supervised: bool

    def progress(self, phase: Phase, step: int) -> None:
        """This rank has come so far: what it does now, with `step` steps taken."""

    def saved(self, step: int) -> None:
        """A checkpoint of this step is complete. Rank 0 says it."""

    def folder(self, output_dir: str) -> None:
        """The job's output folder. Of rank 0: it has it to itself from now on."""

    def ending(self, status: str, step: int, message: str) -> None:
        """The run has ended well, on every rank; this one leaves."""

    def left_early(self, message: str) -> None:
        """A signal ends this rank before the ranks have met: the others are to end, too."""

    def failed(self, error: BaseException, step: int, report: str) -> None:
        """This rank cannot go on; `report` is its traceback."""

    def refused(self, report: str) -> None:
        """The job is wrong; `report` has the problems."""


class NullLink:
    """Tells nobody."""

    supervised = False

    def progress(self, phase: Phase, step: int) -> None:
        pass

    def saved(self, step: int) -> None:
        pass

    def folder(self, output_dir: str) -> None:
        pass

    def ending(self, status: str, step: int, message: str) -> None:
        pass

    def left_early(self, message: str) -> None:
        pass

    def failed(self, error: BaseException, step: int, report: str) -> None:
        pass

    def refused(self, report: str) -> None:
        pass


class AgentLink:
    """Tells the agent, by one JSON object a line. Any thread may speak."""

    supervised = True

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def progress(self, phase: Phase, step: int) -> None:
        self._send(phase=phase, step=step, **{"is": "progress"})

    def saved(self, step: int) -> None:
        self._send(step=step, **{"is": "saved"})

    def folder(self, output_dir: str) -> None:
        self._send(path=str(Path(output_dir).absolute()), **{"is": "folder"})

    def ending(self, status: str, step: int, message: str) -> None:
        self._send(status=status, step=step, message=message, **{"is": "ending"})

    def left_early(self, message: str) -> None:
        self._send(status="stopped", step=0, message=message, early=True, **{"is": "ending"})

    def failed(self, error: BaseException, step: int, report: str) -> None:
        message = f"{type(error).__name__}: {error}".strip()
        first_line = message.splitlines()[0]
        self._send(kind=error_kind(error), step=step, message=first_line, text=report, **{"is": "failure"})

    def refused(self, report: str) -> None:
        first_line = next((line for line in report.splitlines() if line.strip()), "the job is wrong")
        self._send(kind="refused", step=0, message=first_line.strip(), text=report, **{"is": "failure"})

    def _send(self, **message: Any) -> None:
        # Without its agent the rank is killed by the system; there is nobody to tell.
        with self._lock, contextlib.suppress(OSError):
            self._stream.sendall(json.dumps(message).encode() + b"\n")


@dataclass(frozen=True)
class Inherited:
    """What an agent gives its rank.

    Attributes:
        link: Descriptor of the stream to the agent.
        stacks: Descriptor of the file that takes this rank's stacks.
        hosts: (name, slots) of the world that was checked; empty without a launch.
        batch: Batch sizes in place of the JSON's; empty for the JSON's own.
    """

    link: int
    stacks: int
    hosts: tuple[tuple[str, int], ...] = ()
    batch: tuple[int, ...] = ()

    def argument(self) -> str:
        return OPTION + pack(vars(self))


def split_inherited(arguments: Sequence[str]) -> tuple[Inherited | None, list[str]]:
    """What the agent gave, None in a process without one, and the other arguments."""
    rest = [argument for argument in arguments if not argument.startswith(OPTION)]
    given = [argument for argument in arguments if argument.startswith(OPTION)]
    if not given:
        return None, rest
    values = unpack(given[0].removeprefix(OPTION))
    hosts = tuple((name, slots) for name, slots in values["hosts"])
    return Inherited(values["link"], values["stacks"], hosts, tuple(values["batch"])), rest


def connect(inherited: Inherited) -> AgentLink:
    """The link to this process's agent, which can ask for stacks from now on."""
    stacks = os.fdopen(inherited.stacks, "w")
    faulthandler.enable()  # a crash in native code shows where Python was
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    for descriptor in (inherited.link, inherited.stacks):
        os.set_inheritable(descriptor, False)
    return AgentLink(socket.socket(fileno=inherited.link))
