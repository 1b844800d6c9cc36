"""Every shipped recipe trains, and says the same of the same batch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.end_to_end.jobs import PROJECT, Workshop
from tests.harness import run_job

RECIPES = sorted(path.stem for path in (PROJECT / "ds_configs").glob("*.json"))
NEED_A_GPU = {"fp16_v100"}
# The fewest ranks on which every axis of the recipe, data and sharding included, has two.
RANKS = {"dualpipev": 4, "four_way": 16, "pipeline": 4, "tensor": 4, "ulysses": 4}


def recipe(name: str) -> str:
    return str(PROJECT / "ds_configs" / f"{name}.json")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The recipe without any sharding, on one rank."""
    shop = Workshop(tmp_path_factory.mktemp("reference"))
    run_job(shop.arguments("run", recipe("zero0")), 1).check()
    return shop.lines("run")


def test_the_list_of_recipes_is_not_empty():
    assert {"zero0", "zero1", "four_way"} <= set(RECIPES)
    assert set(RANKS) <= set(RECIPES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name != "zero1" else ())
        for name in RECIPES
        if name not in NEED_A_GPU
    ],
)
def test_recipe_trains_as_one_rank_does(name: str, tmp_path: Path, reference: list[dict]):
    """On CPUs that do not compute bf16 natively the recipes' "auto" means fp32, so curves agree closely."""
    shop = Workshop(tmp_path)
    run_job(shop.arguments("run", recipe(name)), RANKS.get(name, 2)).check()
    lines = shop.lines("run")
    assert lines[0]["loss"] == pytest.approx(math.log(257), rel=0.1)
    assert [line.keys() for line in lines] == [line.keys() for line in reference]
    for line, expected in zip(lines, reference, strict=True):
        for key in line.keys() & {"loss", "eval_loss", "grad_norm", "lr", "step", "tokens"}:
            assert line[key] == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.parametrize("name", sorted(NEED_A_GPU))
def test_recipe_for_gpus_is_refused_on_cpu(name: str, tmp_path: Path):
    shop = Workshop(tmp_path)
    result = run_job(shop.arguments("run", recipe(name)), 2)
    assert result.exit_codes == (2, 2)
    shown = " ".join(result.stderr[0].split())
    assert "fp16.enabled" in shown
    assert "needs CUDA devices" in shown
    assert "Use bf16, or neither for fp32" in shown
    assert result.stderr[1] == result.stdout[1] == ""
    assert not (tmp_path / "run").exists()
