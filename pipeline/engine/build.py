"""From a job to an engine: model, optimizer, DeepSpeed."""

from __future__ import annotations

import contextlib
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import nn

from pipeline.engine.engine import PipelinedEngine, SequentialEngine, TrainEngine
from pipeline.engine.loss import token_loss
from pipeline.engine.optimizer import build_optimizer
from pipeline.job.job import Job
from pipeline.model.gpt import SequentialGPT, plan_layers
from pipeline.model.pipelined import build_pipelined
from pipeline.parallel.context import Parallel
from pipeline.parallel.documents import DocumentBoard
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import ParameterFactory, Source, mark_counted_once


def build_engine(job: Job, parallel: Parallel, weights: Source | None = None) -> TrainEngine:
    """Build this rank's part of the model and hand it to DeepSpeed. Collective.

    Args:
        weights: Gives the initial weights; None: they are drawn.
    """
    clock = DropoutClock(job.options.seed, job.batch.micro_batch_size)
    factory = ParameterFactory(job.options.seed, parallel, source=weights)
    board = DocumentBoard()
    plans = plan_layers(job.model, factory, clock, job.activation_checkpointing, board)
    topology = _topology(parallel)
    if parallel.mesh.pipeline > 1:
        loss = token_loss(job.model, parallel)
        # Tied weights are sent from stage to stage here, which autograd would take for a part of the model.
        with torch.no_grad():
            module: nn.Module = build_pipelined(plans, job.stages, job.pipeline_schedule, topology, loss)
        return PipelinedEngine(job, parallel, _initialize(job, parallel, module, None), clock, board)
    grid = PipelineParallelGrid(topology=topology)
    with _partitioned_construction(job, grid):
        module = SequentialGPT(plans)
    return SequentialEngine(job, parallel, _initialize(job, parallel, module, grid), clock, board)


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
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=job.deepspeed, mpu=grid, dist_init_required=False
    )
    if job.zero_stage == 0:
        optimizer.state.clear()
    # The script it puts beside checkpoints merges ZeRO shards only, not pipeline stages or tensor slices.
    engine._copy_recovery_script = lambda save_path: None
    return engine
