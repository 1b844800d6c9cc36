"""The world from this machine, from a hostfile and from a rank's environment."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeline.base.problems import JobError, Problem
from pipeline.cluster import devices, rank_environment, world
from pipeline.cluster.agent.launch_spec import DIRECT_PORTS, direct_ports, is_free_port
from pipeline.cluster.devices import Gpu, visible_gpus
from pipeline.cluster.rank_environment import FIRST_PORT, RankEnvironment, free_port, read_rank_environment
from pipeline.cluster.world import (
    Paper,
    local_world,
    resolve_world,
    world_from_environment,
    world_from_hostfile,
)
from pipeline.job.world import Host

SHIPPED = Path(__file__).parents[2] / "hostfiles"
A100 = "NVIDIA A100-SXM4-80GB"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Gives this machine other devices: `machine(gpus=4, capability=(7, 0), cores=2)`."""

    def pretend(gpus: int = 0, capability: tuple[int, int] = (8, 0), cores: int = 2) -> None:
        found = tuple(Gpu(index, A100, capability) for index in range(gpus))
        monkeypatch.setattr(devices, "_ask_driver", lambda: (found, ()))
        monkeypatch.setattr(world, "available_cores", lambda: cores)

    return pretend


def problems_of(call, *args, **kwargs) -> tuple[Problem, ...]:
    with pytest.raises(JobError) as caught:
        call(*args, **kwargs)
    return caught.value.problems


def test_a_machine_without_gpus_has_two_cpu_ranks(machine) -> None:
    machine(gpus=0, cores=16)
    found = local_world(environ={})
    assert (found.size, found.device, found.device_name, found.bf16_native) == (2, "cpu", None, False)
    assert found.is_local


def test_a_single_core_has_one_rank(machine) -> None:
    machine(gpus=0, cores=1)
    assert local_world(environ={}).size == 1


def test_cpu_ranks_may_exceed_the_cores_when_asked_for(machine) -> None:
    machine(gpus=0, cores=2)
    assert local_world(num_gpus=16, environ={}).size == 16
    (problem,) = problems_of(local_world, num_gpus=0, environ={})
    assert problem.key == "num_gpus" and "CPU ranks" in problem.rule


@pytest.mark.parametrize(
    ("capability", "bf16"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_all_gpus_are_used(machine, capability: tuple[int, int], bf16: bool) -> None:
    machine(gpus=4, capability=capability)
    found = local_world(environ={})
    assert (found.size, found.device, found.device_name, found.bf16_native) == (4, "cuda", A100, bf16)


def test_num_gpus_takes_the_first_and_not_more_than_there_are(machine) -> None:
    machine(gpus=4)
    assert local_world(num_gpus=3, environ={}).hosts == (Host("localhost", 3, (0, 1, 2)),)
    (problem,) = problems_of(local_world, num_gpus=5, environ={})
    assert "slots, 4" in problem.rule


def test_num_nodes_without_a_hostfile(machine) -> None:
    machine(gpus=0)
    (problem,) = problems_of(local_world, num_nodes=2, environ={})
    assert problem.key == "num_nodes"


def test_visible_devices_keep_their_numbers(machine) -> None:
    machine(gpus=2)  # what the driver reports under CUDA_VISIBLE_DEVICES=2,3
    found = local_world(environ={"CUDA_VISIBLE_DEVICES": "2,3"})
    assert found.hosts == (Host("localhost", 2, (2, 3)),)


@pytest.mark.parametrize("value", ["", " ", "-1"])
def test_hidden_gpus_mean_cpu(machine, value: str) -> None:
    machine(gpus=4)
    assert local_world(environ={"CUDA_VISIBLE_DEVICES": value}).device == "cpu"


def test_deepspeeds_own_switch_means_cpu(machine) -> None:
    machine(gpus=4)
    assert local_world(environ={"DS_ACCELERATOR": "cpu"}).device == "cpu"


def test_deepspeeds_own_switch_names_a_device_that_is_there(machine) -> None:
    machine(gpus=1)
    assert local_world(environ={"DS_ACCELERATOR": "cuda"}).device == "cuda"
    for value in ("xpu", ""):
        (problem,) = problems_of(local_world, environ={"DS_ACCELERATOR": value})
        assert problem.value == value and "cuda and cpu" in problem.rule
    machine(gpus=0)
    assert "no usable GPU" in problems_of(local_world, environ={"DS_ACCELERATOR": "cuda"})[0].rule


def test_visible_devices_that_cannot_be_are_problems(machine) -> None:
    machine(gpus=2)
    assert "offers 2 of these 3" in visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,9"})[1][0].rule
    assert "by number only" in visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8f2c"})[1][0].rule


@pytest.mark.parametrize("there", [False, True], ids=["no GPUs", "hidden GPUs"])
def test_numbers_that_the_deepspeed_launcher_gives_to_cpu_ranks(
    machine, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    machine(gpus=0)
    monkeypatch.setattr(devices, "_machine_has_gpus", lambda environ: there)
    launched = {"CUDA_VISIBLE_DEVICES": "0,1", "CROSS_RANK": "0"}
    assert bool(visible_gpus(launched)[1]) == there
    # Where nobody but the user can have set it, it asks for GPUs.
    assert "offers 0 of these 2" in visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"})[1][0].rule


def test_a_broken_driver_is_a_problem_and_not_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuInit(self, _flags: int) -> int:
            return 803

    monkeypatch.setattr(devices.ctypes, "CDLL", lambda _name: Driver())
    (problem,) = problems_of(local_world, environ={})
    assert "error 803" in problem.rule


def test_a_hostfile_of_other_machines_is_taken_to_have_gpus() -> None:
    found = resolve_world(hostfile=str(SHIPPED / "a100x4"))
    assert (found.size, len(found.hosts), found.device, found.bf16_native) == (32, 4, "cuda", True)
    assert not found.is_local
    assert resolve_world(hostfile=str(SHIPPED / "a100x4"), num_nodes=1, num_gpus=2).size == 2


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_a_hostfile_of_this_machine_has_its_devices(tmp_path: Path, machine, name: str) -> None:
    (tmp_path / "hosts").write_text(f"{name} slots=2\n")
    machine(gpus=0)
    found = world_from_hostfile(str(tmp_path / "hosts"), environ={})
    assert (found.size, found.device, found.is_local) == (2, "cpu", True)
    machine(gpus=1)
    (problem,) = problems_of(world_from_hostfile, str(tmp_path / "hosts"), environ={})
    assert "1 usable GPUs, not number 1" in problem.rule


def test_localhost_cannot_stand_beside_others(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\nh2 slots=2\n")
    (problem,) = problems_of(resolve_world, hostfile=str(tmp_path / "hosts"))
    assert problem.value == "localhost"


@pytest.mark.parametrize("second", ["h1", "ada@h1"])
def test_two_names_of_this_machine_are_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    (tmp_path / "hosts").write_text(f"h1.cluster slots=1\nh2 slots=2\n{second} slots=2\n")
    monkeypatch.setattr(socket, "gethostname", lambda: "h1.cluster")
    (problem,) = problems_of(resolve_world, hostfile=str(tmp_path / "hosts"))
    assert (problem.value, problem.rule) == (second, "is this machine, as h1.cluster is")
    assert len(resolve_world(hostfile=str(tmp_path / "hosts"), exclude=second).hosts) == 2


def test_a_named_hostfile_that_is_missing_is_never_one_machine(tmp_path: Path) -> None:
    assert problems_of(resolve_world, hostfile=str(tmp_path / "nope"))[0].key == "hostfile"


def test_deepspeeds_default_hostfile_is_used_where_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostfile").write_text("h1 slots=3\n")
    monkeypatch.setattr(world, "DEFAULT_HOSTFILE", str(tmp_path / "hostfile"))
    assert resolve_world().hosts == (Host("h1", 3),)


def test_an_imagined_world(machine) -> None:
    machine(gpus=0)
    assert resolve_world(paper=Paper(32)).size == 32
    assert len(problems_of(resolve_world, paper=Paper(0), hostfile="x")) == 2
    assert problems_of(resolve_world, paper=Paper(10**9))[0].rule == "must be from 1 to 65536"
    assert problems_of(resolve_world, paper=Paper(4), num_gpus=2)[0].key == "world_size"
    assert problems_of(resolve_world, paper=Paper(hosts_like="4x0"))[0].key == "hosts_like"


@pytest.mark.parametrize(
    ("name", "native"), [("v100-32gb", False), ("t4", False), ("H100", True), ("cpu", False)]
)
def test_a_device_that_is_not_here(machine, name: str, native: bool) -> None:
    machine(gpus=0)
    found = resolve_world(paper=Paper(hosts_like="2048x8", device=name))
    assert (len(found.hosts), found.size, found.bf16_native) == (2048, 16384, native)
    assert found.device == ("cpu" if name == "cpu" else "cuda") and found.assumed == "--device"
    assert name != "v100-32gb" or found.device_memory == 32 * 2**30
    assert "how many" in problems_of(resolve_world, paper=Paper(device=name))[0].rule
    (problem,) = problems_of(resolve_world, paper=Paper(4, device="v100"))
    assert problem.remedy == "Use v100-pcie-16gb or v100-pcie-32gb or v100-16gb or v100-32gb"


RANK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("name", ["LOCAL_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_ranks_environment(name: str) -> None:
    found = read_rank_environment(RANK | {name: "2"})
    assert found == RankEnvironment(3, 4, 1, 2, "h1", 29500)
    assert read_rank_environment(found.variables()) == found


def test_without_a_launcher_there_is_one_rank_with_a_free_port() -> None:
    found = read_rank_environment({"MASTER_PORT": "1"})
    assert (found.rank, found.world_size, found.local_rank, found.local_size) == (0, 1, 0, 1)
    with socket.socket() as listener:
        listener.bind((found.master_addr, found.master_port))


@pytest.mark.parametrize("missing", sorted(RANK))
def test_a_partial_environment_is_refused(missing: str) -> None:
    environ = {name: value for name, value in RANK.items() if name != missing}
    assert [problem.key for problem in problems_of(read_rank_environment, environ)] == [missing]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "x"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_SIZE", "5"),
        ("MASTER_PORT", ""),
    ],
)
def test_an_impossible_environment_is_refused(name: str, value: str) -> None:
    environ = RANK | {"LOCAL_SIZE": "2"} | {name: value}
    assert [problem.key for problem in problems_of(read_rank_environment, environ)] == [name]


def test_the_world_of_a_rank(machine) -> None:
    machine(gpus=2)
    found = world_from_environment(RankEnvironment(3, 4, 1, 2, "h1", 29500), {})
    assert [host.slots for host in found.hosts] == [2, 2]
    assert (found.device, found.device_name) == ("cuda", A100)
    machine(gpus=1)
    (problem,) = problems_of(world_from_environment, RankEnvironment(3, 4, 1, 2, "h1", 29500), {})
    assert "2 ranks on this host need as many GPUs, 1 are visible" in problem.rule


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_port_that_is_taken_over_ipv6_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch listens on all addresses at once."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert not is_free_port(port)
        monkeypatch.setattr(rank_environment, "FIRST_PORT", port)
        monkeypatch.setattr(rank_environment, "FIRST_OUTGOING_PORT", port + 1)
        with pytest.raises(OSError, match="no free port"):
            free_port()
    assert is_free_port(port)


def test_agents_ports_are_in_the_way_of_no_other_rendezvous() -> None:
    """Users number the jobs of a host, 29500, 29501, ...; each finds its agents, and no two meet."""
    ports = [direct_ports(29500 + number) for number in range(500)]
    assert all(len(each) == DIRECT_PORTS for each in ports)
    flat = [port for each in ports for port in each]
    assert len(set(flat)) == len(flat)
    assert min(flat) > 1024 and max(flat) < FIRST_PORT
    assert direct_ports(29500) == direct_ports(30000)
    assert direct_ports(11000) == [*range(11001, 11008)]  # but for the rendezvous itself


def test_free_ports_are_free() -> None:
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
