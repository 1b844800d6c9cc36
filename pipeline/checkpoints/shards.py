"""Where one rank keeps the state of which weights: in its memory, and in the files that DeepSpeed writes.

Each of DeepSpeed's optimizers lays parameters end to end in flat tensors and divides these over replicas,
each in its own way. Here all of them are described alike: a `Shard` is a flat fp32 tensor of master weights,
with the optimizer's state of the same length; its `ShardSlice`s are the slices of parameters in it.

    parameter a        [==========]                  of the tensor slice of this rank, flattened
    parameter b                   [================]
    shard of replica 0 [--------------]              slices a[0:10] at 0, b[0:4] at 10
    shard of replica 1                [------------] slice  b[4:16] at 0
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.pipe import DualPipeVModule, PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from pipeline.checkpoints.stored import Location, StoredState
from pipeline.engine.agreement import gather_objects, gather_rows
from pipeline.engine.engine import TrainEngine
from pipeline.parallel.parameters import slicing_of


class ShardSlice(NamedTuple):
    """Elements ``start .. start + numel - 1`` of this rank's slice of a parameter, at `offset` in a shard."""

    parameter: nn.Parameter
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class Shard:
    """A flat tensor of the optimizer's.

    Attributes:
        master: fp32 weights, the tensor that torch's optimizer updates and has its state under. Of one
            parameter, in its shape, where nothing is flattened.
        weights_at: Of the master weights, in a checkpoint.
        state_at: Of the optimizer's state of `master`.
    """

    master: Tensor
    slices: tuple[ShardSlice, ...]
    weights_at: Location
    state_at: Location


def torch_optimizer(engine: TrainEngine) -> torch.optim.Optimizer:
    """torch's optimizer, below whatever DeepSpeed has put around it."""
    optimizer = engine.deepspeed.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def reads_own_shards(engine: TrainEngine) -> bool:
    """Whether DeepSpeed can load what it saves: not what its bf16 optimizer writes on a pipeline without
    ZeRO, which it looks for in the file of another optimizer."""
    return engine.job.zero_stage > 0 or not isinstance(engine.deepspeed.optimizer, BF16_Optimizer)


def replicates_state(engine: TrainEngine) -> bool:
    """Whether each replica holds all of the optimizer's state, and updates all weights itself."""
    return isinstance(engine.deepspeed.optimizer, (torch.optim.Optimizer, FP16_UnfusedOptimizer))


def shards(engine: TrainEngine) -> list[Shard]:
    """The shards of this rank, in the order of the optimizer's groups.

    Raises:
        TypeError: an optimizer of DeepSpeed's that this pipeline never asks for.
    """
    optimizer = engine.deepspeed.optimizer
    kinds = {
        DeepSpeedZeroOptimizer_Stage3: _zero_3,
        DeepSpeedZeroOptimizer: _zero_1_and_2,
        BF16_Optimizer: _bf16,
        FP16_UnfusedOptimizer: _unsharded_16_bit,
    }
    if isinstance(optimizer, torch.optim.Optimizer):
        return list(_unsharded(engine))
    for kind, describe in kinds.items():
        if isinstance(optimizer, kind):
            return list(describe(engine))
    raise TypeError(f"no description of the shards of {type(optimizer).__name__}")


def refresh_weights(engine: TrainEngine) -> None:
    """Give the weights that the forward pass reads the values of the masters. Collective."""
    optimizer = engine.deepspeed.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.checkpoint_event_prologue()  # whole parameters are given up, or they would stay as they are
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()
    elif isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        optimizer.update_lp_params()
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.data)


def _unsharded(engine: TrainEngine) -> Iterator[Shard]:
    """fp32 without ZeRO: torch's optimizer works on the parameters, and stages save theirs layer by layer."""
    file, module = _model_file(engine), engine.module
    if isinstance(module, PipelineModule):
        locations = dict(_layer_locations(module))
    else:
        locations = {p: Location(file, ("module", name)) for name, p in module.named_parameters()}
    # In the order in which torch numbers them in a state dict.
    parameters = chain.from_iterable(group["params"] for group in torch_optimizer(engine).param_groups)
    for index, parameter in enumerate(parameters):
        whole = ShardSlice(parameter, 0, parameter.numel(), 0)
        state = Location(file, ("optimizer", "state", index))
        yield Shard(parameter, (whole,), locations[parameter], state)


def _layer_locations(module: PipelineModule) -> Iterator[tuple[nn.Parameter, Location]]:
    dual = isinstance(module, DualPipeVModule)
    phases = zip(module.phase_bounds, module.phase_funcs, strict=True) if dual else ()
    chunks = [(bounds[0], layers) for bounds, layers in phases]
    for first, layers in chunks or [(module._local_start, module.forward_funcs)]:
        for index, layer in enumerate(layers, start=first):
            # The module counts from the chunk that it last worked on.
            file = Path(module.ckpt_layer_path("", index - module._local_start)).name
            for name, parameter in layer.named_parameters():
                yield parameter, Location(file, (name,))


def _unsharded_16_bit(engine: TrainEngine) -> Iterator[Shard]:
    """16-bit weights without ZeRO: a master beside each parameter."""
    optimizer, file = engine.deepspeed.optimizer, _model_file(engine)
    count = 0
    for group, (weights, masters) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    ):
        for index, (weight, master) in enumerate(zip(weights, masters, strict=True)):
            weights_at = Location(file, ("optimizer", "fp32_groups", group, index))
            state = Location(file, ("optimizer", OPTIMIZER_STATE_DICT, "state", count))
            yield Shard(master, (ShardSlice(weight, 0, weight.numel(), 0),), weights_at, state)
            count += 1


def _zero_1_and_2(engine: TrainEngine) -> Iterator[Shard]:
    """One flat tensor per group, divided into equal shards. The order in it is not that of the group where
    gradients go round robin."""
    optimizer = engine.deepspeed.optimizer
    for index, master in enumerate(optimizer.single_partition_of_fp32_groups):
        ordered = zip(
            optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index], strict=True
        )
        yield _flat_shard(engine, index, master, ordered)


def _bf16(engine: TrainEngine) -> Iterator[Shard]:
    """bf16 weights with gradients summed in fp32, or on a pipeline without ZeRO: as above, without gaps."""
    optimizer = engine.deepspeed.optimizer
    for index, master in enumerate(optimizer.fp32_groups_flat_partition):
        group = optimizer.bf16_groups[index]
        offsets = accumulate((parameter.numel() for parameter in group), initial=0)  # and the end of the last
        yield _flat_shard(engine, index, master, zip(group, offsets, strict=False))


def _flat_shard(
    engine: TrainEngine, index: int, master: Tensor, ordered: Iterable[tuple[nn.Parameter, int]]
) -> Shard:
    """This replica's shard of group `index`, whose parameters begin at the given offsets."""
    file = _optimizer_file(engine)
    group = engine.deepspeed.optimizer.real_dp_process_group[index]
    first = torch.distributed.get_rank(group) * master.numel()
    slices = tuple(_inside(ordered, first, first + master.numel()))
    weights = Location(file, (OPTIMIZER_STATE_DICT, SINGLE_PARTITION_OF_FP32_GROUPS, index))
    state = Location(file, (OPTIMIZER_STATE_DICT, BASE_OPTIMIZER_STATE, "state", index))
    return Shard(master, slices, weights, state)


def _inside(ordered: Iterable[tuple[nn.Parameter, int]], first: int, end: int) -> Iterator[ShardSlice]:
    """What of the parameters, which begin at the given offsets, lies in ``first .. end - 1``."""
    for parameter, begin in ordered:
        low, high = max(begin, first), min(begin + parameter.numel(), end)
        if low < high:
            yield ShardSlice(parameter, low - begin, high - low, low - first)


def _zero_3(engine: TrainEngine) -> Iterator[Shard]:
    """Each parameter is divided into equal slices (the last one padded); a sub-group holds a slice of each of
    its parameters."""
    optimizer, file = engine.deepspeed.optimizer, _optimizer_file(engine)
    masters = optimizer.fp32_partitioned_groups_flat
    # DeepSpeed hands its sub-groups to torch's optimizer group by group when it saves.
    order = sorted(range(len(masters)), key=lambda index: optimizer.sub_group_to_group_id[index])
    for index, master in enumerate(masters):
        slices = []
        offset = 0
        for parameter in optimizer.fp16_groups[index]:
            length = parameter.partition_numel()
            start = optimizer._get_param_partition_rank(parameter) * length
            if (numel := min(length, parameter.ds_numel - start)) > 0:
                slices.append(ShardSlice(parameter, start, numel, offset))
            offset += length
        weights = Location(file, (OPTIMIZER_STATE_DICT, FP32_FLAT_GROUPS, index))
        state = Location(file, (OPTIMIZER_STATE_DICT, OPTIMIZER_STATE_DICT, "state", order.index(index)))
        yield Shard(master, tuple(slices), weights, state)


def _model_file(engine: TrainEngine) -> str:
    return Path(engine.deepspeed._get_ckpt_name("", "")).name


def _optimizer_file(engine: TrainEngine) -> str:
    return Path(engine.deepspeed._get_zero_ckpt_name("", "")).name


def parameter_names(engine: TrainEngine) -> dict[nn.Parameter, str]:
    """The name of each parameter of this rank; the same in every layout."""
    return {parameter: name for name, parameter in engine.module.named_parameters()}


def state_of(engine: TrainEngine, shard: Shard) -> dict[str, Any]:
    """The torch optimizer's state of a shard; writable, and made if there is none yet."""
    return torch_optimizer(engine).state[shard.master]  # type: ignore[return-value]


def describe_shards(engine: TrainEngine) -> dict[str, Any]:
    """This rank's entry in `shards.json`."""
    here = engine.parallel.coordinates
    names = parameter_names(engine)
    # Of replicas that all hold the whole state only the first writes it.
    writes = not replicates_state(engine) or (here.data == 0 and here.sequence == 0)
    return {
        "stage": here.pipeline,
        "tensor": here.tensor,
        "parameters": {name: slicing_of(parameter) for parameter, name in names.items()},
        "shards": [
            {
                "weights_at": shard.weights_at,
                "state_at": shard.state_at,
                "fragments": [(names[held.parameter], *held[1:]) for held in shard.slices],
            }
            for shard in (shards(engine) if writes else ())
        ],
    }


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
