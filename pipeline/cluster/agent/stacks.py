"""The stacks of all ranks of a hung job: who is where, and who is not where the others are. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from pipeline.cluster.agent.rank_table import rank_list

_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+) in (.+)$')
# faulthandler lists the main thread last, and frames from the innermost outwards.
_THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
# Where torch's ranks wait for each other.
_WAITING = re.compile(r"\(distributed_c10d\.py:\d+\)$")
SILENT = "no answer"


@dataclass(frozen=True)
class Stacks:
    """Every rank's stacks.

    Attributes:
        summary: Which ranks are where, in one line.
        suspect: The rank that the others wait for, where the stacks tell.
        text: All stacks; equal ones once.
    """

    summary: str
    suspect: int | None
    text: str


def grouped_stacks(stacks: Mapping[int, str], ranks: Sequence[int]) -> Stacks:
    """`stacks`: what faulthandler wrote, by rank; of `ranks`, some may not have answered."""
    stacks = {rank: text for rank, text in stacks.items() if text.strip()}  # a stopped process writes nothing
    places = {rank: innermost(stacks[rank]) if rank in stacks else SILENT for rank in ranks}
    counts = Counter(places.values())
    members = {place: [rank for rank in ranks if places[rank] == place] for place in counts}
    parts = [
        f"{rank_list(members[place])} {'gave' if place == SILENT else 'in'} {place}"
        for place, _ in counts.most_common()
    ]
    texts: dict[str, list[int]] = {}
    for rank in ranks:
        texts.setdefault(_without_addresses(stacks.get(rank, SILENT)), []).append(rank)
    text = "\n".join(f"--- stacks of {rank_list(group)}\n{text.rstrip()}" for text, group in texts.items())
    return Stacks("; ".join(parts), _suspect(places), text)


def _suspect(places: Mapping[int, str]) -> int | None:
    """The only rank that does not answer, or else does not wait for others, or else is where no other is."""
    silent = [rank for rank, place in places.items() if place == SILENT]
    busy = [rank for rank, place in places.items() if not _WAITING.search(place)]
    counts = Counter(places.values())
    alone = [rank for rank, place in places.items() if counts[place] == 1] if len(places) > 2 else []
    if len(places) < 2:
        return None
    candidates = silent or (busy if len(busy) == 1 else alone)
    return candidates[0] if len(candidates) == 1 else None


def innermost(stacks: str) -> str:
    """Function, file and line in which the main thread is."""
    main = (
        stacks[[match.start() for match in _THREAD.finditer(stacks)][-1] :] if "hread " in stacks else stacks
    )
    for line in main.splitlines():
        if match := _FRAME.match(line):
            return f"{match[3]} ({PurePath(match[1]).name}:{match[2]})"
    return "an unknown place"


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x..", text)
