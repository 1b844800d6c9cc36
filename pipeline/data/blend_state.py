"""How far each source of a blend has been read, as a checkpoint keeps it, and how a run resumes from it.

    {"start": 800,
     "sources": [{"name": "books", "fingerprint": "9c..", "weight": "7/10", "begun": 400, "taken": 90}, ...]}

`start` is the position at which the weights began to count, `begun` the samples that a source had given by
then, `taken` those it has given since. A source that was left out stays with weight 0, so that it goes on
where it was when it comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from pipeline.base.problems import JobError, Problem
from pipeline.data.blend import Blend, BlendSource


@dataclass(frozen=True)
class SourceState:
    """One source in a checkpoint; fields as in the module's text."""

    name: str
    fingerprint: str
    weight: Fraction
    begun: int
    taken: int

    @property
    def consumed(self) -> int:
        """Samples it has given in all."""
        return self.begun + self.taken


@dataclass(frozen=True)
class BlendState:
    """Where the sources stand.

    Attributes:
        start: Position at which the weights began to count.
        sources: In the blend's order, then those that were left out.
    """

    start: int
    sources: tuple[SourceState, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "start": self.start,
            "sources": [vars(source) | {"weight": str(source.weight)} for source in self.sources],
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> BlendState:
        """What `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        sources = [{**source, "weight": Fraction(source["weight"])} for source in saved["sources"]]
        return cls(saved["start"], tuple(SourceState(**source) for source in sources))


@dataclass(frozen=True)
class ResumedBlend:
    """A blend that resumes from a checkpoint.

    Attributes:
        blend: To be read from the checkpoint's position on.
        left_out: Sources that it no longer holds.
        changes: What is not as it was, in sentences for the console.
    """

    blend: Blend
    left_out: tuple[SourceState, ...] = ()
    changes: tuple[str, ...] = ()

    def state(self, position: int) -> dict[str, Any]:
        """What a checkpoint at `position` keeps.

        Raises:
            ValueError: `position` lies before the one it resumed from.
        """
        counts = self.blend.taken(position)
        sources = [
            SourceState(source.name, source.fingerprint, source.weight, source.begun, taken)
            for source, taken in zip(self.blend.sources, counts, strict=True)
        ]
        return BlendState(self.blend.start, (*sources, *self.left_out)).to_json()


def resume_blend(sources: Sequence[BlendSource], saved: BlendState | None, position: int) -> ResumedBlend:
    """The blend of `sources` for a run that has consumed `position` samples.

    With the sources and weights of the checkpoint it is the same order, continued. Otherwise the new weights
    count from `position` on, and each source goes on behind the last sample that it gave.

    Args:
        saved: The checkpoint's; None at the start of a run.

    Raises:
        JobError: a source holds other tokens than it did, none is left of those trained on, or two are the
            same.
    """
    if problems := _twice(sources):
        raise JobError(problems)
    if saved is None:
        return ResumedBlend(Blend(sources))
    before = {source.fingerprint: source for source in saved.sources}
    if problems := _unknown_sources(sources, saved):
        raise JobError(problems)
    active = [source for source in saved.sources if source.weight > 0]
    here = {source.fingerprint: source for source in sources}
    ordered = [here[source.fingerprint] for source in saved.sources if source.fingerprint in here]
    ordered += [source for source in sources if source.fingerprint not in before]
    left_out = tuple(
        replace(source, weight=Fraction(0), begun=source.consumed, taken=0)
        for source in saved.sources
        if source.fingerprint not in here
    )
    if [(s.fingerprint, s.weight) for s in active] == [(s.fingerprint, s.weight) for s in ordered]:
        same = [replace(source, begun=before[source.fingerprint].begun) for source in ordered]
        taken = [source.taken for source in active]
        return ResumedBlend(Blend(same, saved.start, position, taken), left_out)
    moved = [
        replace(source, begun=before[source.fingerprint].consumed) if source.fingerprint in before else source
        for source in ordered
    ]
    return ResumedBlend(Blend(moved, position), left_out, tuple(_changes(moved, saved, position)))


def _twice(sources: Sequence[BlendSource]) -> list[Problem]:
    first: dict[str, str] = {}
    problems = []
    for source in sources:
        if source.fingerprint in first:
            rule = (
                f"holds the same tokens as {first[source.fingerprint]}, and would be learned twice per epoch"
            )
            problems.append(Problem("data", source.name, rule, "Give it once, with both weights added"))
        first.setdefault(source.fingerprint, source.name)
    return problems


def _unknown_sources(sources: Sequence[BlendSource], saved: BlendState) -> list[Problem]:
    """Sources under whose name the checkpoint knows other tokens, and data that is new altogether."""
    here = {source.fingerprint for source in sources}
    known = {source.fingerprint for source in saved.sources}
    gone = {source.name: source for source in saved.sources if source.fingerprint not in here}
    problems = [
        Problem(
            "data",
            source.name,
            f"holds other tokens (fingerprint {source.fingerprint}) than the checkpoint was trained on "
            f"({gone[source.name].fingerprint}), and its position in the order means nothing in them",
            "Restore the data, give it another name in --data_blend, or start anew in another --output_dir",
        )
        for source in sources
        if source.fingerprint not in known and source.name in gone
    ]
    if not problems and not here & known:
        names = ", ".join(source.name for source in saved.sources)
        rule = f"holds none of the sources that the checkpoint was trained on ({names})"
        remedy = "Restore the data, keep one of those beside the new, or start anew in another --output_dir"
        problems.append(Problem("data", ", ".join(source.name for source in sources), rule, remedy))
    return problems


def _changes(sources: Sequence[BlendSource], saved: BlendState, position: int) -> list[str]:
    before = {source.fingerprint: source for source in saved.sources}
    lines = [f"data: other sources or weights from sample {position:,} on"]
    for source in sources:
        old = before.get(source.fingerprint)
        share = f"{float(source.weight):.4g}"
        if old is None:
            lines.append(f"  {source.name}: new, weight {share}")
            continue
        epoch, number = divmod(source.begun, source.dataset.samples_per_epoch)
        lines.append(
            f"  {source.name}: weight {float(old.weight):.4g} -> {share}, "
            f"goes on at sample {number:,} of its epoch {epoch:,}"
        )
    here = {source.fingerprint for source in sources}
    for old in saved.sources:
        if old.fingerprint not in here and old.weight > 0:
            lines.append(f"  {old.name}: left out after {old.consumed:,} samples")
    return lines
