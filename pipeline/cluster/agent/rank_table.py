"""What the coordinator knows of a start: what each rank does, what failed first, and how all ended.

A failure makes others: ranks lose a peer's connection a moment after the peer died, and report that. The
first failure is therefore the earliest that does not report itself as a consequence.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.base.words import few, rank_list
from pipeline.cluster.outcome import Failure, Kind, Outcome, Status

# What a rank is doing. Data may be tokenized for hours by one rank while the others wait.
Phase = Literal[
    "starting", "preparing data", "joining", "building", "training", "evaluating", "saving", "finishing",
]  # fmt: skip
# How gloo, NCCL and torch's store report that the other end is gone.
_PEER_WORDS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused",
    "Socket Timeout", "socket has been closed", "remote process exited", "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout", "ncclRemoteError", "recvValue failed",
    "Timed out waiting",
)  # fmt: skip


@dataclass
class RankState:
    """One rank, as its agent reports it.

    Attributes:
        host: Number of its host in the job.
        name: Name of that host.
        moved: When it last made progress, by the coordinator's clock.
        facts: `host_inquiry.own_facts` of its host, where its agent was not started by a launch.
        folder: Where its job writes; empty until it has said so.
        ending: How its run ended as it reported itself, before it left.
        code: Exit status in `subprocess` convention; None while it runs.
        gone: Nothing more will be heard of it: its agent has reported its end, or its host is lost.
    """

    rank: int
    host: int
    name: str
    moved: float
    facts: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    phase: Phase = "starting"
    step: int = 0
    ending: str | None = None
    message: str = ""
    code: int | None = None
    gone: bool = False


@dataclass
class RankTable:
    """Every rank of a start, and every failure."""

    states: dict[int, RankState] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    saved: int | None = None

    @property
    def step(self) -> int:
        """Steps taken."""
        return max((state.step for state in self.states.values()), default=0)

    @property
    def running(self) -> list[RankState]:
        return [state for state in self.states.values() if not state.gone]

    @property
    def first_of_hosts(self) -> list[RankState]:
        """The first rank of each host, in their order."""
        ranks: dict[int, RankState] = {}
        for rank in sorted(self.states):
            ranks.setdefault(self.states[rank].host, self.states[rank])
        return [ranks[host] for host in sorted(ranks)]

    @property
    def moved(self) -> float:
        """When any rank last made progress."""
        return max((state.moved for state in self.states.values()), default=0.0)

    @property
    def lost(self) -> list[int]:
        """Ranks to which the connection was lost."""
        return sorted({f.rank for f in self.failures if f.kind == "lost" and f.rank is not None})

    def places(self, ranks: Iterable[int]) -> str:
        """``ranks 0-2 (h1, h2)``."""
        known = [self.states[rank] for rank in ranks if rank in self.states]
        hosts = few(dict.fromkeys(state.name for state in known))
        return f"{rank_list([state.rank for state in known])} ({hosts})"

    @property
    def cause(self) -> Failure | None:
        """The first failure; None where rank 0 has reported that all is done and saved on every rank: what
        fails in a rank that leaves after that changes nothing."""
        return None if self._reported_end is not None else first_failure(self.failures)

    @property
    def _reported_end(self) -> RankState | None:
        first = self.states.get(0)
        return first if first is not None and first.ending in ("finished", "stopped") else None

    def outcome(self, master_port: int) -> Outcome:
        """How the start ended, when nothing runs any more."""
        lost = tuple(sorted({self.states[rank].host for rank in self.lost}))
        return replace(self._outcome(), master_port=master_port, lost_hosts=lost, saved=self.saved)

    def _outcome(self) -> Outcome:
        if (first := self._reported_end) is not None:
            return Outcome(first.ending, first.step, message=first.message)  # type: ignore[arg-type]
        failure = self.cause
        if failure is None:
            return Outcome("failed", self.step, message="the ranks exited without reporting a result")
        if failure.kind == "early":
            return Outcome("stopped", 0, rank=failure.rank or 0, message=failure.message)
        status: Status = "wrong_job" if failure.kind == "refused" else "failed"
        return Outcome(status, failure.step, 0, failure.rank or 0, failure.message, failure)


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The cause of the others."""
    return min(failures, key=lambda failure: (failure.kind == "peer", failure.at), default=None)


def error_kind(error: BaseException) -> Kind:
    """Whether an error that a rank reports is its own, or says that a peer is gone. gloo, NCCL and torch's
    store raise RuntimeError; what the system or a data store says about a connection is an OSError."""
    is_peer = isinstance(error, RuntimeError) and any(word in str(error) for word in _PEER_WORDS)
    return "peer" if is_peer else "error"


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"left with exit code {code} before the job's end"
    return f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    # Nobody else sends it unasked: the kernel does when memory runs out.
    return f"{name} (out of memory?)" if number == signal.SIGKILL else name
