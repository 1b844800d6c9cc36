"""Whether a job that failed is started again, and when. No torch, no clock.

A restart costs a start-up and the steps since the last checkpoint, so it must lead somewhere: every restart
counts until the job has completed a checkpoint that it did not have before, and a failure that comes back at
the same step is not a matter of luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.base.problems import EXIT_FAILED
from pipeline.base.words import counted
from pipeline.cluster.agent.rank_table import Failure, Verdict

FIRST_DELAY = 5.0
LONGEST_DELAY = 300.0
# Failures that a rank makes by itself. Hosts and launchers come and go.
_OWN = ("error", "died", "hung")


@dataclass(frozen=True)
class Decision:
    """What follows a failure.

    Attributes:
        restart: Whether to start again.
        delay: Seconds to wait before that.
        reason: Why not, or which restart it is.
    """

    restart: bool
    delay: float = 0.0
    reason: str = ""


class RestartPolicy:
    """Decides after each start.

    Args:
        max_restarts: Restarts in a row that may pass without a new checkpoint; 0: no restarts.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max = max_restarts
        self._in_vain = 0
        self._saved: int | None = None
        self._last: tuple[str, int, str] | None = None

    @property
    def saved(self) -> int | None:
        """Step of the newest checkpoint that any of the starts has completed; None if none has."""
        return self._saved

    def after(self, code: int, verdict: Verdict | None, stopped: bool) -> Decision:
        """What follows a start that ended with this documented exit code.

        Args:
            stopped: The user has asked for the end.
        """
        if self._max == 0 or code != EXIT_FAILED:
            return Decision(False)
        if stopped:
            return Decision(False, reason="not started again: it was asked to end")
        progress = self._note_progress(verdict)
        failure = verdict.failure if verdict is not None else None
        same = failure is not None and _key(failure) == self._last and not progress
        self._last = _key(failure) if failure is not None and failure.kind in _OWN else None
        if same and failure is not None:
            return Decision(
                False, reason=f"not started again: the same failure after step {failure.step}, twice in a row"
            )
        self._in_vain = 1 if progress else self._in_vain + 1
        if self._in_vain > self._max:
            have = "has" if self._max == 1 else "have"
            what = f"{counted(self._max, 'restart')} {have} brought no new checkpoint"
            return Decision(False, reason=f"not started again: {what}")
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (self._in_vain - 1))
        return Decision(True, delay, f"restart {self._in_vain} of {self._max} since the last new checkpoint")

    def _note_progress(self, verdict: Verdict | None) -> bool:
        """Whether the start has completed a checkpoint that there was not before."""
        saved = verdict.saved if verdict is not None else None
        if saved is None or (self._saved is not None and saved <= self._saved):
            return False
        self._saved = saved
        return True


def _key(failure: Failure) -> tuple[str, int, str]:
    return failure.kind, failure.step, failure.message


def resuming(arguments: Sequence[str]) -> list[str]:
    """A job's arguments, to go on from the newest checkpoint in its folder."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--resume":
            skip = True
        elif not argument.startswith("--resume="):
            kept.append(argument)
    return [*kept, "--resume", "auto"]
