"""What benchmarks compare with: formulas against numbers worked out by hand; the arithmetic of results."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median

import pytest
import torch

from benchmarks.loss_curves import differences
from benchmarks.memory_formulas import states
from benchmarks.memory_probe import Memory, tensors_in
from benchmarks.pipeline_bubble import ideal_over_work, stage_shares
from benchmarks.report import paired_ratio, spread
from benchmarks.setting import CPU_MODEL, merged
from benchmarks.throughput import _loss_differences
from benchmarks.trainer import counterpart
from pipeline.job.models import load_model
from pipeline.job.stages import partition
from pipeline.model.config import ModelConfig
from pipeline.model.counts import total_parameters

# A model of 7.5 B parameters on 64 ranks: figure 1 of the ZeRO paper, in GB.
PAPER = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}


@pytest.mark.parametrize("stage", PAPER)
def test_states_are_those_of_the_papers_figure_1(stage: int):
    total = sum(asdict(states(7_500_000_000, 64, stage, "bf16", "bf16")).values())
    assert total / 1e9 == pytest.approx(PAPER[stage], abs=0.05)


def test_sums_in_fp32_take_twice_the_gradients():
    in_bf16, in_fp32 = (states(1000, 4, 2, "bf16", accumulation) for accumulation in ("bf16", "fp32"))
    assert (in_bf16.gradients, in_fp32.gradients) == (500, 1000)
    assert in_bf16.parameters == in_fp32.parameters == 2000


def test_a_bf16_gradient_stays_beside_its_fp32_sum_at_stage_1():
    assert states(1000, 4, 1, "bf16", "bf16").gradients == 2000
    assert states(1000, 4, 1, "bf16", "fp32").gradients == 6000


def test_an_offloaded_share_of_the_gradient_comes_on_top_at_stage_1():
    assert [states(1000, 4, stage, "fp32", "fp32", True).gradients for stage in (1, 2, 3)] == [
        5000,
        1000,
        1000,
    ]


@pytest.mark.parametrize(("stage", "size"), [(0, 8000), (1, 6000), (2, 6000), (3, 6000)])
def test_fp32_weights_are_their_own_masters_without_zero(stage: int, size: int):
    assert states(1000, 2, stage, "fp32", "fp32").optimizer == size


@pytest.mark.parametrize(("stages", "count"), [(2, 1), (2, 8), (4, 4), (8, 32)])
def test_equal_stages_give_the_textbook_bubble(stages: int, count: int):
    ideal = ideal_over_work([1 / stages] * stages, count)
    assert ideal * stages == pytest.approx((count + stages - 1) / count)


def test_the_slowest_stage_sets_the_pace():
    # 3 micro-batches: one passes both stages (1.0), two follow at 0.75 each; 2.5 of 3.
    assert ideal_over_work([0.25, 0.75], 3) == pytest.approx(2.5 / 3)


def test_shares_follow_the_boundaries():
    model = load_model(CPU_MODEL, "cpu")
    # embedding, positions and 2 of 8 blocks; the rest
    first, second = stage_shares(model, (0, 4, 12), 256, 2)
    assert first + second == pytest.approx(1.0)
    assert second / first == pytest.approx(3.0, rel=0.1)
    folded = stage_shares(model, (0, 4, 6, 8, 12), 256, 2)
    assert folded == pytest.approx([0.5, 0.5], abs=0.02)


def test_shares_take_the_boundaries_of_a_job():
    from pipeline.model.counts import layer_parameters

    model = load_model(CPU_MODEL, "cpu")
    boundaries = partition(layer_parameters(model), 2, "parameters")
    assert max(stage_shares(model, boundaries, 256, 2)) < 0.6


def test_the_models_have_the_size_they_are_named_after():
    assert total_parameters(load_model(CPU_MODEL, "cpu")) == pytest.approx(6.6e6, rel=0.05)
    big = load_model(CPU_MODEL.replace("6m", "1.3b"), "cpu")
    assert total_parameters(big) == pytest.approx(1.3e9, rel=0.02)


def test_a_ratio_is_paired_by_round():
    quiet, busy = [1.0, 1.0, 1.0], [1.0, 10.0, 1.0]
    assert paired_ratio([2 * x for x in busy], busy) == 2.0
    assert median(busy) / median(quiet) == 1.0
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_spread_is_half_the_quartile_distance():
    assert spread([1.0, 2.0, 3.0, 4.0]) == pytest.approx((4.0 - 2.0) / 2 / 2.5)
    assert spread([1.0, 5.0]) == 0.0


def test_memory_is_counted_once():
    flat = torch.zeros(100, dtype=torch.float32)
    memory = Memory()
    assert memory.add(flat[10:30]) == 80
    assert memory.add(flat) == 320
    assert memory.add(flat[:5]) == 0
    assert memory.add_all([None, torch.empty(0), flat, torch.zeros(3, dtype=torch.int64)]) == {"cpu": 24}


def test_tensors_are_found_in_nested_containers():
    a, b = torch.zeros(1), torch.zeros(2)
    assert [id(t) for t in tensors_in({0: [a, None], 1: ({"x": b}, 3)})] == [id(a), id(b)]


def test_layers_of_json_are_merged_by_key():
    merged_values = merged({"zero": {"stage": 1, "a": 1}, "x": 1}, {"zero": {"a": 2}}, {"x": {"y": 3}})
    assert merged_values == {"zero": {"stage": 1, "a": 2}, "x": {"y": 3}}


def test_curves_are_compared_relatively():
    result = differences([2.0, 2.0, 1.0, 1.0], [2.0, 1.0, 1.01, 0.99])
    assert result["first step"] == 0.0
    assert result["second half"] == pytest.approx(0.0)
    assert result["largest"] == -0.5


def test_contenders_that_train_otherwise_are_named():
    rows = {
        "plain": {"losses": [5.0, 4.0, 3.0]},
        "same": {"losses": [5.0, 4.0, 3.0001]},
        "other": {"losses": [5.0, 4.0, 3.1]},
        "broken": {"losses": [5.0, float("nan"), 3.0]},
        "trainer": {"losses": [None, None, None]},
    }
    named = [line.split()[0] for line in _loss_differences(rows, 1e-4)]
    assert named == ["other", "broken"]


def test_the_trainers_model_has_as_many_parameters():
    from transformers import AutoModelForCausalLM

    for model in (load_model(CPU_MODEL, "cpu"), _llama()):
        other = AutoModelForCausalLM.from_config(counterpart(model))
        assert other.num_parameters() == total_parameters(model, padded=True)


def test_a_model_that_transformers_lacks_has_no_counterpart():
    assert counterpart(load_model("tiny", "cpu")) is None


def _llama() -> ModelConfig:
    return ModelConfig(
        "llama", 257, 32, 2, 4, 2, 8, 64, 64,
        position="rotary", norm="rmsnorm", activation="swiglu", bias=False, qkv_bias=False, tied=False,
    )  # fmt: skip
