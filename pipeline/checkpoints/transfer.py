"""Saving and loading: DeepSpeed writes and reads the shards, this decides when they count."""

from __future__ import annotations

import contextlib
import functools
import secrets
from pathlib import Path

from pipeline.base.problems import JobError, Problem
from pipeline.checkpoints.distribution import complete_hosts
from pipeline.checkpoints.folder import (
    Checkpoint,
    TrainState,
    layout_of,
    point_latest,
    tag_of,
)
from pipeline.checkpoints.layout_change import convert_checkpoint, same_shards
from pipeline.checkpoints.lineage import Lineage, saved_lineage, write_lineage
from pipeline.checkpoints.loss_scale import continue_loss_scale, loss_scaler_of
from pipeline.checkpoints.planned import STATE_KEY
from pipeline.checkpoints.resume import PARTS_APART
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.select import lineage_after, named_by_latest
from pipeline.checkpoints.shards import reads_own_shards
from pipeline.checkpoints.stored import StoredState
from pipeline.checkpoints.unpickling import load_torch_file
from pipeline.engine.agreement import gather_objects, gather_rows
from pipeline.engine.deepspeed_patches import loading_own_files, loading_with
from pipeline.engine.engine import TrainEngine
from pipeline.job.job import Job
from pipeline.job.run_file import CHECKPOINTS


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


def load_checkpoint(engine: TrainEngine, checkpoint: Checkpoint) -> TrainState:
    """Continue from a checkpoint; of another layout, its state is converted. Collective.

    Raises:
        JobError: on every rank alike: it has to be converted, and hosts hold parts of it only.
        RuntimeError: DeepSpeed loaded nothing, or another step than the manifest names.
    """
    complete_hosts(engine.parallel, engine.deepspeed.local_rank, checkpoint)
    allowed = engine.job.options.allow_pickle
    stored = StoredState(checkpoint.path, allowed) if checkpoint.has_shard_index else None
    if stored is None or _fits(engine, checkpoint, stored):
        _load_own_shards(engine, checkpoint)
    else:
        _require_every_part(engine, checkpoint)
        convert_checkpoint(engine, checkpoint, stored)
    state = checkpoint.state
    engine.step = state.step
    if hasattr(engine.deepspeed.optimizer, "clip_grad"):
        # DeepSpeed's optimizers bring theirs from the checkpoint; the JSON may have changed since.
        engine.deepspeed.optimizer.clip_grad = engine.job.gradient_clipping
    go_on_from(engine, checkpoint)
    return state


def _require_every_part(engine: TrainEngine, checkpoint: Checkpoint) -> None:
    """A change of the layout is refused before the start; one of offload or of the order in DeepSpeed's files
    shows only when the engine is there."""
    if any(gather_objects(engine.parallel, checkpoint.missing)):
        rule = f"was saved with other settings of offload or of DeepSpeed's buffers, and {PARTS_APART}"
        remedy = "Do that, or resume with the settings it was saved with"
        raise JobError([Problem("resume", str(checkpoint.path), rule, remedy)])


def go_on_from(engine: TrainEngine, checkpoint: Checkpoint) -> None:
    """Make `checkpoint` the one that the run goes on from: where it went back to an earlier one, the later
    ones no longer belong to it. The same on every host, whether or not they share the folder. Collective."""
    folder, parallel = Path(engine.job.output_dir) / CHECKPOINTS, engine.parallel
    first_of_host = engine.deepspeed.local_rank == 0
    name = gather_objects(parallel, secrets.token_hex(4))[0]
    mine = lineage_after(folder, checkpoint, name) if first_of_host else None
    found = [lineage for lineage in gather_objects(parallel, mine) if lineage is not None]
    # A host that has later checkpoints makes the run a branch on all of them.
    lineage = next((each for each in found if name in dict(each.branches)), found[0])
    if parallel.rank == 0:
        _write_down(folder, checkpoint, lineage)
    gather_rows(parallel, 0)  # a barrier: on a common file system the others find it done
    if first_of_host and parallel.rank != 0:
        _write_down(folder, checkpoint, lineage)


def _write_down(folder: Path, checkpoint: Checkpoint, lineage: Lineage) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if saved_lineage(folder) != lineage:
        write_lineage(folder, lineage)
    if folder.resolve() == checkpoint.folder.resolve() and named_by_latest(folder) != checkpoint.tag:
        point_latest(folder, checkpoint.tag)


def _fits(engine: TrainEngine, checkpoint: Checkpoint, stored: StoredState) -> bool:
    """Whether DeepSpeed can load its files as they are: what lies where in them is decided by more than the
    layout (offload, the order of gradients, the size of groups)."""
    same = checkpoint.layout == layout_of(engine.job)
    return same and reads_own_shards(engine) and same_shards(engine, stored)


def _load_own_shards(engine: TrainEngine, checkpoint: Checkpoint) -> None:
    configured = loss_scaler_of(engine)
    load = functools.partial(load_torch_file, allowed=engine.job.options.allow_pickle)
    with (
        loading_with(engine.deepspeed, load),
        contextlib.nullcontext() if checkpoint.shared else loading_own_files(engine.deepspeed),
    ):
        loaded, client_state = engine.deepspeed.load_checkpoint(
            str(checkpoint.folder), tag=checkpoint.tag, load_lr_scheduler_states=False
        )
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found no shards in {checkpoint.path} for rank {engine.parallel.rank}")
    continue_loss_scale(engine, configured, saved=loss_scaler_of(engine))
    state = TrainState(**client_state[STATE_KEY])
    if state != checkpoint.state or engine.deepspeed.global_steps != state.step:
        raise RuntimeError(
            f"{checkpoint.path} holds {state} at DeepSpeed's step {engine.deepspeed.global_steps}, "
            f"its manifest says {checkpoint.state}"
        )
