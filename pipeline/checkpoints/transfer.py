"""Saving and loading: DeepSpeed writes and reads the shards, this decides when they count."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from pipeline.checkpoints.folder import (
    PARTIAL,
    Checkpoint,
    TrainState,
    files_below,
    layout_of,
    point_latest,
    publish,
    remove_partial,
    tag_of,
    write_manifest,
)
from pipeline.checkpoints.layout_change import convert_checkpoint, same_shards, write_shard_index
from pipeline.checkpoints.lineage import Lineage, write_lineage
from pipeline.checkpoints.select import lineage_after
from pipeline.checkpoints.shards import reads_own_shards
from pipeline.checkpoints.stored import StoredState
from pipeline.job.job import Job
from pipeline.job.run_file import CHECKPOINTS
from pipeline.training.atomic_file import sync_files
from pipeline.training.engine import TrainEngine

STATE_KEY = "train_state"


def save_checkpoint(engine: TrainEngine, job: Job, state: TrainState) -> Path:
    """Write a checkpoint of this moment. Collective: every rank calls it, at a step boundary.

    Returns:
        The folder of the checkpoint, complete and pointed to by `latest`.

    Raises:
        OSError: this rank could not write; no `latest` points to the incomplete checkpoint.
    """
    folder = Path(job.output_dir) / CHECKPOINTS
    tag = tag_of(state.step)
    partial = folder / f"{tag}{PARTIAL}"
    if engine.parallel.rank == 0:
        remove_partial(folder)
    dist.barrier()  # nobody writes into what a crash has left: DeepSpeed reads every file that it finds
    engine.deepspeed.save_checkpoint(
        str(folder), tag=partial.name, client_state={STATE_KEY: asdict(state)}, save_latest=False
    )
    write_shard_index(engine, partial)
    dist.barrier()  # every shard is written
    if engine.deepspeed.local_rank == 0:
        sync_files(partial)
    dist.barrier()  # and on the disk, from every host
    if engine.parallel.rank == 0:
        write_manifest(job, state, partial, files_below(partial))
        publish(partial)
        point_latest(folder, tag)
    dist.barrier()  # nobody goes on, and perhaps exits, before the checkpoint counts
    return folder / tag


def load_checkpoint(engine: TrainEngine, checkpoint: Checkpoint) -> TrainState:
    """Continue from a checkpoint; of another layout, its state is converted. Collective.

    Raises:
        RuntimeError: DeepSpeed loaded nothing, or another step than the manifest names.
    """
    stored = StoredState(checkpoint.path) if checkpoint.has_shard_index else None
    if stored is None or _fits(engine, checkpoint, stored):
        _load_own_shards(engine, checkpoint)
    else:
        convert_checkpoint(engine, checkpoint, stored)
    state = checkpoint.state
    engine.step = state.step
    if hasattr(engine.deepspeed.optimizer, "clip_grad"):
        # DeepSpeed's optimizers bring theirs from the checkpoint; the JSON may have changed since.
        engine.deepspeed.optimizer.clip_grad = engine.job.gradient_clipping
    if engine.parallel.rank == 0:
        _settle(Path(engine.job.output_dir) / CHECKPOINTS, checkpoint)
    return state


def _settle(folder: Path, checkpoint: Checkpoint) -> None:
    """Make `checkpoint` the one that a run in `folder` goes on from: where it went back to an earlier one,
    the later ones no longer belong to it."""
    folder.mkdir(parents=True, exist_ok=True)
    lineage = lineage_after(folder, checkpoint, secrets.token_hex(4))
    if lineage != Lineage():
        write_lineage(folder, lineage)
    if folder.resolve() == checkpoint.folder.resolve():
        point_latest(folder, checkpoint.tag)


def _fits(engine: TrainEngine, checkpoint: Checkpoint, stored: StoredState) -> bool:
    """Whether DeepSpeed can load its files as they are: what lies where in them is decided by more than the
    layout (offload, the order of gradients, the size of groups)."""
    same = checkpoint.layout == layout_of(engine.job)
    return same and reads_own_shards(engine) and same_shards(engine, stored)


def _load_own_shards(engine: TrainEngine, checkpoint: Checkpoint) -> None:
    loaded, client_state = engine.deepspeed.load_checkpoint(
        str(checkpoint.folder), tag=checkpoint.tag, load_lr_scheduler_states=False
    )
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found no shards in {checkpoint.path} for rank {engine.parallel.rank}")
    state = TrainState(**client_state[STATE_KEY])
    if state != checkpoint.state or engine.deepspeed.global_steps != state.step:
        raise RuntimeError(
            f"{checkpoint.path} holds {state} at DeepSpeed's step {engine.deepspeed.global_steps}, "
            f"its manifest says {checkpoint.state}"
        )
