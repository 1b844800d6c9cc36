"""A model small enough to build many engines of, as jobs that a JSON describes."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline.checkpoints.folder import tag_of
from pipeline.checkpoints.manifest import TrainState
from pipeline.checkpoints.saver import Saver
from pipeline.data.loader import MicroBatch
from pipeline.engine.build import build_engine
from pipeline.engine.distributed import start_distributed
from pipeline.engine.engine import StepResult, TrainEngine
from pipeline.job.job import Job
from pipeline.job.options import Options
from pipeline.job.resolve import resolve
from pipeline.job.world import Host, World
from pipeline.model.config import ModelConfig
from pipeline.parallel.context import Parallel

TIMEOUT = timedelta(seconds=60)
SEQUENCE = 8
MODEL = ModelConfig(
    name="small",
    vocab_size=257,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=32,
    max_position_embeddings=SEQUENCE,
    init_std=0.1,
)
CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "scheduler": None,
}


def job(
    folder: Path,
    ranks: int = 2,
    device: Literal["cpu", "cuda"] = "cpu",
    output: Path | None = None,
    dropout: float | None = None,
    **changes: Any,
) -> Job:
    """The job of `CONFIG` with `changes`; its run folder is `output`, or ``folder / "run"``."""
    model, config = folder / "model.json", folder / "ds.json"
    model.write_text(json.dumps(asdict(MODEL)), encoding="utf-8")
    config.write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    options = Options(
        deepspeed_config=str(config),
        model=str(model),
        seq_length=SEQUENCE,
        train_steps=4,
        dropout=dropout,
        output_dir=str(output or folder / "run"),
    )
    return resolve(options, World((Host("localhost", ranks),), device))


def start(job: Job) -> TrainEngine:
    """Join the process group and build this rank's engine."""
    start_distributed("cpu", 0, TIMEOUT)
    return build_engine(job, Parallel.create(job.mesh, TIMEOUT))


def train(engine: TrainEngine, seed: int) -> StepResult:
    """One step on random tokens that `seed` and the data rank choose."""
    job, data_rank = engine.job, engine.parallel.coordinates.data
    generator = torch.Generator().manual_seed(1000 * seed + data_rank)
    batches = []
    for _ in range(job.batch.accumulation_steps):
        shape = (job.batch.micro_batch_size, SEQUENCE + 1)
        rows = torch.randint(MODEL.vocab_size, shape, generator=generator)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        batches.append(MicroBatch(tokens, labels, torch.ones_like(labels, dtype=torch.bool), (0,)))
    return engine.train_step(batches, job.batch.tokens_per_step)


def save_checkpoint(engine: TrainEngine, job: Job, state: TrainState) -> Path:
    """Write a checkpoint of this moment. Collective: every rank calls it, at a step boundary.

    Returns:
        The folder of the checkpoint, complete and pointed to by `latest`.

    Raises:
        SaveFailed: some rank could not write; on every rank, and nothing counts that did not before.
    """
    saver = Saver(engine, job)
    saver.begin(state)
    return saver.folder / tag_of(state.step)
