"""Into the engine of one layout, the state that a checkpoint holds in another.

Between the two stands the whole parameter by its name, in fp32, which no layout changes. A rank reads the
part of it that its own shards hold, and copies it there; no arithmetic is done on the way.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from pipeline.checkpoints.folder import Checkpoint
from pipeline.checkpoints.loss_scale import continue_loss_scale, loss_scaler_of
from pipeline.checkpoints.shards import (
    Fragment,
    Shard,
    parameter_names,
    refresh_weights,
    shards,
    state_of,
    torch_optimizer,
)
from pipeline.checkpoints.stored import MASTER, Slice, StoredState, describe_shards
from pipeline.engine.agreement import gather_objects, gather_rows
from pipeline.engine.engine import TrainEngine
from pipeline.parallel.parameters import cut_of


def shard_index(engine: TrainEngine) -> dict[str, Any]:
    """What `shards.json` says: the shards of all ranks. Collective."""
    return {
        "skipped_steps": engine.deepspeed.skipped_steps,
        "ranks": gather_objects(engine.parallel, describe_shards(engine)),
    }


def same_shards(engine: TrainEngine, stored: StoredState) -> bool:
    """Whether DeepSpeed's own files fit this engine, rank by rank. Collective."""
    rank = engine.parallel.rank
    mine = json.loads(json.dumps(describe_shards(engine)))
    same = len(stored.ranks) == engine.parallel.mesh.world_size and stored.ranks[rank] == mine
    return bool(gather_rows(engine.parallel, int(same)).all())


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
    if not shard.fragments:  # nothing but padding
        return
    first = names[shard.fragments[0].parameter]
    state = state_of(engine, shard)
    state.clear()
    for key in stored.state_names(first):
        state[key] = torch.zeros_like(shard.master)
    for key, value in stored.scalars(first).items():
        state[key] = _scalar(engine, shard, value)
    for fragment in shard.fragments:
        wanted = _slice(engine, fragment)
        name = names[fragment.parameter]
        for key in (MASTER, *stored.state_names(first)):
            target = shard.master if key == MASTER else state[key]
            flat = target.detach().view(-1).narrow(0, fragment.offset, fragment.numel)
            flat.copy_(stored.view(name, key, wanted))


def _slice(engine: TrainEngine, fragment: Fragment) -> Slice:
    dim = cut_of(fragment.parameter).dim
    parts, index = (
        (1, 0) if dim is None else (engine.parallel.mesh.tensor, engine.parallel.coordinates.tensor)
    )
    return Slice(dim, parts, index, fragment.start, fragment.numel)


def _scalar(engine: TrainEngine, shard: Shard, value: Any) -> Any:
    """A value such as Adam's step, where torch expects it: fused kernels read it on the device."""
    if not torch.is_tensor(value):
        return value
    fused = torch_optimizer(engine).defaults["fused"]
    return value.clone().to(shard.master.device if fused else "cpu")
