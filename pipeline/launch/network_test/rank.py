"""One rank of the test of a cluster's links: collectives and sends, timed, and checked element by element.

Groups, for 2 hosts (rows) of 3 slots; each collective runs in all of them:

    world   [0 1 2 3 4 5]
    host    [0 1 2] [3 4 5]              inside hosts
    slot    [0 3] [1 4] [2 5]            between hosts, each device with its likes

Sends go both ways at once between two ranks at a time per host, in the rounds of a tournament, so that no
two of them share a device or a network card unless the host has one card for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Bytes of a tensor: large enough to fill the link for milliseconds.
_BYTES = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}
_REPEATS = 3
# All links are tried so often, one round after the other: what slows one down for a moment is not its own.
ROUNDS = 3
Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        slots: Ranks of each host.
        rank: This one's number in the job.
        device: Number of its GPU on its host; None on the CPU.
    """

    slots: tuple[int, ...]
    rank: int
    device: int | None

    def rank_of(self, host: int, slot: int) -> int:
        return sum(self.slots[:host]) + slot


def run_rank(place: Place, address: str, port: int, seconds: float, say: Say) -> None:
    """Join, try every link in each of some rounds, and `say` each result: {"at": what, "round": its number,
    "bandwidth": bytes/s, "right": bool, ...}.

    Raises:
        RuntimeError: of torch, for a rank that cannot join or a collective that fails.
    """
    backend, device = ("gloo", torch.device("cpu"))
    if place.device is not None:
        backend, device = "nccl", torch.device("cuda", place.device)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    world = sum(place.slots)
    where = f"[{address}]" if ":" in address else address  # of IPv6
    dist.init_process_group(
        backend, f"tcp://{where}:{port}", timedelta(seconds=seconds), world, place.rank,
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    say({"at": "joined"})
    made = _make_groups(place)
    for number in range(ROUNDS):
        for kind, ranks, name, result in _collectives(place, made, device):
            say({"at": name, "round": number, "kind": kind, "ranks": ranks, **result})
        for receiver, sender, result in _sends(place, device):
            say({"at": "send", "round": number, "from": sender, "to": receiver, **result})
    dist.barrier()
    dist.destroy_process_group()
    say({"at": "done"})


def groups(slots: Sequence[int]) -> dict[str, list[list[int]]]:
    """Ranks of each group, by kind. Groups of one rank are left out, and those that are the world again."""
    firsts = [sum(slots[:host]) for host in range(len(slots))]
    hosts = [list(range(first, first + count)) for first, count in zip(firsts, slots, strict=True)]
    rails = [[host[slot] for host in hosts if slot < len(host)] for slot in range(max(slots))]
    found = {"world": [list(range(sum(slots)))]}
    if len(slots) > 1:
        found["host"] = hosts
    if len(slots) > 1 and max(slots) > 1:
        found["slot"] = rails
    return {kind: [ranks for ranks in each if len(ranks) > 1] for kind, each in found.items()}


def _make_groups(place: Place) -> dict[str, list[tuple[list[int], Any]]]:
    """Ranks and process group of each group, by kind; every rank takes part in making every one."""
    return {
        kind: [(ranks, dist.new_group(ranks)) for ranks in each] for kind, each in groups(place.slots).items()
    }


def _collectives(
    place: Place, made: dict[str, list[tuple[list[int], Any]]], device: torch.device
) -> Iterator[tuple[str, list[int], str, dict[str, Any]]]:
    """(kind, ranks, collective, result) of this rank's. Groups of a kind have no rank in common, and run side
    by side, as they do in training."""
    for kind, each in made.items():
        for ranks, group in each:
            if place.rank in ranks:
                for name, collective in (("all-reduce", _all_reduce), ("all-to-all", _all_to_all)):
                    yield kind, ranks, name, collective(ranks, place.rank, group, device)
        dist.barrier()


def _all_reduce(ranks: list[int], rank: int, group: Any, device: torch.device) -> dict[str, Any]:
    """Bandwidth of each rank's link in a ring: 2 (n - 1) / n of the tensor go out and come in."""
    pattern = _pattern(device)
    expected = pattern * sum(each + 1 for each in ranks)
    tensor = torch.empty_like(pattern)

    def prepare() -> None:
        torch.mul(pattern, rank + 1, out=tensor)

    seconds = _best(lambda: dist.all_reduce(tensor, group=group), group, device, prepare)
    share = 2 * (len(ranks) - 1) / len(ranks)
    return _result(tensor, expected, share, seconds)


def _all_to_all(ranks: list[int], rank: int, group: Any, device: torch.device) -> dict[str, Any]:
    """Each rank sends part j of its tensor to rank j: (n - 1) / n of it go out and come in."""
    size = _BYTES[device.type] // 4 // len(ranks) * len(ranks)
    place = ranks.index(rank)
    parts = torch.arange(len(ranks), device=device, dtype=torch.float32).repeat_interleave(size // len(ranks))
    sent, received = parts + 1000 * place, torch.empty(size, device=device)
    seconds = _best(lambda: dist.all_to_all_single(received, sent, group=group), group, device)
    return _result(received, place + 1000 * parts, (len(ranks) - 1) / len(ranks), seconds)


def _sends(place: Place, device: torch.device) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(receiver, sender, result) of each exchange of this rank."""
    pattern = _pattern(device)
    sent, received = pattern + place.rank, torch.empty_like(pattern)
    for pairs in send_rounds(place.slots):
        peer = next((sum(pair) - place.rank for pair in pairs if place.rank in pair), None)
        dist.barrier()
        if peer is not None:
            received.fill_(-1)
            seconds = _best(lambda peer=peer: _exchange(sent, received, peer), None, device)
            yield place.rank, peer, _result(received, pattern + peer, 1.0, seconds)


def _exchange(sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def send_rounds(slots: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Pairs of ranks that exchange at the same time, round by round: between hosts, then inside."""
    firsts = [sum(slots[:host]) for host in range(len(slots))]
    for slot in range(max(slots)):
        hosts = [host for host, count in enumerate(slots) if slot < count]
        for pairs in tournament(len(hosts)):
            yield [(firsts[hosts[one]] + slot, firsts[hosts[other]] + slot) for one, other in pairs]
    for pairs in tournament(max(slots)):
        inside = [
            (first + one, first + other)
            for first, count in zip(firsts, slots, strict=True)
            for one, other in pairs
            if max(one, other) < count
        ]
        yield inside


def tournament(players: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which everybody meets everybody once, and nobody two at a time (circle method)."""
    circle = list(range(players + players % 2))
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [pair for pair in pairs if max(pair) < players]
        circle.insert(1, circle.pop())


def _pattern(device: torch.device) -> torch.Tensor:
    """Small whole numbers, of which fp32 sums of thousands are exact."""
    return torch.arange(_BYTES[device.type] // 4, device=device, dtype=torch.float32).remainder_(251)


def _best(
    action: Callable[[], object],
    group: Any,
    device: torch.device,
    prepare: Callable[[], None] = lambda: None,
) -> float:
    """Seconds of the fastest of some repeats; the first one connects, and does not count."""
    times = []
    for _ in range(1 + _REPEATS):
        prepare()
        if group is not None:
            dist.barrier(group=group)
        began = _now(device)
        action()
        times.append(_now(device) - began)
    return min(times[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _result(found: torch.Tensor, expected: torch.Tensor, share: float, seconds: float) -> dict[str, Any]:
    bandwidth = share * found.numel() * found.element_size() / seconds
    return {"bandwidth": bandwidth, "right": bool((found == expected).all())}
