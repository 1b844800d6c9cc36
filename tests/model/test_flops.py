"""FLOPs against torch's own counter on a plain model, and against published numbers."""

from dataclasses import replace

import pytest

from pipeline.job.models import PRESETS
from pipeline.job.world import DEVICES
from pipeline.model.counts import (
    block_flops_per_token,
    forward_flops_per_token,
    total_parameters,
    training_flops_per_token,
)
from pipeline.training.throughput import mfu, peak_tflops

GPT2 = PRESETS["gpt2-124m"].model


def test_gpt2_by_hand():
    # The sums of the module's docstring.
    assert block_flops_per_token(GPT2, 1024) == 3_538_944 + 1_572_864 + 1_179_648 + 9_437_184
    assert forward_flops_per_token(GPT2, 1024) == 12 * 15_728_640 + 77_194_752
    assert training_flops_per_token(GPT2, 1024) == 797_815_296


def _small(kind, **changes):
    """A transformers model of width 64, and ours of the same sizes."""
    import transformers

    sizes = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "GPT2Config":
        config = transformers.GPT2Config(**sizes, attn_implementation="eager")
        base = replace(GPT2, num_heads=4, num_kv_heads=4, head_dim=16, ffn_hidden_size=256)
    else:
        sizes |= {"intermediate_size": 96, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, attn_implementation="eager")
        base = replace(
            PRESETS["llama3-8b"].model, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden_size=96
        )
    reference = transformers.AutoModelForCausalLM.from_config(config)
    return reference, replace(base, vocab_size=300, hidden_size=64, num_layers=2)


@pytest.mark.parametrize("kind", ["GPT2Config", "LlamaConfig"])
def test_equals_torchs_counter(kind):
    """torch counts the products that a plain implementation computes: the whole square of attention
    scores, of which causal counting keeps half, and all the rest exactly as we do."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    reference, model = _small(kind)
    batch, length = 2, 32
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        reference(tokens, labels=tokens).loss.backward()
    # Per token, layer and pass: 2 products of 2 * query width for each of the other length / 2 tokens.
    upper_triangle = 3 * model.num_layers * 2 * 2 * 64 * (length // 2) * batch * length
    training = training_flops_per_token(model, length) * batch * length
    assert counter.get_total_flops() == training + upper_triangle


@pytest.mark.parametrize("name", PRESETS)
def test_near_six_per_parameter(name):
    """6 N (Kaplan et al. 2020) lacks attention and counts untied embeddings: within 10 % at the usual
    length for models of this shape."""
    preset = PRESETS[name]
    flops = training_flops_per_token(preset.model, preset.training.sequence_length)
    assert flops == pytest.approx(6 * total_parameters(preset.model), rel=0.1)


def test_gpt3_total_of_the_paper():
    # Brown et al. 2020, table D.1: GPT-3 175B, 300 B tokens, 3.14e23 FLOPs (6 N, no attention).
    model = PRESETS["gpt3-175b"].model
    assert training_flops_per_token(model, 2048) * 300e9 == pytest.approx(3.14e23, rel=0.03)


def test_grouped_heads_save_projections_only():
    grouped = replace(GPT2, num_kv_heads=4)
    # Eight k and eight v heads of 64 fewer.
    assert block_flops_per_token(GPT2, 1024) - block_flops_per_token(grouped, 1024) == 2 * 768 * 2 * 8 * 64


def test_swiglu_has_three_products():
    swiglu = replace(GPT2, activation="swiglu")
    assert block_flops_per_token(swiglu, 8) - block_flops_per_token(GPT2, 8) == 2 * 768 * 3072


def test_attention_grows_with_the_sequence():
    longer = training_flops_per_token(GPT2, 2048) - training_flops_per_token(GPT2, 1024)
    # 3 passes, 12 layers, scores and mix, 2 * 768 each, for half of 1,024 more tokens.
    assert longer == 3 * 12 * 2 * 2 * 768 * 512


def test_padding_does_not_count():
    assert GPT2.padded_vocab_size > GPT2.vocab_size
    padded = replace(GPT2, vocab_size=GPT2.padded_vocab_size)
    assert forward_flops_per_token(padded, 64) > forward_flops_per_token(GPT2, 64)


# Names as torch.cuda.get_device_name() gives them; TFLOP/s for bf16, fp16, fp32.
NAMES = {
    "NVIDIA H200": (989.5, 989.5, 67.0),
    "NVIDIA H100 80GB HBM3": (989.5, 989.5, 67.0),
    "NVIDIA H100 PCIe": (756.0, 756.0, 51.0),
    "NVIDIA H100 NVL": (835.5, 835.5, 60.0),
    "NVIDIA A100-SXM4-80GB": (312.0, 312.0, 19.5),
    "NVIDIA A100 80GB PCIe": (312.0, 312.0, 19.5),
    "A100-SXM4-40GB": (312.0, 312.0, 19.5),
    "NVIDIA A10G": (70.0, 70.0, 35.0),
    "NVIDIA A10": (125.0, 125.0, 31.2),
    "NVIDIA L4": (121.0, 121.0, 30.3),
    "NVIDIA L40S": (362.0, 362.0, 91.6),
    "NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6),
    "NVIDIA GeForce RTX 3090": (71.0, 71.0, 35.6),
    "NVIDIA GeForce RTX 3090 Ti": (80.0, 80.0, 40.0),
    "Tesla V100-SXM2-32GB": (None, 125.0, 15.7),
    "Tesla V100-PCIE-16GB": (None, 112.0, 14.0),
    "Tesla T4": (None, 65.0, 8.1),
}
UNKNOWN = [
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "GRID A100-10C",
    "NVIDIA A1000",
    "AMD Instinct MI300X",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_peaks_by_name(name):
    assert tuple(peak_tflops(name, dtype) for dtype in ("bf16", "fp16", "fp32")) == NAMES[name]


@pytest.mark.parametrize("name", [None, *UNKNOWN])
def test_no_peak_is_guessed(name):
    assert all(peak_tflops(name, dtype) is None for dtype in ("bf16", "fp16", "fp32"))


def test_every_peak_names_its_source():
    assert all(device.source.startswith("NVIDIA") and device.half > device.single for device in DEVICES)


def test_mfu():
    assert mfu(156.0, 312.0) == 0.5
    assert mfu(156.0, None) is None
