"""The stacks of all ranks of a hung job: who is where, and who is not where the others are. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from pipeline.cluster.roster import ranges

_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+) in (.+)$')
# faulthandler lists the main thread last, and frames from the innermost outwards.
_THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
SILENT = "no answer"


@dataclass(frozen=True)
class Stacks:
    """Every rank's stacks.

    Attributes:
        summary: Which ranks are where, in one line.
        suspect: The only rank that is elsewhere than the others, if there is one.
        text: All stacks; equal ones once.
    """

    summary: str
    suspect: int | None
    text: str


def grouped_stacks(stacks: Mapping[int, str], ranks: Sequence[int]) -> Stacks:
    """`stacks`: what faulthandler wrote, by rank; of `ranks`, some may not have answered."""
    places = {rank: innermost(stacks[rank]) if rank in stacks else SILENT for rank in ranks}
    counts = Counter(places.values())
    members = {place: [rank for rank in ranks if places[rank] == place] for place in counts}
    parts = [f"ranks {ranges(members[place])} in {place}" for place, _ in counts.most_common()]
    alone = [rank for rank in ranks if counts[places[rank]] == 1]
    suspect = alone[0] if len(alone) == 1 and len(ranks) > 2 else None
    texts: dict[str, list[int]] = {}
    for rank in ranks:
        texts.setdefault(_without_addresses(stacks.get(rank, SILENT)), []).append(rank)
    text = "\n".join(f"--- stacks of ranks {ranges(group)}\n{text.rstrip()}" for text, group in texts.items())
    return Stacks("; ".join(parts), suspect, text)


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
