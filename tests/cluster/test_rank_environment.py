"""A rank's place as mpirun, mpiexec and srun say it, alone and inside each other."""

from __future__ import annotations

import pytest

from pipeline.base.problems import JobError, Problem
from pipeline.cluster.rank_environment import (
    RankEnvironment,
    read_rank_environment,
    slurm_first_host,
    slurm_local_size,
    without_managers,
)

# As the programs set them for rank 3 of 4, two on each of h1 and h2.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "168493057",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "h[1-2]",
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
}
RENDEZVOUS = {"MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
PLACE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
HERE = RankEnvironment(3, 4, 1, 2, "h1", 29500)


def problems_of(environ: dict[str, str]) -> tuple[Problem, ...]:
    with pytest.raises(JobError) as caught:
        read_rank_environment(environ)
    return caught.value.problems


def keys_of(environ: dict[str, str]) -> list[str]:
    return [problem.key for problem in problems_of(environ)]


@pytest.mark.parametrize("manager", [OPEN_MPI, HYDRA, SLURM], ids=["Open MPI", "Hydra", "Slurm"])
def test_the_place_that_a_manager_gives(manager: dict[str, str]) -> None:
    assert read_rank_environment(manager | RENDEZVOUS) == HERE
    # A user who repeats it contradicts nobody.
    assert read_rank_environment(manager | RENDEZVOUS | PLACE) == HERE


@pytest.mark.parametrize("manager", [OPEN_MPI, HYDRA, SLURM], ids=["Open MPI", "Hydra", "Slurm"])
@pytest.mark.parametrize("name", PLACE)
def test_numbers_that_an_earlier_start_left_are_no_rank(manager: dict[str, str], name: str) -> None:
    (problem,) = problems_of(manager | RENDEZVOUS | {name: "0"})
    assert problem.key == name and "started this process and says" in problem.rule
    assert f"Unset {name}" in problem.remedy


def test_slurm_says_where_the_ranks_meet() -> None:
    found = read_rank_environment(SLURM)
    assert found.master_addr == "h1" and 15_000 <= found.master_port < 32_768
    others = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert read_rank_environment(others).master_port == found.master_port
    for next_one in ({"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "42"}):
        assert read_rank_environment(SLURM | next_one).master_port != found.master_port
    assert read_rank_environment(SLURM | {"MASTER_PORT": "29500"}) == HERE
    assert read_rank_environment(SLURM | {"MASTER_ADDR": "10.0.0.1"}).master_addr == "10.0.0.1"


def test_mpirun_derives_a_port_and_on_one_host_the_address() -> None:
    assert keys_of(OPEN_MPI) == ["MASTER_ADDR"]
    assert "mpirun -x MASTER_ADDR=HOST" in problems_of(OPEN_MPI)[0].remedy
    alone = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    found = read_rank_environment(alone)
    assert found.master_addr == "127.0.0.1" and 15_000 <= found.master_port < 32_768
    assert read_rank_environment(alone | {"OMPI_COMM_WORLD_RANK": "0"}).master_port == found.master_port
    assert read_rank_environment(alone | {"PMIX_NAMESPACE": "168493058"}).master_port != found.master_port


def test_hydra_gives_nothing_that_two_starts_would_not_share() -> None:
    assert keys_of(HYDRA) == ["MASTER_ADDR", "MASTER_PORT"]
    assert "mpiexec -genv MASTER_PORT 29500" in problems_of(HYDRA)[1].remedy


@pytest.mark.parametrize("sign", ["CROSS_RANK", "TORCHELASTIC_RUN_ID"])
@pytest.mark.parametrize("outer", [OPEN_MPI, HYDRA, SLURM], ids=["Open MPI", "Hydra", "Slurm"])
def test_a_launcher_that_a_manager_started_counts(outer: dict[str, str], sign: str) -> None:
    inner = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_SIZE": "4", sign: "0"}
    assert read_rank_environment(outer | inner | RENDEZVOUS) == RankEnvironment(6, 8, 2, 4, "h1", 29500)


def test_mpirun_in_an_allocation_counts_and_not_what_started_its_helpers() -> None:
    helper = SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    assert read_rank_environment(helper | OPEN_MPI | RENDEZVOUS) == HERE
    assert read_rank_environment(helper | HYDRA | RENDEZVOUS) == HERE
    # Slurm's own PMI-2 sets these two.
    assert read_rank_environment(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"} | RENDEZVOUS) == HERE


def test_two_managers_are_refused() -> None:
    (problem,) = problems_of(OPEN_MPI | HYDRA | RENDEZVOUS)
    assert "mpirun (Open MPI) and mpiexec (Hydra) both claim" in problem.rule


def test_accelerate_that_starts_one_process_for_many_is_no_job_of_one() -> None:
    started = {"ACCELERATE_MIXED_PRECISION": "no"}
    assert read_rank_environment(started).world_size == 1
    assert keys_of(started | RENDEZVOUS) == ["accelerate launch"]
    assert read_rank_environment(started | RENDEZVOUS | PLACE | {"LOCAL_WORLD_SIZE": "2"}) == HERE
    assert read_rank_environment(started | RENDEZVOUS | OPEN_MPI) == HERE


def test_a_batch_script_is_no_rank() -> None:
    batch = {"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    assert read_rank_environment(batch).world_size == 1


@pytest.mark.parametrize("manager", [OPEN_MPI, HYDRA, SLURM], ids=["Open MPI", "Hydra", "Slurm"])
def test_half_of_what_a_manager_sets_is_refused(manager: dict[str, str]) -> None:
    local_rank = next(name for name in manager if name.endswith(("LOCALID", "LOCAL_RANK", "LOCALRANKID")))
    local_size = next(name for name in manager if name.endswith(("NODEID", "LOCAL_SIZE", "LOCALNRANKS")))
    for name in {local_rank, local_size} - {"MPI_LOCALRANKID"}:
        environ = {key: value for key, value in manager.items() if key != name}
        assert keys_of(environ | RENDEZVOUS) == [name]
    assert keys_of(manager | RENDEZVOUS | {local_rank: "x"}) == [local_rank]
    assert keys_of(manager | RENDEZVOUS | {local_rank: "2"}) == ["LOCAL_RANK"]


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_a_rendezvous_on_every_host_is_none(address: str) -> None:
    here = PLACE | {"MASTER_PORT": "29500", "MASTER_ADDR": address}
    (problem,) = problems_of(here | {"LOCAL_SIZE": "2"})
    assert problem.key == "MASTER_ADDR" and "2 ranks are on others" in problem.rule
    assert read_rank_environment(here | {"LOCAL_SIZE": "4"}).master_addr == address


@pytest.mark.parametrize(
    ("name", "value"), [("MASTER_ADDR", " "), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536")]
)
def test_an_impossible_rendezvous(name: str, value: str) -> None:
    assert keys_of(PLACE | RENDEZVOUS | {"LOCAL_SIZE": "2", name: value}) == [name]


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x2),1", [2, 2, 1]), ("1,8(x2),3", [1, 8, 8, 3])],
)
def test_tasks_of_a_node(text: str, counts: list[int]) -> None:
    assert [slurm_local_size(text, node) for node in range(len(counts))] == counts
    with pytest.raises(ValueError, match="nodes, not number"):
        slurm_local_size(text, len(counts))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("h1", "h1"),
        ("h1,h2", "h1"),
        ("h[1-4]", "h1"),
        ("gpu[007-010,13],login", "gpu007"),
        ("gpu[3,5-7]", "gpu3"),
        ("rack[1-2]node[04-08]", "rack1node04"),
        ("a100-[1-2].example.org", "a100-1.example.org"),
    ],
)
def test_first_host_of_a_list(nodes: str, first: str) -> None:
    assert slurm_first_host(nodes) == first


@pytest.mark.parametrize("text", ["", "[", ",h1", "h 1", "h[]"])
def test_a_list_that_cannot_be_understood(text: str) -> None:
    assert keys_of(SLURM | {"SLURM_STEP_NODELIST": text}) == ["SLURM_STEP_NODELIST"]
    assert keys_of(SLURM | {"SLURM_STEP_TASKS_PER_NODE": text}) == ["SLURM_STEP_TASKS_PER_NODE"]


def test_a_rank_does_not_see_what_mpi_left_in_the_shell() -> None:
    """DeepSpeed ends ranks whose LOCAL_RANK differs from OMPI_COMM_WORLD_LOCAL_RANK."""
    left = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMI_RANK": "0", "PMIX_RANK": "0", "MPI_LOCALRANKID": "0"}
    assert without_managers(left | {"NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}
