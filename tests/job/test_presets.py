"""Presets have the sizes of the models whose names they carry."""

import pytest

from pipeline.job.models import PRESETS, training_defaults
from pipeline.model.config import size_problems
from pipeline.model.counts import total_parameters

# Counts of the released weights: sums over the published safetensors files.
RELEASED = {
    "gpt2-124m": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", RELEASED)
def test_counts_equal_the_released_models(name):
    assert total_parameters(PRESETS[name].model) == RELEASED[name]


@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    # Brown et al. 2020, table 2.1. 13B: the paper's 13.0 B goes with a printed width of 5,140, which is not
    # 40 heads of 128; 5,120 gives 12.85 B.
    [("gpt3-6.7b", 6.7e9, 0.0075), ("gpt3-13b", 13.0e9, 0.012), ("gpt3-175b", 175.0e9, 0.003)],
)
def test_counts_agree_with_the_gpt3_paper(name, published, tolerance):
    assert total_parameters(PRESETS[name].model) == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_possible_models(name):
    preset = PRESETS[name]
    assert preset.model.name == name
    assert size_problems(preset.model, name) == ()
    assert preset.model.dropout == preset.model.attention_dropout == 0.0


@pytest.mark.parametrize("name", PRESETS)
def test_training_defaults_fit_their_model(name):
    defaults = training_defaults(PRESETS[name].model)
    assert defaults.sequence_length <= PRESETS[name].model.max_position_embeddings
    assert 0 < defaults.warmup_steps < defaults.train_steps / 5
    assert 0 < defaults.learning_rate < 1e-2
    assert defaults.source


@pytest.mark.parametrize(
    ("name", "tokens_per_step", "tokens"),
    [
        ("gpt2-124m", 0.5e6, 20 * 124.4e6),
        ("gpt3-175b", 3.2e6, 300e9),
        ("llama3-8b", 4e6, 15e12),
        ("qwen2-7b", 4e6, 7e12),
    ],
)
def test_training_defaults_consume_the_published_tokens(name, tokens_per_step, tokens):
    defaults = PRESETS[name].training
    assert defaults.tokens_per_step == pytest.approx(tokens_per_step, rel=0.05)
    assert defaults.tokens_per_step * defaults.train_steps == pytest.approx(tokens, rel=0.01)


def test_a_model_that_is_no_preset_has_no_usual_training():
    model = PRESETS["tiny"].model
    assert training_defaults(type(model)(**{**model.to_json(), "name": "models/x/config.json"})) is None


def test_tiny_is_cut_by_every_size_up_to_four():
    model = PRESETS["tiny"].model
    sizes = (model.num_heads, model.num_kv_heads, model.padded_vocab_size, model.ffn_hidden_size)
    assert all(size % 4 == 0 for size in sizes)
    assert total_parameters(model) < 5_000_000
