"""When a failed job is started again, and on what."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.base.words import ranges
from pipeline.checkpoints.lineage import write_lineage
from pipeline.checkpoints.manifest import TrainState, read_checkpoint
from pipeline.checkpoints.resume import lineage_after
from pipeline.cluster.agent.rank_table import RankTable, error_kind, first_failure
from pipeline.cluster.hostfile import read_hostfile
from pipeline.cluster.launcher_options import LauncherOptions, launcher_problems
from pipeline.cluster.outcome import Failure, Outcome, Status
from pipeline.job.job import Job
from pipeline.job.options import Options
from pipeline.job.stop_file import read_stamp
from pipeline.job.world import Host, World
from pipeline.launch import restart_loop
from pipeline.launch.fewer_hosts import (
    Plan,
    describe_fewer,
    describe_return,
    on_hosts,
    plan_fewer,
    same_step,
    separate_folders,
)
from pipeline.launch.preflight import check
from pipeline.launch.restart_loop import RestartPolicy, resuming, say_how_to_resume
from tests.checkpoints.saved_runs import job_in
from tests.checkpoints.saved_runs import saved as saved_checkpoint

HOSTS = tuple(Host(f"h{number}", 2) for number in range(1, 5))
WORLD = World(HOSTS, "cuda", None, True, "hosts")


def failed(
    step: int = 3, saved: int | None = None, kind: str = "error", message: str = "full disk"
) -> Outcome:
    failure = Failure(kind, 1, step, message)  # type: ignore[arg-type]
    return Outcome("failed", step, 0, 1, message, failure, saved=saved)


def decisions(policy: RestartPolicy, *outcomes: Outcome) -> list[bool]:
    return [policy.after(outcome).restart for outcome in outcomes]


@pytest.mark.parametrize("status", ["finished", "wrong_job", "stopped"])
def test_only_failures_are_followed_by_a_start(status: Status) -> None:
    assert not RestartPolicy(3).after(replace(failed(), status=status)).restart


def test_whoever_asked_for_the_end_gets_it() -> None:
    assert not RestartPolicy(3).after(replace(failed(saved=2), on_request=True)).restart
    assert not RestartPolicy(0).after(failed(saved=2)).restart


def test_restarts_in_vain_are_counted_and_delayed() -> None:
    policy = RestartPolicy(3)
    lost = [failed(step, kind="lost", message="h2 is gone") for step in (3, 3, 3, 3)]
    found = [policy.after(outcome) for outcome in lost]
    assert [each.restart for each in found] == [True, True, True, False]
    assert [each.delay for each in found[:3]] == [5, 10, 20]
    assert "3 restarts have brought no new checkpoint" in found[3].reason


def test_a_new_checkpoint_begins_the_count_anew() -> None:
    policy = RestartPolicy(1)
    assert decisions(policy, failed(3, 2), failed(5, 4), failed(6, 6)) == [True, True, True]
    assert policy.saved == 6
    # The same checkpoint again is none.
    assert decisions(policy, failed(7, 6)) == [False]


def test_the_same_failure_at_the_same_step_is_not_tried_a_third_time() -> None:
    policy = RestartPolicy(9)
    assert policy.after(failed(3, 2)).restart
    decision = policy.after(failed(3))
    assert not decision.restart and "the same failure after step 3, twice" in decision.reason
    # Hosts may be lost as often as they like, and another step is another failure.
    assert decisions(RestartPolicy(9), *[failed(3, kind="lost")] * 3) == [True] * 3
    assert decisions(RestartPolicy(9), failed(3), failed(4), failed(3)) == [True] * 3


def test_a_start_that_reached_no_rank_counts() -> None:
    assert decisions(RestartPolicy(2), *[Outcome("failed", 0)] * 3) == [True, True, False]


def test_a_restart_goes_on_whatever_the_first_start_was_told() -> None:
    assert resuming(["--resume", "never", "--seed", "1"]) == ["--seed", "1", "--resume", "auto"]
    assert resuming(["--resume=x/global_step2"]) == ["--resume", "auto"]


@pytest.mark.parametrize("where", ["back-off", "check"])
@pytest.mark.parametrize("saved", [None, 4])
def test_a_stop_between_two_starts_is_a_stop(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    where: str,
    saved: int | None,
) -> None:
    """Nothing runs then, so that it must not count as the failure that was before."""

    def prepare(*_: object, again: bool = False) -> restart_loop.Ready:
        if again and where == "check":
            raise KeyboardInterrupt("SIGTERM")
        return restart_loop.Ready(full(tmp_path), LauncherOptions(max_restarts=2))

    def sleep(_: float) -> None:
        if where == "back-off":
            raise KeyboardInterrupt("SIGTERM")

    monkeypatch.setattr(restart_loop, "prepare", prepare)
    monkeypatch.setattr(restart_loop, "start_once", lambda *_: failed(5, saved))
    monkeypatch.setattr(restart_loop.time, "sleep", sleep)
    assert restart_loop.run_job(options(tmp_path), LauncherOptions(max_restarts=2), [], ["./launch.sh"]) == 3
    said = capsys.readouterr().err.partition("Stopped by SIGTERM between two starts: no rank is running.\n")[
        2
    ]
    assert said == ("To resume from the checkpoint of step 4: ./launch.sh\n" if saved else "")


def test_a_stop_file_counts_from_the_moment_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between that and the first look of rank 0 hosts are asked, and ranks started."""
    job, given = full(tmp_path), []

    def prepare(asked: Options, *_: object, **__: object) -> restart_loop.Ready:
        Path(job.output_dir).mkdir(exist_ok=True)
        (Path(job.output_dir) / "STOP").touch()
        return restart_loop.Ready(replace(job, options=asked), LauncherOptions())

    def start(*arguments: object) -> Outcome:
        given.append(arguments[3])
        return Outcome("stopped", 0, on_request=True)

    monkeypatch.setattr(restart_loop, "prepare", prepare)
    monkeypatch.setattr(restart_loop, "start_once", start)
    asked = replace(options(tmp_path), output_dir=job.output_dir)
    assert restart_loop.run_job(asked, LauncherOptions(), ["--x"], ["./launch.sh"]) == 3
    assert given[0][:2] == ["--x", "--stop_stamp"] and read_stamp(given[0][2]) is None


def test_a_restart_that_is_refused_says_only_why(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The job has been described before the first start."""
    wrong = replace(options(tmp_path), train_steps=0)
    launcher = LauncherOptions(num_gpus=1)
    assert restart_loop.prepare(wrong, launcher) is restart_loop.prepare(wrong, launcher, again=True) is None
    first, second = re.split(r"This job cannot start: .*\n", capsys.readouterr().err)
    assert first.startswith("World") and second.startswith("error: train_steps = 0: ")


def test_a_restart_reads_the_files_anew_and_outlives_the_middle_of_an_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asked = options(tmp_path)
    path, rates = Path(asked.deepspeed_config), []
    edited = path.read_text().replace("0.001", "0.002")
    texts = [edited[:-9], edited]

    def start(*_: object) -> Outcome:
        rates.append(check(asked, LauncherOptions(num_gpus=1)).job.optimizer.lr)
        return failed(5, 4) if len(rates) == 1 else Outcome("finished", 10)

    monkeypatch.setattr(restart_loop, "start_once", start)
    monkeypatch.setattr(restart_loop.time, "sleep", lambda _: path.write_text(texts.pop(0)))
    assert restart_loop.run_job(asked, LauncherOptions(num_gpus=1, max_restarts=3), [], ["./launch.sh"]) == 0
    assert rates == [1e-3, 2e-3]
    assert "config.json:1" in capsys.readouterr().err


def test_a_stop_of_a_second_start_before_its_first_step_names_the_checkpoint_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    results = [failed(5, 4), Outcome("stopped", 0, on_request=True)]
    ready = restart_loop.Ready(full(tmp_path), LauncherOptions(max_restarts=2))
    monkeypatch.setattr(restart_loop, "prepare", lambda *_, **__: ready)
    monkeypatch.setattr(restart_loop, "start_once", lambda *_: results.pop(0))
    monkeypatch.setattr(restart_loop.time, "sleep", lambda _: None)
    assert restart_loop.run_job(options(tmp_path), LauncherOptions(max_restarts=2), [], ["./launch.sh"]) == 3
    assert capsys.readouterr().err.endswith("To resume from the checkpoint of step 4: ./launch.sh\n")


# What failed first ---------------------------------------------------------------------------------------


def test_a_lost_peer_is_no_cause() -> None:
    peer = Failure(
        error_kind(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:5")), 0, 3, "peer", at=1.0
    )
    own = Failure(error_kind(ConnectionRefusedError("Connection refused")), 3, 3, "own", at=1.2)
    assert (peer.kind, own.kind) == ("peer", "error")
    assert first_failure([peer, own]) is own
    assert first_failure([peer]) is peer
    assert first_failure([]) is None
    assert RankTable(failures=[peer, own]).outcome(1).rank == 3


def test_lists_of_ranks_are_short() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


# Fewer hosts ---------------------------------------------------------------------------------------------


def job_on(tmp_path: Path, world: World, batch: tuple[int, ...] = (), **json: object) -> object:
    return check(options(tmp_path, **json), LauncherOptions(), world=world, batch=batch)


def options(tmp_path: Path, **changes: object) -> Options:
    import json

    values = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        **changes,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return Options(deepspeed_config=str(path), model="tiny", output_dir=str(tmp_path / "run"))


def full(tmp_path: Path, **json: object) -> Job:
    draft = job_on(tmp_path, WORLD, **json)
    assert draft.job is not None, draft.problems
    return draft.job


BATCH = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    ("json", "usable", "ranks", "batch"),
    [
        # 8 replicas of 4 x 1: a step of 32.
        (BATCH, (0, 1), 4, (32, 4, 2)),
        (BATCH, (3,), 2, (32, 4, 4)),
        # 32 sequences on 6 replicas do not go: 4 replicas are used.
        (BATCH, (0, 2, 3), 4, (32, 4, 2)),
        # 2 stages: 4 replicas, then 3, which share 12 sequences.
        (
            {"pipeline": {"stages": 2}, "train_batch_size": 12, "gradient_accumulation_steps": 3},
            (0, 1, 2), 6, (12, 1, 4),
        ),
        ({"tensor_parallel": {"autotp_size": 2}, **BATCH}, (1,), 2, (16, 4, 4)),
    ],
)  # fmt: skip
def test_a_step_stays_what_it_was(tmp_path: Path, json, usable, ranks: int, batch) -> None:
    job = full(tmp_path, **json)
    hosts = [HOSTS[number] for number in usable]
    plan = plan_fewer(job, hosts, 1, lambda world, sizes: job_on(tmp_path, world, sizes, **json))
    assert isinstance(plan, Plan), plan
    assert (plan.job.world.size, plan.batch) == (ranks, batch)
    assert plan.job.batch.train_batch_size == job.batch.train_batch_size
    same = ("pipeline", "sequence", "tensor")
    assert [getattr(plan.job.mesh, name) for name in same] == [getattr(job.mesh, name) for name in same]
    assert plan.job.mesh.data < job.mesh.data
    text = describe_fewer(job, plan, "unreachable")
    assert "\n" not in text and f"data-parallel size {plan.job.mesh.data} instead of {job.mesh.data}" in text


def test_too_few_hosts_or_too_large_a_replica_are_refused(tmp_path: Path) -> None:
    job = full(tmp_path, **BATCH)
    problems = plan_fewer(job, HOSTS[:1], 2, lambda *_: pytest.fail("too few"))
    assert [problem.key for problem in problems] == ["allow_fewer_hosts"]
    stages = full(tmp_path, pipeline={"stages": 4}, train_batch_size=8)
    assert "4 that hold one replica" in same_step(stages, 2).rule
    assert isinstance(plan_fewer(stages, HOSTS[:1], 1, lambda *_: pytest.fail("no replica")), list)


@pytest.mark.parametrize(
    ("given", "groups", "warns"),
    [
        ({"allow_fewer_hosts": 1, "max_restarts": 2}, [["h1"], ["h2"]], True),
        ({"allow_fewer_hosts": 1, "max_restarts": 2}, [["h1", "h2"]], False),
        ({"allow_fewer_hosts": 1}, [["h1"], ["h2"]], False),
        ({"max_restarts": 2}, [["h1"], ["h2"]], False),
    ],
)
def test_folders_that_a_restart_on_fewer_hosts_could_not_read_are_told(given, groups, warns: bool) -> None:
    problems = separate_folders(LauncherOptions(**given), groups)
    assert [(each.key, each.severity) for each in problems] == [("allow_fewer_hosts", "warning")] * warns


def test_hosts_that_are_used_again_are_named(tmp_path: Path) -> None:
    whole, alone = (
        full(tmp_path, **BATCH),
        job_on(tmp_path, replace(WORLD, hosts=HOSTS[:1]), (32, 4, 4), **BATCH),
    )
    assert alone.job is not None and describe_return(whole, alone.job) == describe_return(whole, whole) == ""
    assert describe_return(alone.job, whole) == (
        "Used again: h2, h3, h4. The job runs on 4 hosts, 8 ranks instead of 2: data-parallel size 8 instead "
        "of 2. A step still takes 32 sequences, with 1 micro-batch of 4 per replica instead of 4 "
        "micro-batches of 4 per replica. A checkpoint of the other layout is converted when it is loaded."
    )


def test_exactly_the_hosts_of_a_plan_are_started(tmp_path: Path) -> None:
    given = LauncherOptions(hostfile="hosts", exclude="h2", num_gpus=None)
    exact, world, file = on_hosts(given, World((HOSTS[0], Host("user@h3", 2)), "cuda", hostfile="hosts"))
    with file:
        assert read_hostfile(exact.hostfile)[0] == (HOSTS[0], Host("user@h3", 2))
        assert (exact.exclude, exact.include, world.hostfile) == ("", "", exact.hostfile)
        # A launcher reads it from a process of its own, and in one piece whenever it does.
        for _ in range(2):
            read = subprocess.run(["cat", exact.hostfile], capture_output=True, text=True, check=True).stdout
            assert read.splitlines() == ["h1 slots=2", "user@h3 slots=2"]
    assert not Path(exact.hostfile).exists()
    some = World((Host("me@h1", 2), Host("h3", 2, (1, 3))), "cuda", hostfile="hosts")
    chosen, _, file = on_hosts(given, some)
    with file:
        read = Path(chosen.hostfile).read_text()
        assert (chosen.include, chosen.exclude, read) == ("", "h3:0,2", "me@h1 slots=2\nh3 slots=4\n")


@pytest.mark.parametrize(
    ("given", "again"),
    [
        (["--x", "a b"], "./launch.sh --x 'a b'"),
        (["--resume", "never", "--x"], "./launch.sh --x --resume auto"),
        (["--resume=never"], "./launch.sh --resume auto"),
    ],
)
def test_a_failed_job_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture, given: list[str], again: str
) -> None:
    """Of a job whose folder is on other hosts, the ranks have told that there is a checkpoint."""
    job = full(tmp_path, **BATCH)
    say_how_to_resume(job, None, ["./launch.sh", *given])
    assert capsys.readouterr().err == ""
    say_how_to_resume(job, 7, ["./launch.sh", *given])
    assert capsys.readouterr().err == f"To resume from the checkpoint of step 7: {again}\n"


def test_a_named_checkpoint_is_named_again_until_it_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for step in (1, 2):
        path = saved_checkpoint(tmp_path, TrainState(step=step))
    first = path.with_name("global_step1")
    command = ["./launch.sh", "--resume", str(first)]
    job = job_in(tmp_path, resume=str(first))
    say_how_to_resume(job, None, command)
    assert capsys.readouterr().err == f"To resume from the checkpoint of step 1: {shlex.join(command)}\n"
    write_lineage(path.parent, lineage_after(path.parent, read_checkpoint(first), "b"))
    say_how_to_resume(job, None, command)
    assert capsys.readouterr().err == "To resume from the checkpoint of step 1: ./launch.sh --resume auto\n"


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"max_restarts": -1}, ["max_restarts"]),
        ({"max_restarts": 1, "no_ssh": True, "node_rank": 0, "master_addr": "h"}, ["max_restarts"]),
        ({"allow_fewer_hosts": 1}, ["allow_fewer_hosts"]),
        ({"allow_fewer_hosts": 0, "hostfile": "x"}, ["allow_fewer_hosts"]),
        ({"allow_fewer_hosts": 1, "hostfile": "x", "no_ssh_check": True}, ["allow_fewer_hosts"]),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(given: dict, keys: list[str]) -> None:
    assert [problem.key for problem in launcher_problems(LauncherOptions(**given))] == keys
