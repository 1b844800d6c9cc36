"""What is said between the rendezvous and the first step."""

from __future__ import annotations

from typing import get_args

from pipeline.cluster.agent.rank_table import Phase, RankState
from pipeline.cluster.agent.start_phases import _WORDS, StartPhases


def test_long_phases_are_told_when_they_are_long_and_when_they_end() -> None:
    said: list[str] = []
    phases = StartPhases(said.append)
    phases.look(None, 0.0)
    state = RankState(0, 0, "h", 0.0)
    for now, phase, expected in (
        (0.0, "starting", []),
        (1.9, "starting", []),
        (2.1, "starting", ["importing torch and DeepSpeed ..."]),
        (9.0, "starting", []),
        (13.2, "preparing data", ["importing torch and DeepSpeed: 13 s"]),
        (14.0, "joining", []),
        (17.0, "joining", ["waiting for all ranks to join ..."]),
        (18.0, "building", ["waiting for all ranks to join: 4 s"]),
        (19.0, "preparing data", []),
        (19.5, "building", []),
        (20.0, "training", []),
        (90.0, "training", []),
        (99.0, "building", []),
    ):
        state.phase = phase
        said.clear()
        phases.look(state, now)
        assert said == expected, now


def test_every_phase_that_has_words_is_one() -> None:
    assert set(_WORDS) < set(get_args(Phase))
