"""Parameters and floating-point operations of a model, from its sizes alone. No torch.

Parameters are counted layer by layer, as pipelines are cut: token embedding, positions, blocks, final norm,
output layer.

Floating-point operations are those that the mathematics needs (model FLOPs, as PaLM's appendix B defines them
for MFU): matrix products, a multiply-add being 2. The backward pass of a product is two products of the same
size, so that training costs three times the forward pass. Recomputed activations are not counted, nor are
norms, activations, softmax and the embedding look-up, which are below 1 % together. Unlike in PaLM, attention
counts causally: a token attends to half the sequence on average, and a kernel that skips the rest does less.

Worked for gpt2-124m at 1,024 tokens, forward, per token:

    per block   q, k, v       2 * 768 * 3 * 768          =   3,538,944
                scores, mix   2 * 2 * 12 * 64 * 1024 / 2 =   1,572,864
                output        2 * 768 * 768              =   1,179,648
                feed-forward  2 * 2 * 768 * 3072         =   9,437,184
    12 blocks                 12 * 15,728,640            = 188,743,680
    vocabulary                2 * 768 * 50257            =  77,194,752
    forward                                              = 265,938,432
    training                  3 * forward                = 797,815,296

The usual 6 FLOPs per parameter (Kaplan et al. 2020, section 2.1) would be 746.6 M: it has no attention, but
the position table.
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
    """Parameters in memory; a tied output layer adds its weight if the embedding is on another stage."""
    layers = list(layers)
    shared = any(layer.name == "embedding" for layer in layers)
    return sum(layer.parameters if shared else layer.held for layer in layers)


def block_parameters(model: ModelConfig) -> int:
    """Parameters of one transformer block.

    Worked for GPT-2 124M (h = 768): qkv 3 h^2 + 3 h = 1,771,776; out h^2 + h = 590,592; up and down
    8 h^2 + 5 h = 4,722,432; two norms 4 h = 3,072; together 7,087,872.
    """
    query, qkv, up, hidden = *widths(model), model.hidden_size
    attention = _linear(hidden, qkv, model.bias or model.qkv_bias) + _linear(query, hidden, model.bias)
    feed_forward = _linear(hidden, up, model.bias) + _linear(model.ffn_hidden_size, hidden, model.bias)
    qk_norms = 2 * model.head_dim if model.qk_norm else 0
    return 2 * _norm(model) + attention + qk_norms + feed_forward


def widths(model: ModelConfig) -> tuple[int, int, int]:
    """Rows of the query part, of the whole q, k, v projection, and of the feed-forward layer's input."""
    query = model.num_heads * model.head_dim
    up = (2 if model.activation == "swiglu" else 1) * model.ffn_hidden_size
    return query, query + 2 * model.num_kv_heads * model.head_dim, up


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _norm(model: ModelConfig) -> int:
    """LayerNorm has weight and bias, RMSNorm a weight."""
    return (2 if model.norm == "layernorm" else 1) * model.hidden_size


def block_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Forward FLOPs of one transformer block for one token."""
    query, qkv, up = widths(model)
    projections = 2 * model.hidden_size * (qkv + query)
    feed_forward = 2 * model.hidden_size * (up + model.ffn_hidden_size)
    # Scores and weighted sum of values, each 2 * query width per visible token. Grouped key/value heads save
    # memory, not products: each query head meets all of its group's keys.
    visible = sequence_length / 2
    return projections + feed_forward + 2 * 2 * query * visible


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Forward FLOPs for one token; vocabulary padding is not counted."""
    output = 2 * model.hidden_size * model.vocab_size
    return model.num_layers * block_flops_per_token(model, sequence_length) + output


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token in sequences of `sequence_length`."""
    # A backward pass computes the gradient of both factors of each product.
    return 3 * forward_flops_per_token(model, sequence_length)
