"""What is said before the first step, and who holds up a hung job, from the stacks of its ranks."""

from __future__ import annotations

from typing import get_args

import pytest

from pipeline.base.command import show_messages
from pipeline.cluster.agent.progress import _WORDS, StartPhases, grouped_stacks
from pipeline.cluster.agent.rank_table import Phase, RankState


def stack(file: str, line: int, function: str) -> str:
    """As faulthandler writes it: a helper thread, then the main one, innermost frames first."""
    return (
        'Thread 0x00007f1 (most recent call first):\n  File "/x/threading.py", line 331 in wait\n\n'
        f'Current thread 0x00007f2 (most recent call first):\n  File "/x/{file}", line {line} in {function}\n'
        '  File "/x/pretrain.py", line 1 in <module>\n'
    )


GATHER = stack("distributed_c10d.py", 4287, "all_gather")
BROADCAST = stack("distributed_c10d.py", 3151, "broadcast")
READING = stack("loader.py", 7, "read")
LOSS = stack("loop.py", 3, "loss")


@pytest.mark.parametrize(
    ("stacks", "suspect", "summary"),
    [
        # A stopped process writes nothing.
        ([GATHER, BROADCAST, GATHER, ""], 3, "rank 3 gave no answer"),
        ([GATHER, READING, None, GATHER], 2, "rank 2 gave no answer"),
        ([GATHER, BROADCAST, READING, GATHER], 2, "rank 2 in read (loader.py:7)"),
        (
            [GATHER, READING],
            1,
            "rank 0 in all_gather (distributed_c10d.py:4287); rank 1 in read (loader.py:7)",
        ),
        # All wait, one of them elsewhere.
        ([GATHER, GATHER, BROADCAST], 2, "ranks 0-1 in all_gather"),
        # On a GPU nobody is seen to wait.
        ([LOSS, READING, LOSS], 1, "rank 1 in read (loader.py:7)"),
        ([GATHER, BROADCAST], None, "rank 0 in all_gather"),
        ([READING, READING], None, "ranks 0-1 in read (loader.py:7)"),
        ([None, "", GATHER], None, "ranks 0-1 gave no answer"),
        ([READING], None, "rank 0 in read"),
    ],
)
def test_the_rank_that_the_others_wait_for(stacks: list, suspect: int | None, summary: str) -> None:
    found = grouped_stacks({r: text for r, text in enumerate(stacks) if text is not None}, range(len(stacks)))
    assert found.suspect == suspect
    assert summary in found.summary


def test_equal_stacks_are_shown_once() -> None:
    text = grouped_stacks({0: GATHER, 1: GATHER.replace("7f2", "7f9"), 2: ""}, [0, 1, 2]).text
    assert text.count("all_gather") == 1
    assert "--- stacks of ranks 0-1\n" in text and text.endswith("--- stacks of rank 2\nno answer")


def test_long_phases_are_told_when_they_are_long_and_when_they_end() -> None:
    said: list[str] = []
    show_messages(said.append, "pipeline.cluster.agent")
    phases = StartPhases()
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
        (90.0, "training", ["taking the first step ..."]),
        (95.4, "a step", ["taking the first step: 75 s"]),
        (99.0, "building", []),
    ):
        state.phase, state.step = ("training", 1) if phase == "a step" else (phase, state.step)
        said.clear()
        phases.look(state, now)
        assert said == expected, now


def test_every_phase_that_has_words_is_one() -> None:
    assert set(_WORDS) < set(get_args(Phase))
