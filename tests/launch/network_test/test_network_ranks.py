"""The test of the links, rank by rank: who meets whom, what is measured, and that a wrong result is seen."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from pipeline.launch.network_test import rank as rank_module
from pipeline.launch.network_test.rank import ROUNDS, Place, groups, run_rank, send_rounds, tournament
from tests.harness import run_ranks

LAYOUTS = [(1,), (2,), (5,), (2, 2), (1, 1, 1), (2, 3), (3, 1, 2), (4, 4, 4, 4, 4)]


@pytest.mark.parametrize("players", range(1, 10))
def test_everybody_meets_everybody_once_and_one_at_a_time(players: int) -> None:
    rounds = list(tournament(players))
    met = Counter(frozenset(pair) for pairs in rounds for pair in pairs)
    assert set(met.values()) <= {1}
    assert len(met) == players * (players - 1) // 2
    for pairs in rounds:
        assert len({player for pair in pairs for player in pair}) == 2 * len(pairs)


@pytest.mark.parametrize("slots", LAYOUTS)
def test_sends_go_over_every_link_and_never_two_at_a_time_over_one(slots: tuple[int, ...]) -> None:
    host_of = [host for host, count in enumerate(slots) for _ in range(count)]
    slot_of = [slot for count in slots for slot in range(count)]
    links = Counter()
    for pairs in send_rounds(slots):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)
        between = [host_of[rank] for pair in pairs if host_of[pair[0]] != host_of[pair[1]] for rank in pair]
        assert len(set(between)) == len(between)
        links.update(frozenset(pair) for pair in pairs)
    expected = {
        frozenset((one, other))
        for one in range(sum(slots))
        for other in range(one)
        if host_of[one] == host_of[other] or slot_of[one] == slot_of[other]
    }
    assert set(links) == expected and set(links.values()) <= {1}


def test_groups() -> None:
    assert groups((3, 3)) == {
        "world": [[0, 1, 2, 3, 4, 5]], "host": [[0, 1, 2], [3, 4, 5]], "slot": [[0, 3], [1, 4], [2, 5]],
    }  # fmt: skip
    assert groups((2,)) == {"world": [[0, 1]]}
    assert groups((1, 1)) == {"world": [[0, 1]], "host": []}
    assert groups((1, 2)) == {"world": [[0, 1, 2]], "host": [[1, 2]], "slot": [[0, 1]]}
    assert groups((1,)) == {"world": []}


def try_links(slots: tuple[int, ...], fault: str = "") -> list[dict[str, Any]]:
    """What one rank says; on rank 1 the operation `fault` spoils one element of its result."""
    rank = int(os.environ["RANK"])
    if fault and rank == 1:
        owner = rank_module if fault == "_exchange" else dist
        setattr(owner, fault, _spoiled(getattr(owner, fault), 1 if fault == "_exchange" else 0))
    said: list[dict[str, Any]] = []
    port = int(os.environ["MASTER_PORT"])
    run_rank(Place(slots, rank, None), os.environ["MASTER_ADDR"], port, 60, said.append)
    return said


def _spoiled(operation: Any, result: int) -> Any:
    """The same operation with another value in its argument number `result`."""

    def spoil(*args: Any, **kwargs: Any) -> None:
        operation(*args, **kwargs)
        args[result][7] += 1

    return spoil


@pytest.mark.slow
def test_every_rank_tries_its_links_and_finds_them_right() -> None:
    said = run_ranks(try_links, 4, (2, 2))
    for rank, events in enumerate(said):
        assert (events[0]["at"], events[-1]["at"]) == ("joined", "done")
        results = [event for event in events if "bandwidth" in event]
        assert all(event["right"] and event["bandwidth"] > 0 for event in results)
        kinds = [(event["at"], event["kind"]) for event in results if "kind" in event]
        once = [(name, kind) for kind in ("world", "host", "slot") for name in ("all-reduce", "all-to-all")]
        assert kinds == once * ROUNDS
        peers = {event["from"] for event in results if event["at"] == "send"}
        assert peers == {rank ^ 1, rank ^ 2}
        assert all(event["to"] == rank for event in results if event["at"] == "send")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "wrong"),
    [("all_reduce", "all-reduce"), ("all_to_all_single", "all-to-all"), ("_exchange", "send")],
)
def test_a_wrong_result_is_seen_by_the_rank_that_has_it(fault: str, wrong: str) -> None:
    said = run_ranks(try_links, 2, (1, 1), fault)
    for rank, events in enumerate(said):
        bad = {event["at"] for event in events if not event.get("right", True)}
        assert bad == ({wrong} if rank == 1 else set())
