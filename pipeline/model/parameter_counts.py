"""Parameter counts, layer by layer, from the sizes alone. No torch.

The layer list is the unit of pipelining: token embedding, positions, blocks, final norm, output layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.model.config import ModelConfig


@dataclass(frozen=True)
class LayerSize:
    """One entry of the layer list.

    Attributes:
        name: ``embedding``, ``positions``, ``block 0`` .., ``final norm``, ``output``.
        parameters: Its own weights, each counted once over the whole list.
        tied: Weights that it uses but that an earlier layer owns: the embedding's, in a tied output layer.
    """

    name: str
    parameters: int
    tied: int = 0

    @property
    def held(self) -> int:
        """Parameters in memory where this layer runs apart from the one it shares weights with."""
        return self.parameters + self.tied


def layer_parameters(model: ModelConfig, *, padded: bool = True) -> tuple[LayerSize, ...]:
    """Sizes of all num_layers + 4 layers, in order.

    With `padded` the vocabulary has its padding rows, as in memory; without, as published.
    """
    vocabulary = (model.padded_vocab_size if padded else model.vocab_size) * model.hidden_size
    positions = model.max_position_embeddings * model.hidden_size if model.position == "learned" else 0
    block = block_parameters(model)
    return (
        LayerSize("embedding", vocabulary),
        LayerSize("positions", positions),
        *(LayerSize(f"block {index}", block) for index in range(model.num_layers)),
        LayerSize("final norm", _norm(model)),
        LayerSize("output", 0, tied=vocabulary) if model.tied else LayerSize("output", vocabulary),
    )


def total_parameters(model: ModelConfig, *, padded: bool = False) -> int:
    """Parameters of the whole model, tied ones once; by default as published, without vocabulary padding."""
    return sum(layer.parameters for layer in layer_parameters(model, padded=padded))


def stage_parameters(layers: Iterable[LayerSize]) -> int:
    """Parameters in memory; a tied output layer adds its weight only where the embedding is elsewhere."""
    layers = list(layers)
    shared = any(layer.name == "embedding" for layer in layers)
    return sum(layer.parameters if shared else layer.held for layer in layers)


def block_parameters(model: ModelConfig) -> int:
    """Parameters of one transformer block.

    Worked for GPT-2 124M (h = 768): qkv 3 h^2 + 3 h = 1,771,776; out h^2 + h = 590,592; up and down
    8 h^2 + 5 h = 4,722,432; two norms 4 h = 3,072; together 7,087,872.
    """
    query_width = model.num_heads * model.head_dim
    qkv_width = query_width + 2 * model.num_kv_heads * model.head_dim
    up_width = (2 if model.activation == "swiglu" else 1) * model.ffn_hidden_size
    hidden = model.hidden_size
    attention = _linear(hidden, qkv_width, model.bias or model.qkv_bias) + _linear(
        query_width, hidden, model.bias
    )
    feed_forward = _linear(hidden, up_width, model.bias) + _linear(model.ffn_hidden_size, hidden, model.bias)
    qk_norms = 2 * model.head_dim if model.qk_norm else 0
    return 2 * _norm(model) + attention + qk_norms + feed_forward


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _norm(model: ModelConfig) -> int:
    """LayerNorm has weight and bias, RMSNorm a weight."""
    return (2 if model.norm == "layernorm" else 1) * model.hidden_size
