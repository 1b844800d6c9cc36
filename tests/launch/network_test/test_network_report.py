"""What is said about links, from what ranks measured: the wrong, the slow and the cut one by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.job.report import console
from pipeline.job.world import Host, World
from pipeline.launch.network_test.network_test import LEAST_SECONDS, NetworkTest, time_limit
from pipeline.launch.network_test.rank import ROUNDS, groups, send_rounds
from pipeline.launch.network_test.report import network_problems, network_tables

GB = 1e9


def measured(
    hosts: int, slots: int, slow: dict[tuple[int, int], float] | None = None, device: str = "cuda"
) -> NetworkTest:
    """A test in which every link has 20 GB/s, those between the hosts of a pair in `slow` less."""
    world = World(tuple(Host(f"h{number}", slots) for number in range(1, hosts + 1)), device)
    found = NetworkTest(world, started=True)
    found.loads = dict.fromkeys(range(hosts), 0.1)
    found.events = [{"rank": rank, "at": "joined"} for rank in range(world.size)]
    for number in range(2):
        found.events += _round(hosts, slots, slow or {}, {"round": number, "right": True})
    found.events += [{"rank": rank, "at": "done"} for rank in range(world.size)]
    return found


def _round(
    hosts: int, slots: int, slow: dict[tuple[int, int], float], common: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for kind, each in groups([slots] * hosts).items():
        for ranks in each:
            for name in ("all-reduce", "all-to-all"):
                result = {"at": name, "kind": kind, "ranks": ranks, "bandwidth": 10 * GB, **common}
                yield from ({"rank": rank, **result} for rank in ranks)
    for pair in [pair for pairs in send_rounds([slots] * hosts) for pair in pairs]:
        for source, target in (pair, pair[::-1]):
            rate = slow.get((source // slots + 1, target // slots + 1), 20.0)
            yield {
                "rank": target, "at": "send", "from": source, "to": target, "bandwidth": rate * GB, **common,
            }  # fmt: skip


def spoil(found: NetworkTest, change: dict[str, Any], **which: Any) -> NetworkTest:
    """Change the events that have these entries."""
    chosen = [event for event in found.events if which.items() <= event.items()]
    assert chosen
    for event in chosen:
        event.update(change)
    return found


@pytest.mark.parametrize(("hosts", "slots"), [(1, 1), (1, 8), (2, 1), (2, 8), (16, 8)])
def test_equal_links_have_no_problem(hosts: int, slots: int) -> None:
    assert network_problems(measured(hosts, slots)) == []


@pytest.mark.parametrize(("hosts", "slots"), [(2, 1), (3, 4), (16, 8), (64, 8)])
def test_the_time_limit_grows_with_the_rounds(hosts: int, slots: int) -> None:
    world = World(tuple(Host(f"h{number}", slots) for number in range(hosts)), "cuda")
    rounds = ROUNDS * sum(1 for _ in send_rounds([slots] * hosts))
    assert time_limit(world) >= LEAST_SECONDS + 0.16 * rounds


def test_a_wrong_sum_and_a_wrong_send_are_errors() -> None:
    found = spoil(measured(2, 2), {"right": False}, rank=3, at="all-reduce", kind="world")
    (problem,) = network_problems(found)
    assert (problem.key, problem.severity) == ("rank 3 (h2)", "error")
    assert "all-reduce of rank 0 (h1), rank 1 (h1), rank 2 (h2), rank 3 (h2) is wrong" in problem.rule
    found = spoil(measured(2, 2), {"right": False}, at="send", **{"from": 0, "to": 2})
    (problem,) = network_problems(found)
    assert (problem.key, problem.severity) == ("rank 0 (h1) -> rank 2 (h2)", "error")


def test_a_slow_pair_of_hosts_is_named_in_its_direction() -> None:
    (problem,) = network_problems(measured(4, 2, slow={(2, 3): 2.0}))
    assert (problem.key, problem.value, problem.severity) == ("h2 -> h3", "2 GB/s", "warning")
    assert "the median of its kind is 20 GB/s" in problem.rule


def test_a_host_whose_links_are_all_slow_is_named_once() -> None:
    slow = {pair: 3.0 for other in (1, 2, 4) for pair in ((3, other), (other, 3))}
    (problem,) = network_problems(measured(4, 2, slow))
    assert problem.key == "h3" and "every link of it is slow" in problem.rule


def test_slow_links_inside_a_host_are_told_from_those_between() -> None:
    (problem,) = network_problems(measured(3, 4, slow={(2, 2): 5.0}))
    assert problem.key == "inside h2"


def test_links_between_hosts_are_not_slow_because_those_inside_are_faster() -> None:
    slow = {(one, other): 2.0 for one in (1, 2, 3) for other in (1, 2, 3) if one != other}
    assert network_problems(measured(3, 4, slow)) == []


def test_what_is_slow_in_one_round_only_has_no_problem() -> None:
    """Something else ran there at that moment."""
    found = measured(4, 2)
    for which in ({"at": "send", "from": 0, "to": 2}, {"at": "all-reduce", "kind": "host", "rank": 5}):
        spoil(found, {"bandwidth": GB}, round=1, **which)
    assert network_problems(found) == []
    spoil(found, {"bandwidth": GB}, round=0, **{"at": "send", "from": 0, "to": 2})
    (problem,) = network_problems(found)
    assert (problem.key, problem.severity) == ("h1 -> h2", "warning")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_remedy_fits_the_device(device: str) -> None:
    found = measured(4, 2, {(2, 3): 2.0}, device)
    spoil(found, {"right": False}, rank=3, at="all-reduce", kind="world")
    spoil(found, {"bandwidth": GB}, rank=5, at="all-reduce", kind="host")
    wrong, *slow = network_problems(found)
    remedies = " ".join(problem.remedy for problem in (wrong, *slow))
    assert len(slow) == 2 and "ethtool" in remedies
    words = ["ibstat", "nvidia-smi", "GPU", "NCCL"]
    assert [word for word in words if word in remedies] == (words if device == "cuda" else [])


def test_rates_of_busy_cpu_hosts_say_nothing() -> None:
    found = measured(4, 2, {(2, 3): 2.0}, "cpu")
    found.loads[1] = 3.5
    (problem,) = network_problems(found)
    assert (problem.key, problem.severity) == ("h2", "warning") and "busy" in problem.rule
    gpus = measured(4, 2, {(2, 3): 2.0})
    gpus.loads[1] = 3.5
    assert [problem.key for problem in network_problems(gpus)] == ["h2 -> h3"]


def test_a_slow_group_is_named() -> None:
    found = spoil(measured(4, 2), {"bandwidth": GB}, rank=5, at="all-reduce", kind="host")
    (problem,) = network_problems(found)
    assert problem.key == "all-reduce of rank 4 (h3), rank 5 (h3)"


def test_the_first_failure_is_named_and_not_its_consequences() -> None:
    found = measured(2, 2)
    found.events = found.events[:4]
    for rank, error in ((2, "NCCL error: unhandled system error\nmore"), (0, "Connection closed by peer")):
        found.events.append({"rank": rank, "at": "failed", "after": "joined", "error": error})
        found.events.append({"rank": rank, "at": "ended", "code": 1})
    (problem,) = network_problems(found)
    assert problem.key == "rank 2 (h2)"
    assert problem.rule == "it fails after 'joined' (NCCL error: unhandled system error)"


def test_a_killed_rank_is_named_with_its_signal() -> None:
    found = measured(2, 2)
    closed = {"rank": 0, "at": "failed", "after": "joined", "error": "Connection closed by peer"}
    found.events = [*found.events[:4], closed, {"rank": 1, "at": "ended", "code": -9}]
    (problem,) = network_problems(found)
    assert (problem.key, problem.rule) == ("rank 1 (h1)", "it is killed by signal 9")


def test_ranks_that_come_to_no_end_are_named() -> None:
    found = measured(2, 2)
    found.events = [event for event in found.events if event["rank"] != 3 or event["at"] == "joined"]
    (problem,) = network_problems(found)
    assert problem.key == "rank 3 (h2)" and "no end after 'joined'" in problem.rule


def test_ranks_that_never_say_a_word_are_named() -> None:
    found = measured(1, 2)
    found.events = []
    (problem,) = network_problems(found)
    assert problem.key == "rank 0 (h1), rank 1 (h1)" and "no end after 'the start'" in problem.rule


def test_silent_hosts_and_cut_links() -> None:
    found = NetworkTest(
        measured(3, 1).world, silent=[(1, "nothing listens")], unreached=[(0, 2, "timed out")]
    )
    silent, cut = network_problems(found)
    assert (silent.key, silent.rule) == ("h2: network test", "nothing listens")
    assert (cut.key, cut.value) == ("h1 -> h3", "timed out")


def shown(found: NetworkTest, capsys: pytest.CaptureFixture[str]) -> str:
    for table in network_tables(found):
        console().print(table)
    return " ".join(capsys.readouterr().out.split())


def test_the_matrix_goes_from_row_to_column(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(measured(2, 2, slow={(1, 2): 3.0, (1, 1): 40.0}), capsys)
    assert "h1 h2 h1 40 3 h2 20 20" in text, text
    assert "all-reduce, all ranks 10 10 10" in text
    assert "all-to-all, between hosts 10 10 10" in text


def test_many_hosts_are_summed_up_and_none_need_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(measured(16, 8, slow={(1, 2): 3.0}), capsys)
    assert "between hosts 3 20 20" in text and "inside hosts 20 20 20" in text
    assert shown(NetworkTest(measured(2, 2).world), capsys) == ""
    assert shown(measured(1, 1), capsys) == ""
