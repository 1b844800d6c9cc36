"""GPT as one list of layers with two assemblies: sequential (one stage) and pipelined.

Both give every parameter the same name, the one `PipelineModule` would give it: ``tied_modules.embed.weight``
for the shared table, ``<index in the list>.<name>`` for all others.

What tensor ranks divide, and along which dimension; each layer declares it where it makes the parameter:

    parameter               whole shape                          dim    a tensor rank holds
    embed.weight            [vocabulary, hidden]                 0      a range of tokens
    attention.qkv.weight    [(heads + 2 kv heads) * d, hidden]   0      whole groups of heads
    attention.qkv.bias      [(heads + 2 kv heads) * d]           0      the same rows
    attention.out.weight    [hidden, heads * d]                  1      the columns of its heads
    mlp.up.weight           [ffn, hidden], SwiGLU: [2 ffn, ..]   0      a range of inner units
    mlp.up.bias             [ffn], SwiGLU: [2 ffn]               0      the same rows
    mlp.down.weight         [hidden, ffn]                        1      the columns of its inner units
    all others              biases of out and down, norms,       none   everything
                            learned positions
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.model.config import ModelConfig
from pipeline.model.layers import Block, Positions
from pipeline.model.modules import norm_class
from pipeline.model.rotary import Rotary
from pipeline.parallel.context import Parallel
from pipeline.parallel.documents import PassDocuments
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import ParameterFactory, Slicing, slicing_of
from pipeline.parallel.tensor import VocabularyEmbedding

TIED_KEY = "embed"


@dataclass(frozen=True)
class LayerPlan:
    """One entry of the layer list, not built yet: ``module(*arguments)`` builds it.

    `tied` entries share one module, built once on each stage that holds one of them.
    """

    module: type[nn.Module]
    arguments: tuple[Any, ...]
    tied: bool = False


def plan_layers(
    config: ModelConfig,
    factory: ParameterFactory,
    clock: DropoutClock,
    recompute: str,
    pass_documents: PassDocuments | None = None,
) -> list[LayerPlan]:
    """The layer list of a GPT: embedding, positions, `num_layers` blocks, final norm, output layer.

    `pass_documents` says where documents lie in each micro-batch; without it attention sees whole rows.
    """
    pass_documents = pass_documents or PassDocuments()

    def table(name: str) -> LayerPlan:
        make = factory.under("tied_modules").under(TIED_KEY) if config.tied else factory.under(name)
        arguments = (make, config.padded_vocab_size, config.hidden_size, config.init_std)
        return LayerPlan(VocabularyEmbedding, arguments, tied=config.tied)

    last = config.num_layers + 3
    rotary = Rotary(config) if config.position == "rotary" else None
    blocks = [
        LayerPlan(Block, (config, factory.under(str(2 + i)), clock, pass_documents, rotary, i, recompute))
        for i in range(config.num_layers)
    ]
    return [
        table("0"),
        LayerPlan(Positions, (config, factory.under("1"), clock, pass_documents)),
        *blocks,
        LayerPlan(norm_class(config), (factory.under(str(last - 1)), config.hidden_size, config.norm_eps)),
        table(str(last)),
    ]


class SequentialGPT(nn.Module):
    """All layers on one stage: token ids [b, t / n] -> logits [b, t / n, padded vocabulary / tensor].

    With ``ParameterFactory(seed, Parallel.single())`` it is a plain module on one device.
    """

    def __init__(self, plans: list[LayerPlan]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self._order: list[str] = []
        for index, plan in enumerate(plans):
            if plan.tied and TIED_KEY not in self.tied_modules:
                self.tied_modules[TIED_KEY] = plan.module(*plan.arguments)
            elif not plan.tied:
                self.add_module(str(index), plan.module(*plan.arguments))
            self._order.append(f"tied_modules.{TIED_KEY}" if plan.tied else str(index))

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for name in self._order:
            x = self.get_submodule(name)(x)
        return x


class OutlineFactory(ParameterFactory):
    """Makes parameters that take no memory, with the slicing that they would have on several tensor ranks."""

    def _make(
        self, name: str, shape: tuple[int, ...], dim: int | None, draw: Callable[[], np.ndarray]
    ) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(shape, device="meta"))
        parameter.slicing = Slicing(shape, dim)  # type: ignore[attr-defined]
        return parameter


def outline(config: ModelConfig) -> SequentialGPT:
    """The whole model, whose parameters take no memory."""
    factory = OutlineFactory(seed=0, parallel=Parallel.single())
    return SequentialGPT(plan_layers(config, factory, DropoutClock(0, 1), "none"))


def parameter_slicings(config: ModelConfig) -> dict[str, Slicing]:
    """Of each parameter of a model its full shape and the dimension that tensor ranks divide, by name.

    This is the one rule for a parameter, also where a checkpoint is converted. It comes from the class of the
    layer that makes the parameter; there are no patterns of names to keep.
    """
    return {name: slicing_of(parameter) for name, parameter in outline(config).named_parameters()}
