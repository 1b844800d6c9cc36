"""Whole jobs on data in an S3 server, with document masks: the same losses as from local files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.remote_objects import SECRET, s3_bucket
from tests.end_to_end.jobs import Workshop
from tests.harness import run_job

LAYOUTS = {
    "zero 2": (2, {"zero_optimization": {"stage": 2}}),
    "1f1b": (2, {"pipeline": {"stages": 2}}),
    "sequence": (2, {"sequence_parallel_size": 2, "zero_optimization": {"stage": 1}}),
}


def write_records(path: Path) -> Path:
    """Documents of a few words: several in each sample."""
    dice = random.Random(3)
    texts = [" ".join(dice.choices("what a layer does not say".split(), k=3)) for _ in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which s3://books/records.jsonl can be read."""
    with s3_bucket() as (system, environment):
        system.put(str(write_records(tmp_path_factory.mktemp("records") / "records.jsonl")), "books/")
        yield environment


def arguments(workshop: Workshop, run: str, config: str, data: str, *more: str) -> list[str]:
    found = workshop.arguments(run, config, *more, steps=4)
    found[found.index("--data") + 1] = data
    return found


@pytest.mark.slow
def test_remote_data_with_document_masks_trains_as_local_data(tmp_path: Path, s3: dict[str, str]):
    workshop = Workshop(tmp_path)
    local = str(write_records(tmp_path / "records.jsonl"))
    config = workshop.config()
    run_job(arguments(workshop, "local", config, local, "--document_mask"), 1).check()
    run_job(arguments(workshop, "unmasked", config, local), 1).check()
    losses = [step["loss"] for step in workshop.steps("local")]
    assert losses != pytest.approx([step["loss"] for step in workshop.steps("unmasked")], rel=1e-5)
    for name, (ranks, changes) in LAYOUTS.items():
        given = arguments(
            workshop, name, workshop.config(name, **changes), "s3://books/records.jsonl", "--document_mask"
        )
        result = run_job(given, ranks, env=s3).check()
        assert [step["loss"] for step in workshop.steps(name)] == pytest.approx(losses, rel=1e-5), name
        assert workshop.evaluations(name) == pytest.approx(workshop.evaluations("local"), rel=1e-5)
        assert SECRET not in "".join((*result.stdout, *result.stderr))
    for path in tmp_path.rglob("*.json"):
        assert SECRET not in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_missing_object_is_a_problem_that_names_it(tmp_path: Path, s3: dict[str, str]):
    workshop = Workshop(tmp_path)
    given = arguments(workshop, "run", workshop.config(), "s3://books/none.jsonl")
    result = run_job(given, 1, env=s3)
    assert result.exit_codes == (2,)
    assert "s3://books/none.jsonl" in result.stderr[0] and "does not exist" in result.stderr[0]
