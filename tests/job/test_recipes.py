"""Every file in ds_configs/ describes a job: on four hosts of eight GPUs, and on CPU ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.base.problems import JobError
from pipeline.cluster.world import world_from_hostfile
from pipeline.job.options import Options
from pipeline.job.pages import KEYS_PAGE, PROJECT
from pipeline.job.resolve import resolve
from tests.job.drafts import V100, world

RECIPES = sorted((PROJECT / "ds_configs").glob("*.json"))
NEEDS_CUDA = {"fp16_v100.json"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_resolves_on_a_cluster(path: Path, tmp_path: Path) -> None:
    options = Options(deepspeed_config=str(path), output_dir=str(tmp_path))
    ranks = world_from_hostfile(str(PROJECT / "hostfiles" / "a100x4"))
    job = resolve(options, ranks)
    assert (job.mesh.world_size, job.model.name, job.problems) == (32, "gpt2-124m", ())
    assert job.batch.train_batch_size == 512
    (minimal := tmp_path / "minimal.json").write_text("{}", encoding="utf-8")
    assert resolve(replace(options, deepspeed_config=str(minimal)), ranks).schedule == job.schedule


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_resolves_on_cpu_ranks(path: Path, tmp_path: Path) -> None:
    options = Options(deepspeed_config=str(path), output_dir=str(tmp_path))
    ranks = world(8 if path.name == "four_way.json" else 2)
    if path.name in NEEDS_CUDA:
        with pytest.raises(JobError, match="needs CUDA"):
            resolve(options, ranks)
        ranks = world(2, device=V100)
    job = resolve(options, ranks)
    assert job.problems == ()
    if path.name not in NEEDS_CUDA:
        assert (job.model.name, job.precision.compute, job.batch.train_batch_size) == ("tiny", "fp32", 16)


def test_the_four_way_recipe_uses_all_four(tmp_path: Path) -> None:
    path = PROJECT / "ds_configs" / "four_way.json"
    options = Options(deepspeed_config=str(path), output_dir=str(tmp_path))
    assert resolve(options, world(8, 8)).mesh.shape == (2, 2, 2, 2)


def test_the_readme_lists_each_of_them() -> None:
    page = KEYS_PAGE.read_text(encoding="utf-8")
    assert all(f"`{path.name}`" in page for path in RECIPES)
