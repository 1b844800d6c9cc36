"""What a GPT is: its sizes and options. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf
from typing import Annotated, Any, Literal

from pipeline.base.fields import Limits, check, range_problems
from pipeline.base.problems import JobError, Problem

# The vocabulary is padded so that it divides by every usual tensor size. The padding is the same in
# every layout, because the initial weights are drawn for the full padded tensor.
VOCAB_MULTIPLE = 128
Size = Annotated[int, Limits(1)]
# Each is listed, in stages and in checkpoints; the deepest transformers that were published have 1,000.
Layers = Annotated[int, Limits(1, 10_000)]
Positive = Annotated[float, Limits(0, above=True)]
Rate = Annotated[float, Limits(0, 1, below=True)]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are rescaled, in the words of transformers' ``rope_scaling``.

    Attributes:
        rope_type: The formula (`pipeline.model.rotary`).
        factor: How much longer sequences may be than those of the first training.
        original_max_position_embeddings: The longest of these; None: the model's max_position_embeddings.
        low_freq_factor, high_freq_factor: Of llama3: pairs that turn fewer or more times in that length.
        attention_factor: Of yarn: multiplies rotated queries and keys; None: follows from the others.
        beta_fast, beta_slow: Of yarn: as high_freq_factor and low_freq_factor; None: 32 and 1.
        mscale, mscale_all_dim: Of yarn: weights of log(factor) in the attention factor, where both are set.
        truncate: Of yarn: the bounds are whole pairs; None: they are.
    """

    rope_type: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: Annotated[float, Limits(1, inf)]
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Annotated[float, Limits(0)] | None = None
    mscale_all_dim: Annotated[float, Limits(0)] | None = None
    truncate: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """What is set, as plain JSON values."""
        return _set(asdict(self))


# Beside rope_type and factor: what each formula needs, and what else it reads.
SCALINGS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "linear": (frozenset(), frozenset()),
    "dynamic": (frozenset(), frozenset()),
    "llama3": (
        frozenset(("low_freq_factor", "high_freq_factor")),
        frozenset(("original_max_position_embeddings",)),
    ),
    "yarn": (
        frozenset(),
        frozenset(
            (
                *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
                *("mscale", "mscale_all_dim", "truncate"),
            )
        ),
    ),
}


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
        rope_scaling: How these are rescaled; None: they are not.
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
    num_layers: Layers
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    ffn_hidden_size: Size
    max_position_embeddings: Size
    position: Literal["learned", "rotary"] = "learned"
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
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
        """All fields that are set, as plain JSON values; `model_from_json` reads them back."""
        return _set(asdict(self))


def _set(values: dict[str, Any]) -> dict[str, Any]:
    """Without what is None, in objects too: descriptions from before a field compare with those after it."""
    return {
        key: _set(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


def model_from_json(values: dict[str, Any], source: str = "model") -> ModelConfig:
    """The model that `ModelConfig.to_json` described.

    Raises:
        JobError: unknown or missing fields, wrong types, sizes that do not fit; all of them.
    """
    values = _set(values)
    problems = list(check(ModelConfig, values, lambda key: f"{source}: {key}"))
    if problems:
        raise JobError(problems)
    scaling = values.pop("rope_scaling", None)
    return checked(
        ModelConfig(**values, rope_scaling=None if scaling is None else RopeScaling(**scaling)), source
    )


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
    return out_of_range or (*_divisibility_problems(model, source), *_scaling_problems(model, source))


def _scaling_problems(model: ModelConfig, source: str) -> Iterator[Problem]:
    """What is wrong with the rescaling of a model's rotary positions."""
    scaling, key = model.rope_scaling, f"{source}: rope_scaling"
    if scaling is None:
        return
    if model.position != "rotary":
        yield Problem(key, scaling.rope_type, "rescales rotary positions, and these are learned", "Remove it")
    if scaling.rope_type == "yarn" and model.rope_theta <= 1:
        rule = "must be above 1 for yarn, which divides by its logarithm"
        yield Problem(f"{source}: rope_theta", model.rope_theta, rule, "Give the model's own")
    yield from scaling_problems(scaling, key)


def scaling_problems(scaling: RopeScaling, key: str) -> Iterator[Problem]:
    """What is missing in a rescaling, out of range, or without effect on its formula."""
    yield from range_problems(scaling, lambda name: f"{key}.{name}")
    needed, read = SCALINGS[scaling.rope_type]
    given = scaling.to_json()
    for name in sorted(needed - given.keys()):
        rule = f"is required for {scaling.rope_type} and was not given"
        yield Problem(f"{key}.{name}", None, rule, "Give it as the model's authors do")
    for name in sorted(given.keys() - needed - read - {"rope_type", "factor"}):
        rule = f"has no effect on {scaling.rope_type} positions"
        yield Problem(f"{key}.{name}", given[name], rule, "Remove it")
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is not None and high is not None and low >= high:
        rule = f"must be above low_freq_factor = {low:g}"
        yield Problem(f"{key}.high_freq_factor", high, rule, "Exchange the two")


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
