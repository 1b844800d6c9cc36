"""Tells what rank 0 does before the first step, where that takes a while. No torch.

importing torch and DeepSpeed ...
importing torch and DeepSpeed: 13 s
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.cluster.agent.rank_table import RankState

# Shorter phases are not spoken of.
LONG_SECONDS = 2.0
_WORDS = {
    "starting": "importing torch and DeepSpeed",
    "preparing data": "reading data",
    "joining": "waiting for all ranks to join",
    "building": "building model and optimizer",
}


class StartPhases:
    """What has been said of the phases of one start.

    Args:
        say: Prints for the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._phase = ""
        self._since = 0.0
        self._is_long = False
        self._is_over = False

    def look(self, rank_0: RankState | None, now: float) -> None:
        """Say what is due at time `now`; nothing any more when training has begun."""
        if rank_0 is None or self._is_over:
            return
        if rank_0.phase != self._phase:
            if self._is_long:
                self._say(f"{_WORDS[self._phase]}: {now - self._since:.0f} s")
            self._phase, self._since, self._is_long = rank_0.phase, now, False
            self._is_over = rank_0.phase not in _WORDS
        elif not self._is_long and now - self._since > LONG_SECONDS:
            self._is_long = True
            self._say(f"{_WORDS[self._phase]} ...")
