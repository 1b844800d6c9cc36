"""What agents tell of their hosts before ranks start, and what follows when hosts do not fit together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster import host_probe
from pipeline.cluster.agent.host_inquiry import (
    ANSWER_SECONDS,
    Asked,
    Inquiry,
    Verdict,
    differences,
    interface_for,
)
from pipeline.cluster.host_probe import REQUEST, TOKEN
from pipeline.cluster.rank_environment import RankEnvironment, free_port
from tests.cluster.agent.agents import Start, start
from tests.covering import first_fast

__all__ = ["start"]


def inquiry(folder: Path, verdict: Verdict, heard: list) -> Inquiry:
    """Of one host, about `folder`; what is heard goes to `heard`."""
    request = {
        "project": str(folder), "cwd": str(folder), "files": [], "data": [], "folders": [str(folder)],
        "environment": {}, "commands": [], "listen": None, "run": "r", "index": 0,
    }  # fmt: skip

    def again(answers: list, address: str) -> str:
        heard.append(json.loads(answers[0])["project"]["cwd"])
        return json.dumps({"reached": None, "reports": None})

    def conclude(answers: list, others: list, address: str) -> Verdict:
        heard.append((json.loads(others[0])["seen"][str(folder)], address))
        return verdict

    return Inquiry((f"{REQUEST}{json.dumps(request)}",), again, conclude)


@pytest.mark.parametrize("problems", ["error: h1: data = 'other': must be as here", ""])
def test_ranks_start_when_their_hosts_have_been_compared(tmp_path: Path, problems: str) -> None:
    heard: list = []
    verdict = Verdict(problems, (("GLOO_SOCKET_IFNAME", "eth7"),))
    start = Start(tmp_path, world_size=2, inquiry=inquiry(tmp_path, verdict, heard))
    try:
        start.all("2", "0.01")
        outcome = start.outcome()
        assert heard == [True, ([0], "127.0.0.1")]
        assert not list(tmp_path.glob(f"{TOKEN}*"))
        if problems:
            assert (outcome.status, start.codes()) == ("wrong_job", [2, 2])
            assert sum(problems in line for line in start.said) == 1
            assert not (tmp_path / "ranks").exists()
        else:
            assert (outcome.status, start.codes()) == ("finished", [0, 0])
            assert {rank["environment"]["GLOO_SOCKET_IFNAME"] for rank in start.ranks()} == {"eth7"}
    finally:
        start.coordinator.close()
        for agent in start.agents:
            agent.kill()


def test_a_host_that_does_not_answer_is_not_waited_for() -> None:
    """Nor asked again."""
    heard: list = []
    asked = Asked(Inquiry(("", ""), lambda *given: heard.append(given) or "", lambda *given: given), "a")
    asked.take(0, "one")
    now = asked._since
    assert asked.next(now + ANSWER_SECONDS - 1) is None
    assert asked.next(now + ANSWER_SECONDS + 1) == "" and heard == [(["one", None], "a")]
    asked.take(0, "two")
    assert asked.next(now) == (["one", None], ["two", None], "a")


FACTS = {"code": "abc", "machine": ["h1", "boot"], "versions": {"torch": "2.13.0", "Python": "3.11.7"}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": ["h2", "boot"]}, []),
        ({}, ["h2: machine", "is the same machine as h1"]),
        ({"machine": []}, []),  # two starts by hand on one machine
        ({"machine": ["h2"], "code": "abd"}, ["h2: code", "must be abc, as on h1"]),
        ({"machine": ["h2"], "versions": {"torch": "2.12.0", "Python": "3.11.7"}}, ["h2: torch", "2.13.0"]),
        ({"machine": ["h2"], "versions": None}, ["h2: torch", "h2: Python"]),
    ],
)
def test_what_hosts_of_a_start_without_a_launch_must_have_alike(change: dict, said: list[str]) -> None:
    text = "\n".join(map(str, differences({"h1": FACTS, "h2": FACTS | change})))
    assert all(each in text for each in said) and bool(text) == bool(said)


@pytest.mark.parametrize("fault", first_fast(["machine", "folder"], 1))
def test_a_start_without_a_launch_ends_where_hosts_do_not_fit(start: Start, fault: str) -> None:
    """Two hosts, as the deepspeed launcher numbers them, which are one; or with two folders of one name."""
    start.coordinator.close()
    by = "0" if fault == "machine" else None  # a start by hand may have one machine for two hosts
    place = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "MASTER_ADDR": "0.0.0.0", "CROSS_RANK": by}
    place["MASTER_PORT"] = free_port()
    first = start.folder
    for rank in range(2):
        agent = {"address": "", "port": 0, "key_file": "", "hosts": ()}
        start.agent(rank, "1000", "0.05", elsewhere=place | {"RANK": rank}, **agent)
        if fault == "folder":
            start.folder = first / "elsewhere"
            start.folder.mkdir(exist_ok=True)
    assert [agent.wait(30) for agent in start.agents] == [2, 2]
    said = (first / "console0").read_text()
    assert {"machine": "is the same machine as", "folder": "give --output_dir in full"}[fault] in said


@pytest.mark.parametrize(
    ("own", "changes", "environ", "told"),
    [
        (["127.0.1.1"], {}, {}, {"GLOO_SOCKET_IFNAME": "eth3"}),
        ([], {}, {}, {"GLOO_SOCKET_IFNAME": "eth3"}),
        (["127.0.1.1"], {}, {"GLOO_SOCKET_IFNAME": "ib0"}, {}),
        (["127.0.1.1"], {"local_size": 2}, {}, {}),
        (["127.0.1.1"], {"master_addr": "127.0.1.1"}, {}, {}),  # the way is to this host itself
        (["10.0.0.1"], {}, {}, {}),
    ],
)
def test_gloo_is_told_an_interface_where_a_name_leads_to_its_own_host(
    monkeypatch: pytest.MonkeyPatch, own: list, changes: dict, environ: dict, told: dict
) -> None:
    monkeypatch.setattr(host_probe, "own_addresses", lambda: own)
    way = lambda other: other if other.startswith("127.") else "10.0.0.7"  # noqa: E731
    monkeypatch.setattr(host_probe, "address_to", way)
    monkeypatch.setattr(host_probe, "interface_of", {"10.0.0.7": "eth3"}.get)
    place = replace(RankEnvironment(0, 2, 0, 1, "10.0.0.9", 29500), **changes)
    assert interface_for(place, environ) == told
