"""GPT as one list of layers with two assemblies: sequential (one stage) and pipelined.

Both give every parameter the same name, the one `PipelineModule` would give it: ``tied_modules.embed.weight``
for the shared table, ``<index in the list>.<name>`` for all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeline.model.config import ModelConfig
from pipeline.model.layers import Block, Positions
from pipeline.model.norm import norm_class
from pipeline.model.rotary import Rotary
from pipeline.parallel.documents import DocumentBoard
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import ParameterFactory
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
    board: DocumentBoard | None = None,
) -> list[LayerPlan]:
    """The layer list of a GPT: embedding, positions, `num_layers` blocks, final norm, output layer.

    `board` says where documents lie in each micro-batch; without it attention always sees whole rows.
    """
    board = board or DocumentBoard()

    def table(name: str) -> LayerPlan:
        make = factory.under("tied_modules").under(TIED_KEY) if config.tied else factory.under(name)
        arguments = (make, config.padded_vocab_size, config.hidden_size, config.init_std)
        return LayerPlan(VocabularyEmbedding, arguments, tied=config.tied)

    last = config.num_layers + 3
    rotary = Rotary(config.head_dim, config.rope_theta) if config.position == "rotary" else None
    blocks = [
        LayerPlan(Block, (config, factory.under(str(2 + i)), clock, board, rotary, i, recompute))
        for i in range(config.num_layers)
    ]
    return [
        table("0"),
        LayerPlan(Positions, (config, factory.under("1"), clock, board)),
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
