"""What a GPT is: its sizes and options. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pipeline.base.fields import Limits, check, range_problems
from pipeline.base.problems import JobError, Problem

# The vocabulary is padded so that it divides by every usual tensor size. The padding is the same in
# every layout, because the initial weights are drawn for the full padded tensor.
VOCAB_MULTIPLE = 128
Size = Annotated[int, Limits(1)]
Positive = Annotated[float, Limits(0, above=True)]
Rate = Annotated[float, Limits(0, 1, below=True)]


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
    vocab_size: Size
    hidden_size: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    ffn_hidden_size: Size
    max_position_embeddings: Size
    position: Literal["learned", "rotary"] = "learned"
    rope_theta: Positive = 10000.0
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: Positive = 1e-5
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu_tanh"
    bias: bool = True
    qkv_bias: bool = True
    tied: bool = True
    qk_norm: bool = False
    dropout: Rate = 0.0
    attention_dropout: Rate = 0.0
    init_std: Positive = 0.02

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values; `model_from_json` reads them back."""
        return asdict(self)


def model_from_json(values: dict[str, Any], source: str = "model") -> ModelConfig:
    """The model that `ModelConfig.to_json` described.

    Raises:
        JobError: unknown or missing fields, wrong types, sizes that do not fit; all of them.
    """
    values = dict(values)
    problems = list(check(ModelConfig, values, lambda key: f"{source}: {key}"))
    if problems:
        raise JobError(problems)
    return checked(ModelConfig(**values), source)


def checked(model: ModelConfig, source: str) -> ModelConfig:
    """The model itself.

    Raises:
        JobError: its sizes are impossible; all reasons.
    """
    problems = size_problems(model, source)
    if problems:
        raise JobError(problems)
    return model


def size_problems(model: ModelConfig, source: str) -> tuple[Problem, ...]:
    """Everything that makes the sizes of `model` impossible, whatever the layout."""
    out_of_range = tuple(range_problems(model, lambda key: f"{source}: {key}"))
    return out_of_range or _divisibility_problems(model, source)


def _divisibility_problems(model: ModelConfig, source: str) -> tuple[Problem, ...]:
    problems = []
    if model.num_heads % model.num_kv_heads:
        rule = f"must divide the {model.num_heads} query heads, each kv head serves equally many"
        remedy = f"Choose a divisor of {model.num_heads}"
        problems.append(Problem(f"{source}: num_kv_heads", model.num_kv_heads, rule, remedy))
    if model.position == "rotary" and model.head_dim % 2:
        rule = "must be even, rotary positions turn pairs of components"
        remedy = "Change head_dim, or hidden_size / num_heads that it comes from"
        problems.append(Problem(f"{source}: head_dim", model.head_dim, rule, remedy))
    return tuple(problems)
