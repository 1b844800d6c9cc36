"""The pipelined assembly: the layer list cut into stages that the job has already decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology

from pipeline.model.gpt import TIED_KEY, LayerPlan


class StagedGPT(PipelineModule):
    """A `PipelineModule` whose stage boundaries are given, not searched for by building every layer."""

    def __init__(self, plans: Sequence[LayerPlan], boundaries: Sequence[int], **arguments: Any) -> None:
        self.parts = list(boundaries)
        super().__init__(layers=[_layer_spec(plan) for plan in plans], **arguments)

    def _partition_layers(self, method: str = "given") -> None:
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


class StagedDualPipeVGPT(DualPipeVModule, StagedGPT):
    """The same for DualPipeV, whose ranks hold chunk r and chunk 2 * stages - 1 - r."""


def _layer_spec(plan: LayerPlan) -> LayerSpec:
    if plan.tied:
        return TiedLayerSpec(TIED_KEY, plan.module, *plan.arguments, tied_weight_attr="weight")
    return LayerSpec(plan.module, *plan.arguments)


def build_pipelined(
    plans: Sequence[LayerPlan],
    boundaries: Sequence[int],
    schedule: str,
    topology: ProcessTopology,
    loss_fn: Any,
) -> PipelineModule:
    """The stages of this rank, for the schedule ``1f1b`` or ``dualpipev``."""
    kind = StagedDualPipeVGPT if schedule == "dualpipev" else StagedGPT
    return kind(plans, boundaries, topology=topology, loss_fn=loss_fn)
