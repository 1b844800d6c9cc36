"""What a launcher would ignore or refuse in a world is said before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import check
from pipeline.cluster.launcher_options import LAUNCHERS, LauncherOptions
from pipeline.job.options import Options, parse_options
from pipeline.job.world import Host, World
from pipeline.launch import preflight
from pipeline.launch.launcher_command import launcher_world_problems, start_problems, unused_problems

EQUAL = World((Host("h1", 2), Host("h2", 2)), "cuda", None, True, "hosts")
UNEQUAL = World((Host("h1", 2), Host("h2", 4)), "cuda", None, True, "hosts")
ONE = World((Host("h2", 2),), "cuda", None, True, "hosts")
CHOSEN = World((Host("h1", 2, (1, 3)), Host("h2", 2)), "cuda", None, True, "hosts")
LOCAL = World((Host("localhost", 2),), "cpu")
MPI = ["openmpi", "mpich", "impi", "mvapich"]


def rules(launcher: str | None, world: World, **options: object) -> list[str]:
    problems = launcher_world_problems(LauncherOptions(launcher=launcher, **options), world)
    return [problem.rule for problem in problems]


@pytest.mark.parametrize("launcher", [None, *LAUNCHERS])
def test_whole_hosts_with_equal_slots_suit_all(launcher: str | None) -> None:
    assert rules(launcher, EQUAL) == []
    assert rules(launcher, ONE) == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_unequal_slots(launcher: str) -> None:
    found = rules(launcher, UNEQUAL)
    refused = launcher not in ("pdsh", "openmpi")
    assert ["on every host (h1 has 2, h2 has 4)" in rule for rule in found] == [True] * refused


@pytest.mark.parametrize("option", [{"include": "h2"}, {"exclude": "h1"}, {"num_nodes": 1}, {"num_gpus": 2}])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_part_of_the_hostfile(launcher: str, option: dict[str, object]) -> None:
    found = rules(launcher, ONE, **option)
    assert found == [f"{launcher} starts all of a hostfile"] * (launcher in MPI)


def test_chosen_slots_are_not_slurms() -> None:
    assert "as on h1" in rules("slurm", CHOSEN)[0]
    assert rules("pdsh", CHOSEN) == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_that_would_not_be_used(launcher: str) -> None:
    assert len(rules(launcher, LOCAL)) == (launcher != "pdsh")
    assert "with --no_ssh" in rules(launcher, EQUAL, no_ssh=True)[0]


def test_a_place_beyond_the_hosts() -> None:
    assert rules(None, EQUAL, no_ssh=True, node_rank=1) == []
    assert rules(None, EQUAL, no_ssh=True, node_rank=2) == ["this job has 2 hosts, counted from 0"]


def test_users_are_unknown_where_slots_are_chosen_and_to_slurm() -> None:
    chosen = World((Host("me@h1", 1, (1,)), Host("h2", 2)), "cuda", None, True, "hosts")
    assert "'@' separates hosts there" in rules(None, chosen)[0]
    whole = World((Host("me@h1", 1), Host("h2", 1, (1,))), "cuda", None, True, "hosts")
    assert rules(None, whole) == []
    assert "not me@h1" in rules("slurm", World(whole.hosts[:1], "cuda", None, True, "hosts"))[0]


def test_options_that_nothing_looks_at() -> None:
    given = {"launcher_args": "-x", "ssh_port": 22, "launch_addr": "h0"}

    def keys(world: World, **options: object) -> list[str]:
        return [problem.key for problem in unused_problems(LauncherOptions(**options), world)]

    assert keys(LOCAL, **given) == keys(EQUAL, no_ssh=True, **given) == [*given]
    assert keys(EQUAL, **given) == keys(LOCAL, no_ssh_check=True) == []
    assert keys(EQUAL, launcher="slurm", **given) == ["ssh_port"]


@pytest.mark.parametrize("path", ["/a b", "/a&b", "/a;b", "/$HOME", "/it's", "/%n", "/a`b", "/a*", "/a\nb"])
def test_what_shells_of_other_hosts_would_read(path: str) -> None:
    def keys(world: World, paths: dict[str, str], environ: dict[str, str], **options: object) -> list[str]:
        found = start_problems(LauncherOptions(**options), world, paths, environ)
        return [problem.key for problem in found]

    variables = {"PYTHONPATH": path, "PYTHONWARNINGS": path}
    assert keys(EQUAL, {"current folder": path, "python": "/ü/python3.11"}, {}) == ["current folder"]
    assert keys(ONE, {"python": path}, variables) == ["python", "PYTHONPATH"]
    assert keys(EQUAL, {"python": path}, variables, launcher="openmpi") == ["PYTHONPATH"]
    assert keys(LOCAL, {"python": path}, variables) == []
    assert keys(EQUAL, {"python": path}, variables, no_ssh=True) == []


def test_the_check_looks_at_where_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=2\n")
    monkeypatch.chdir(tmp_path / "a b")
    arguments = ["--hostfile", str(tmp_path / "hosts"), "--output_dir", str(tmp_path / "run")]
    assert check.main(arguments) == 2
    assert "current folder = " in capsys.readouterr().out


def test_a_part_of_the_job_may_not_need_what_the_whole_does(tmp_path: Path) -> None:
    options = parse_options(["--output_dir", str(tmp_path), "--model", "tiny"], Options)
    given = LauncherOptions(hostfile="hosts", ssh_port=22)
    keys = [problem.key for problem in preflight.check(options, given, world=LOCAL).problems]
    part = [problem.key for problem in preflight.check(options, given, world=LOCAL, batch=(4, 1, 2)).problems]
    assert ("ssh_port" in keys, "ssh_port" in part) == (True, False)


def test_the_check_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=2\n")
    arguments = ["--hostfile", str(tmp_path / "hosts"), "--launcher", "openmpi", "--num_nodes", "1"]
    assert check.main(arguments) == 2
    assert "openmpi starts all of a hostfile" in " ".join(capsys.readouterr().out.split())
