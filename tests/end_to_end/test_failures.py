"""What goes wrong while ranks run: it ends on every rank, soon, with exit code 1 and the reason."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from tests.end_to_end.jobs import (
    Workshop,
    change_copy,
    poison_weight,
    raise_on_call,
    read_elsewhere,
    replace_argument,
    run_faulty_job,
    run_out_of_memory,
    write_text,
)
from tests.harness import run_job
from tests.harness.job import GRACE

TWO_STAGES = {"pipeline": {"stages": 2}}
# A rank may wait here for one to come that does not, with no connection to lose: the launcher ends it.
MEETING = ("pipeline.training.preparing:load_data", "pipeline.training.run:build_engine")


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {"stage": 1}},
        TWO_STAGES,
        {"tensor_parallel": {"autotp_size": 2}},
        {"sequence_parallel_size": 2},
    ],
    ids=["zero 0", "zero 1", "pipeline", "tensor", "sequence"],
)
def test_a_loss_that_is_no_number_stops_every_rank(config: dict, shop: Workshop):
    arguments = shop.arguments("run", shop.config(**config), "--save_interval", "1", steps=5)
    result = run_faulty_job(arguments, 2, poison_weight, 3, 1)
    assert result.exit_codes == (1, 1)
    for stderr in result.stderr:
        assert "TrainingDiverged: the loss is nan at step 3, samples 16 to 23 of the order" in stderr
    # The last good checkpoint stays, and the run can resume from it.
    assert shop.latest("run").name == "global_step2"
    assert [line["step"] for line in shop.steps("run")] == [1, 2]
    assert shop.outcome("run")["status"] == "failed"
    assert "step 3" in shop.outcome("run")["message"]
    run_job(arguments, 2).check()
    assert [line["step"] for line in shop.steps("run")] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_weight_that_tensor_ranks_do_not_have_alike_is_not_saved(shop: Workshop):
    config = shop.config(tensor_parallel={"autotp_size": 2})
    arguments = shop.arguments("run", config, "--save_interval", "2", steps=5)
    result = run_faulty_job(arguments, 2, change_copy, 3, 1, "3.norm1.weight", 1e-3)
    assert result.exit_codes == (1, 1)
    for stderr in result.stderr:
        assert "CopiesDiffer: copies that must be equal differ after step 4: " in stderr
        assert "3.norm1.weight (weight) over tensor ranks: ranks 0-1" in stderr
    assert shop.latest("run").name == "global_step2"
    assert [path.name for path in shop.latest("run").parent.glob("global_step*")] == ["global_step2"]
    assert shop.outcome("run")["status"] == "failed"
    run_job(arguments, 2).check()
    assert [line["step"] for line in shop.steps("run")] == [1, 2, 3, 4, 5]


def test_ranks_that_read_other_texts_are_named(shop: Workshop):
    other = write_text(shop.folder / "other", seed=1)
    arguments = shop.arguments("run", shop.config())
    result = run_faulty_job(arguments, 3 + 1, replace_argument, 2, shop.text(), str(other))
    assert result.exit_codes == (1,) * 4
    for stderr in result.stderr:
        assert "DataMismatch: ranks [2] read other training tokens than rank 0" in stderr
    assert not (shop.folder / "run" / "run.json").exists()


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TWO_STAGES, id="pipeline"),
        pytest.param({"tensor_parallel": {"autotp_size": 2}}, id="tensor", marks=pytest.mark.slow),
        pytest.param({"sequence_parallel_size": 2}, id="sequence", marks=pytest.mark.slow),
    ],
)
def test_peers_that_read_other_samples_are_named(config: dict, shop: Workshop):
    result = run_faulty_job(shop.arguments("run", shop.config(**config)), 2, read_elsewhere, 1)
    assert result.exit_codes == (1, 1)
    for stderr in result.stderr:
        assert "BatchMismatch: the samples from" in stderr
        assert "ranks [1] against the first of their peers" in stderr
    assert shop.steps("run") == []


def test_ranks_that_find_another_checkpoint_are_named(shop: Workshop):
    """Two hosts, each with an output folder of its own, one of which has lost its checkpoints."""
    arguments = shop.arguments("run", shop.config())
    run_job(arguments, 2).check()
    shutil.copytree(shop.folder / "run", shop.folder / "copy")
    shutil.rmtree(shop.folder / "copy" / "checkpoints")
    here, there = str(shop.folder / "run"), str(shop.folder / "copy")
    result = run_faulty_job(arguments, 2, replace_argument, 1, here, there)
    assert result.exit_codes == (2, 2)
    assert "is not complete on the host of rank 1" in result.stderr[0]
    assert shop.outcome("run")["status"] == "wrong_job"


@pytest.mark.parametrize(
    "target",
    [
        "pipeline.training.preparing:load_data",
        "pipeline.training.run:build_engine",
        "pipeline.training.loop:agree_on_step",
        "pipeline.training.loop:evaluate",
        "pipeline.checkpoints.saver:gather_objects",
        "pipeline.training.train:sample_text",
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.repeats), 1])
def test_a_rank_that_raises_takes_the_others_along(target: str, victim: int, shop: Workshop):
    arguments = shop.arguments("run", shop.config(), "--sample_tokens", "3")
    begin = time.monotonic()
    grace = 2.0 if target in MEETING else GRACE
    result = run_faulty_job(arguments, 2, raise_on_call, target, victim, grace=grace)
    assert result.exit_codes[victim] == 1
    if target not in MEETING:
        assert result.exit_codes[1 - victim] == 1
        assert time.monotonic() - begin < 30
    assert f"rank {victim} failed" in result.stderr[victim]
    assert f"OSError: rank {victim} has no space left" in result.stderr[victim]
    assert shop.outcome("run")["status"] == "failed"


def test_a_rank_without_memory_says_in_one_line_what_to_change(shop: Workshop):
    config = shop.config(train_micro_batch_size_per_gpu=4)
    result = run_faulty_job(shop.arguments("run", config), 2, run_out_of_memory, 1)
    assert result.exit_codes[1] == 1
    (line,) = [line for line in result.stderr[1].splitlines() if line.startswith("rank 1 failed")]
    assert re.fullmatch(
        r"rank 1 failed before the first step: out of memory \(GPU 0\): 2 MiB asked for, 80 GiB of 80 GiB "
        r"in use\. A rank needs (.*) MiB by the formulas\. Set train_micro_batch_size_per_gpu to 1 and "
        r"gradient_accumulation_steps to 4: (.*) MiB",
        line,
    ), line
    assert line.endswith(shop.outcome("run")["message"])


def test_a_failed_save_leaves_no_checkpoint_to_resume_from(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), steps=1)
    target = "pipeline.checkpoints.saver:write_manifest"
    result = run_faulty_job(arguments, 2, raise_on_call, target, 0)
    assert result.exit_codes == (1, 1)
    assert list((shop.folder / "run" / "checkpoints").iterdir()) == []
    result = run_job(arguments, 2).check()
    assert "starting at step 0" in result.stdout[0]
