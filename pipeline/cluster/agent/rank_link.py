"""How a rank reports to its agent.

The agent hands its rank one argument, `--agent=`, with the numbers of the descriptors that it has opened
for it and what the launch decided.
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
from typing import Any

from pipeline.base.words import first_line
from pipeline.cluster.agent.launch_spec import pack, unpacked_option
from pipeline.cluster.agent.rank_table import Phase, error_kind
from pipeline.cluster.outcome import Outcome

OPTION = "--agent="
# Not SIGUSR1, which asks a job to save and end.
STACKS_SIGNAL = signal.SIGUSR2


class RankLink:
    """Reports to the agent by one JSON object a line, from any thread.

    Args:
        stream: To the agent; None in a rank that was started without one (a test), which reports to nobody.
    """

    def __init__(self, stream: socket.socket | None = None) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    @property
    def has_agent(self) -> bool:
        """Whether an agent hears it."""
        return self._stream is not None

    def progress(self, phase: Phase, step: int) -> None:
        """What this rank does now, with `step` steps taken."""
        self._send("progress", phase=phase, step=step)

    def saved(self, step: int) -> None:
        """A checkpoint of this step is complete. Rank 0 reports it."""
        self._send("saved", step=step)

    def folder(self, output_dir: str) -> None:
        """The job's output folder. Of rank 0: it has it to itself from now on."""
        self._send("folder", path=str(Path(output_dir).absolute()))

    def ended(self, outcome: Outcome) -> None:
        """The run has ended well, on every rank; this one leaves."""
        self._send("ending", status=outcome.status, step=outcome.step, message=outcome.message)

    def left_early(self, message: str) -> None:
        """A signal ends this rank before the ranks have met: the others are to end, too."""
        self._send("ending", status="stopped", step=0, message=message, early=True)

    def memory_advice(self, text: str) -> None:
        """What to change should the system kill this rank because memory has run out."""
        self._send("advice", text=text)

    def failed(self, error: BaseException, step: int, report: str, message: str = "") -> None:
        """This rank cannot continue; `report`: its traceback; `message`: in place of the error's words."""
        message = first_line(message or f"{type(error).__name__}: {error}")
        self._send("failure", kind=error_kind(error), step=step, message=message, text=report)

    def refused(self, report: str) -> None:
        """The job is wrong; `report` has the problems."""
        message = first_line(report) or "the job is wrong"
        self._send("failure", kind="refused", step=0, message=message, text=report)

    def _send(self, what: str, **message: Any) -> None:
        if self._stream is None:
            return
        # Without its agent the rank is killed by the system; there is nobody to tell.
        with self._lock, contextlib.suppress(OSError):
            self._stream.sendall(json.dumps({"is": what} | message).encode() + b"\n")


@dataclass(frozen=True)
class Inherited:
    """What an agent gives its rank.

    Attributes:
        link: Descriptor of the stream to the agent.
        stacks: Descriptor of the file that takes this rank's stacks.
        hosts: (name, slots) of the world that was checked; empty without a launch.
        batch: Batch sizes in place of the JSON's; empty for the JSON's own.
        command: As in the launch spec.
    """

    link: int
    stacks: int
    hosts: tuple[tuple[str, int], ...] = ()
    batch: tuple[int, ...] = ()
    command: tuple[str, ...] = ()

    def argument(self) -> str:
        return OPTION + pack(vars(self))


def split_inherited(arguments: Sequence[str]) -> tuple[Inherited | None, list[str]]:
    """What the agent gave, None in a process without one, and the other arguments."""
    values, rest = unpacked_option(arguments, OPTION)
    return None if values is None else Inherited(**values), rest


def connect(inherited: Inherited) -> RankLink:
    """The link to this process's agent, which can ask for stacks from now on."""
    stacks = os.fdopen(inherited.stacks, "w")
    faulthandler.enable(stacks)  # a crash in native code leaves there where Python was
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    for descriptor in (inherited.link, inherited.stacks):
        os.set_inheritable(descriptor, False)
    return RankLink(socket.socket(fileno=inherited.link))
