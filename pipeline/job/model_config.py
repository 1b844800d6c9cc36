"""What a GPT is: its sizes and options. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The vocabulary is padded so that it divides by every usual tensor size. The padding is the same in
# every layout, because the initial weights are drawn for the full padded tensor.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer.

    Attributes:
        name: Preset name, or the path it was read from.
        vocab_size: Token ids are 0 .. vocab_size - 1. Rows above it are padding and never predicted.
        hidden_size: Width of the residual stream.
        num_layers: Transformer blocks.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; equal to num_heads without grouping.
        head_dim: Width of one head; hidden_size / num_heads in most models.
        ffn_hidden_size: Inner width of the feed-forward layer (of each of gate and up for SwiGLU).
        max_position_embeddings: Longest sequence the position table or rotary range is made for.
        position: ``learned`` table, or ``rotary`` (rotate-half pairing, as Llama).
        rope_theta: Base of the rotary frequencies.
        norm: ``layernorm`` (weight and bias) or ``rmsnorm`` (weight).
        norm_eps: Epsilon inside the norm.
        activation: ``gelu`` (exact), ``gelu_tanh`` (GPT-2's approximation) or ``swiglu``.
        bias: Biases on all linear layers (GPT-2), except the output layer, which never has one.
        qkv_bias: Bias on the q, k, v projection only matters when `bias` is off (Qwen2 has it on).
        tied: Output layer shares the embedding's weight.
        qk_norm: RMS norm with a weight over each query and key head before positions are applied.
        dropout: Rate on the embedding output and on both residual branches.
        attention_dropout: Rate on the attention probabilities.
        init_std: Standard deviation of the initial normal weights; residual output projections use
            init_std / sqrt(2 * num_layers) (GPT-2 paper, section 2.3).
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    max_position_embeddings: int
    position: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 10000.0
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu_tanh"
    bias: bool = True
    qkv_bias: bool = True
    tied: bool = True
    qk_norm: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
