"""Names, shapes and the order of rows: ours are those of the layers, theirs those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.base.problems import JobError
from pipeline.engine.folder_weights import FolderWeights
from pipeline.hugging_face.config import KINDS as READ_KINDS
from pipeline.hugging_face.config import model_from_hugging_face
from pipeline.hugging_face.families import FAMILIES, config_json, family_of
from pipeline.hugging_face.tensor_map import tensor_map
from pipeline.job.initial_weights import wanted_tensors
from pipeline.job.models import PRESETS, load_model
from pipeline.model.config import ModelConfig
from pipeline.model.gpt import SequentialGPT, plan_layers
from pipeline.parallel.context import Parallel
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import ParameterFactory, Slicing, Source
from tests.hugging_face.folders import write_folder
from tests.model.hugging_face import KINDS, build, in_our_layout

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_layers": 2,
    "head_dim": 8,
    "ffn_hidden_size": 48,
    "max_position_embeddings": 16,
}


def model(config: ModelConfig, source: Source | None = None) -> SequentialGPT:
    factory = ParameterFactory(0, Parallel.single(), source=source)
    return SequentialGPT(plan_layers(config, factory, DropoutClock(0, 1), "none"))


def small(name: str) -> ModelConfig:
    """A preset's kind of model."""
    preset = PRESETS[name].model
    grouped = preset.num_kv_heads < preset.num_heads
    return replace(preset, **SMALL, num_heads=4, num_kv_heads=2 if grouped else 4)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_model_of_transformers(name: str):
    """Its small version has the same parameters here, in the map, and in the class that config.json names."""
    config = small(name)
    ours = {key: tuple(value.shape) for key, value in model(config).named_parameters()}
    assert {entry.name: entry.shape for entry in tensor_map(config)} == ours
    described = config_json(config, "float32", 256)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described))
    assert described["architectures"] == [type(theirs).__name__]
    assert wanted_tensors(config) == {key: tuple(value.shape) for key, value in theirs.named_parameters()}
    assert theirs.config.tie_word_embeddings == config.tied


@pytest.mark.parametrize("name", PRESETS)
def test_a_written_config_is_read_as_the_same_model(name: str):
    """But for the rate of residual dropout, which Llama and Qwen do not have."""
    for config in (PRESETS[name].model, replace(PRESETS[name].model, tied=not PRESETS[name].model.tied)):
        read = model_from_hugging_face(config_json(config, "float32", 0), "file")
        biases = {"qkv_bias": config.bias or config.qkv_bias}
        assert replace(read, **biases) == replace(config, name="file", **biases)
        assert family_of(read) == family_of(config)


def test_every_kind_that_is_read_is_written():
    assert set(READ_KINDS) == set(FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_weights_of_an_independent_conversion(kind: str, tmp_path: Path):
    config = load_model(str(write_folder(tmp_path, kind)), "cpu")
    found = dict(model(config, FolderWeights(tmp_path, config)).named_parameters())
    expected = in_our_layout(dict(build(kind).named_parameters()), config, padding=0.0)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_parts_make_up_the_whole(kind: str, tmp_path: Path):
    weights = FolderWeights(write_folder(tmp_path, kind), load_model(str(tmp_path), "cpu"))
    for entry in tensor_map(load_model(str(tmp_path), "cpu")):
        whole = weights.part(entry.name, Slicing(entry.shape, None), 1, 0)
        for dim in range(len(entry.shape)):
            if entry.shape[dim] % 2 == 0 and (dim == 1 or len(entry.order) % 4 == 0):
                parts = [weights.part(entry.name, Slicing(entry.shape, dim), 2, index) for index in (0, 1)]
                assert torch.equal(torch.cat(parts, dim), whole), (entry.name, dim)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_block_keep_their_order(kind: str, tmp_path: Path):
    """So that a part of ours is one range of each block of theirs, and can be read by slices."""
    build(kind).config.save_pretrained(tmp_path)
    for entry in tensor_map(load_model(str(tmp_path), "cpu")):
        begin = 0
        for block in entry.blocks:
            own = entry.order[(entry.order >= begin) & (entry.order < begin + block.rows)] - begin
            assert np.array_equal(own, np.arange(block.rows)), entry
            begin += block.rows


REFUSED = {
    "positions": ({"norm": "rmsnorm"}, "gpt2-124m", "learned positions, rmsnorm and gelu_tanh at once"),
    "norm": ({"norm": "layernorm"}, "llama3-8b", "rotary positions, layernorm and swiglu at once"),
    "biases": ({"bias": False}, "gpt2-124m", "is not a GPT2LMHeadModel, the nearest class"),
    "kv heads": ({"num_kv_heads": 4}, "gpt2-124m", "as many kv heads as heads, not 4 of 12"),
    "width": ({"head_dim": 32}, "gpt2-124m", "as wide as the model, not 384 of 768"),
    "norms of q and k": ({"qk_norm": True}, "tiny", "it has no norms of q and k"),
    "biases of qwen3": ({"qk_norm": True}, "qwen2-7b", "it has no biases"),
    "some biases": ({"bias": False}, "tiny", "it has biases everywhere or nowhere"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_models_are_refused_with_the_reason(case: str):
    change, preset, text = REFUSED[case]
    with pytest.raises(JobError) as caught:
        family_of(replace(PRESETS[preset].model, **change))
    assert text in str(caught.value)
