"""From a job to an engine: model, optimizer, DeepSpeed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import nn

from pipeline.engine.deepspeed_patches import (
    GivenDualPipeVStages,
    GivenStages,
    skip_recovery_script,
    time_stages_once,
    with_own_16_bit_optimizer,
)
from pipeline.engine.engine import PipelinedEngine, SequentialEngine, TrainEngine
from pipeline.engine.loss import token_loss
from pipeline.engine.optimizer import build_optimizer
from pipeline.job.job import Job
from pipeline.model.gpt import TIED_KEY, LayerPlan, SequentialGPT, plan_layers
from pipeline.parallel.context import Parallel
from pipeline.parallel.documents import PassDocuments
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import ParameterFactory, Source, mark_counted_once


def build_engine(job: Job, parallel: Parallel, weights: Source | None = None) -> TrainEngine:
    """Build this rank's part of the model and hand it to DeepSpeed. Collective.

    The order in which parallelism is applied:

    1. tensor: the factory slices each parameter as it is made, so that no rank keeps more than its slice.
    2. sequence, activation checkpointing: the layers themselves exchange and recompute; they are planned here
       and not built, because
    3. pipeline: a stage builds the layers it holds and no others.
    4. ZeRO 3: partitions each parameter as soon as its layer is built, before there is a whole model.
    5. The optimizer: over what is left on this rank, since DeepSpeed replaces its parameters by shards.
    6. data: DeepSpeed wraps both, for ZeRO, 16-bit weights and the reduction of gradients over replicas.

    Args:
        weights: Gives the initial weights; None: they are drawn.
    """
    clock = DropoutClock(job.seed, job.batch.micro_batch_size)
    factory = ParameterFactory(job.seed, parallel, source=weights)
    pass_documents = PassDocuments()
    plans = plan_layers(job.model, factory, clock, job.activation_checkpointing, pass_documents)
    topology = _topology(parallel)
    if parallel.mesh.pipeline > 1:
        engine = _initialize(job, parallel, _stages(job, parallel, plans, topology), None)
        return PipelinedEngine(job, parallel, engine, clock, pass_documents)
    grid = PipelineParallelGrid(topology=topology)
    with _partitioned_construction(job, grid):
        module = SequentialGPT(plans)
    return SequentialEngine(job, parallel, _initialize(job, parallel, module, grid), clock, pass_documents)


def _stages(
    job: Job, parallel: Parallel, plans: Sequence[LayerPlan], topology: PipeModelDataParallelTopology
) -> GivenStages:
    """This rank's stage, or its two chunks of DualPipeV."""
    kind = GivenDualPipeVStages if job.pipeline_schedule == "dualpipev" else GivenStages
    layers = [_layer_spec(plan) for plan in plans]
    # Tied weights are sent from stage to stage here, which autograd would take for a part of the model.
    with torch.no_grad():
        return kind(layers, job.stages, topology=topology, loss_fn=token_loss(job.model, parallel))


def _layer_spec(plan: LayerPlan) -> LayerSpec:
    if plan.tied:
        return TiedLayerSpec(TIED_KEY, plan.module, *plan.arguments, tied_weight_attr="weight")
    return LayerSpec(plan.module, *plan.arguments)


def _topology(parallel: Parallel) -> PipeModelDataParallelTopology:
    """DeepSpeed's three axes. Its data axis holds data x sequence; ranks are numbered as in `Mesh`."""
    mesh = parallel.mesh
    return PipeModelDataParallelTopology(num_pp=mesh.pipeline, num_mp=mesh.tensor, num_dp=mesh.replicas)


def _partitioned_construction(job: Job, grid: PipelineParallelGrid) -> contextlib.AbstractContextManager[Any]:
    """Under ZeRO-3 each parameter is partitioned as soon as its module is built, so that no rank ever holds
    the whole model."""
    if job.zero_stage < 3:
        return contextlib.nullcontext()
    return deepspeed.zero.Init(
        config_dict_or_path=job.deepspeed,
        mpu=grid,
        data_parallel_group=grid.get_data_parallel_group(),
        mem_efficient_linear=False,
    )


def _initialize(job: Job, parallel: Parallel, module: nn.Module, grid: PipelineParallelGrid | None) -> Any:
    mark_counted_once(module, parallel)
    optimizer = build_optimizer(job.optimizer, module)
    # The loop sets the rate before each step. Without ZeRO, DeepSpeed's 16-bit optimizers take a step on zero
    # gradients to allocate their state; at rate 0 it moves no weight, and what it counted is forgotten.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    with with_own_16_bit_optimizer():
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=job.deepspeed, mpu=grid, dist_init_required=False
        )
    if job.zero_stage == 0:
        optimizer.state.clear()
    skip_recovery_script(engine)
    if job.mesh.pipeline > 1:
        time_stages_once(engine)
    return engine
