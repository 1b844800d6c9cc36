"""Small transformers models, and their weights under this project's names: the inverse of our layout."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from pipeline.model.config import ModelConfig

SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 80}
# Positions of the first training up to 16, rescaled in every way: below, between and above the bounds.
SCALED: dict[str, dict[str, object]] = {
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 0.1,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.1},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3.3},
}
KINDS = ("gpt2", "untied gpt2", "llama", "llama with biases", "qwen2", "qwen3", "starcoder2")


def rope(rope_type: str, theta: float = 10000.0) -> dict[str, object]:
    """Rotary positions of that type, as transformers describes them."""
    return {"rope_type": rope_type, "rope_theta": theta, **SCALED[rope_type]}


def build(kind: str) -> PreTrainedModel:
    """An untrained model in which no parameter has its neutral value, zero biases and unit norms included."""
    torch.manual_seed(11)
    models = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SIZES)),
        "untied gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SIZES, tie_word_embeddings=False)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, rope_parameters=rope("llama3", 500.0))),
        "llama with biases": lambda: LlamaForCausalLM(
            LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
        ),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED, rope_parameters=rope("yarn", 1000.0))),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=8, rope_parameters=rope("linear"))),
        "starcoder2": lambda: Starcoder2ForCausalLM(
            Starcoder2Config(**GROUPED, rope_parameters=rope("dynamic"))
        ),
    }
    model = models[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def in_our_layout(theirs: dict[str, Tensor], config: ModelConfig, padding: float) -> dict[str, Tensor]:
    """Their parameters, or gradients, by our names and in our order of rows.

    Args:
        padding: Fills the rows of the vocabulary that only we have.
    """
    convert = _from_gpt2 if "transformer.wte.weight" in theirs else _from_llama
    return convert(theirs, config, padding)


def grouped_rows(q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
    """Rows of q, k and v, interleaved: for each kv head its query heads, its key, its value."""
    d, per_group = config.head_dim, config.num_heads // config.num_kv_heads
    groups = []
    for group in range(config.num_kv_heads):
        groups.append(q[group * per_group * d : (group + 1) * per_group * d])
        groups += [x[group * d : (group + 1) * d] for x in (k, v)]
    return torch.cat(groups)


def _padded(table: Tensor, config: ModelConfig, padding: float) -> Tensor:
    rows = config.padded_vocab_size - config.vocab_size
    return torch.cat([table, torch.full((rows, config.hidden_size), padding)])


def _tables(
    theirs: dict[str, Tensor], embedding: str, config: ModelConfig, padding: float
) -> dict[str, Tensor]:
    table = _padded(theirs[embedding], config, padding)
    if config.tied:
        return {"tied_modules.embed.weight": table}
    output = _padded(theirs["lm_head.weight"], config, padding)
    return {"0.weight": table, f"{config.num_layers + 3}.weight": output}


def _from_gpt2(theirs: dict[str, Tensor], config: ModelConfig, padding: float) -> dict[str, Tensor]:
    """GPT-2 stores its linear weights transposed, [in, out]."""
    ours = {
        **_tables(theirs, "transformer.wte.weight", config, padding),
        "1.weight": theirs["transformer.wpe.weight"],
        f"{config.num_layers + 2}.weight": theirs["transformer.ln_f.weight"],
        f"{config.num_layers + 2}.bias": theirs["transformer.ln_f.bias"],
    }
    names = {
        "ln_1": "norm1",
        "attn.c_proj": "attention.out",
        "ln_2": "norm2",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    for layer in range(config.num_layers):
        for kind in ("weight", "bias"):
            for their_name, our_name in names.items():
                ours[f"{2 + layer}.{our_name}.{kind}"] = theirs[
                    f"transformer.h.{layer}.{their_name}.{kind}"
                ].t()
            q, k, v = theirs[f"transformer.h.{layer}.attn.c_attn.{kind}"].t().chunk(3)
            ours[f"{2 + layer}.attention.qkv.{kind}"] = grouped_rows(q, k, v, config)
    return ours


def _from_llama(theirs: dict[str, Tensor], config: ModelConfig, padding: float) -> dict[str, Tensor]:
    """Llama and those that name their weights as it does; biases where there are some."""
    ours = _tables(theirs, "model.embed_tokens.weight", config, padding)
    for kind in ("weight", "bias"):
        if f"model.norm.{kind}" in theirs:
            ours[f"{config.num_layers + 2}.{kind}"] = theirs[f"model.norm.{kind}"]
    for layer in range(config.num_layers):
        _llama_layer(theirs, f"model.layers.{layer}", ours, f"{2 + layer}", config)
    return ours


def _llama_layer(
    theirs: dict[str, Tensor], prefix: str, ours: dict[str, Tensor], index: str, config: ModelConfig
) -> None:
    same = {
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
        "self_attn.o_proj": "attention.out",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
        "mlp.down_proj": "mlp.down",
    }
    for kind in ("weight", "bias"):
        for their_name, our_name in same.items():
            if f"{prefix}.{their_name}.{kind}" in theirs:
                ours[f"{index}.{our_name}.{kind}"] = theirs[f"{prefix}.{their_name}.{kind}"]
        if f"{prefix}.self_attn.q_proj.{kind}" in theirs:
            q, k, v = (theirs[f"{prefix}.self_attn.{x}_proj.{kind}"] for x in "qkv")
            ours[f"{index}.attention.qkv.{kind}"] = grouped_rows(q, k, v, config)
        if f"{prefix}.mlp.up_proj.{kind}" in theirs:
            gate, up = (theirs[f"{prefix}.mlp.{x}_proj.{kind}"] for x in ("gate", "up"))
            ours[f"{index}.mlp.up.{kind}"] = torch.stack([gate, up], 1).flatten(0, 1)
