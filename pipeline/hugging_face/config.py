"""Hugging Face's description of a GPT-2, Llama, Qwen2, Qwen3 or Starcoder2 model -> ours. No transformers.

Defaults of absent fields are those of transformers' configuration classes, because its own files may
leave defaults out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeline.base.fields import check
from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.words import did_you_mean
from pipeline.model.config import ModelConfig, RopeScaling, checked, scaling_problems

# Fields that do not touch the training computation: bookkeeping, generation, heads for other tasks.
# fmt: off
NEUTRAL = frozenset(
    (
        "architectures", "attn_implementation", "bos_token_id", "chunk_size_feed_forward",
        "cross_attention_hidden_size", "decoder_start_token_id", "do_sample", "dtype", "eos_token_id",
        "finetuning_task", "gradient_checkpointing", "id2label", "is_decoder", "label2id", "max_length",
        "min_length", "model_type", "name_or_path", "num_beams", "num_labels", "output_attentions",
        "output_hidden_states", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
        "repetition_penalty", "return_dict", "sep_token_id", "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "task_specific_params", "temperature", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
        "torch_dtype", "torchscript", "transformers_version", "use_cache",
    )
)
# fmt: on

# The values of a field that the models built here agree with; others are refused for the reason given.
REQUIRED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "scale_attn_weights": ((True,), "attention scores are always divided by sqrt(head_dim)"),
    "scale_attn_by_inverse_layer_idx": ((False,), "attention scores are not scaled by layer"),
    "reorder_and_upcast_attn": ((False,), "attention is not upcast to fp32"),
    "add_cross_attention": ((False,), "there is no encoder to attend to"),
    "is_encoder_decoder": ((False,), "there is no encoder"),
    "pruned_heads": ((None, {}), "heads cannot be pruned"),
    "quantization_config": ((None,), "weights are trained unquantized"),
    "rope_interleaved": ((False,), "rotary positions pair component i with i + head_dim / 2"),
    "use_mrope": ((False,), "positions have one dimension"),
    "partial_rotary_factor": ((None, 1, 1.0), "positions rotate the whole head"),
    "layer_types": ((None,), "every layer attends to all earlier tokens"),
    "auto_map": ((None, {}), "a model with code of its own may compute anything"),
}

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}


def model_from_hugging_face(values: dict[str, Any], source: str) -> ModelConfig:
    """The model that a config.json describes.

    Args:
        values: Its content, with ``model_type``.
        source: The file, used as the model's name and in problems.

    Raises:
        JobError: another kind, unknown or unsupported fields, impossible sizes; all of them.
    """
    kind = values["model_type"]
    if not isinstance(kind, str) or kind not in KINDS:
        rule = f"is not a kind of model that can be built: {', '.join(KINDS)}"
        raise job_error(f"{source}: model_type", kind, rule, did_you_mean(str(kind), KINDS))
    fields = _Fields(values, source)
    model = KINDS[kind](fields)
    fields.refuse_the_rest(kind)
    if fields.problems:
        raise JobError(fields.problems)
    return checked(model, source)


@dataclass
class _Fields:
    """Typed access to a file's fields; records which were read and what was wrong."""

    values: dict[str, Any]
    source: str
    read: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def get(self, name: str, default: Any, *aliases: str) -> Any:
        """The field under its name or an alias (GPT-2's have two each); `default` if absent."""
        self.read.update((name, *aliases))
        given = [alias for alias in (name, *aliases) if alias in self.values]
        if any(self.values[alias] != self.values[given[0]] for alias in given):
            rule = f"differs from {given[0]} = {self.values[given[0]]}, another name of the same size"
            self.refuse(given[-1], self.values[given[-1]], rule, "Keep one of the two")
        return self.values[given[0]] if given else default

    def whole(self, name: str, default: int, *aliases: str) -> int:
        """A size of at least 1; 1 replaces a wrong one, which becomes a problem."""
        value = self.get(name, default, *aliases)
        right = type(value) is int and value >= 1
        return value if right else self._wrong(name, value, "a whole number of at least 1", 1)

    def whole_or(self, name: str, default: int) -> int:
        """A size that may be absent or null, which both mean `default`."""
        return default if self.get(name, None) is None else self.whole(name, default)

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        right = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if right else self._wrong(name, value, "a number", default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        return value if isinstance(value, bool) else self._wrong(name, value, "true or false", default)

    def _wrong(self, name: str, value: object, kind: str, default: Any) -> Any:
        self.refuse(name, value, f"must be {kind}", "Correct the value")
        return default

    def quotient(self, name: str, size: int, divisor: int, parts: str) -> int:
        """size / divisor, which must be whole."""
        if size % divisor:
            rule = f"does not divide by {divisor} {parts}: {size} / {divisor} = {size / divisor:.2f}"
            self.refuse(name, size, rule, f"Use a multiple of {divisor}")
        return max(1, size // divisor)

    def refuse(self, name: str, value: object, rule: str, remedy: str) -> None:
        self.problems.append(Problem(f"{self.source}: {name}", value, rule, remedy))

    def unsupported(self, name: str, value: object, rule: str, accepted: object) -> None:
        remedy = f"Set it to {json.dumps(accepted)}, if the model allows that"
        self.refuse(name, value, f"is not supported: {rule}", remedy)

    def refuse_the_rest(self, kind: str) -> None:
        """Problems for fields that nothing has read: known to be unsupported, or unknown."""
        for name, value in self.values.items():
            if name in self.read or name in NEUTRAL or name.startswith("_"):
                continue
            if name in REQUIRED_VALUES:
                accepted, rule = REQUIRED_VALUES[name]
                if value not in accepted:
                    self.unsupported(name, value, rule, accepted[0])
            else:
                rule = f"is not a known field of {kind} models and might change the computation"
                self.refuse(name, value, rule, "Remove it if it does not")


def _gpt2(fields: _Fields) -> ModelConfig:
    hidden = fields.whole("n_embd", 768, "hidden_size")
    heads = fields.whole("n_head", 12, "num_attention_heads")
    positions = fields.whole("n_positions", 1024, "max_position_embeddings")
    fields.get("n_ctx", positions)  # an old second name of n_positions, which transformers ignores
    return ModelConfig(
        name=fields.source,
        vocab_size=fields.whole("vocab_size", 50257),
        hidden_size=hidden,
        num_layers=fields.whole("n_layer", 12, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=fields.quotient("n_embd", hidden, heads, "heads"),
        ffn_hidden_size=fields.whole_or("n_inner", 4 * hidden),
        max_position_embeddings=positions,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=_activation(fields, "activation_function", "gelu_new"),
        tied=fields.flag("tie_word_embeddings", True),
        dropout=_dropout(fields, "resid_pdrop", "embd_pdrop", 0.1),
        attention_dropout=fields.number("attn_pdrop", 0.1),
        init_std=fields.number("initializer_range", 0.02),
    )


def _activation(fields: _Fields, name: str, default: str) -> Any:
    value = fields.get(name, default)
    if isinstance(value, str) and value in _ACTIVATIONS:
        return _ACTIVATIONS[value]
    fields.refuse(name, value, "is not built here", did_you_mean(str(value), _ACTIVATIONS))
    return "gelu"


def _dropout(fields: _Fields, residual: str, embedding: str, default: float) -> float:
    rate, other = fields.number(residual, default), fields.number(embedding, default)
    if rate != other:
        rule = f"differs from {residual} = {rate:g}; one rate serves embedding and residual branches"
        fields.refuse(embedding, other, rule, "Make the two equal")
    return rate


def _llama(fields: _Fields) -> ModelConfig:
    """Llama puts one flag on the biases of q, k, v and output projection, one on the feed-forward's."""
    attention, feed_forward = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    if attention != feed_forward:
        rule = (
            f"differs from attention_bias = {json.dumps(attention)}; all linear layers have biases, or none"
        )
        fields.refuse("mlp_bias", feed_forward, rule, "Make the two equal")
    heads = fields.whole("num_attention_heads", 32)
    return _rotary(
        fields,
        vocab_size=fields.whole("vocab_size", 32000),
        ffn_hidden_size=fields.whole("intermediate_size", 11008),
        num_heads=heads,
        num_kv_heads=fields.whole_or("num_key_value_heads", heads),
        max_position_embeddings=fields.whole("max_position_embeddings", 2048),
        bias=attention,
        qkv_bias=attention,
    )


def _qwen2(fields: _Fields, **more: Any) -> ModelConfig:
    """Qwen2 always has biases on q, k and v, and nowhere else. Absent num_key_value_heads mean 32."""
    heads = fields.whole("num_attention_heads", 32)
    groups = fields.get("num_key_value_heads", 32)
    _no_sliding_window(fields)
    return _rotary(
        fields,
        vocab_size=fields.whole("vocab_size", 151936),
        ffn_hidden_size=fields.whole("intermediate_size", 22016),
        num_heads=heads,
        num_kv_heads=heads if groups is None else fields.whole("num_key_value_heads", 32),
        max_position_embeddings=fields.whole("max_position_embeddings", 32768),
        **{"bias": False, "qkv_bias": True, **more},
    )


def _qwen3(fields: _Fields) -> ModelConfig:
    """Qwen2 with norms of q and k instead of biases. An absent head_dim means 128."""
    if fields.flag("attention_bias", False):
        rule = "q, k, v and the output projection would have biases, the rest none"
        fields.unsupported("attention_bias", True, rule, False)
    return _qwen2(fields, qkv_bias=False, qk_norm=True, head_dim=fields.whole("head_dim", 128))


def _starcoder2(fields: _Fields) -> ModelConfig:
    """Rotary positions and grouped heads around GPT-2's norms and feed-forward layer."""
    if (window := fields.get("sliding_window", None)) is not None:
        fields.unsupported("sliding_window", window, REQUIRED_VALUES["layer_types"][1], None)
    bias = fields.flag("use_bias", True)
    return _rotary(
        fields,
        hidden_size=fields.whole("hidden_size", 3072),
        num_layers=fields.whole("num_hidden_layers", 30),
        vocab_size=fields.whole("vocab_size", 49152),
        ffn_hidden_size=fields.whole("intermediate_size", 12288),
        num_heads=fields.whole("num_attention_heads", 24),
        num_kv_heads=fields.whole("num_key_value_heads", 2),
        max_position_embeddings=fields.whole("max_position_embeddings", 4096),
        norm="layernorm",
        norm_eps=fields.number("norm_epsilon", 1e-5),
        activation=_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        bias=bias,
        qkv_bias=bias,
        tied=fields.flag("tie_word_embeddings", True),
        dropout=_dropout(fields, "residual_dropout", "embedding_dropout", 0.0),
        init_std=fields.number("initializer_range", 0.018042),
    )


def _no_sliding_window(fields: _Fields) -> None:
    """Sliding windows act in layers from max_window_layers on, and only where they are switched on."""
    fields.get("sliding_window", None)
    on = fields.flag("use_sliding_window", False)
    first = fields.get("max_window_layers", 28)
    layers = fields.get("num_hidden_layers", 32)
    numbers = isinstance(first, int) and isinstance(layers, int)
    if on and "layer_types" not in fields.values and numbers and first < layers:
        rule = f"layers {first} to {layers - 1} would attend to a window of the earlier tokens"
        fields.unsupported("use_sliding_window", True, rule, False)


def _rotary(fields: _Fields, **sizes: Any) -> ModelConfig:
    """What all but GPT-2 have in common; `sizes` are the fields that differ."""
    if "hidden_size" not in sizes:
        sizes["hidden_size"] = fields.whole("hidden_size", 4096)
    if "activation" not in sizes:
        sizes |= _rms_norm_and_swiglu(fields)
    _full_attention_only(fields)
    head_dim = sizes.pop("head_dim", 0) or fields.whole_or("head_dim", 0)
    if not head_dim:
        head_dim = fields.quotient("hidden_size", sizes["hidden_size"], sizes["num_heads"], "heads")
    return ModelConfig(
        name=fields.source,
        head_dim=head_dim,
        position="rotary",
        attention_dropout=fields.number("attention_dropout", 0.0),
        **_rope(fields),
        **sizes,
    )


def _rms_norm_and_swiglu(fields: _Fields) -> dict[str, Any]:
    """What else Llama and Qwen have in common."""
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        fields.refuse("hidden_act", fields.values["hidden_act"], "is not built here", "Use silu")
    return {
        "num_layers": fields.whole("num_hidden_layers", 32),
        "norm": "rmsnorm",
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "tied": fields.flag("tie_word_embeddings", False),
        "dropout": 0.0,
        "init_std": fields.number("initializer_range", 0.02),
    }


def _full_attention_only(fields: _Fields) -> None:
    types = fields.get("layer_types", None)
    if types is not None and (not isinstance(types, list) or set(map(str, types)) != {"full_attention"}):
        rule, remedy = REQUIRED_VALUES["layer_types"][1], "Use full_attention in each layer"
        fields.refuse("layer_types", types, f"is not supported: {rule}", remedy)


def _rope(fields: _Fields) -> dict[str, Any]:
    """Base frequency and rescaling. The first stands at the top (older files) or among the parameters."""
    theta = fields.number("rope_theta", 10000.0)
    older, parameters = fields.get("rope_scaling", None), fields.get("rope_parameters", None)
    name, given = ("rope_scaling", older) if older else ("rope_parameters", parameters)
    if not given:
        return {"rope_theta": theta}
    if not isinstance(given, dict):
        fields.refuse(name, given, "must be an object {...}", "Correct the value")
        return {"rope_theta": theta}
    given = {key: value for key, value in given.items() if value is not None}
    if given.get("partial_rotary_factor", 1) != 1:
        rule = REQUIRED_VALUES["partial_rotary_factor"][1]
        fields.unsupported(f"{name}.partial_rotary_factor", given["partial_rotary_factor"], rule, 1.0)
    inner = _Fields({f"{name}.{key}": value for key, value in given.items()}, fields.source)
    theta = inner.number(f"{name}.rope_theta", theta)
    fields.problems += inner.problems
    return {"rope_theta": theta, "rope_scaling": _rope_scaling(fields, name, given)}


def _rope_scaling(fields: _Fields, name: str, given: dict[str, Any]) -> RopeScaling | None:
    """The rescaling that the parameters of rotary positions ask for; None for plain ones, or wrong ones."""
    values = {key: value for key, value in given.items() if key not in _NOT_OF_SCALING}
    values["rope_type"] = kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default" and len(values) == 1:
        return None
    place = f"{fields.source}: {name}"
    if problems := list(check(RopeScaling, values, lambda key: f"{place}.{key}")):
        fields.problems += problems
        return None
    scaling = RopeScaling(**values)
    fields.problems += scaling_problems(scaling, place)
    return scaling


# Of the parameters of rotary positions: the base frequency, an older name of rope_type, and what must be 1.
_NOT_OF_SCALING = ("rope_theta", "type", "partial_rotary_factor")
KINDS: dict[str, Callable[[_Fields], ModelConfig]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "starcoder2": _starcoder2,
}
