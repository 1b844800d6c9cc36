"""Hosts with one file system, and hosts with one each: four ranks that stand for two hosts."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from pipeline.checkpoints.hosts import FileSystems, find_file_systems
from pipeline.checkpoints.manifest import TrainState
from pipeline.checkpoints.saver import Saver
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from pipeline.parallel.mesh import Mesh
from tests.checkpoints.small import job, start, train
from tests.harness import init_deepspeed_distributed, run_ranks


def find(folders: list[Path], local_ranks: list[int]) -> FileSystems:
    init_deepspeed_distributed()
    parallel = Parallel.create(Mesh(1, 4, 1, 1), timedelta(seconds=30))
    return find_file_systems(parallel, folders[parallel.rank], local_ranks[parallel.rank])


def test_one_file_system(tmp_path: Path):
    (found,) = set(run_ranks(find, 4, [tmp_path / "new"] * 4, [0, 1, 0, 1]))
    assert found == FileSystems(leaders=(0, 0, 0, 0), hosts=(0, 0, 1, 1))
    assert found.shared
    assert found.num_hosts == 2
    assert list((tmp_path / "new").iterdir()) == []


def test_one_file_system_for_each_host(tmp_path: Path):
    folders = [tmp_path / name for name in ("a", "a", "b", "b")]
    (found,) = set(run_ranks(find, 4, folders, [0, 1, 0, 1]))
    assert found == FileSystems(leaders=(0, 0, 2, 2), hosts=(0, 0, 1, 1))
    assert not found.shared
    assert found.members(2) == [2, 3]


def fail(folders: list[Path], local_ranks: list[int]) -> str:
    with pytest.raises((OSError, RuntimeError)) as failure:
        find(folders, local_ranks)
    return str(failure.value)


def test_a_rank_that_sees_nothing_of_its_host_is_named_to_all(tmp_path: Path):
    folders = [tmp_path / name for name in ("a", "a", "b", "c")]
    (says,) = set(run_ranks(fail, 4, folders, [0, 1, 0, 1]))
    assert says == f"rank 3 does not see in {folders[3]} what the first rank of its host wrote there"


def test_a_folder_that_cannot_be_made_is_named_to_all(tmp_path: Path):
    (tmp_path / "file").touch()
    folders = [tmp_path] * 2 + [tmp_path / "file" / "below"] * 2
    (says,) = set(run_ranks(fail, 4, folders, [0, 1, 0, 1]))
    assert says.startswith(f"rank 2 cannot write into {folders[2]}: NotADirectoryError")


def save_apart(job: Job, folder: Path) -> None:
    """Save on two hosts that share nothing."""
    engine = start(job)
    rank = engine.parallel.rank
    engine.deepspeed.local_rank = rank % 2
    train(engine, 1)
    here = replace(job, output_dir=str(folder / f"host{rank // 2}"))
    Saver(engine, here, extra_files=lambda path: (path / "note").write_text("beside")).begin(
        TrainState(step=1)
    )


def test_each_host_has_its_own_files_and_the_same_manifest(tmp_path: Path):
    run_ranks(
        save_apart, 4, job(tmp_path, ranks=4, train_batch_size=8, zero_optimization={"stage": 1}), tmp_path
    )
    folders = [tmp_path / f"host{host}" / "checkpoints" for host in (0, 1)]
    first, second = (folder / "global_step1" for folder in folders)
    assert (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()
    assert (first / "shards.json").read_bytes() == (second / "shards.json").read_bytes()
    assert all((folder / "latest").read_text() == "global_step1\n" for folder in folders)
    manifest = json.loads((first / "manifest.json").read_text())
    assert (manifest["hosts"], manifest["shared"]) == (2, False)
    for name, entry in manifest["files"].items():
        place = (first, second)[entry["host"]] / name
        assert place.stat().st_size == entry["bytes"]
    own = {name for name, entry in manifest["files"].items() if entry["host"] == 1}
    assert own == {f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (2, 3)} | {
        f"random_rank_{r:05d}.pt" for r in (2, 3)
    }
