"""When a job that makes no progress counts as hung. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

# Unless the user says otherwise: a step may take this many times the longest of the last ones, ...
SLOWEST_STEPS = 20
_REMEMBERED = 50
# ... and at least this long: a file system may stall for minutes, and come back.
LEAST_SECONDS = 300.0
# Start-up, the first step (kernels are compiled, connections made), evaluations, saves and the end.
LONG_SECONDS = 1800.0
# One rank may tokenize for hours, and a download has time limits of its own.
_UNLIMITED = ("preparing data",)


class StepWatch:
    """Measures steps, and says how long the job may go without progress.

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
        self._phases: set[str] = {"starting"}
        self._last_phase = "starting"

    def progress(self, phase: str, step: int, now: float) -> None:
        """Some rank has come to `phase`, with `step` steps taken."""
        if self._step is not None and step > self._step and self._last_phase == "training":
            # Agents report once a second at most, of fast steps every so many.
            self._durations.append((now - self._since) / (step - self._step))
        if phase != self._last_phase or step != self._step:
            self._since = now
        self._last_phase, self._step = phase, step

    def note_phases(self, phases: Iterable[str]) -> None:
        """What the ranks are doing now."""
        self._phases = set(phases)

    @property
    def limit(self) -> float | None:
        """Seconds without progress that are too many now; None: no number is."""
        if self._phases & set(_UNLIMITED):
            return None
        if self._phases <= {"training"} and self._durations:
            return self._given or max(LEAST_SECONDS, SLOWEST_STEPS * max(self._durations))
        return max(LONG_SECONDS, self._given or 0.0)

    def is_hung(self, now: float, moved: float) -> bool:
        """Whether the last progress, at `moved`, was too long ago."""
        return self.limit is not None and now - moved > self.limit
