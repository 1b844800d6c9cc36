"""The parameters of a model without their values: name, shape and cut, as the layer classes declare them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from pipeline.model.config import ModelConfig
from pipeline.model.gpt import SequentialGPT, plan_layers
from pipeline.parallel.context import Parallel
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import Cut, ParameterFactory, cut_of


class OutlineFactory(ParameterFactory):
    """Makes parameters that take no memory, with the cut that they would have on several tensor ranks."""

    def _make(
        self, name: str, shape: tuple[int, ...], dim: int | None, draw: Callable[[], np.ndarray]
    ) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(shape, device="meta"))
        parameter.cut = Cut(shape, dim)  # type: ignore[attr-defined]
        return parameter


def outline(config: ModelConfig) -> SequentialGPT:
    """The whole model, whose parameters take no memory."""
    factory = OutlineFactory(seed=0, parallel=Parallel.single())
    return SequentialGPT(plan_layers(config, factory, DropoutClock(0, 1), "none"))


def parameter_cuts(config: ModelConfig) -> dict[str, Cut]:
    """Of each parameter of a model its full shape and the dimension that tensor ranks divide, by name.

    This is the one rule for a parameter wherever a checkpoint is cut anew. It comes from the class of the
    layer that makes the parameter; there are no patterns of names to keep.
    """
    return {name: cut_of(parameter) for name, parameter in outline(config).named_parameters()}
