"""Models by name and from files: what is built, what is refused, and by which name."""

import contextlib
import json
from dataclasses import replace

import pytest

from pipeline.base.problems import JobError
from pipeline.hugging_face.families import config_json
from pipeline.job.models import PRESETS, load_model
from pipeline.model.config import ModelConfig, model_from_json
from pipeline.model.counts import total_parameters

# As published with the weights, to the letter where it matters.
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA31 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


@pytest.fixture
def load(tmp_path):
    def load_values(values):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return load_model(str(path), "cpu")

    return load_values


def _refusals(load, values):
    with pytest.raises(JobError) as caught:
        load(values)
    return {problem.key.rpartition(": ")[2]: str(problem) for problem in caught.value.problems}


def test_presets_by_name_and_auto_by_device():
    assert load_model("llama3-8b", "cuda") is PRESETS["llama3-8b"].model
    assert load_model("auto", "cpu").name == "tiny"
    assert load_model("auto", "cuda").name == "gpt2-124m"


@pytest.mark.parametrize(
    ("values", "preset"), [(GPT2, "gpt2-124m"), (LLAMA3, "llama3-8b"), (QWEN2, "qwen2-7b")]
)
def test_published_files_describe_the_presets(load, values, preset):
    loaded = load(values)
    dropout = values.get("resid_pdrop", 0.0)
    expected = replace(
        PRESETS[preset].model,
        name=loaded.name,
        dropout=dropout,
        attention_dropout=dropout,
        qkv_bias=loaded.qkv_bias,
    )
    assert loaded == expected
    assert loaded.bias or loaded.qkv_bias == PRESETS[preset].model.qkv_bias


def test_a_folder_stands_for_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3))
    assert load_model(str(tmp_path), "cpu") == load_model(str(tmp_path / "config.json"), "cpu")


@pytest.mark.parametrize("kind", ["GPT2Config", "LlamaConfig", "Qwen2Config"])
@pytest.mark.parametrize("use_diff", [True, False])
def test_what_transformers_saves_is_read_with_its_defaults(load, kind, use_diff):
    import transformers

    config = getattr(transformers, kind)()
    saved = load(json.loads(config.to_json_string(use_diff=use_diff)))
    assert saved == load({"model_type": config.model_type})
    assert saved.hidden_size == config.hidden_size
    assert saved.num_kv_heads == getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert saved.tied == config.tie_word_embeddings
    assert saved.norm_eps == getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("GPT2Config", {"n_inner": 100}),
        ("GPT2Config", {"tie_word_embeddings": False}),
        ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
        ("LlamaConfig", {"num_key_value_heads": 2}),
        ("LlamaConfig", {"head_dim": 32, "tie_word_embeddings": True}),
        ("Qwen2Config", {"num_key_value_heads": 2}),
        ("Qwen2Config", {"num_key_value_heads": None, "tie_word_embeddings": True}),
    ],
)
def test_options_have_the_parameters_of_transformers_model(load, kind, changes):
    import torch
    import transformers

    sizes = {"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    if kind != "GPT2Config":
        sizes["intermediate_size"] = 96
    config = getattr(transformers, kind)(**sizes, **changes)
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config)
    assert total_parameters(load(json.loads(config.to_json_string()))) == reference.num_parameters()


@pytest.mark.parametrize(
    "given", [LLAMA31, {"factor": 4, "type": "yarn"}, {"type": "dynamic", "factor": 2.0, "beta_fast": None}]
)
def test_rescaled_positions_are_read_from_either_place_and_written_again(load, given):
    older = {**LLAMA3, "max_position_embeddings": 131072, "rope_scaling": given}
    current = {**older, "rope_scaling": None, "rope_parameters": {**given, "rope_theta": 5e5}}
    model = load(older)
    assert load(current) == model
    kind = {"rope_type": given.get("rope_type", given.get("type"))}
    kept = {key: value for key, value in given.items() if key != "type" and value is not None} | kind
    written = config_json(model, "float32", 0)
    assert (written["rope_scaling"], written["rope_theta"]) == (kept, 5e5)
    assert load(written) == model == model_from_json(model.to_json() | {"name": model.name})


def test_rotary_parameters_in_either_place(load):
    for extra in (
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_scaling": {"type": "default", "rope_theta": 5e5}},
    ):
        assert load({"model_type": "llama", **extra}).rope_theta == 5e5


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2 | {"activation_function": "relu"}, "activation_function"),
        (GPT2 | {"embd_pdrop": 0.2}, "embd_pdrop"),
        (GPT2 | {"n_embd": 770}, "n_embd"),
        (GPT2 | {"n_layer": 0}, "n_layer"),
        (GPT2 | {"vocab_size": -5}, "vocab_size"),
        (GPT2 | {"resid_pdrop": 1.0, "embd_pdrop": 1.0}, "dropout"),
        (GPT2 | {"rope_theta": 1e4}, "rope_theta"),
        (GPT2 | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA3 | {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "rope_scaling.rope_type"),
        (LLAMA3 | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
        (LLAMA3 | {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        (LLAMA3 | {"rope_scaling": {"type": "linear", "factor": 2, "alpha": 1}}, "rope_scaling.alpha"),
        (
            LLAMA3 | {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 8}},
            "rope_scaling.beta_fast",
        ),
        (LLAMA3 | {"rope_scaling": "yarn"}, "rope_scaling"),
        (LLAMA3 | {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta"),
        (
            LLAMA3 | {"rope_parameters": LLAMA31 | {"low_freq_factor": None}},
            "rope_parameters.low_freq_factor",
        ),
        (LLAMA3 | {"rope_scaling": LLAMA31 | {"low_freq_factor": 4}}, "rope_scaling.high_freq_factor"),
        (LLAMA3 | {"rope_parameters": {"rope_theta": "1e4"}}, "rope_parameters.rope_theta"),
        (
            LLAMA3 | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
        ),
        (LLAMA3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA3 | {"mlp_bias": True}, "mlp_bias"),
        (LLAMA3 | {"attention_bias": True}, "mlp_bias"),
        (LLAMA3 | {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA3 | {"num_key_value_heads": 5}, "num_kv_heads"),
        (LLAMA3 | {"head_dim": 33}, "head_dim"),
        (LLAMA3 | {"rms_norm_eps": 0}, "norm_eps"),
        (LLAMA3 | {"hidden_size": "4096"}, "hidden_size"),
        (LLAMA3 | {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        (LLAMA3 | {"logit_softcap": 30.0}, "logit_softcap"),
        (LLAMA3 | {"auto_map": {"AutoModel": "model.Own"}}, "auto_map"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 20}, "use_sliding_window"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 28}, "layer_types"),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name(load, values, field):
    assert list(_refusals(load, values)) == [field]


def test_a_sliding_window_that_acts_in_no_layer_is_accepted(load):
    on_but_unused = QWEN2 | {"use_sliding_window": True, "max_window_layers": 28}
    assert load(on_but_unused) == load(QWEN2 | {"layer_types": ["full_attention"] * 28})


def test_all_problems_of_a_file_come_together(load):
    wrong = LLAMA3 | {"mlp_bias": True, "hidden_act": "relu", "vocab_size": 0, "sliding_window": 4096}
    assert set(_refusals(load, wrong)) == {"mlp_bias", "hidden_act", "vocab_size", "sliding_window"}


def test_unknown_kinds_are_refused_with_the_choice(load):
    (text,) = _refusals(load, {"model_type": "mamba"}).values()
    assert "gpt2, llama, qwen2" in text
    (text,) = _refusals(load, {"hidden_size": 5}).values()
    assert "gpt2, llama, qwen2" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt2-124", "gpt2-124m"),
        ("lama3-8b", "llama3-8b"),
        ("models/none", "there is no such file or folder"),
        ("none.json", "there is no such file or folder"),
    ],
)
def test_unknown_names(name, text):
    with pytest.raises(JobError, match=text):
        load_model(name, "cpu")


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(JobError, match=r"the folder has no config\.json"):
        load_model(str(tmp_path), "cpu")


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "\xff", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": ' + "[" * 100_000]
)
def test_files_that_are_no_json_object(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(JobError, match=r"config\.json"):
        load_model(str(path), "cpu")


@pytest.mark.parametrize("value", [None, [], {}, 3, True, "x"])
@pytest.mark.parametrize("kind", [GPT2, LLAMA3, QWEN2], ids=["gpt2", "llama", "qwen2"])
def test_any_type_in_any_field_is_a_model_or_a_problem(load, kind, value):
    for field in (*kind, "rope_parameters", "layer_types", "num_hidden_layers", "pruned_heads"):
        with contextlib.suppress(JobError):
            load(kind | {"use_sliding_window": True} | {field: value})


def test_two_names_of_one_size_agree(load):
    assert load(GPT2 | {"hidden_size": 768}) == load(GPT2)
    assert list(_refusals(load, GPT2 | {"hidden_size": 64})) == ["hidden_size"]


@pytest.mark.parametrize("name", PRESETS)
def test_our_own_description_survives_json(name, load):
    model = PRESETS[name].model
    saved = json.loads(json.dumps(model.to_json()))
    assert model_from_json(saved) == model
    # From a file, the file is the name: a copy of a preset is not the preset.
    assert load(saved) == replace(model, name=load(saved).name)
    assert load(saved).name.endswith("config.json")


def test_our_own_description_is_read_strictly(load):
    saved = PRESETS["tiny"].model.to_json()
    wrong = saved | {"hiden_size": 3, "num_layers": 0.5, "position": "alibi", "tied": 1, "rope_theta": True}
    del wrong["vocab_size"]
    problems = _refusals(load, wrong)
    assert set(problems) == {"hiden_size", "num_layers", "position", "tied", "rope_theta", "vocab_size"}
    assert "hidden_size" in problems["hiden_size"]
    impossible = saved | {"num_heads": 0, "dropout": 1.5, "norm_eps": 0.0}
    assert set(_refusals(load, impossible)) == {"num_heads", "dropout", "norm_eps"}
    assert set(_refusals(load, saved | {"num_kv_heads": 3})) == {"num_kv_heads"}


def test_whole_numbers_serve_as_rates():
    assert isinstance(model_from_json(PRESETS["tiny"].model.to_json() | {"rope_theta": 10000}), ModelConfig)
