"""What a GPT is: its sizes and options. No torch."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from pipeline.base.problems import JobError, Problem
from pipeline.base.words import did_you_mean

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

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values; `model_from_json` reads them back."""
        return asdict(self)


def model_from_json(values: dict[str, Any], source: str = "model") -> ModelConfig:
    """The model that `ModelConfig.to_json` described.

    Raises:
        JobError: unknown or missing fields, wrong types, sizes that do not fit; all of them.
    """
    known = {field.name for field in fields(ModelConfig)}
    required = {field.name for field in fields(ModelConfig) if field.default is MISSING}
    problems = [
        Problem(f"{source}: {key}", values[key], "a model has no such field", did_you_mean(key, known))
        for key in values
        if key not in known
    ]
    problems += [
        Problem(f"{source}: {key}", None, "the field is missing", "Give its value")
        for key in sorted(required - values.keys())
    ]
    problems += [
        problem
        for key in sorted(known & values.keys())
        for problem in _type_problems(key, values[key], source)
    ]
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
    problems = [
        Problem(f"{source}: {key}", getattr(model, key), "must be at least 1", "Give a positive whole number")
        for key in _SIZES
        if getattr(model, key) < 1
    ]
    problems += [
        Problem(f"{source}: {key}", getattr(model, key), "must be a rate from 0 to below 1", "Use 0 for none")
        for key in ("dropout", "attention_dropout")
        if not 0 <= getattr(model, key) < 1
    ]
    problems += [
        Problem(f"{source}: {key}", getattr(model, key), "must be above 0", "Give a positive number")
        for key in ("norm_eps", "rope_theta", "init_std")
        if not getattr(model, key) > 0
    ]
    return tuple(problems) or _divisibility_problems(model, source)


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "max_position_embeddings",
)


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


def _type_problems(key: str, value: object, source: str) -> list[Problem]:
    """Whether a JSON value has the field's type; a whole number serves as a float."""
    kind = get_type_hints(ModelConfig)[key]
    choices = get_args(kind)
    if choices:
        fits, rule = value in choices, f"must be one of {', '.join(choices)}"
    elif kind is float:
        fits, rule = isinstance(value, (int, float)) and not isinstance(value, bool), "must be a number"
    else:
        fits, rule = type(value) is kind, f"must be of type {kind.__name__}"
    return [] if fits else [Problem(f"{source}: {key}", value, rule, "Correct the value")]
