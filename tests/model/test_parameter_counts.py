"""Parameter counts against models that transformers builds, and against shapes worked out by hand."""

from dataclasses import replace

import pytest

from pipeline.job.models import PRESETS
from pipeline.model.counts import LayerSize, layer_parameters, total_parameters

TINY = PRESETS["tiny"].model


def _transformers_model(model):
    """transformers' model of the same architecture, without storage."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    with torch.device("meta"):
        if model.position == "learned":
            config = GPT2Config(
                vocab_size=model.vocab_size,
                n_positions=model.max_position_embeddings,
                n_embd=model.hidden_size,
                n_layer=model.num_layers,
                n_head=model.num_heads,
                n_inner=model.ffn_hidden_size,
            )
            return GPT2LMHeadModel(config)
        config_class, model_class = (
            (Qwen2Config, Qwen2ForCausalLM) if model.qkv_bias else (LlamaConfig, LlamaForCausalLM)
        )
        config = config_class(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            tie_word_embeddings=model.tied,
        )
        return model_class(config)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "tiny"])
def test_layer_counts_equal_transformers(name):
    model = PRESETS[name].model
    reference = _transformers_model(model)
    base = reference.transformer if model.position == "learned" else reference.model
    blocks = base.h if model.position == "learned" else base.layers
    counts = {layer.name: layer.parameters for layer in layer_parameters(model, padded=False)}
    assert total_parameters(model) == reference.num_parameters()
    for index, block in enumerate(blocks):
        assert counts[f"block {index}"] == sum(weight.numel() for weight in block.parameters())
    assert counts["embedding"] == reference.get_input_embeddings().weight.numel()


def test_tiny_by_hand():
    # Width 96, ffn 384, rotary, LayerNorm, biases, tied. Block: qkv 96 * 288 + 288 = 27,936; out
    # 96 * 96 + 96 = 9,312; up 96 * 384 + 384 = 37,248; down 384 * 96 + 96 = 36,960; norms 4 * 96 = 384.
    model = replace(
        TINY, position="rotary", norm="layernorm", bias=True, activation="gelu_tanh", ffn_hidden_size=384
    )
    block = 27_936 + 9_312 + 37_248 + 36_960 + 384
    assert [layer.parameters for layer in layer_parameters(model, padded=False)] == [
        257 * 96,
        0,
        block,
        block,
        block,
        2 * 96,
        0,
    ]


def test_layer_names_follow_the_layer_list():
    names = [layer.name for layer in layer_parameters(TINY)]
    assert names == ["embedding", "positions", "block 0", "block 1", "block 2", "final norm", "output"]


def test_tied_weights_count_once_but_are_held_twice():
    tied, untied = replace(TINY, tied=True), replace(TINY, tied=False)
    vocabulary = TINY.padded_vocab_size * TINY.hidden_size
    assert layer_parameters(tied)[-1] == LayerSize("output", 0, tied=vocabulary)
    assert layer_parameters(untied)[-1] == LayerSize("output", vocabulary)
    assert layer_parameters(tied)[-1].held == layer_parameters(untied)[-1].held == vocabulary
    assert total_parameters(untied, padded=True) - total_parameters(tied, padded=True) == vocabulary


def test_padding_rows_count_where_asked():
    # 257 tokens are padded to 384: 127 rows of 96.
    tied = replace(TINY, tied=True)
    assert total_parameters(tied, padded=True) - total_parameters(tied) == 127 * 96


@pytest.mark.parametrize(
    ("changes", "difference_per_block"),
    [
        ({"qk_norm": True}, 2 * 24),  # two weights of head_dim
        ({"activation": "swiglu"}, 96 * 384 + 384),  # the gate and its bias
        ({"num_kv_heads": 2}, -2 * 2 * 24 * (96 + 1)),  # two k and two v heads fewer
        ({"norm": "rmsnorm"}, -2 * 96),  # no biases in two norms
        ({"bias": False, "qkv_bias": True}, -(96 + 384 + 96)),  # out, up, down
        ({"bias": False, "qkv_bias": False}, -(288 + 96 + 384 + 96)),
        ({"head_dim": 32}, 4 * 8 * (3 * (96 + 1) + 96)),  # wider q, k, v with biases, and output
    ],
)
def test_options_change_a_block_by_their_weights(changes, difference_per_block):
    base = replace(
        TINY,
        norm="layernorm",
        bias=True,
        activation="gelu_tanh",
        ffn_hidden_size=384,
        qk_norm=False,
        num_kv_heads=4,
        head_dim=24,
    )
    before, after = layer_parameters(base), layer_parameters(replace(base, **changes))
    assert after[2].parameters - before[2].parameters == difference_per_block
