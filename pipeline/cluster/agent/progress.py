"""Whether a start makes progress: what to show before its first step, and when it counts as hung.

importing torch and DeepSpeed ...
importing torch and DeepSpeed: 13 s

On a terminal the first line is a clock, which runs until the second one.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from pipeline.base.command import draw
from pipeline.base.words import after_step, rank_list
from pipeline.cluster.agent.rank_table import RankState, RankTable
from pipeline.cluster.outcome import Failure

logger = logging.getLogger(__name__)

# Shorter phases are not shown.
SHOWN_SECONDS = 2.0
_WORDS = {
    "starting": "importing torch and DeepSpeed",
    "preparing data": "reading data",
    "joining": "waiting for all ranks to join",
    "building": "building model and optimizer",
    "training": "taking the first step",
}


class StartPhases:
    """Logs the phases of one start that take long."""

    def __init__(self) -> None:
        self._phase = ""
        self._since = 0.0
        self._first_step = 0  # steps taken when training begins
        self._redraw = 0.0
        self._is_long = False
        self._is_over = False

    def look(self, rank_0: RankState | None, now: float) -> None:
        """Show what is due at time `now`; nothing any more when a step has been taken."""
        if rank_0 is None or self._is_over:
            return
        has_stepped = rank_0.phase == self._phase == "training" and rank_0.step > self._first_step
        if rank_0.phase != self._phase or has_stepped:
            if self._is_long:
                logger.info(f"{_WORDS[self._phase]}: {now - self._since:.0f} s")
            self._phase, self._since, self._is_long = rank_0.phase, now, False
            self._first_step = rank_0.step
            self._is_over = has_stepped or rank_0.phase not in _WORDS
        elif now - self._since > SHOWN_SECONDS and now >= self._redraw:
            self._redraw = now + 1.0
            is_drawn = draw(f"{_WORDS[self._phase]}: {now - self._since:.0f} s")
            if not is_drawn and not self._is_long:
                logger.info(f"{_WORDS[self._phase]} ...")
            self._is_long = True


# Unless the user says otherwise: a step may take this many times the longest of the last ones, ...
SLOWEST_STEPS = 20
_REMEMBERED = 50
# ... and at least this long: a file system may stall for minutes, and come back.
LEAST_SECONDS = 300.0
# Start-up, the first step (kernels are compiled, connections made), evaluations, saves and the end.
LONG_SECONDS = 1800.0
# One rank may tokenize for hours, and a download has time limits of its own.
_UNLIMITED = ("preparing data",)
# Between the question for the ranks' stacks and the end.
STACKS_SECONDS = 3.0


class HangDetector:
    """Measures steps, notices when no rank makes progress, and asks all of them where they are.

    Progress of any rank is progress of the job: ranks wait for each other in every step, so that one that
    hangs holds up all of them. A phase of any rank counts for all: while one saves, the others wait.

    Args:
        step_timeout: Seconds for a step after the first of a start; None: from the measured ones. The other
            phases get at least `LONG_SECONDS`.
    """

    def __init__(self, step_timeout: float | None = None) -> None:
        self._given = step_timeout
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self._step: int | None = None
        self._since = 0.0
        self._phase = "starting"
        self._asked: float | None = None
        self._stacks: dict[int, str] = {}

    def progress(self, phase: str, step: int, now: float) -> None:
        """Some rank has come to `phase`, with `step` steps taken."""
        if self._step is not None and step > self._step and self._phase == "training":
            # Agents report once a second at most, of fast steps every so many.
            self._durations.append((now - self._since) / (step - self._step))
        if phase != self._phase or step != self._step:
            self._since = now
        self._phase, self._step = phase, step

    def stacks(self, rank: int, text: str) -> None:
        """Where a rank is."""
        self._stacks[rank] = text

    def look(self, table: RankTable, now: float, ask: Callable[[], None]) -> Failure | None:
        """The hang, once every rank has written its stacks or has had its time to; `ask` asks them."""
        running = table.running
        if self._asked is None:
            limit = self._limit({state.phase for state in running})
            if running and not table.failures and limit is not None and now - table.moved > limit:
                self._asked = now
                ask()
            return None
        if now - self._asked <= STACKS_SECONDS and any(state.rank not in self._stacks for state in running):
            return None
        self._asked = None
        found = grouped_stacks(self._stacks, [state.rank for state in running])
        message = f"no progress for {now - table.moved:.0f} s {after_step(table.step)} ({found.summary})"
        return Failure("hung", found.suspect, table.step, message, found.text, now)

    def _limit(self, phases: set[str]) -> float | None:
        """Seconds without progress that are too many in these phases; None: no number is."""
        if phases & set(_UNLIMITED):
            return None
        if phases <= {"training"} and self._durations:
            return self._given or max(LEAST_SECONDS, SLOWEST_STEPS * max(self._durations))
        return max(LONG_SECONDS, self._given or 0.0)


_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+) in (.+)$')
# faulthandler lists the main thread last, and frames from the innermost outwards.
_THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
# Where torch's ranks wait for each other.
_WAITING = re.compile(r"\(distributed_c10d\.py:\d+\)$")
SILENT = "no answer"


@dataclass(frozen=True)
class Stacks:
    """Every rank's stacks.

    Attributes:
        summary: Which ranks are where, in one line.
        suspect: The rank that the others wait for, where the stacks tell.
        text: All stacks; equal ones once.
    """

    summary: str
    suspect: int | None
    text: str


def grouped_stacks(stacks: Mapping[int, str], ranks: Sequence[int]) -> Stacks:
    """`stacks`: what faulthandler wrote, by rank; of `ranks`, some may not have answered."""
    stacks = {rank: text for rank, text in stacks.items() if text.strip()}  # a stopped process writes nothing
    places = {rank: innermost(stacks[rank]) if rank in stacks else SILENT for rank in ranks}
    counts = Counter(places.values())
    members = {place: [rank for rank in ranks if places[rank] == place] for place in counts}
    parts = [
        f"{rank_list(members[place])} {'gave' if place == SILENT else 'in'} {place}"
        for place, _ in counts.most_common()
    ]
    texts: dict[str, list[int]] = {}
    for rank in ranks:
        texts.setdefault(_without_addresses(stacks.get(rank, SILENT)), []).append(rank)
    text = "\n".join(f"--- stacks of {rank_list(group)}\n{text.rstrip()}" for text, group in texts.items())
    return Stacks("; ".join(parts), _suspect(places), text)


def _suspect(places: Mapping[int, str]) -> int | None:
    """The only rank that does not answer, or else does not wait for others, or else is where no other is."""
    silent = [rank for rank, place in places.items() if place == SILENT]
    busy = [rank for rank, place in places.items() if not _WAITING.search(place)]
    counts = Counter(places.values())
    alone = [rank for rank, place in places.items() if counts[place] == 1] if len(places) > 2 else []
    if len(places) < 2:
        return None
    candidates = silent or (busy if len(busy) == 1 else alone)
    return candidates[0] if len(candidates) == 1 else None


def innermost(stacks: str) -> str:
    """Function, file and line in which the main thread is."""
    for line in _THREAD.split(stacks)[-1].splitlines():
        if match := _FRAME.match(line):
            return f"{match[3]} ({PurePath(match[1]).name}:{match[2]})"
    return "an unknown place"


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x..", text)
