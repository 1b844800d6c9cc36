"""Digests are verified by all ranks together, before anything is unpickled, and all ranks agree."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.base.problems import JobError
from pipeline.checkpoints import verification
from pipeline.checkpoints.files import digest_of
from pipeline.checkpoints.manifest import TrainState, files_below, read_checkpoint, write_manifest
from pipeline.checkpoints.resume import Selection, select_checkpoint
from pipeline.checkpoints.verification import Verifier, agree_on_checkpoint
from pipeline.engine.distributed import start_distributed
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from tests.checkpoints.saved_runs import edit_manifest, job_in, saved
from tests.checkpoints.small import TIMEOUT
from tests.checkpoints.test_unpickling import malicious
from tests.harness import run_ranks


def three(folder: Path) -> Path:
    for step in (1, 2, 3):
        path = saved(folder, TrainState(step=step))
    return path.parent


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def alone(job: Job) -> Selection:
    """What a job of one rank resumes from."""
    return agree_on_checkpoint(job, select_checkpoint(job), Verifier(Parallel.single(), 0))


@pytest.mark.parametrize("name", ["sub/shard.pt", "shards.json"])
def test_a_flipped_bit_is_found_and_the_older_one_taken(name: str, tmp_path: Path):
    folder = three(tmp_path)
    for path in folder.rglob("shard.pt"):
        torch.save({"weights": torch.ones(5)}, path)
        write_manifest(job_in(tmp_path), TrainState(step=int(path.parts[-3][-1])), path.parents[1],
                       files_below(path.parents[1]))  # fmt: skip
    flip_a_bit(folder / "global_step3" / name)
    assert select_checkpoint(job_in(tmp_path)).checkpoint.state.step == 3  # sizes are as they were
    agreed = alone(job_in(tmp_path))
    assert agreed.checkpoint.state.step == 2
    assert f"global_step3: it is damaged: {name} has another digest" in "\n".join(agreed.notes)
    with pytest.raises(JobError, match="has another digest"):
        alone(job_in(tmp_path, resume=str(folder / "global_step3")))
    for step in (1, 2):
        flip_a_bit(folder / f"global_step{step}" / name)
    with pytest.raises(JobError) as caught:
        alone(job_in(tmp_path))
    assert len(caught.value.problems) == 3


def test_an_earlier_version_had_no_digests(tmp_path: Path):
    path = saved(tmp_path)
    torch.save({}, path / "sub" / "shard.pt")
    size = (path / "sub" / "shard.pt").stat().st_size
    edit_manifest(path, lambda manifest: manifest["files"].update({"sub/shard.pt": size}), format_2=False)
    assert alone(job_in(tmp_path)).checkpoint.path == path


@pytest.mark.parametrize("named", [False, True])
def test_a_stop_before_the_verification_is_done_verifies_nothing(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Neither that the checkpoint is whole nor that it is not; what is done by then counts."""
    newest = three(tmp_path) / "global_step3"
    shutil.rmtree(newest / "sub")
    write_manifest(job_in(tmp_path), TrainState(step=3), newest, files_below(newest))
    job = job_in(tmp_path, resume=str(newest) if named else "auto")
    verifier = Verifier(Parallel.single(), 0, stopped=lambda: True)
    found = select_checkpoint(job)
    assert agree_on_checkpoint(job, found, verifier).verified
    flip_a_bit(newest / "shards.json")
    agreed = agree_on_checkpoint(job, found, verifier)
    assert (agreed.checkpoint.path, agreed.verified) == (newest, False)
    (newest / "shards.json").write_bytes(b"{}\n")
    monkeypatch.setattr(verification, "ROUND_SECONDS", -1.0)  # a round for each block
    assert not agree_on_checkpoint(job, found, verifier).verified


def with_foreign_file(folder: Path, witness: Path) -> Path:
    path = saved(folder)
    malicious(path / "sub" / "shard.pt", witness)
    write_manifest(job_in(folder), TrainState(step=3), path, files_below(path))
    return path


def test_a_foreign_pickle_with_its_digest_is_refused_not_passed_over(tmp_path: Path):
    path = with_foreign_file(tmp_path, tmp_path / "witness")
    with pytest.raises(JobError, match=r"would call posix\.system") as caught:
        alone(job_in(tmp_path))
    assert caught.value.problems[0].value == str(path / "sub" / "shard.pt")
    assert not (tmp_path / "witness").exists()


def test_all_ranks_agree(tmp_path: Path):
    """One of them finds the flipped bit, or the foreign file; all continue, or not, in the same way."""
    folder = three(tmp_path)
    for step in (1, 2, 3):
        path = folder / f"global_step{step}"
        shutil.rmtree(path / "sub")
        for number in range(6):
            torch.save({"weights": torch.ones(50 + number)}, path / f"shard{number}.pt")
        write_manifest(job_in(tmp_path), TrainState(step=step), path, files_below(path))
    flip_a_bit(folder / "global_step3" / "shard4.pt")
    jobs = [job_in(tmp_path), job_in(tmp_path, resume=str(folder / "global_step3"))]
    (tmp_path / "foreign").mkdir()
    with_foreign_file(tmp_path / "foreign", tmp_path / "witness")
    jobs.append(job_in(tmp_path / "foreign"))
    answers = run_ranks(outcomes, 2, jobs)
    assert answers[0] == answers[1] == [2, "has another digest", "would call posix.system"]
    assert not (tmp_path / "witness").exists()


def outcomes(jobs: list[Job]) -> list[Any]:
    start_distributed("cpu", 0, TIMEOUT)
    parallel = Parallel.create(jobs[0].mesh, TIMEOUT)
    verification.ROUND_SECONDS = 0.0  # a round for each block
    return [outcome(job, parallel) for job in jobs]


def outcome(job: Job, parallel: Parallel, local_rank: int = 0) -> Any:
    """The step that a rank resumes from, or what it is refused for."""
    try:
        agreed = agree_on_checkpoint(job, select_checkpoint(job), Verifier(parallel, local_rank))
    except JobError as error:
        said = str(error)
        known = (
            "has another digest",
            "would call posix.system",
            "on the host that wrote it",
            "of rank 1",
            "other hosts",
        )
        return next((each for each in known if each in said), said)
    return agreed.checkpoint and agreed.checkpoint.state.step


def test_hosts_without_a_common_file_system_verify_their_own(tmp_path: Path):
    """Each rank is a host with a folder of its own. Step 3 was saved on one of them only."""
    jobs = [two_hosts(tmp_path / name) for name in ("whole", "exchanged", "fresh", "damaged")]
    shutil.rmtree(tmp_path / "whole" / "host1" / "run" / "checkpoints" / "global_step3")
    for step in (1, 2, 3):
        exchange(*(tmp_path / "exchanged" / host / f"run/checkpoints/global_step{step}" for host in HOSTS))
    shutil.rmtree(tmp_path / "fresh" / "host1" / "run" / "checkpoints")
    flip_a_bit(tmp_path / "damaged" / "host1" / "run" / "checkpoints" / "global_step3" / "of1.bin")
    answers = run_ranks(outcomes_by_host, 2, jobs)
    assert answers[0] == [2, "on the host that wrote it", "of rank 1", 2]
    assert answers[1] == [2, "on the host that wrote it", "other hosts", 2]


HOSTS = ("host0", "host1")


def two_hosts(folder: Path) -> list[Job]:
    """A job on two hosts with three checkpoints; each host has its own file of each, and the manifest."""
    jobs = []
    for index, host in enumerate(HOSTS):
        (folder / host).mkdir(parents=True)
        jobs.append(job_in(folder / host))
        for step in (1, 2, 3):
            path = saved(folder / host, TrainState(step=step))
            shutil.rmtree(path / "sub")
            (path / f"of{index}.bin").write_bytes(bytes([step, index]) * 10)
    for step in (1, 2, 3):
        paths = [folder / host / "run" / "checkpoints" / f"global_step{step}" for host in HOSTS]
        entries = {"shards.json": files_below(paths[0])["shards.json"]}
        for index, path in enumerate(paths):
            entry = files_below(path)[f"of{index}.bin"]
            entries[f"of{index}.bin"] = type(entry)(entry.bytes, entry.digest, index)
        for job, path in zip(jobs, paths, strict=True):
            write_manifest(job, TrainState(step=step), path, entries, hosts=2, shared=False)
    return jobs


def exchange(one: Path, other: Path) -> None:
    """Let each host have what the other wrote."""
    (one / "of0.bin").rename(other / "of0.bin")
    (other / "of1.bin").rename(one / "of1.bin")


def outcomes_by_host(jobs: list[list[Job]]) -> list[Any]:
    start_distributed("cpu", 0, TIMEOUT)
    rank = int(os.environ["RANK"])
    parallel = Parallel.create(jobs[0][0].mesh, TIMEOUT)
    return [outcome(each[rank], parallel) for each in jobs]


def test_a_stop_ends_the_verification(tmp_path: Path):
    """What is not loaded need not be verified: a host may have seconds left to live."""
    flip_a_bit(three(tmp_path) / "global_step3" / "shards.json")
    job = job_in(tmp_path)
    verifier = Verifier(Parallel.single(), 0, stopped=lambda: True)
    assert agree_on_checkpoint(job, select_checkpoint(job), verifier).checkpoint.state.step == 3


def test_both_kinds_of_digests_are_read(tmp_path: Path):
    path = saved(tmp_path)
    torch.save({}, path / "sub" / "shard.pt")
    entries = {
        name: type(entry)(entry.bytes, digest_of(path / name, "sha256"))
        for name, entry in files_below(path).items()
    }
    write_manifest(job_in(tmp_path), TrainState(step=3), path, entries)
    assert alone(job_in(tmp_path)).checkpoint == read_checkpoint(path)
    flip_a_bit(path / "shards.json")
    with pytest.raises(JobError, match="has another digest"):
        alone(job_in(tmp_path))
