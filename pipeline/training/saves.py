"""When a run's checkpoints are saved, what it says about them, and what a failure means to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from pipeline.checkpoints.folder import tag_of
from pipeline.checkpoints.manifest import TrainState
from pipeline.checkpoints.saver import SaveFailed, Saver

logger = logging.getLogger(__name__)


class RunSaves:
    """The saves of one start of a run; its methods are collective, as the loop expects (`loop.Saves`).

    Args:
        saved: The state that a checkpoint holds already; None at a start at step 0.
        on_failure: ``stop`` raises the failure of any save, ``continue`` that of one the run would end with.
        with_progress: Adds to a state how far the data has been read.
        compare_copies: Called with the step of what is to be saved; raises CopiesDiffer.
        record_seconds: Called with the seconds a save took.
        record_saved: Called with the step of a checkpoint that counts.
    """

    def __init__(
        self,
        saver: Saver,
        *,
        saved: TrainState | None,
        on_failure: Literal["continue", "stop"],
        with_progress: Callable[[TrainState], TrainState],
        compare_copies: Callable[[int], None] = lambda step: None,
        record_seconds: Callable[[float], None] = lambda seconds: None,
        record_saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._saver = saver
        self._saved = saved  # what counts
        self._begun: TrainState | None = None  # what is being written
        self._on_failure = on_failure
        self._with_progress = with_progress
        self._compare_copies = compare_copies
        self._record_seconds, self._record_saved = record_seconds, record_saved

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing files."""
        return self._saver.busy

    @property
    def outstanding(self) -> bool:
        """Whether a save has begun that does not count yet."""
        return self._saver.outstanding

    def save(self, state: TrainState) -> None:
        """Save, or begin to; at most one is outstanding, so that a second one waits for the first.

        Raises:
            SaveFailed: where failures end the run.
        """
        self.settle()
        self._tolerate(lambda: self._begin(state))

    def settle(self) -> None:
        """Finish what is outstanding.

        Raises:
            SaveFailed: where failures end the run.
        """
        self._tolerate(self._finish)

    def complete(self, state: TrainState) -> None:
        """Return when `state` is saved, and the checkpoint counts.

        Raises:
            SaveFailed: it cannot be saved.
        """
        if self._begun is None or not _same(self._begun, state):
            self.settle()
        else:
            self._finish()
        if self._saved is None or not _same(self._saved, state):
            self._begin(state)
            self._finish()

    def _begin(self, state: TrainState) -> None:
        self._compare_copies(state.step)
        self._begun = state
        self._saver.begin(self._with_progress(state))
        if not self._saver.outstanding:
            self._count()

    def _finish(self) -> None:
        if self._saver.outstanding:
            self._saver.finish()
            self._count()

    def _count(self) -> None:
        assert self._begun is not None
        self._saved, self._begun = self._begun, None
        self._record_seconds(self._saver.seconds)
        self._record_saved(self._saved.step)
        logger.info(f"saved {self._saver.folder / tag_of(self._saved.step)}")

    def _tolerate(self, action: Callable[[], None]) -> None:
        try:
            action()
        except SaveFailed as error:
            self._begun = None
            if self._on_failure == "stop":
                raise
            at = "there is none before" if self._saved is None else f"the last is {tag_of(self._saved.step)}"
            logger.warning(f"WARNING: {error}. The run continues without this checkpoint; {at}")


def _same(one: TrainState, other: TrainState) -> bool:
    """Whether a checkpoint of one is a checkpoint of the other: how far the data has been read follows."""
    return replace(one, data={}) == replace(other, data={})
