"""Which class of transformers computes what one of our models computes, and its config.json. No torch.

    positions, norm, activation      biases                 class
    learned, LayerNorm, GELU         all                    GPT2LMHeadModel
    rotary, RMSNorm, SwiGLU          none, or all           LlamaForCausalLM
    the same                         q, k, v only           Qwen2ForCausalLM
    the same, norms of q and k       none                   Qwen3ForCausalLM
    rotary, LayerNorm, GELU          none, or all           Starcoder2ForCausalLM

A model is of one family at most, and what `pipeline.hugging_face.config` reads is of the family that its
file names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipeline.base.problems import job_error
from pipeline.hugging_face.config import NEUTRAL
from pipeline.model.config import ModelConfig

NOTHING: Mapping[str, Any] = MappingProxyType({})
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What an earlier config.json says of its own weights.
_OF_AN_EXPORT = frozenset(("architectures", "dtype", "torch_dtype", "name_or_path", "transformers_version"))


@dataclass(frozen=True)
class Family:
    """A kind of model of transformers.

    Attributes:
        model_type: Its name in config.json.
        architecture: The class.
        base: What its tensors' names begin with, but for the output layer's; files of the model without its
            output layer leave it out.
        sizes: The fields of config.json that say what is computed.
        misfits: Why a model with the family's positions, norm and activation is still not of it.
    """

    model_type: str
    architecture: str
    base: str
    sizes: Callable[[ModelConfig], dict[str, Any]]
    misfits: Callable[[ModelConfig], Iterable[str]] = lambda _: ()


def family_of(model: ModelConfig) -> Family:
    """The family that computes what `model` does.

    Raises:
        JobError: none does; all reasons.
    """
    family, remedy = _nearest(model), "Such models train, but are not exported"
    if family is None:
        rule = (
            f"no class of transformers is known that has {model.position} positions, {model.norm} and "
            f"{model.activation} at once"
        )
        raise job_error("model", model.name, rule, f"{remedy}. These are: {', '.join(FAMILIES)}")
    if reasons := list(family.misfits(model)):
        rule = f"is not a {family.architecture}, the nearest class of transformers: {'; '.join(reasons)}"
        raise job_error("model", model.name, rule, remedy)
    return family


def config_json(
    model: ModelConfig, dtype: str, end_of_document: int, earlier: Mapping[str, Any] = NOTHING
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        dtype: Format of the weights, by torch's name.
        end_of_document: The id that ends a document. As it comes before the next document, a text may begin
            with it.
        earlier: The config.json beside the tokenizer: its ids are kept and, of the same kind of model,
            what no computation reads.

    Raises:
        JobError: as `family_of`.
    """
    family = family_of(model)
    same_kind = earlier.get("model_type") == family.model_type
    kept = {key: earlier[key] for key in earlier if same_kind and key in NEUTRAL - _OF_AN_EXPORT}
    return {
        **kept,
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.sizes(model),
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        **_token_ids(end_of_document, earlier),
        "torch_dtype": dtype,
        "use_cache": True,
    }


def generation_config_json(
    end_of_document: int, earlier: Mapping[str, Any] = NOTHING, config: Mapping[str, Any] = NOTHING
) -> dict[str, Any]:
    """The content of generation_config.json: the ids that begin and end a text, and pad a shorter one.

    Args:
        earlier: The generation_config.json beside the tokenizer, which is kept.
        config: The config.json there, whose ids count where `earlier` has none.
    """
    ids = {key: config[key] for key in TOKEN_IDS if key in config}
    return {"pad_token_id": end_of_document, **earlier, **_token_ids(end_of_document, {**ids, **earlier})}


def _token_ids(end_of_document: int, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The earlier ids; the one that ended documents in training is always among those that end a text."""
    given = {key: earlier[key] for key in TOKEN_IDS if key in earlier}
    stops = given.get("eos_token_id")
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if end_of_document not in stops:
        stops = [*stops, end_of_document]
        given["eos_token_id"] = stops if len(stops) > 1 else end_of_document
    return {"bos_token_id": end_of_document, **given}


def _nearest(model: ModelConfig) -> Family | None:
    """The family with these positions, norm and activation."""
    kind = (model.position, model.norm, "swiglu" if model.activation == "swiglu" else "gelu")
    if kind == ("rotary", "rmsnorm", "swiglu"):
        if model.qk_norm:
            return FAMILIES["qwen3"]
        return FAMILIES["qwen2" if model.qkv_bias and not model.bias else "llama"]
    names = {("learned", "layernorm", "gelu"): "gpt2", ("rotary", "layernorm", "gelu"): "starcoder2"}
    return FAMILIES[names[kind]] if kind in names else None


def _gpt2_misfits(model: ModelConfig) -> Iterator[str]:
    if not model.bias:
        yield "it has biases everywhere"
    if model.num_kv_heads != model.num_heads:
        yield f"it has as many kv heads as heads, not {model.num_kv_heads} of {model.num_heads}"
    if model.num_heads * model.head_dim != model.hidden_size:
        size = model.num_heads * model.head_dim
        yield f"its heads together are as wide as the model, not {size} of {model.hidden_size}"
    yield from _no_qk_norm(model)


def _starcoder2_misfits(model: ModelConfig) -> Iterator[str]:
    if model.qkv_bias and not model.bias:
        yield "it has biases everywhere or nowhere"
    yield from _no_qk_norm(model)


def _qwen3_misfits(model: ModelConfig) -> Iterator[str]:
    if model.bias or model.qkv_bias:
        yield "it has no biases"


def _no_qk_norm(model: ModelConfig) -> Iterator[str]:
    if model.qk_norm:
        yield "it has no norms of q and k"


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_position_embeddings,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
    }


def _rotary(model: ModelConfig) -> dict[str, Any]:
    """What all families with rotary positions have in common."""
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope_theta,
        **({"rope_scaling": model.rope_scaling.to_json()} if model.rope_scaling else {}),
        "attention_dropout": model.attention_dropout,
    }


def _rms(model: ModelConfig) -> dict[str, Any]:
    return {**_rotary(model), "hidden_act": "silu", "rms_norm_eps": model.norm_eps}


def _llama(model: ModelConfig) -> dict[str, Any]:
    return {**_rms(model), "attention_bias": model.bias, "mlp_bias": model.bias}


def _qwen2(model: ModelConfig) -> dict[str, Any]:
    return {**_rms(model), "use_sliding_window": False}


def _qwen3(model: ModelConfig) -> dict[str, Any]:
    return {**_qwen2(model), "attention_bias": False}


def _starcoder2(model: ModelConfig) -> dict[str, Any]:
    return {
        **_rotary(model),
        "hidden_act": "gelu_pytorch_tanh" if model.activation == "gelu_tanh" else "gelu",
        "norm_epsilon": model.norm_eps,
        "use_bias": model.bias,
        "residual_dropout": model.dropout,
        "embedding_dropout": model.dropout,
        "sliding_window": None,
    }


FAMILIES = {
    family.model_type: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", "transformer.", _gpt2, _gpt2_misfits),
        Family("llama", "LlamaForCausalLM", "model.", _llama),
        Family("qwen2", "Qwen2ForCausalLM", "model.", _qwen2),
        Family("qwen3", "Qwen3ForCausalLM", "model.", _qwen3, _qwen3_misfits),
        Family("starcoder2", "Starcoder2ForCausalLM", "model.", _starcoder2, _starcoder2_misfits),
    )
}
