"""Jobs over real hosts, a pipeline from one to the other: losses, checkpoints, and other numbers of hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.host_jobs import LAUNCH, SCRIPT, assert_nothing_runs, finish, ranks
from tests.end_to_end.jobs import PROJECT, Workshop
from tests.harness import run_job
from tests.hosts import Hosts

pytestmark = [pytest.mark.slow, pytest.mark.multihost, pytest.mark.timeout(600)]

# Sums of other ranks' shares in another order; 32-bit floats have 7 digits.
TOLERANCE = 1e-5
JOB_SECONDS = 200
STEPS = 6
TWO_STAGES = {"pipeline": {"stages": 2}}


def losses(steps: list[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps]


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    workshop = Workshop(tmp_path_factory.mktemp("one"))
    run_job(workshop.arguments("run", workshop.config(), steps=STEPS), 1).check()
    return losses(workshop.steps("run"))


def test_two_hosts_then_one_then_two_again(hosts: Hosts, curve: list[float]) -> None:
    workshop = Workshop(hosts.folder)
    two, one = hosts.write_hostfile(2), hosts.write_hostfile(2, ["h2"], "one_host")
    legs = [
        # (start, layout of that many ranks, steps at its end)
        ([*LAUNCH, "--hostfile", two], {**TWO_STAGES, "zero_optimization": {"stage": 1}}, 2),
        ([*LAUNCH, "--hostfile", one], {"zero_optimization": {"stage": 2}}, 4),
        (["deepspeed", "--hostfile", two, SCRIPT], {**TWO_STAGES, "tensor_parallel": {"autotp_size": 2}}, 6),
    ]
    for start, layout, steps in legs:
        config = workshop.config(f"to_{steps}", **layout)
        arguments = workshop.arguments("run", config, steps=steps)
        output = finish(hosts, hosts.start("h0", [*start, *arguments], cwd=PROJECT), JOB_SECONDS)
        assert ("resumed from" in output) == (steps > 2)
        assert_nothing_runs(hosts)
    assert losses(workshop.steps("run")) == pytest.approx(curve, rel=TOLERANCE)


def test_disks_of_their_own_and_a_full_one(make_hosts, curve: list[float]) -> None:
    """Each host keeps what its ranks wrote. A save for which a host has no space fails on all, and the run
    goes on; the next one succeeds, and is resumed from."""
    hosts = make_hosts(4, shared=False, disk=64 * 2**20)  # one rank on each: stages and replicas apart
    workshop = Workshop(hosts.new_folder("inputs"))
    config = workshop.config("stages", **TWO_STAGES, zero_optimization={"stage": 1})
    start = [*LAUNCH, "--hostfile", hosts.write_hostfile(1)]
    run = hosts.folder / "run"

    def arguments(config: str, steps: int) -> list[str]:
        given = workshop.arguments(
            "run", config, "--save_interval", "15", "--eval_interval", "60", steps=steps
        )
        given[given.index("--output_dir") + 1] = str(run)
        return given

    def checkpoints(host: str) -> list[str]:
        return sorted(path.name for path in hosts.path(host, run / "checkpoints").glob("global_step*"))

    job = hosts.start("h0", [*start, *arguments(config, 45)], cwd=PROJECT)
    hosts.wait_until(lambda: job.returncode is not None or "global_step15" in job.stdout, JOB_SECONDS)
    stopped = ranks(hosts)
    for rank in stopped:
        rank.suspend()
    hosts.fill_disk("h2")
    for rank in stopped:
        rank.resume()
    message = "global_step30 could not be saved: rank 1 on h2: OSError: [Errno 28] No space left on device"
    hosts.wait_until(lambda: job.returncode is not None or message in job.stdout, JOB_SECONDS)
    hosts.empty_disk("h2")
    assert message in finish(hosts, job, JOB_SECONDS)
    assert [checkpoints(name) for name in hosts.names] == [["global_step15", "global_step45"]] * 4
    parts = [files(hosts.path(name, run / "checkpoints/global_step45")) for name in hosts.names]
    assert parts[0] & parts[2] == {"manifest.json", "shards.json"}
    weights = [{name for name in part if name.startswith(("layer", "mp_rank"))} for part in parts]
    assert weights[0] == weights[1] and weights[2] == weights[3]  # two replicas of each stage

    other = workshop.config("replicas")
    refused = hosts.run("h0", [*start, *arguments(other, 48)], JOB_SECONDS, cwd=PROJECT)
    assert refused.returncode == 2
    assert "each of its hosts holds a part" in " ".join((refused.stdout + refused.stderr).split())
    output = finish(hosts, hosts.start("h0", [*start, *arguments(config, 48)], cwd=PROJECT), JOB_SECONDS)
    assert f"resumed from {run}/checkpoints/global_step45" in output
    lines = hosts.path("h1", run / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    assert [step["step"] for step in steps] == list(range(1, 49))
    assert losses(steps)[:STEPS] == pytest.approx(curve, rel=TOLERANCE)
    assert_nothing_runs(hosts)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}
