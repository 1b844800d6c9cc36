"""What is wrong with hosts, told from their answers. Every check finds its fault; healthy hosts have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.words import few, size
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.job.options import Options
from pipeline.job.resolve import examine
from pipeline.job.world import Host, World
from pipeline.launch.host_check import host_check
from pipeline.launch.host_check.ask import Answers, HostReport, Question
from pipeline.launch.host_check.comparison import Survey
from pipeline.launch.host_check.host_check import (
    CHECKS,
    HostCheck,
    HostProblem,
    check_values,
    host_problems,
    world_found,
)
from pipeline.launch.host_check.inventory import HARDWARE
from pipeline.launch.host_check.session import no_client
from pipeline.launch.host_check.system import common_interface, file_systems
from tests.launch.host_check.host_facts import FACTS, GIB, GPU, facts, report, survey


def the_problem(found: Survey) -> HostProblem:
    problems = host_problems(found)
    assert len(problems) == 1, [str(each.problem) for each in problems]
    return problems[0]


def test_healthy_hosts_have_no_problem() -> None:
    assert host_problems(survey(report(1), report(2))) == []


def gpus(**change: Any) -> list[dict[str, str]]:
    return [{"index": str(index), **GPU, **change} for index in range(8)]


OUTPUT = FACTS["folders"]["/nfs/runs"]
LOCK = {"path": "/home/ada/.cache/torch_extensions/py311/op/lock", "age": 3600.0, "held": False}
FAULTS = [
    ({"user": {"name": "root"}}, "user", "error", "must be ada, as on this machine"),
    ({"project": {"digest": "ffff"}}, "code", "error", "must be 0123456789ab"),
    ({"project": {"digest": None}}, "code", "error", "must be 0123456789ab"),
    ({"project": {"cwd": False}}, "current folder", "error", "ranks start in"),
    ({"machine": {"arch": "aarch64"}}, "processor", "error", "must be x86_64, as on dgx-1"),
    ({"python": {"version": "3.12.1"}}, "Python", "error", "must be 3.11.7 /nfs/job/.venv/bin/python"),
    ({"python": {"path": "/usr/bin/python3"}}, "Python", "error", "as on this machine"),
    ({"packages": {"torch": "2.12.0+cu130"}}, "torch", "error", "must be 2.13.0+cu130, as on dgx-1"),
    ({"packages": {"cuda": "12.8"}}, "CUDA of torch", "error", "must be 13.0, as on dgx-1"),
    ({"packages": {"nccl": "2.27.3"}}, "NCCL", "error", "must be 2.28.9"),
    ({"packages": {"deepspeed": "0.19.7"}}, "deepspeed", "error", "must be 0.19.8"),
    ({"packages": {"transformers": None}}, "transformers", "error", "must be 5.24.0"),
    ({"files": {"/nfs/job/zero1.json": "cccc"}}, "job files", "error", "as on this machine (digest aaaa)"),
    ({"files": {"/nfs/job/zero1.json": None}}, "job files", "error", "is read by every rank"),
    ({"data": {"/nfs/text": None}}, "data", "error", "must hold the same files (3 files, 2.93 KiB"),
    ({"environment": {"NCCL_SOCKET_IFNAME": "ib0"}}, "environment", "warning", "must be absent"),
    ({"gpus": {"gpus": gpus()[:7]}}, "GPUs", "error", "uses 8 GPUs there, and there is no number 7"),
    ({"gpus": {"gpus": [], "smi": None}}, "GPUs", "warning", "no nvidia-smi to ask it"),
    ({"gpus": {"gpus": [], "failed": "has fallen off the bus"}}, "GPUs", "error", "fallen off the bus"),
    ({"gpus": {"gpus": gpus(name="Tesla V100")}}, "GPUs", "warning", "the slowest sets the pace"),
    ({"gpus": {"gpus": gpus(driver_version="590.1")}}, "driver", "warning", "must be 580.95.05"),
    ({"memory": {"cores": 4}}, "cores and memory", "warning", "8 ranks there share them"),
    ({"shared_memory": {"total": 64 * 2**20, "free": 64 * 2**20}}, "/dev/shm", "error", "need about 512 MiB"),
    ({"limits": {"files": [256, 4096]}}, "open files", "warning", "a rank of 16 may need about 768"),
    ({"limits": {"locked": [65536, 65536]}}, "locked memory", "error", "locks its buffers for mlx5_0"),
    ({"folders": {"/nfs/runs": OUTPUT | {"writable": False}}}, "free disk", "error", "may not be written"),
    ({"folders": {"/nfs/runs": OUTPUT | {"free": GIB}}}, "free disk", "error", "the job needs 2 GiB"),
    ({"folders": {"/nfs/runs": OUTPUT | {"nearest": "/"}}}, "free disk", "warning", "is /, and /nfs else"),
    ({"locks": [LOCK]}, "compiled ops", "error", "no process of these hosts holds this lock"),
    ({"locks": [LOCK | {"age": 60.0}]}, "compiled ops", "warning", "would wait for ever"),
    ({"clock": 75.0}, "clock", "error", "75 s ahead of"),
    ({"clock": -5.0}, "clock", "warning", "5 s behind"),
    ({"names": ["127.0.1.1"]}, "own name", "warning", "takes its own name (dgx-2) for 127.0.1.1: no other"),
    ({"names": []}, "own name", "warning", "nothing that it knows: no other host reaches it there; ranks"),
    ({"names": [], "doors": {"interface": "eth1"}}, "own name", "error", "(dgx-2) for nothing that it knows"),
    ({"reached": "Connection timed out"}, "rendezvous", "error", "not reach rank 0 at 10.0.0.1, port 29500"),
    ({"unreached": {"own": {"0": "no"}, "net": {"0": "no"}}}, "links", "warning", "dgx-1 at 10.0.0.1 (no)"),
    ({"reports": "No route to host"}, "reports", "error", "does not reach this machine"),
    ({"machine": {"host": "dgx-1", "boot": "boot-1"}}, "machine", "error", "is the same machine as dgx-1"),
    ({"noise": "Welcome!\nto dgx-2"}, "shell", "warning", "prints this at every login"),
    ({"seen": {}}, "connection", "error", "answered once, and then no more"),
    ({"commands": {"orted": None}}, "launcher", "error", "not on the PATH of logins"),
    ({"limits": {"error": "OSError: no"}}, "open files", "warning", "cannot be found out (OSError: no)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "check", "severity", "rule"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_fault_of_one_host_is_named_with_a_remedy(
    change: dict, check: str, severity: str, rule: str
) -> None:
    bad = report(2, **change)
    if "error" in change.get("limits", {}):
        bad.facts["limits"] = change["limits"]
    found = [
        each for each in host_problems(survey(report(1), bad, output_bytes=2 * GIB)) if each.check == check
    ]
    assert len(found) == 1, [str(each.problem) for each in found]
    assert found[0].hosts == ("dgx-2",)
    problem = found[0].problem
    assert (problem.key, problem.severity) == (f"dgx-2: {check}", severity)
    assert rule in problem.rule
    assert problem.remedy and "{host}" not in problem.remedy


def test_every_check_is_tried_here() -> None:
    tried = {check for _, check, _, _ in FAULTS}
    own = {"free GPU memory", "output folder"}  # below
    like_transformers = {"datasets", "accelerate", "numpy"}
    assert {check.name for check in CHECKS} == tried | own | like_transformers


def test_hosts_with_the_same_fault_share_a_line() -> None:
    old = {"packages": {"torch": "2.12.0+cu130"}}
    found = the_problem(survey(report(1), report(2, **old), report(3, **old)))
    assert found.hosts == ("dgx-2", "dgx-3")
    assert found.problem.key == "dgx-2, dgx-3: torch"


def test_this_machine_decides_who_is_right_where_one_host_agrees_with_it() -> None:
    new, old = {"packages": {"torch": "2.13.0+cu130"}}, {"packages": {"torch": "2.12.0+cu130"}}
    assert the_problem(survey(report(1, **old), report(2, **old), report(3, **new))).hosts == (
        "dgx-1",
        "dgx-2",
    )
    login = facts(9, packages={"torch": "2.13.0+cpu"})
    assert the_problem(survey(report(1, **old), report(2, **old), report(3, **new), here=login)).hosts == (
        "dgx-3",
    )


def test_a_user_named_in_the_hostfile_is_meant() -> None:
    assert host_problems(survey(report(1, name="root@dgx-1", user={"name": "root"}))) == []


def test_an_old_driver_is_named_with_the_one_that_is_needed() -> None:
    old = {"gpus": {"gpus": gpus(driver_version="535.183.01")}}
    found = the_problem(survey(report(1, **old)))
    assert (found.check, found.problem.severity) == ("driver", "error")
    assert found.problem.rule == "torch's CUDA 13.0 needs driver 580 or newer"


def test_a_gpu_that_somebody_uses_is_named_with_its_processes() -> None:
    used = gpus()
    used[3] |= {"memory.free": "500"}
    change = {"gpus": {"gpus": used, "processes": [["4711", "python", "80000"]]}}
    found = the_problem(survey(report(1, **change)))
    assert found.check == "free GPU memory"
    assert found.problem.value == "GPU 3: 500 of 81920 MiB free"
    assert "python (pid 4711)" in found.problem.rule
    # A job that does not use that GPU does not mind.
    few_slots = report(1, slots=2, **change)
    assert host_problems(survey(few_slots)) == []


def test_a_cpu_build_of_torch_is_no_fault_on_cpus() -> None:
    cpu = {"packages": {"torch": "2.13.0+cpu", "cuda": None, "nccl": None}}
    assert {each.check for each in host_problems(survey(report(1, **cpu), here=facts(9, **cpu)))} == {"torch"}
    none = {**cpu, "gpus": {"gpus": [], "smi": None, "driver": False}}
    assert host_problems(survey(report(1, **none), here=facts(9, **none), device="cpu")) == []


def test_a_lock_that_another_host_holds_is_no_stale_one() -> None:
    assert (
        the_problem(survey(report(1), report(2, locks=[LOCK]))).problem.remedy
        == f"On dgx-2: rm {LOCK['path']}"
    )
    assert host_problems(survey(report(1, locks=[LOCK | {"held": True}]), report(2, locks=[LOCK]))) == []


UNREACHED = {"own": {"0": "Network is unreachable"}, "net": {}}


@pytest.mark.parametrize(
    ("second", "severity", "interface"),
    [
        ({"unreached": UNREACHED}, "warning", "eth0"),
        # They call the network by which they were asked otherwise.
        ({"unreached": UNREACHED, "doors": {"interface": "ib0"}}, "error", None),
        ({"unreached": UNREACHED, "doors": {"interface": None}}, "error", None),
        ({}, None, None),
    ],
)
def test_a_name_that_leads_where_others_do_not_come(
    second: dict, severity: str | None, interface: str | None
) -> None:
    found = survey(report(1), report(2, **second))
    problems = host_problems(found)
    assert common_interface(found) == interface
    assert [each.problem.severity for each in problems] == ([severity] if severity else [])
    for each in problems:
        assert (each.hosts, each.problem.value) == (("dgx-1",), "10.0.0.1")
        assert "(dgx-1) for 10.0.0.1: dgx-2 cannot reach it there (Network is" in each.problem.rule
        assert ("ranks are told to use eth0" in each.problem.rule) == (severity == "warning")


def test_an_interface_for_gloo_replaces_the_address_of_the_name() -> None:
    loop = {"names": ["127.0.1.1"]}
    assert the_problem(survey(report(1), report(2, **loop))).check == "own name"
    assert host_problems(survey(report(1), report(2, **loop), interface="eth0")) == []
    assert host_problems(survey(report(1, **loop))) == []


def test_a_busy_port_of_the_first_host() -> None:
    found = the_problem(survey(report(1, port="Address already in use"), report(2)))
    assert (found.hosts, found.problem.value) == (("dgx-1",), "Address already in use")
    assert "--master_port" in found.problem.remedy


def seen(*groups: str) -> list[HostReport]:
    """Hosts 1 .. n; each group such as "12" is one file system."""
    reports = {}
    for group in groups:
        for place in map(int, group):
            others = [int(each) - 1 for each in group]
            reports[place] = report(place, seen={"/nfs/runs": others})
    return [reports[place] for place in sorted(reports)]


@pytest.mark.parametrize(
    ("groups", "expected", "complaint"),
    [
        (["123"], [["dgx-1", "dgx-2", "dgx-3"]], ()),
        (["1", "2", "3"], [["dgx-1"], ["dgx-2"], ["dgx-3"]], ()),
        (["12", "3"], [["dgx-1", "dgx-2"], ["dgx-3"]], ("dgx-3",)),
    ],
)
def test_shared_and_separate_file_systems(groups: list[str], expected: list, complaint: tuple) -> None:
    found = survey(*seen(*groups))
    assert file_systems(found) == expected
    assert [each.hosts for each in host_problems(found)] == ([complaint] if complaint else [])


def test_a_host_that_was_not_reached_has_one_line_and_no_other() -> None:
    lost = HostReport(report(2).host, {}, failure=no_client("ssh", FileNotFoundError(2, "ssh")))
    found = the_problem(survey(report(1), lost))
    assert (found.check, found.hosts) == ("reachable", ("dgx-2",))
    assert found.problem.remedy == "Install ssh here"


def test_the_world_has_the_devices_that_were_found() -> None:
    hosts = (report(1).host, report(2).host)
    believed = World(hosts, "cuda", None, True, "hosts")

    def found(*reports: HostReport, **environ: str) -> tuple:
        world = world_found(believed, Answers(report(9), reports), environ)
        assert (world.hosts, world.hostfile) == (hosts, "hosts")
        return world.device, world.device_name, world.bf16_native

    none = {"gpus": {"gpus": [], "smi": None, "driver": False}}
    volta = {"gpus": {"gpus": gpus(name="Tesla V100-SXM2-32GB", compute_cap="7.0")}}
    assert found(report(1), report(2)) == ("cuda", GPU["name"], True)
    assert found(report(1), report(2, **volta)) == ("cuda", f"{GPU['name']} + Tesla V100-SXM2-32GB", False)
    assert found(report(1, **none), report(2, **none)) == ("cpu", None, False)
    assert found(report(1), report(2), DS_ACCELERATOR="cpu") == ("cpu", None, False)
    unknown = {"gpus": {"gpus": [], "smi": None, "driver": True}}
    assert found(report(1, **unknown), report(2, **unknown)) == ("cuda", None, True)


def test_gpus_on_some_hosts_only() -> None:
    none = {"gpus": {"gpus": [], "smi": None, "driver": False}}
    found = the_problem(survey(report(1), report(2, **none)))
    assert (found.hosts, found.problem.value) == (("dgx-2",), "no GPU")


def test_usable_hosts_are_those_without_an_error() -> None:
    reports = [report(1), report(2, clock=-5.0), report(3, clock=100.0)]
    world = World(tuple(each.host for each in reports), "cuda")
    found = survey(*reports)
    check = HostCheck(world, found, tuple(host_problems(found)))
    assert [host.name for host in check.usable] == ["dgx-1", "dgx-2"]
    mine = HostProblem("launcher", (), check.errors[0].problem)
    assert HostCheck(world, found, (mine,)).usable == ()


def test_the_table_groups_hosts_by_value() -> None:
    found = survey(report(1), report(2, packages={"torch": "2.12.0"}), report(3))
    values = dict(
        check_values(found, [each for each in CHECKS if each.name in ("torch", "GPUs", "compiled ops")])
    )
    assert values == {
        "torch": {"2.13.0+cu130": ["dgx-1", "dgx-3"], "2.12.0": ["dgx-2"]},
        "GPUs": {f"8 x {GPU['name']}": ["dgx-1", "dgx-2", "dgx-3"]},
    }
    assert {check.name for check in HARDWARE} <= {check.name for check in CHECKS}


def test_words() -> None:
    assert few(f"h{number}" for number in range(7)) == "h0, h1, h2, h3, 2 more and h6"
    assert (size(999), size(1000), size(5 * 2**40)) == ("999 B", "0.977 KiB", "5 TiB")


def test_what_was_read_of_the_job_is_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blend file is read once, for the job: hosts are asked for its data, though it is gone by then."""
    text, blend = tmp_path / "text.txt", tmp_path / "blend.json"
    text.write_text("a word")
    sources = [{"data": [str(text), "hub:somebody/words"], "weight": 1.0}]
    blend.write_text(json.dumps({"sources": sources}))
    world = World((Host("localhost", 1),), "cpu")
    options = Options(
        data_blend=str(blend), validation=(f"own={tmp_path}",), output_dir=str(tmp_path / "run")
    )
    draft = examine(options, world)
    blend.unlink()
    asked: list[Question] = []
    healthy = survey(report(1)).answers
    monkeypatch.setattr(host_check, "ask_hosts", lambda _, question, __: asked.append(question) or healthy)
    host_check.ask_job_hosts(draft, LauncherOptions())
    assert asked[0].data == (str(text), str(tmp_path))
    assert asked[0].folders == (str(tmp_path / "run"), str(tmp_path / "run/data/remote"))
