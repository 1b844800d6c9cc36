"""Loading a checkpoint into an engine, of the layout that saved it or of another.

In the same layout DeepSpeed reads its own shards. What two layouts have in common is the whole parameter
with its name, in fp32: a rank reads the slices of it that its own shards hold; no arithmetic is done on the
way. How fp16's loss scale changes is set by the JSON, its present value by the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from pathlib import Path
from typing import Any

import torch

from pipeline.base.problems import job_error
from pipeline.checkpoints.folder import named_by_latest, point_latest
from pipeline.checkpoints.hosts import complete_hosts
from pipeline.checkpoints.lineage import Lineage, saved_lineage, write_lineage
from pipeline.checkpoints.manifest import Checkpoint, TrainState, layout_of
from pipeline.checkpoints.resume import ONE_FOLDER, PARTS_APART, lineage_after
from pipeline.checkpoints.shards import (
    Shard,
    ShardSlice,
    parameter_names,
    reads_own_shards,
    refresh_weights,
    same_shards,
    shards,
    state_of,
    torch_optimizer,
)
from pipeline.checkpoints.snapshot import STATE_KEY
from pipeline.checkpoints.stored import MASTER, Slice, StoredState
from pipeline.checkpoints.torch_file import load_torch_file
from pipeline.engine.agreement import gather_objects, gather_rows
from pipeline.engine.deepspeed_patches import loading_own_files, loading_with
from pipeline.engine.engine import TrainEngine
from pipeline.job.run_file import CHECKPOINTS
from pipeline.parallel.parameters import slicing_of


def load_checkpoint(engine: TrainEngine, checkpoint: Checkpoint) -> TrainState:
    """Continue from a checkpoint; of another layout, its state is converted. Collective.

    Raises:
        JobError: on every rank alike: it has to be converted, and hosts hold parts of it only.
        RuntimeError: DeepSpeed loaded nothing, or another step than the manifest names.
    """
    complete_hosts(engine.parallel, engine.deepspeed.local_rank, checkpoint)
    allowed = engine.job.allow_pickle
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
    resume_from(engine, checkpoint)
    return state


def _require_every_part(engine: TrainEngine, checkpoint: Checkpoint) -> None:
    """A change of the layout is refused before the start; one of offload or of the order in DeepSpeed's files
    shows only when the engine is there."""
    if any(gather_objects(engine.parallel, checkpoint.missing)):
        rule = f"was saved with other settings of offload or of DeepSpeed's buffers, and {PARTS_APART}"
        remedy = f"{ONE_FOLDER}, or resume with the settings it was saved with"
        raise job_error("resume", str(checkpoint.path), rule, remedy)


def resume_from(engine: TrainEngine, checkpoint: Checkpoint) -> None:
    """Make `checkpoint` the one that the run resumes from: where it went back to an earlier one, the later
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
    """Whether DeepSpeed can load its files as they are: what is where in them depends on more than the
    layout (offload, the order of gradients, the size of groups)."""
    same = checkpoint.layout == layout_of(engine.job)
    return same and reads_own_shards(engine) and same_shards(engine, stored)


def _load_own_shards(engine: TrainEngine, checkpoint: Checkpoint) -> None:
    configured = loss_scaler_of(engine)
    load = functools.partial(load_torch_file, allowed=engine.job.allow_pickle)
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


def convert_checkpoint(engine: TrainEngine, checkpoint: Checkpoint, stored: StoredState) -> None:
    """Load a checkpoint of another layout. Collective.

    Raises:
        RuntimeError: it lacks the optimizer's state, though steps have been taken.
    """
    names = parameter_names(engine)
    missing = [name for name in names.values() if not stored.scalars(name)]
    if missing and engine.job.optimizer.type != "SGD" and checkpoint.state.step > stored.skipped_steps:
        raise RuntimeError(f"{checkpoint.path} holds no optimizer state for {missing}")
    with torch.no_grad():
        for shard in shards(engine):
            _fill(engine, shard, stored, names)
        refresh_weights(engine)
    deepspeed = engine.deepspeed
    deepspeed.global_steps = checkpoint.state.step
    deepspeed.global_samples = checkpoint.state.step * deepspeed.train_batch_size()
    deepspeed.skipped_steps = stored.skipped_steps
    if checkpoint.layout["compute"] == engine.job.precision.compute == "fp16":
        continue_loss_scale(engine, loss_scaler_of(engine), saved=stored.loss_scaler())


def _fill(engine: TrainEngine, shard: Shard, stored: StoredState, names: dict[Any, str]) -> None:
    """Give one shard its weights and its optimizer state."""
    if not shard.slices:  # nothing but padding
        return
    first = names[shard.slices[0].parameter]
    state = state_of(engine, shard)
    state.clear()
    for key in stored.state_names(first):
        state[key] = torch.zeros_like(shard.master)
    for key, value in stored.scalars(first).items():
        state[key] = _scalar(engine, shard, value)
    for held in shard.slices:
        wanted, name = _wanted(engine, held), names[held.parameter]
        for key in (MASTER, *stored.state_names(first)):
            target = shard.master if key == MASTER else state[key]
            flat = target.detach().view(-1).narrow(0, held.offset, held.numel)
            flat.copy_(stored.view(name, key, wanted))


def _wanted(engine: TrainEngine, held: ShardSlice) -> Slice:
    """What to read for a slice that this rank holds."""
    if (dim := slicing_of(held.parameter).dim) is None:
        return Slice(None, 1, 0, held.start, held.numel)
    mesh, here = engine.parallel.mesh, engine.parallel.coordinates
    return Slice(dim, mesh.tensor, here.tensor, held.start, held.numel)


def _scalar(engine: TrainEngine, shard: Shard, value: Any) -> Any:
    """A value such as Adam's step, where torch expects it: fused kernels read it on the device."""
    if not torch.is_tensor(value):
        return value
    fused = torch_optimizer(engine).defaults["fused"]
    return value.clone().to(shard.master.device if fused else "cpu")


def loss_scaler_of(engine: TrainEngine) -> Any:
    """DeepSpeed's loss scaler, also where it scales nothing (bf16, fp32); None in fp32 without ZeRO and under
    its bf16 optimizer, which have none."""
    return getattr(engine.deepspeed.optimizer, "loss_scaler", None)


def continue_loss_scale(engine: TrainEngine, configured: Any, saved: Any) -> None:
    """Let `engine` scale as its JSON says; a dynamic scale continues from a dynamic one.

    Between a fixed and a dynamic one nothing carries over: the value of the one is no estimate
    for the other, and a scale chosen by hand is meant as it is written.

    Args:
        configured: The scaler that the engine was built with.
        saved: The checkpoint's; None where it has none.
    """
    if configured is None:
        return
    if saved is not None and configured.dynamic and saved.dynamic:
        _continue(configured, saved)
    optimizer = engine.deepspeed.optimizer
    optimizer.loss_scaler, optimizer.dynamic_loss_scale = configured, configured.dynamic


def _continue(scaler: Any, saved: Any) -> None:
    scaler.cur_iter, scaler.last_overflow_iter = saved.cur_iter, saved.last_overflow_iter
    # Below a new floor an overflow would raise the scale to it.
    scaler.cur_scale = max(saved.cur_scale, scaler.min_scale)
    # Overflows that are used up stay so. The last one that is left halves the scale and is not used up.
    used_up = saved.delayed_shift - saved.cur_hysteresis
    scaler.cur_hysteresis = max(scaler.delayed_shift - used_up, 1)
