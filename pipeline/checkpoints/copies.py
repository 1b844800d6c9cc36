"""Copies of the state that must be equal: whether they are, now and then in a run and before each save.

    over                     what is compared                             how nearly it must be equal
    replicas                 weights with ZeRO, gathered from one owner   to the bit
    replicas                 weights and optimizer state without ZeRO:    to the rounding of a norm, and of
                             each updates its own, by the same gradients  16-bit weights
    tensor ranks             what is not sliced (norms, positions,        to the rounding of sums over
                             biases after a sum), its masters and         replicas in another order
                             optimizer state
    stages of a tied weight  the weight, without ZeRO its optimizer       as tensor ranks
                             state

What ranks compute for themselves has the same bits only where all devices add in one order. They do so on
CPUs, and with two replicas; but NCCL does not promise it to two groups, nor does anyone to devices of two
kinds: a hash of the bits would end good jobs. So ranks compare sketches. Element i of a copy is added, with a
random sign, to bucket i % `BUCKETS`, in double precision: equal elements have equal sums, and a difference of
e in one element is one of e in one bucket.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from pipeline.base.words import after_step, rank_list
from pipeline.checkpoints.shards import parameter_names, replicates_state, shards, torch_optimizer
from pipeline.engine.agreement import gather_objects, gather_rows
from pipeline.engine.engine import TrainEngine
from pipeline.model.gpt import TIED_KEY
from pipeline.parallel.parameters import slicing_of

# Of a run's time, what comparing between saves may take.
SHARE = 1e-3
BUCKETS = 1024
# Elements added at once: 4 MiB in fp32, which is six times as fast on a CPU as 16 MiB, and enough for a GPU.
_CHUNK = BUCKETS * 2**10
# The difference that is allowed, as a share of the largest bucket. Sums of 512 random gradients in two orders
# differ by 5e-7 of their size in fp32, 4e-3 in fp16 and 3e-2 in bf16, and steps add that up; a 16-bit weight
# goes to the next number, up to 8e-3 away, however little its master differs.
_EXACT, _ROUNDED, _ROUNDED_16_BIT, _SUMMED_IN_16_BIT = 1e-12, 1e-4, 2e-2, 0.1
_SHOWN = 5


class CopiesDiffer(RuntimeError):
    """Ranks that must hold the same do not. Raised on every rank alike."""


class Copy(NamedTuple):
    """Values of which other ranks hold a copy.

    Attributes:
        name: The parameter's.
        what: ``weight``, ``master`` or the optimizer's name of its state.
        whole: Whether it is all that a tensor rank has of the parameter; else one replica's shard of that.
    """

    name: str
    what: str
    parameter: nn.Parameter
    values: Tensor
    whole: bool


class _Peers(NamedTuple):
    """Ranks that hold copies of the same."""

    label: str
    group: dist.ProcessGroup
    copies: list[Copy]
    tolerances: list[float]


class CopyCheck:
    """Compares the copies in one start of a run; its methods are collective.

    Attributes:
        interval: Steps from one comparison to the next: the last one's time, as a `SHARE` of that of steps.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.engine, self.parallel = engine, engine.parallel
        self.interval = 1
        self._compared: int | None = None  # after which step; None: not in this start
        self._begun, self._since = engine.step, time.perf_counter()
        self._signs: dict[torch.device, Tensor] = {}

    def after_step(self, step: int) -> None:
        """Compare, if it is time to: after the first step of a start, and then each `interval`.

        Raises:
            CopiesDiffer: on every rank alike, naming ranks and parameters.
        """
        if self._compared is None or step >= self._compared + self.interval:
            self._compare(step)

    def before_save(self, step: int) -> None:
        """Compare what is to be saved, if that was not done after the same step.

        Raises:
            CopiesDiffer: as above.
        """
        if self._compared != step:
            self._compare(step)

    def _compare(self, step: int) -> None:
        get_accelerator().synchronize()  # else the time would be that of the step's last work, too
        begin = time.perf_counter()
        found = list(self._differences())
        seconds = time.perf_counter() - begin
        steps = max(step - (self._begun if self._compared is None else self._compared), 1)
        times = [max(1, int(each * 1e9)) for each in (seconds, (begin - self._since) / steps)]
        rows = gather_rows(self.parallel, int(bool(found)), *times)
        if rows[:, 0].any():
            raise CopiesDiffer(self._describe(step, found))
        # The slowest rank's comparison and rank 0's steps, so that every rank comes to the same number.
        self.interval = math.ceil(int(rows[:, 1].max()) / (SHARE * int(rows[0, 2])))
        self._compared, self._since = step, time.perf_counter()

    def _differences(self) -> Iterator[str]:
        """Who of the groups of this rank differs in what; all ranks of a group say the same."""
        sketches: dict[int, Tensor] = {}
        for label, group, copies, tolerances in self._all_peers():
            for copy in copies:
                if id(copy.values) not in sketches:
                    sketches[id(copy.values)] = self._sketch(copy.values)
            mine = torch.stack([sketches[id(copy.values)] for copy in copies])
            highest = torch.cat([mine, -mine])
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            highest, lowest = highest[: len(mine)], -highest[len(mine) :]
            near = _near(lowest, highest, mine.new_tensor(tolerances))
            for index in (~near).nonzero().flatten().tolist()[: _SHOWN + 1]:
                ranks = dist.get_process_group_ranks(group)
                theirs = [torch.empty_like(mine[index]) for _ in ranks]
                dist.all_gather(theirs, mine[index], group=group)
                who = _who(dict(zip(ranks, theirs, strict=True)), tolerances[index])
                yield f"{copies[index].name} ({copies[index].what}) over {label}: {who}"

    def _all_peers(self) -> list[_Peers]:
        """In an order that is the same on all ranks of each group; those without copies are left out."""
        parallel, module = self.parallel, self.engine.module
        copies = list(copies_of(self.engine)) if parallel.mesh.world_size > 1 else []
        whole = [copy for copy in copies if copy.whole]
        unsliced = [copy for copy in copies if slicing_of(copy.parameter).dim is None]
        tied = module.tied_comms.get(TIED_KEY) if isinstance(module, PipelineModule) else None
        table = set(tied["module"].parameters()) if tied else set()
        shared = [copy for copy in whole if copy.parameter in table]
        tied_group = tied["group"] if tied and len(tied["ranks"]) > 1 else None
        everyone = [
            _Peers("replicas", parallel.replica_group, whole, self._updated(whole)),
            _Peers("tensor ranks", parallel.tensor_group, unsliced, self._summed(unsliced)),
            _Peers("stages of a tied weight", tied_group, shared, self._summed(shared)),
        ]
        return [peers for peers in everyone if peers.group is not None and peers.copies]

    def _updated(self, copies: list[Copy]) -> list[float]:
        """Tolerances over replicas, which reduce gradients together: all get the same bits."""
        if not replicates_state(self.engine):
            return [_EXACT] * len(copies)
        return [_ROUNDED if copy.values.element_size() > 2 else _ROUNDED_16_BIT for copy in copies]

    def _summed(self, copies: list[Copy]) -> list[float]:
        """Tolerances over ranks each of which sums its gradients over replicas of its own."""
        job = self.engine.job
        tolerance = _ROUNDED if job.precision.compute == "fp32" else _ROUNDED_16_BIT
        in_16_bit = job.deepspeed["communication_data_type"] != "fp32"
        return [_SUMMED_IN_16_BIT if in_16_bit else tolerance] * len(copies)

    def _sketch(self, values: Tensor) -> Tensor:
        """Signed sums of the elements in `BUCKETS` buckets, fp64, on the device of the ranks' groups."""
        flat = values.detach().reshape(-1)
        if flat.device not in self._signs:
            generator = torch.Generator().manual_seed(0)
            bits = torch.randint(2, (_CHUNK // BUCKETS, BUCKETS), generator=generator, dtype=torch.int8)
            self._signs[flat.device] = bits.to(flat.device).float() * 2 - 1
        signs = self._signs[flat.device]
        total = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
        for part in flat.split(_CHUNK):
            padded = nn.functional.pad(part.float(), (0, -len(part) % BUCKETS)).view(-1, BUCKETS)
            total += (padded * signs[: len(padded)]).sum(0, dtype=torch.float64)
        # What is not a number is equal to nothing, but a copy of it is a copy.
        return total.nan_to_num().to(self.engine.deepspeed.device)

    def _describe(self, step: int, found: list[str]) -> str:
        """What all ranks found. Collective."""
        everything = gather_objects(self.parallel, found[: _SHOWN + 1])
        lines = list(dict.fromkeys(chain.from_iterable(everything)))
        more = "; and more" if len(lines) > _SHOWN else ""
        return (
            f"copies that must be equal differ {after_step(step)}: {'; '.join(lines[:_SHOWN])}{more}. "
            "This step is not saved: the next start goes on from the checkpoint before. "
            "If the same ranks are named again, test the memory and the GPUs of their hosts"
        )


def copies_of(engine: TrainEngine) -> Iterator[Copy]:
    """This rank's weights and optimizer state, as far as they are in memory (what is on NVMe is not)."""
    names, states = parameter_names(engine), torch_optimizer(engine).state
    zero_3, whole_state = engine.job.zero_stage == 3, replicates_state(engine)
    for parameter, name in names.items():
        # ZeRO 3 keeps small parameters whole on every rank, and of the others one shard.
        if not zero_3 or (parameter.ds_persist and parameter.ds_status == ZeroParamStatus.AVAILABLE):
            yield Copy(name, "weight", parameter, parameter.data, whole=True)
    for shard in shards(engine):
        for parameter, _, numel, offset in shard.slices:
            tensors: dict[str, Any] = {} if shard.master is parameter else {"master": shard.master}
            for what, values in {**tensors, **states.get(shard.master, {})}.items():
                if torch.is_tensor(values) and values.shape == shard.master.shape and values.numel() > 1:
                    part = values.detach().reshape(-1)[offset : offset + numel]
                    yield Copy(names[parameter], what, parameter, part, whole_state)


def _near(lowest: Tensor, highest: Tensor, tolerance: Tensor | float) -> Tensor:
    """Whether sketches [..., buckets] are the same, [...]."""
    scale = torch.maximum(lowest.abs(), highest.abs()).amax(-1)
    return (highest - lowest).amax(-1) <= tolerance * scale


def _who(sketches: dict[int, Tensor], tolerance: float) -> str:
    """Which ranks are unlike most; with two of them nobody knows."""

    def like(one: Tensor) -> list[int]:
        pairs = (
            (rank, torch.minimum(one, each), torch.maximum(one, each)) for rank, each in sketches.items()
        )
        return [rank for rank, low, high in pairs if bool(_near(low, high, tolerance))]

    most = max(map(like, sketches.values()), key=len)
    odd = [rank for rank in sketches if rank not in most]
    return (
        f"{rank_list(odd)} against {rank_list(most)}" if len(odd) < len(most) else rank_list(list(sketches))
    )
