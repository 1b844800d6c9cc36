"""A checkpoint with whole parameters: DeepSpeed's universal format, with an index that this project reads.

    zero/<parameter>/fp32.pt            {"param": the whole, "cat_dim": the dimension that tensor ranks slice}
    zero/<parameter>/exp_avg.pt, ...    the optimizer's tensors, in the same way
    zero/<parameter>/step.pt            what else the optimizer keeps for it, as it is
    zero/optimizer_state.pt             settings of the optimizer's groups; the loss scale of an fp16 run
    *mp_rank_00_model_states.pt         counters that DeepSpeed looks for; no weights
    shards.json                         where each parameter is, as in every checkpoint

Each rank of any layout reads from it the slice of each parameter that it holds. DeepSpeed's own loading
(``"checkpoint": {"load_universal": true}``) reads it at ZeRO 1 and 2 and, with whole weights, at ZeRO 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import (
    CAT_DIM,
    CLIP_GRAD,
    DS_VERSION,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_GROUPS,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.git_version_info import version as deepspeed_version

from pipeline.base.json_reader import saved_json
from pipeline.checkpoints.files import WrittenFile, write_bytes
from pipeline.checkpoints.manifest import SHARDS, TrainState
from pipeline.checkpoints.stored import MASTER, Location, StoredState
from pipeline.checkpoints.torch_file import PickledObject
from pipeline.engine.optimizer import build_optimizer
from pipeline.job.job import Job
from pipeline.model.gpt import outline
from pipeline.parallel.parameters import Slicing

ZERO = "zero"
FP32 = "fp32"
OPTIMIZER_FILE = f"{ZERO}/optimizer_state.pt"
# ZeRO 3 looks for the second name.
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
FLOAT32 = 4  # bytes
# What torch.save and the file system add to the tensor of one file, about.
FILE_OVERHEAD = 8192


@dataclass(frozen=True)
class WholeParameters:
    """The state that is written, with the slicing of each parameter.

    Attributes:
        slicings: By name, of the whole model.
        loss_scaler: DeepSpeed's, where weights are in fp16.
    """

    stored: StoredState
    slicings: dict[str, Slicing]
    loss_scaler: Any = None

    def bytes_of(self, name: str) -> int:
        """What the files of a parameter will take, about."""
        tensors, scalars = 1 + len(self.stored.state_names(name)), len(self.stored.scalars(name))
        notes = 1  # of the conversion, `PartialFolder.record_written`
        return tensors * self.slicings[name].numel * FLOAT32 + (tensors + scalars + notes) * FILE_OVERHEAD

    def values(self, name: str) -> Iterator[tuple[str, Any]]:
        """The content of each file of a parameter, by the file's stem. One tensor is in memory at a time."""
        slicing = self.slicings[name]
        for key in (MASTER, *self.stored.state_names(name)):
            values = self.stored.read(name, key)
            content: dict[str, Any] = {PARAM: values.view(slicing.full_shape)}
            if slicing.dim is not None:
                content[CAT_DIM] = slicing.dim
            yield FP32 if key == MASTER else key, content
            del values, content
        yield from self.stored.scalars(name).items()


def write_parameter(source: WholeParameters, name: str, folder: Path) -> list[WrittenFile]:
    """Write all files of one parameter of `source` into the checkpoint at `folder`.

    Raises:
        OSError: they could not be written.
    """
    return [
        PickledObject(content).write(folder, f"{ZERO}/{name}/{key}.pt")
        for key, content in source.values(name)
    ]


def write_common(
    source: WholeParameters, job: Job, state: TrainState, origin: dict[str, Any], folder: Path
) -> list[WrittenFile]:
    """Write what is not of one parameter.

    Args:
        job: Of the layout that the checkpoint is meant for.
        state: The position of the run.
        origin: What the checkpoint is made from, which its `shards.json` keeps.
    """
    counters = _counters(source, job, state)
    index = json.dumps(_index(source, origin)) + "\n"
    return [
        PickledObject(_optimizer_state(source, job, state)).write(folder, OPTIMIZER_FILE),
        *(PickledObject(counters).write(folder, name) for name in MODEL_FILES),
        write_bytes(folder, SHARDS, index.encode()),
    ]


def origin_of(folder: Path) -> dict[str, Any] | None:
    """What the checkpoint at `folder` was made from; None if it was not written here."""
    return saved_json(folder / SHARDS).get("origin")  # type: ignore[no-any-return]


def _counters(source: WholeParameters, job: Job, state: TrainState) -> dict[str, Any]:
    return {
        "module": {},
        "dp_world_size": job.mesh.replicas,
        "mp_world_size": 1,
        "global_steps": state.step,
        "global_samples": state.consumed_samples,
        "skipped_steps": source.stored.skipped_steps,
        DS_VERSION: deepspeed_version,
        UNIVERSAL_CHECKPOINT_INFO: {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE},
    }


def _optimizer_state(source: WholeParameters, job: Job, state: TrainState) -> dict[str, Any]:
    """What DeepSpeed's own loading gives the groups of torch's optimizer; ours takes the JSON's."""
    optimizer = build_optimizer(replace(job.optimizer, fused=False), outline(job.model))
    rate = job.schedule(max(state.step, 1))
    groups = [{**group, "lr": rate} for group in optimizer.state_dict()[PARAM_GROUPS]]
    first = source.stored.scalars(next(iter(source.slicings)))
    content = {
        PARAM_GROUPS: groups,
        OPTIMIZER_STATE_DICT: {"state": {0: first}, PARAM_GROUPS: groups},  # where ZeRO 3 looks
        CLIP_GRAD: job.gradient_clipping,
        DS_VERSION: deepspeed_version,
    }
    return content if source.loss_scaler is None else {**content, LOSS_SCALER: source.loss_scaler}


def _index(source: WholeParameters, origin: dict[str, Any]) -> dict[str, Any]:
    """The content of `shards.json`: one rank that holds every parameter whole."""
    return {
        "origin": origin,
        "skipped_steps": source.stored.skipped_steps,
        "loss_scaler_at": None if source.loss_scaler is None else Location(OPTIMIZER_FILE, (LOSS_SCALER,)),
        "ranks": [
            {
                "stage": 0,
                "tensor": 0,
                "parameters": {name: each._replace(dim=None) for name, each in source.slicings.items()},
                "shards": [_shard(source, name) for name in source.slicings],
            }
        ],
    }


def _shard(source: WholeParameters, name: str) -> dict[str, Any]:
    folder, stored = f"{ZERO}/{name}", source.stored
    tensors = {key: Location(f"{folder}/{key}.pt", (PARAM,)) for key in stored.state_names(name)}
    scalars = {key: Location(f"{folder}/{key}.pt", ()) for key in stored.scalars(name)}
    return {
        "weights_at": Location(f"{folder}/{FP32}.pt", (PARAM,)),
        "state_at": {**tensors, **scalars},
        "fragments": [(name, 0, source.slicings[name].numel, 0)],
    }
