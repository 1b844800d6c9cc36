"""Each parameter has one rule for its slicing, and it is the one that its layer applies."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.model import gpt
from pipeline.model.config import ModelConfig
from pipeline.model.counts import total_parameters
from pipeline.model.gpt import SequentialGPT, outline, parameter_slicings, plan_layers
from pipeline.parallel.context import Parallel
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.mesh import Coordinates, Mesh
from pipeline.parallel.parameters import ParameterFactory, slicing_of
from tests.parity.cases import MODELS


def built(config: ModelConfig, tensor: int, rank: int) -> SequentialGPT:
    """The model of one of `tensor` ranks; no process group is needed to build it."""
    parallel = Parallel(Mesh(tensor=tensor), Coordinates(0, 0, 0, rank))
    return SequentialGPT(plan_layers(config, ParameterFactory(7, parallel), DropoutClock(7, 1), "none"))


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_cut_as_their_rule_says(model: str):
    """By values, not by what the layers say of themselves: the parts of two ranks, put together along the
    rule's dimension, are the whole; without a dimension both are."""
    whole = dict(built(MODELS[model], 1, 0).named_parameters())
    parts = [dict(built(MODELS[model], 2, rank).named_parameters()) for rank in range(2)]
    slicings = parameter_slicings(MODELS[model])
    assert slicings.keys() == whole.keys() == parts[0].keys() == parts[1].keys()
    for name, (shape, dim) in slicings.items():
        first, second = (part[name] for part in parts)
        assert shape == whole[name].shape
        if dim is None:
            assert torch.equal(first, whole[name])
            assert torch.equal(second, whole[name])
        else:
            assert torch.equal(torch.cat([first, second], dim), whole[name])


@pytest.mark.parametrize("model", MODELS)
def test_each_parameter_is_made_by_one_rule(model: str, monkeypatch: pytest.MonkeyPatch):
    """Every parameter comes from a factory, once; none has a rule from elsewhere."""
    made: Counter[int] = Counter()
    keep: list[nn.Parameter] = []  # so that no two have the same id
    make = ParameterFactory._make

    def counting(factory: ParameterFactory, *arguments: Any) -> nn.Parameter:
        keep.append(make(factory, *arguments))
        made[id(keep[-1])] += 1
        return keep[-1]

    monkeypatch.setattr(ParameterFactory, "_make", counting)
    module = built(MODELS[model], 2, 0)
    assert made == Counter(id(parameter) for parameter in module.parameters())


@pytest.mark.parametrize("model", MODELS)
def test_an_outline_is_the_whole_model_and_takes_no_memory(model: str):
    parameters = list(outline(MODELS[model]).parameters())
    assert all(parameter.is_meta for parameter in parameters)
    assert sum(parameter.numel() for parameter in parameters) == total_parameters(MODELS[model], padded=True)


@pytest.mark.parametrize("model", MODELS)
def test_the_table_in_the_docstring_says_how_each_parameter_is_cut(model: str):
    rows = re.findall(r"^    (\w+\.\S+) .*?  +(\d) ", gpt.__doc__ or "", re.MULTILINE)
    table = {name: int(dim) for name, dim in rows}
    assert len(table) == 7
    config = MODELS[model]
    tables = () if config.tied else ("0", str(config.num_layers + 3))
    for name, (_, dim) in parameter_slicings(config).items():
        index, _, own = name.partition(".")
        own = "embed.weight" if index in tables else own
        assert dim == table.get(own), name


def test_a_parameter_without_a_rule_is_an_error():
    with pytest.raises(AttributeError, match="slicing"):
        slicing_of(nn.Parameter(torch.zeros(2)))
