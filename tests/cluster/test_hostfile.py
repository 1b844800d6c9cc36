"""Hostfiles are read strictly, and filtered as DeepSpeed does where DeepSpeed is not silent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.cluster.hostfile import read_hostfile, select_hosts
from pipeline.job.world import Host

SHIPPED = Path(__file__).parents[2] / "hostfiles"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1 slots=2\n", [("h1", 2)]),
        ("h1 slots=2\nh2 slots=16", [("h1", 2), ("h2", 16)]),
        ("# comment\n\n  \t\n  # indented\nh1\tslots=8  \n", [("h1", 8)]),
        ("h1 slots=2\r\nh2 slots=1\r\n", [("h1", 2), ("h2", 1)]),
        ("me@h-1.example.org slots=1\n10.0.0.7 slots=1\n", [("me@h-1.example.org", 1), ("10.0.0.7", 1)]),
        ("b slots=1\na slots=1\n", [("b", 1), ("a", 1)]),
        ("h1 slots=007\n", [("h1", 7)]),
        ("h1 slots=1\rh2 slots=1\r\n\x0c\n", [("h1", 1), ("h2", 1)]),
        # A comment goes on to the end of its line, for DeepSpeed, too.
        ("# a\u2028h1 slots=1\x0bh2 slots=1\x85h3 slots=1\nh4 slots=1\n", [("h4", 1)]),
    ],
)
def test_good_files(tmp_path: Path, text: str, expected: list[tuple[str, int]]) -> None:
    hosts, problems = read_hostfile(write(tmp_path, text))
    assert problems == ()
    assert [(host.name, host.slots) for host in hosts] == expected
    assert all(host.devices == tuple(range(host.slots)) for host in hosts)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("h1", "the slot count is missing"),
        ("h1:2", "not a host name"),
        ("\ufeffh1 slots=2", "not a host name"),  # DeepSpeed would take the mark for a part of the name
        *((f"h1 slots=2{c}h2 slots=2", f"U+{ord(c):04X}") for c in "\v\f\x1c\x1f\x85\xa0\u2028"),
        ("fe80::1 slots=2", "'fe80::1' is an IPv6 address"),
        ("me@[fd00::1] slots=2", "is an IPv6 address"),
        ("h1 slots", "without spaces around '='"),
        ("h1 slots = 2", "without spaces around '='"),
        ("h1 slots=", "without spaces around '='"),
        ("h1 slot=2", "unknown key 'slot'"),
        ("h1 Slots=2", "unknown key 'Slots'"),
        ("h1 slots=0", "at least 1, not 0"),
        ("h1 slots=-1", "at least 1, not -1"),
        ("h1 slots=00", "at least 1, not 00"),
        ("h1 slots=4097", "at most 4096"),
        ("h1 slots=" + "9" * 5000, "at most 4096"),
        ("h1 slots=2.9", "whole number, not '2.9'"),
        ("h1 slots=2x", "whole number, not '2x'"),
        ("h1 slots=\u0662", "whole number"),
        ("h1 slots=2 # two", "follows the slot count"),
        ("h1 slots=2 max_slots=4", "'max_slots=4' follows the slot count"),
        ("h1;reboot slots=2", "safe in a shell"),
        ("$(id) slots=2", "safe in a shell"),
        ("-oProxyCommand=x slots=2", "safe in a shell"),
        ("h[1-2] slots=2", "safe in a shell"),
        ("h1- slots=2", "safe in a shell"),
        ("a b@h1 slots=2", "without spaces"),
        ("a;b@h1 slots=2", "not a user name"),
        ("slots=2", "safe in a shell"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, rule: str) -> None:
    hosts, (problem,) = read_hostfile(write(tmp_path, f"# first\nok slots=1\n{line}\n"))
    assert [host.name for host in hosts] == ["ok"]
    assert problem.key.endswith("line 3")
    assert problem.value == line
    assert rule in problem.rule
    assert problem.severity == "error"


def test_all_problems_of_a_file_are_collected(tmp_path: Path) -> None:
    text = "h1 slots=2\nh2\nh1 slots=4\nh3 slots=0\n"
    _, problems = read_hostfile(write(tmp_path, text))
    assert [problem.key.rpartition(" ")[2] for problem in problems] == ["2", "3", "4"]
    assert "listed on line 1 already" in problems[1].rule


@pytest.mark.parametrize("again", ["h1", "ada@h1", "H1"])
def test_a_host_is_one_host_whoever_logs_in_and_however_it_is_spelled(tmp_path: Path, again: str) -> None:
    _, (problem,) = read_hostfile(write(tmp_path, f"h1 slots=2\n{again} slots=2\n"))
    assert f"host {again} is listed on line 1 already" in problem.rule


@pytest.mark.parametrize("text", ["", "\n\n", "# nobody\n"])
def test_a_file_without_hosts_is_a_problem(tmp_path: Path, text: str) -> None:
    hosts, (problem,) = read_hostfile(write(tmp_path, text))
    assert hosts == ()
    assert "names no host" in problem.rule


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    hosts, (problem,) = read_hostfile(tmp_path / "nope")
    assert hosts == ()
    assert problem.key == "hostfile"
    assert "No such file" in problem.rule


def test_a_folder_and_a_binary_file_are_problems(tmp_path: Path) -> None:
    assert "directory" in read_hostfile(tmp_path)[1][0].rule
    assert "no regular file" in read_hostfile("/dev/zero")[1][0].rule
    (tmp_path / "large").write_bytes(b"#" * (2**20 + 1))
    assert "larger than" in read_hostfile(tmp_path / "large")[1][0].rule
    assert "null byte" in read_hostfile("a\0b")[1][0].rule
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not text" in read_hostfile(tmp_path / "binary")[1][0].rule


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader, writer = os.pipe()
    os.write(writer, b"h1 slots=2\n")
    os.close(writer)
    for path in (f"/proc/self/fd/{reader}", tmp_path / "pipe"):
        hosts, (problem,) = read_hostfile(path)
        assert (hosts, "no regular file" in problem.rule) == ((), True)
    os.close(reader)
    (tmp_path / "hosts").write_text("h1 slots=2\n")
    (tmp_path / "link").symlink_to(tmp_path / "hosts")
    with (tmp_path / "hosts").open() as file:
        for path in (tmp_path / "link", f"/proc/self/fd/{file.fileno()}"):
            assert read_hostfile(path) == ((Host("h1", 2),), ())


HOSTS = (Host("h1", 4), Host("h2", 4), Host("u@h3", 2))


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [("h1", (0, 1, 2, 3)), ("h2", (0, 1, 2, 3)), ("u@h3", (0, 1))]),
        ({"include": "h2"}, [("h2", (0, 1, 2, 3))]),
        ({"include": "h2:3,1@h1:0"}, [("h1", (0,)), ("h2", (1, 3))]),
        ({"include": "u@h3:1@h1:2"}, [("h1", (2,)), ("u@h3", (1,))]),
        ({"include": "h1@u@h3"}, [("h1", (0, 1, 2, 3)), ("u@h3", (0, 1))]),
        ({"exclude": "h1@h2:0,1"}, [("h2", (2, 3)), ("u@h3", (0, 1))]),
        ({"num_nodes": 2}, [("h1", (0, 1, 2, 3)), ("h2", (0, 1, 2, 3))]),
        ({"num_gpus": 2}, [("h1", (0, 1)), ("h2", (0, 1)), ("u@h3", (0, 1))]),
        ({"num_nodes": 1, "num_gpus": 3}, [("h1", (0, 1, 2))]),
    ],
)
def test_filters(filters: dict, expected: list) -> None:
    hosts, problems = select_hosts(HOSTS, **filters)
    assert problems == ()
    assert [(host.name, host.devices) for host in hosts] == expected


@pytest.mark.parametrize(
    ("filters", "key", "rule"),
    [
        ({"include": "h9"}, "include", "no host 'h9'"),
        ({"include": "h1:4"}, "include", "no slot 4"),
        ({"include": "h1:-1"}, "include", "not a list of slots"),
        ({"include": "h1:"}, "include", "not a list of slots"),
        ({"include": "h1:0,"}, "include", "not a list of slots"),
        ({"include": "h1:0,0"}, "include", "named twice"),
        ({"include": "h1:0@h1:1"}, "include", "named twice"),
        ({"exclude": "h1@h2@u@h3"}, "exclude", "no slot is left"),
        ({"include": "h1", "exclude": "h2"}, "exclude", "cannot be combined with --include"),
        ({"include": "h1", "num_gpus": 1}, "include", "cannot be combined with --num_gpus"),
        ({"num_nodes": 4}, "num_nodes", "number of hosts, 3"),
        ({"num_nodes": 0}, "num_nodes", "from 1"),
        ({"num_gpus": 3}, "num_gpus", "smallest host's slots, 2"),
        ({"num_gpus": 0}, "num_gpus", "from 1"),
    ],
)
def test_bad_filters(filters: dict, key: str, rule: str) -> None:
    _, (problem,) = select_hosts(HOSTS, **filters)
    assert problem.key == key
    assert rule in problem.rule


def test_both_counts_can_be_wrong_at_once() -> None:
    _, problems = select_hosts(HOSTS, num_nodes=9, num_gpus=9)
    assert [problem.key for problem in problems] == ["num_nodes", "num_gpus"]


@pytest.mark.parametrize("name", [path.name for path in sorted(SHIPPED.iterdir()) if path.suffix != ".md"])
@pytest.mark.slow
def test_deepspeed_reads_the_shipped_files_alike(name: str) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    hosts, problems = read_hostfile(SHIPPED / name)
    assert problems == ()
    assert dict(fetch_hostfile(str(SHIPPED / name))) == {host.name: host.slots for host in hosts}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("include", "exclude"), [("h2:3,1@h1:0", ""), ("h1", ""), ("", "h1@h2:0,1"), ("", "h2:2")]
)
def test_deepspeed_filters_alike(include: str, exclude: str) -> None:
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    hosts = HOSTS[:2]
    theirs = parse_inclusion_exclusion({host.name: host.slots for host in hosts}, include, exclude)
    ours, _ = select_hosts(hosts, include, exclude)
    assert {name: sorted(slots) for name, slots in theirs.items()} == {
        host.name: list(host.devices) for host in ours
    }
    assert list(theirs) == [host.name for host in ours]
