"""Rescaled rotary positions at the sizes of published models: transformers' frequencies, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.hugging_face.config import model_from_hugging_face
from pipeline.model.rotary import Rotary, amplitude, frequencies

YARN = {"rope_type": "yarn", "factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "Llama 3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "Llama 3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"rope_type": "linear", "factor": 4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn as Qwen2.5": {**YARN, "original_max_position_embeddings": 32768},
    "yarn, no first length": YARN,
    "yarn, attention factor": {**YARN, "attention_factor": 1.7},
    "yarn, two weights": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, one weight": {**YARN, "mscale": 0.707},
    "yarn, own bounds": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn, a step": {**YARN, "original_max_position_embeddings": 4, "beta_fast": 32, "beta_slow": 16},
    "yarn, factor 1": {**YARN, "factor": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_transformers(case: str):
    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={**CASES[case], "rope_theta": 500000.0},
    )
    ours = model_from_hugging_face(theirs.to_dict(), "file")
    expected, size = ROPE_INIT_FUNCTIONS[CASES[case]["rope_type"]](theirs)
    assert torch.equal(frequencies(ours), expected)
    assert amplitude(ours.rope_scaling) == size
    # The long way round: what a query becomes far out.
    query = torch.full((1, 1, 20000, 128), 0.5)
    angles = torch.arange(20000.0)[:, None] * expected
    turned = 0.5 * torch.cat((angles.cos() - angles.sin(), angles.cos() + angles.sin()), -1) * size
    torch.testing.assert_close(Rotary(ours)(query)[0, 0], turned, rtol=0, atol=1e-6)
