"""Ways to do the same training: plain PyTorch, PyTorch DDP, this pipeline, transformers' Trainer.

Each is ``contender(task, environment, clock)``, runs in processes of its own and ends by the clock. All
train the same sizes on the same samples with the same optimizer; all but the Trainer start from the same
weights, so that their losses must agree.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.setting import Setting
from benchmarks.trainer import train
from benchmarks.workers import Clock
from pipeline.checkpoints.manifest import TrainState
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.data.loader import BatchLoader, MicroBatch, read_step
from pipeline.engine.build import build_engine
from pipeline.engine.distributed import start_distributed
from pipeline.engine.engine import TrainEngine
from pipeline.engine.optimizer import build_optimizer
from pipeline.job.job import Job
from pipeline.model.counts import training_flops_per_token
from pipeline.model.gpt import SequentialGPT, plan_layers
from pipeline.parallel.context import Parallel
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import ParameterFactory
from pipeline.training.loop import Loop
from pipeline.training.metrics import EvalMetrics, StepMetrics
from pipeline.training.quiet import captured_stdout
from pipeline.training.throughput import Speedometer

TIMEOUT = timedelta(minutes=10)
ENDLESS = 10**9  # steps; the clock ends a loop


@dataclass(frozen=True)
class Task:
    """A setting, and how this contender is to do it.

    Attributes:
        recipe: File in ds_configs, for the pipeline; the others take sizes and optimizer from it.
        changes: Of its keys.
    """

    setting: Setting
    recipe: str = "zero0"
    changes: tuple[tuple[str, Any], ...] = ()

    def job(self, world_size: int) -> Job:
        """The job, resolved.

        Raises:
            JobError: the setting cannot run like this.
        """
        return self.setting.job(self.recipe, world_size, dict(self.changes))


def plain(task: Task, environment: RankEnvironment, clock: Clock) -> None:
    """A loop as one would write it without any library around PyTorch."""
    job = task.job(1)
    device = torch.device(task.setting.device)
    _torch_loop(task, job, _model(job).to(device), environment, clock)


def ddp(task: Task, environment: RankEnvironment, clock: Clock) -> None:
    """The same loop with `DistributedDataParallel`."""
    job = task.job(environment.world_size)
    cuda = task.setting.device == "cuda"
    device = torch.device("cuda", environment.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    module = nn.parallel.DistributedDataParallel(
        _model(job).to(device), device_ids=[device] if cuda else None, gradient_as_bucket_view=True
    )
    _torch_loop(task, job, module, environment, clock)


def _model(job: Job) -> SequentialGPT:
    factory = ParameterFactory(job.seed, Parallel.single())
    clock = DropoutClock(job.seed, job.batch.micro_batch_size)
    return SequentialGPT(plan_layers(job.model, factory, clock, job.activation_checkpointing))


def _torch_loop(task: Task, job: Job, module: nn.Module, environment: RankEnvironment, clock: Clock) -> None:
    data = task.setting.load_data(job).train
    optimizer = build_optimizer(job.optimizer, module)
    device = next(module.parameters()).device
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=job.precision.compute == "bf16")
    count = job.batch.accumulation_steps
    clock.begin()
    for step in range(ENDLESS):
        first = step * job.batch.train_batch_size
        share = read_step(data, job.batch, environment.rank, environment.world_size, first)
        total = torch.zeros((), device=device)
        for index, micro_batch in enumerate(share.micro_batches):
            batch = micro_batch.to(device)
            # DDP reduces in the last micro-batch's backward pass only.
            waits = index + 1 < count and isinstance(module, nn.parallel.DistributedDataParallel)
            with module.no_sync() if waits else contextlib.nullcontext():
                with bf16:
                    logits = module(batch.tokens)
                loss = _loss(logits, batch, job.model.vocab_size) / count
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(module.parameters(), job.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if environment.world_size > 1:
            dist.all_reduce(total)
        clock.step_done(total / environment.world_size)


def _loss(logits: torch.Tensor, batch: MicroBatch, vocabulary: int) -> torch.Tensor:
    """Training samples are never padded, so that every label counts."""
    return functional.cross_entropy(logits[..., :vocabulary].float().flatten(0, 1), batch.labels.flatten())


def start_engine(job: Job, environment: RankEnvironment) -> tuple[Parallel, TrainEngine]:
    """The pipeline's engine, as `pipeline.training.run` builds it."""
    start_distributed(job.world.device, environment.local_rank, TIMEOUT)
    parallel = Parallel.create(job.mesh, TIMEOUT)
    with captured_stdout():
        return parallel, build_engine(job, parallel)


def this_pipeline(task: Task, environment: RankEnvironment, clock: Clock) -> None:
    """The pipeline's own loop, with all it does in each step; it writes no files."""
    job = replace(task.job(environment.world_size), train_steps=ENDLESS, eval_interval=0)
    data = task.setting.load_data(job).train
    parallel, engine = start_engine(job, environment)
    mesh = parallel.mesh
    with BatchLoader(data, job.batch, parallel.coordinates.data, mesh.data) as loader:
        loop = Loop(
            job=job,
            parallel=parallel,
            engine=engine,
            loader=loader,
            eval_sets=(),
            sinks=(_ToClock(clock),),
            speedometer=Speedometer(
                tokens_per_step=job.batch.tokens_per_step,
                flops_per_token=training_flops_per_token(job.model, job.batch.sequence_length),
                num_devices=mesh.world_size,
            ),
            saves=NoSaves(),
            stop_code=lambda: 0,
            state=TrainState(),
        )
        clock.begin()
        loop.run()


class NoSaves:
    """Saves nothing."""

    busy = outstanding = False

    def save(self, state: TrainState) -> None:
        pass

    def settle(self) -> None:
        pass

    def complete(self, state: TrainState) -> None:
        pass


class _ToClock:
    """The loop's sink, on every rank."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def step(self, metrics: StepMetrics) -> None:
        self.clock.step_done(metrics.loss)

    def evaluation(self, metrics: EvalMetrics) -> None:
        raise NotImplementedError("nothing is evaluated here")


def hugging_face(task: Task, environment: RankEnvironment, clock: Clock) -> None:
    """transformers' Trainer with its own model of the same sizes, without logging and saving."""
    job = task.job(1)
    train(job, task.setting.load_data(job).train, task.setting, Path(task.setting.folder), clock)
