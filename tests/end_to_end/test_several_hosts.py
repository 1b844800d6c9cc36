"""Jobs over real hosts, a pipeline from one to the other: losses, checkpoints, and other numbers of hosts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.host_jobs import LAUNCH, SCRIPT, assert_nothing_runs, finish, ranks
from tests.end_to_end.jobs import PROJECT, Workshop
from tests.harness import run_job
from tests.hosts import Hosts
from tests.training.test_evaluation import evaluate

pytestmark = [pytest.mark.slow, pytest.mark.multihost, pytest.mark.timeout(600)]

# Sums of other ranks' shares in another order; 32-bit floats have 7 digits.
TOLERANCE = 1e-5
JOB_SECONDS = 200
STEPS = 48
TWO_STAGES = {"pipeline": {"stages": 2}}


def losses(steps: list[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps]


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    workshop = Workshop(tmp_path_factory.mktemp("one"))
    run_job(workshop.arguments("run", workshop.config(), steps=STEPS), 1).check()
    return losses(workshop.steps("run"))


def test_one_host_then_two_without_the_launch(hosts: Hosts, curve: list[float]) -> None:
    """Two hosts, then one, then both are below."""
    workshop = Workshop(hosts.folder)
    two, one = hosts.write_hostfile(2), hosts.write_hostfile(2, ["h2"], "one_host")
    legs = [
        # (start, layout of that many ranks, steps at its end)
        ([*LAUNCH, "--hostfile", one], {"zero_optimization": {"stage": 2}}, 2),
        (["deepspeed", "--hostfile", two, SCRIPT], {**TWO_STAGES, "tensor_parallel": {"autotp_size": 2}}, 4),
    ]
    for start, layout, steps in legs:
        config = workshop.config(f"to_{steps}", **layout)
        arguments = workshop.arguments("run", config, steps=steps)
        output = finish(hosts, hosts.start("h0", [*start, *arguments], cwd=PROJECT), JOB_SECONDS)
        assert ("resumed from" in output) == (steps > 2)
        assert_nothing_runs(hosts)
    assert losses(workshop.steps("run")) == pytest.approx(curve[:4], rel=TOLERANCE)
    run, evaluating = str(workshop.folder / "run"), [sys.executable, "-m", "pipeline.evaluate"]
    output = finish(hosts, hosts.start("h0", [*evaluating, run, "--hostfile", two], cwd=PROJECT), JOB_SECONDS)
    assert_nothing_runs(hosts)
    here = evaluate([run, "--deepspeed_config", workshop.config()])["sets"][0]
    assert json.loads(output)["sets"][0]["loss"] == pytest.approx(here["loss"], rel=TOLERANCE)


def test_disks_of_their_own_and_a_full_one(make_hosts, curve: list[float]) -> None:
    """One host's name leads to a network that no other has: gloo would listen there, and is told better.

    Each host keeps what its ranks wrote. A save for which a host has no space fails on all, and the run
    continues; the next one succeeds, and is resumed from. Each host gets the outcome, and the first one all
    logs, whatever the end."""
    hosts = make_hosts(4, shared=False, disk=64 * 2**20)  # one rank on each: stages and replicas apart
    hosts.lead_astray("h1")
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

    def outcomes(rank: int) -> set[str]:
        """On every host; the logs of all ranks are on the first."""
        found = [json.loads(hosts.path(name, run / "outcome.json").read_text()) for name in hosts.names]
        assert {outcome["rank"] for outcome in found} == {rank}
        newest = sorted(hosts.path("h1", run / "logs").iterdir())[-1]
        texts = [(newest / f"rank_0000{rank}.log").read_text() for rank in range(4)]
        assert [f"rank {rank} of 4 on h{rank + 1}," in text for rank, text in enumerate(texts)] == [True] * 4
        return {outcome["status"] for outcome in found}

    assert outcomes(rank=0) == {"finished"}
    assert [checkpoints(name) for name in hosts.names] == [["global_step15", "global_step45"]] * 4
    parts = [files(hosts.path(name, run / "checkpoints/global_step45")) for name in hosts.names]
    assert parts[0] & parts[2] == {"manifest.json", "shards.json"}
    weights = [{name for name in part if name.startswith(("layer", "mp_rank"))} for part in parts]
    assert weights[0] == weights[1] and weights[2] == weights[3]  # two replicas of each stage

    other = workshop.config("replicas")
    fewer = ["--max_restarts", "1", "--allow_fewer_hosts", "2"]
    refused = hosts.run("h0", [*start, *fewer, *arguments(other, 48)], JOB_SECONDS, cwd=PROJECT)
    assert refused.returncode == 2
    said = " ".join((refused.stdout + refused.stderr).split())
    assert "warning: allow_fewer_hosts = 2: each host has an output folder of its own" in said
    assert "each of its hosts holds a part" in said

    # A rank of another host that hangs after the next save, with the others in their collectives.
    job = hosts.start("h0", [*start, "--step_timeout", "3", *arguments(config, 4000)], cwd=PROJECT)
    hosts.wait_until(lambda: job.returncode is not None or f"saved {run}" in job.stdout, JOB_SECONDS)
    assert f"resumed from {run}/checkpoints/global_step45" in job.stdout
    (victim,) = (rank for rank in ranks(hosts) if rank.environ().get("RANK") == "3")
    victim.suspend()
    assert job.wait(30) == 1
    assert "rank 3 on h4: no progress for" in job.stderr and "rank 3 gave no answer" in job.stderr
    assert outcomes(rank=3) == {"failed"}
    logs = sorted(hosts.path("h1", run / "logs").iterdir())[-1]
    for rank in range(3):  # the stacks of those that could answer
        assert 'File "' in (logs / f"rank_0000{rank}.log").read_text()
    lines = hosts.path("h1", run / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 60
    assert losses(steps)[:6] == pytest.approx(curve[:6], rel=TOLERANCE)
    assert_nothing_runs(hosts)


def test_hosts_that_ask_or_have_another_key_are_refused_before_a_rank_starts(hosts: Hosts) -> None:
    workshop = Workshop(hosts.folder)
    hostfile = hosts.write_hostfile(1, name="troubled")
    command = [*LAUNCH, "--hostfile", hostfile, *workshop.arguments("refused", workshop.config())]
    began = time.monotonic()
    with hosts.ssh_trouble("h1", "wrong_host_key"), hosts.ssh_trouble("h2", "password"):
        done = hosts.run("h0", command, 60, cwd=PROJECT)
    print(f"refused after {time.monotonic() - began:.1f} s")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2
    assert "error: h1: reachable = 'key changed'" in said and "ssh-keygen -R h1" in said
    assert "error: h2: reachable = 'asks'" in said and "ssh-copy-id h2" in said
    assert "Starting" not in said and not (hosts.folder / "refused").exists()
    assert_nothing_runs(hosts)


def test_a_host_dies_the_other_goes_on_and_it_comes_back(make_hosts, curve: list[float]) -> None:
    """A host loses its power; the run continues without it, and on both when a later restart finds that it
    works again."""
    hosts = make_hosts(2)
    workshop = Workshop(hosts.folder)
    config = workshop.config("stages", **TWO_STAGES, zero_optimization={"stage": 1})
    hostfile = ["--hostfile", str(hosts.write_hostfile(2))]
    job = workshop.arguments("run", config, *"--save_interval 5 --eval_interval 60".split(), steps=STEPS)
    restarts = "--max_restarts 3 --allow_fewer_hosts 1 --failure_timeout 12".split()
    training = hosts.start("h0", [*LAUNCH, *hostfile, *restarts, *job], cwd=PROJECT)

    def wait_for(text: str, count: int = 1) -> None:
        def is_there() -> bool:
            return training.returncode is not None or (training.stdout + training.stderr).count(text) >= count

        hosts.wait_until(is_there, JOB_SECONDS, f"{count} x {text!r}")

    wait_for("global_step5")
    hosts.crash("h2", power_loss=True)
    crashed = time.monotonic()
    wait_for("Starting 2 ranks")
    hosts.boot("h2")
    wait_for("resumed from")
    saved = training.stdout.count("saved")
    wait_for("saved", saved + 1)
    ranks(hosts)[1].kill()
    output = finish(hosts, training, JOB_SECONDS)
    print(f"finished {time.monotonic() - crashed:.0f} s after the power loss")
    assert output.count("resumed from") == 2
    alone, together = training.stderr.partition("Used again: h2. ")[::2]
    assert "Left out: h2 (" in alone and "The job runs on 1 of 2 hosts, 2 of 4 ranks: " in alone
    assert "with 8 micro-batches of 1 per replica instead of 4" in alone
    assert "\nwarning: h2: reachable = " in alone and "\nerror: " not in alone
    assert together.startswith(
        "The job runs on 2 hosts, 4 ranks instead of 2: data-parallel size 2 instead of 1."
    )
    assert losses(workshop.steps("run")) == pytest.approx(curve, rel=TOLERANCE)
    assert workshop.outcome("run")["status"] == "finished"
    assert_nothing_runs(hosts)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}
