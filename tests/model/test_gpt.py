"""The assembled model: names, initial weights, first loss, causality."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from pipeline.job.models import PRESETS
from pipeline.model.config import ModelConfig
from pipeline.model.counts import layer_parameters
from pipeline.model.gpt import SequentialGPT, plan_layers
from pipeline.parallel.context import Parallel
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parameters import ParameterFactory, slicing_of
from tests.parity.cases import MODELS


def build(config: ModelConfig, parallel: Parallel | None = None, seed: int = 1234) -> SequentialGPT:
    factory = ParameterFactory(seed, parallel or Parallel.single())
    return SequentialGPT(plan_layers(config, factory, DropoutClock(seed, 2), "none"))


def small(name: str) -> ModelConfig:
    """A preset with its options and initialisation, in a size that a test can afford."""
    model = PRESETS[name].model
    per_group = model.num_heads // model.num_kv_heads
    return replace(
        model,
        vocab_size=1000,
        hidden_size=128,
        num_layers=4,
        num_heads=2 * per_group,
        num_kv_heads=2,
        head_dim=8,
        ffn_hidden_size=256,
        max_position_embeddings=64,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_the_first_loss_is_that_of_a_guess(name: str):
    config = small(name)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(config.vocab_size, (2, 4, 64), generator=generator)
    with torch.no_grad():
        logits = build(config)(tokens)[..., : config.vocab_size]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert loss == pytest.approx(math.log(config.vocab_size), rel=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_a_token_depends_on_itself_and_all_earlier_ones_only(name: str):
    model = build(MODELS[name]).eval()
    tokens = torch.randint(257, (1, 12), generator=torch.Generator().manual_seed(3))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 257
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:7].max() == 0.0
    assert difference[7:].min() > 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_the_partition_counts(name: str):
    """Per entry of the layer list; a tied table counts at the first of its places."""
    config = MODELS[name]
    counted = {str(index): layer.parameters for index, layer in enumerate(layer_parameters(config))}
    found: dict[str, int] = dict.fromkeys(counted, 0)
    for parameter_name, parameter in build(config).named_parameters():
        prefix = parameter_name.split(".")[0]
        found["0" if prefix == "tied_modules" else prefix] += parameter.numel()
    assert found == counted


# First values of a few parameters, drawn once and written down: a run of today and one of next year with the
# same seed begin with the same weights.
PINNED = {
    "tied_modules.embed.weight": [-0.009284, 0.006389, -0.141123],
    "1.weight": [-0.017697, 0.057183, 0.08507],
    "2.attention.qkv.weight": [0.220027, 0.031255, 0.078572],
    "4.mlp.down.weight": [0.006968, 0.012061, 0.037659],
}


def test_initial_weights_are_stable():
    named = dict(build(MODELS["gpt"]).named_parameters())
    found = {name: [round(x, 6) for x in named[name].flatten()[:3].tolist()] for name in PINNED}
    assert found == PINNED


def test_initial_weights_depend_on_seed_and_name_and_nothing_else():
    named = dict(build(MODELS["gpt"]).named_parameters())
    again = dict(build(MODELS["seven layers"]).named_parameters())
    other = dict(build(MODELS["gpt"], seed=1235).named_parameters())
    assert torch.equal(named["2.attention.qkv.weight"], again["2.attention.qkv.weight"])
    assert not torch.equal(named["2.attention.qkv.weight"], named["3.attention.qkv.weight"])
    assert not torch.equal(named["2.attention.qkv.weight"], other["2.attention.qkv.weight"])


def test_initial_spread():
    """init_std everywhere, divided by sqrt(2 * layers) where a branch meets the residual stream."""
    named = dict(build(MODELS["gpt"]).named_parameters())
    for name, parameter in named.items():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name or name == "5.weight":
            assert (parameter == 1).all()
        else:
            branch = "attention.out" in name or "mlp.down" in name
            std = 0.1 / math.sqrt(2 * 3) if branch else 0.1
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name


@pytest.mark.parametrize("name", ["gpt", "qk norm"])
def test_slices_of_tensor_ranks_make_up_the_whole(name: str):
    whole = dict(build(MODELS[name]).named_parameters())
    mesh = Mesh(tensor=2)
    parts = [
        dict(build(MODELS[name], Parallel(mesh, mesh.coordinates(r))).named_parameters()) for r in (0, 1)
    ]
    dims = set()
    for key, parameter in whole.items():
        slices = [part[key] for part in parts]
        dim = slicing_of(slices[0]).dim
        dims.add(dim)
        assert slicing_of(slices[0]).full_shape == tuple(parameter.shape)
        joined = slices[0] if dim is None else torch.cat(slices, dim)
        assert torch.equal(joined, parameter)
        assert dim is not None or torch.equal(*slices)
    assert dims == {None, 0, 1}
