"""A run that was stopped and resumed is the run that was not, to the last bit, in every layout."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import Workshop, run_faulty_job, signal_after_step
from tests.end_to_end.shards import differing_files
from tests.harness import run_job, run_ranks

STEPS = 5
STOP_AFTER = 2


@dataclass(frozen=True)
class Case:
    """A layout, and what changes in the JSON and on the command line.

    Attributes:
        repeats: What it shows, other cases show together.
    """

    name: str
    ranks: int
    config: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    slow: bool = True
    repeats: bool = False

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        slow, repeats = (pytest.mark.slow,) * self.slow, (pytest.mark.repeats,) * self.repeats
        return [*slow, *repeats]


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


CPU = {"device": "cpu", "pin_memory": False}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
DROPOUT = ("--dropout", "0.2")
ASYNC = ("--async_save", "--save_interval", "1")
SHORT = ("--eval_fraction", "0.8", "--async_save", "--save_interval", "3")  # trains on little
WARM_UP = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 10}}}
THREE = {
    "pipeline": {"stages": 2},
    "tensor_parallel": {"autotp_size": 2},
    "sequence_parallel_size": 2,
}
CASES = (
    Case("zero 1, dropout", 2, zero(1), DROPOUT, slow=False),
    Case("1f1b", 2, {"pipeline": {"stages": 2}}, repeats=True),
    Case("zero 3", 2, zero(3), repeats=True),
    Case("one rank", 1, repeats=True),
    Case("zero 0", 2, repeats=True),
    Case("zero 0, accumulation", 2, {"train_micro_batch_size_per_gpu": 1}, DROPOUT, repeats=True),
    Case("zero 2, accumulation", 2, {**zero(2), "train_micro_batch_size_per_gpu": 1}),
    Case("zero 1, offload", 2, zero(1, offload_optimizer=CPU), repeats=True),
    Case("zero 2, offload", 2, zero(2, offload_optimizer=CPU), repeats=True),
    Case("zero 3, offload", 2, zero(3, offload_optimizer=CPU, offload_param=CPU), DROPOUT),
    Case("zero 1, 1f1b, dropout", 4, {"pipeline": {"stages": 2}, **zero(1)}, DROPOUT, repeats=True),
    Case("dualpipev", 2, {"pipeline": {"stages": 2, "schedule": "dualpipev"}, **zero(1)}, DROPOUT),
    Case("tensor", 2, {"tensor_parallel": {"autotp_size": 2}}, DROPOUT, repeats=True),
    Case("tensor, zero 3", 4, {"tensor_parallel": {"autotp_size": 2}, **zero(3)}, DROPOUT, repeats=True),
    Case("sequence", 2, {"sequence_parallel_size": 2, **zero(1)}, DROPOUT, repeats=True),
    Case("1f1b, tensor, sequence", 8, {**THREE, **zero(1)}, DROPOUT),
    Case("four-way", 16, {**THREE, **zero(1)}, DROPOUT, repeats=True),
    Case("bf16, zero 1", 2, {**BF16, **zero(1)}, DROPOUT, repeats=True),
    Case("bf16, zero 2", 2, {**BF16, **zero(2)}, repeats=True),
    Case("bf16, zero 3", 2, {**BF16, **zero(3)}),
    Case("bf16, zero 1, 1f1b", 2, {**BF16, **zero(1), "pipeline": {"stages": 2}}, repeats=True),
    Case("bf16, zero 1, offload", 2, {**BF16, **zero(1, offload_optimizer=CPU)}, repeats=True),
    Case("bf16, zero 0", 2, {**BF16, "data_types": {"grad_accum_dtype": "bf16"}}),
    Case("recomputation", 2, {"activation_checkpointing": {"mode": "full"}, **zero(1)}, DROPOUT),
    Case(
        "sgd with momentum",
        2,
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
        repeats=True,
    ),
    Case("saved at step 3, stopped after 2", 2, zero(1), ("--save_interval", "3")),
    Case("async, zero 1", 2, zero(1), (*ASYNC, *DROPOUT), repeats=True),
    Case("async, zero 0", 2, {}, ASYNC, repeats=True),
    Case("async, zero 3, offload", 2, zero(3, offload_optimizer=CPU, offload_param=CPU), ASYNC, repeats=True),
    Case("async, bf16, zero 1, 1f1b", 2, {**BF16, **zero(1), "pipeline": {"stages": 2}}, ASYNC),
    # 32 samples a step, of a text that has about 60: the stop is in the second epoch, and in the warm-up.
    Case("async, mid-epoch, odd intervals", 2, {**zero(1), **WARM_UP, "train_batch_size": 32}, SHORT),
)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=case.marks) for case in CASES])
def test_stopped_and_resumed_is_equal_to_the_last_bit(case: Case, tmp_path: Path):
    shop = Workshop(tmp_path)
    config = shop.config(**case.config)
    # Held-out losses at odd steps: they fall before, at and after the stop.
    whole, parts = (
        shop.arguments(run, config, "--eval_interval", "2", *case.options, steps=STEPS)
        for run in ("whole", "parts")
    )
    run_job(whole, case.ranks).check()

    # The signal reaches the last rank alone; all stop at the same step.
    stopped = run_faulty_job(parts, case.ranks, signal_after_step, STOP_AFTER, case.ranks - 1, signal.SIGTERM)
    assert stopped.exit_codes == (3,) * case.ranks, stopped.stderr[0]
    assert [line["step"] for line in shop.steps("parts")] == [1, 2]
    assert shop.latest("parts").name == "global_step2"

    resumed = run_job(parts, case.ranks).check()
    assert f"resumed from {tmp_path}/parts/checkpoints/global_step2" in resumed.stdout[0]
    assert [line["step"] for line in shop.steps("parts")] == [1, 2, 3, 4, 5]  # no gap, none twice
    assert shop.steps("parts") == shop.steps("whole")
    assert shop.evaluations("parts") == shop.evaluations("whole")
    assert len(shop.evaluations("whole")) == 3
    assert run_ranks(differing_files, 1, shop.latest("whole"), shop.latest("parts")) == [[]]


@pytest.mark.slow
def test_saving_in_the_background_changes_no_bit(tmp_path: Path):
    """Every file of every checkpoint, and the run itself."""
    shop = Workshop(tmp_path)
    config = shop.config(**zero(1), train_micro_batch_size_per_gpu=1)
    run_job(shop.arguments("at_once", config, "--save_interval", "1", steps=4), 2).check()
    run_job(shop.arguments("behind", config, *ASYNC, steps=4), 2).check()
    assert shop.steps("behind") == shop.steps("at_once")
    one, other = shop.latest("at_once").parent, shop.latest("behind").parent
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    assert len({path.parts[0] for path in files}) == 5  # four checkpoints, latest
    shards = [path for path in files if path.suffix == ".pt"]
    assert len(shards) >= 4 * 5
    for path in files:
        # The two runs' folders have names, which the manifest does not hold, nor the shards.
        assert (one / path).read_bytes() == (other / path).read_bytes(), path


@pytest.mark.slow
def test_a_longer_run_continues_a_finished_one(tmp_path: Path):
    shop = Workshop(tmp_path)
    config = shop.config(**zero(2))
    run_job(shop.arguments("whole", config, steps=4), 2).check()
    run_job(shop.arguments("parts", config, steps=2), 2).check()
    run_job(shop.arguments("parts", config, steps=4), 2).check()
    assert shop.steps("parts") == shop.steps("whole")
    assert run_ranks(differing_files, 1, shop.latest("whole"), shop.latest("parts")) == [[]]


def test_the_comparison_sees_one_weight(tmp_path: Path):
    """The oracle of this file can fail."""
    shop = Workshop(tmp_path)
    run_job(shop.arguments("run", shop.config(), steps=1), 1).check()
    run_job(shop.arguments("other", shop.config(), "--seed", "7", steps=1), 1).check()
    assert run_ranks(differing_files, 1, shop.latest("run"), shop.latest("run")) == [[]]
    found = run_ranks(differing_files, 1, shop.latest("run"), shop.latest("other"))[0]
    assert any("2.attention.qkv.weight" in line for line in found), found
