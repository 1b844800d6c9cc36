"""Every shipped recipe on every shipped hostfile: it has this layout, or the right refusal."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster.hostfile import read_hostfile
from pipeline.cluster.world import world_from_hostfile
from pipeline.job.options import Options
from pipeline.job.resolve import examine
from pipeline.job.world import World
from tests.job.drafts import A100, CPU, V100

PROJECT = Path(__file__).parents[2]
FOLDER = PROJECT / "hostfiles"
HOSTFILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".md")
RECIPES = sorted(path.stem for path in (PROJECT / "ds_configs").glob("*.json"))
H100 = ("cuda", "NVIDIA H100 80GB HBM3", True)
# Hosts, slots of each, and what they compute with: the files do not say that, their hosts do when asked.
SHIPPED = {
    "localhost": (1, 2, CPU),
    "a100x1": (1, 8, A100),
    "a100x4": (4, 8, A100),
    "h100x16": (16, 8, H100),
    "v100x2": (2, 8, V100),
}
# The only pairs that do not fit.
REFUSED = {
    ("localhost", "four_way"): (
        "world size",
        "must be a multiple of 2 (pipeline) * 2 (sequence) * 2 (tensor)",
    ),
    ("localhost", "fp16_v100"): ("fp16.enabled", "needs CUDA devices"),
}
# Pipeline, sequence and tensor size of the recipes that are not data-parallel only.
SIZES = {
    "pipeline": (2, 1, 1),
    "dualpipev": (2, 1, 1),
    "ulysses": (1, 2, 1),
    "tensor": (1, 1, 2),
    "four_way": (2, 2, 2),
}


def world_of(hostfile: str) -> World:
    """The world of a shipped file, with the devices that its hosts have."""
    device, name, bf16 = SHIPPED[hostfile][2]
    world = world_from_hostfile(str(FOLDER / hostfile))
    return replace(world, device=device, device_name=name, bf16_native=bf16)


def test_the_shipped_files_are_those_and_as_large_as_their_names_say() -> None:
    assert set(SHIPPED) == set(HOSTFILES)
    for name, (hosts, slots, _) in SHIPPED.items():
        found, problems = read_hostfile(FOLDER / name)
        assert ([host.slots for host in found], problems) == ([slots] * hosts, ()), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hostfile", HOSTFILES)
def test_a_recipe_fits_or_is_refused_for_its_reason(hostfile: str, recipe: str, tmp_path: Path) -> None:
    options = Options(
        deepspeed_config=str(PROJECT / "ds_configs" / f"{recipe}.json"), output_dir=str(tmp_path)
    )
    world = world_of(hostfile)
    draft = examine(options, world)
    if refusal := REFUSED.get((hostfile, recipe)):
        (problem,) = draft.problems
        assert problem.key.startswith(refusal[0]) and problem.rule.startswith(refusal[1])
        assert draft.job is None
        return
    job = draft.job
    assert job is not None and job.problems == (), draft.problems
    pipeline, sequence, tensor = SIZES.get(recipe, (1, 1, 1))
    assert job.mesh.shape == (pipeline, world.size // (pipeline * sequence * tensor), sequence, tensor)
    # The same number of samples per step everywhere: a job moves without another learning rate.
    on_cpu = world.device == "cpu"
    assert (job.model.name, job.batch.train_batch_size) == (("tiny", 16) if on_cpu else ("gpt2-124m", 512))
    native = "bf16" if world.bf16_native else "fp32"
    assert job.precision.compute == {"fp16_v100": "fp16", "zero0": "fp32"}.get(recipe, native)


def test_bf16_asked_for_on_v100_is_said_to_be_slow(tmp_path: Path) -> None:
    text = (PROJECT / "ds_configs" / "zero1.json").read_text().replace('"enabled": "auto"', '"enabled": true')
    (tmp_path / "zero1.json").write_text(text)
    options = Options(deepspeed_config=str(tmp_path / "zero1.json"), output_dir=str(tmp_path))
    (problem,) = examine(options, world_of("v100x2")).problems
    assert problem.key.startswith("bf16.enabled") and "emulates bf16" in problem.rule
    assert examine(options, world_of("a100x4")).problems == []


def test_the_readme_tells_of_each_of_them() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.+?) \| (\d+) \|", text, re.MULTILINE)}
    assert set(rows) == set(SHIPPED)
    for name, (hosts, slots, _) in SHIPPED.items():
        assert rows[name] == ("this machine" if name == "localhost" else str(hosts), str(hosts * slots))


@pytest.mark.parametrize("name", HOSTFILES)
def test_each_file_says_what_to_edit(name: str) -> None:
    first = (FOLDER / name).read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ") and ("Write your host" in first or name == "localhost")
