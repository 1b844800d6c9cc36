"""What the options say about data: training sources with their weights, and named validation sets.

    --data PATH...                  one source, all its documents in one order
    --data PATH=WEIGHT...           one source each; the weights add up to 1
    --data_blend FILE.json          the same with names and several paths per source
    --validation NAME=PATH...       sets of their own, evaluated by name; one NAME may come several times

A blend file holds ``{"sources": [{"name": "books", "data": ["books", "more.txt"], "weight": 0.7}, ...]}``;
`data` may be a single path, `name` may be left out. Comments are allowed. Paths count from the current
folder, as those of ``--data`` do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from pipeline.base.fields import Limits, Record, build, check, described
from pipeline.base.json_reader import read_json
from pipeline.base.problems import JobError, Problem
from pipeline.base.user_input import exists
from pipeline.data.corpus import SourceSpec, data_problems
from pipeline.data.inputs import is_remote, readable, token_prefix
from pipeline.data.preparation import Rules
from pipeline.data.token_file import described_remarks
from pipeline.data.training_data import DataSettings
from pipeline.job.job import Job
from pipeline.job.options import Name, Options, PathName

# How far from 1 the weights' sum may be: thirds written with six digits are meant well.
SUM_TOLERANCE = Fraction(1, 100_000)
HEAVIEST = 10**15
_WEIGHT = "a weight is above 0, and below 1e15"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def one_source(paths: Sequence[str]) -> tuple[SourceSpec, ...]:
    """All `paths` as a single source."""
    return (SourceSpec(", ".join(map(readable, paths)) or "standard library", tuple(paths)),)


def training_sources(options: Options) -> tuple[SourceSpec, ...]:
    """The sources to train on, weights made to add up to exactly 1.

    Raises:
        JobError: with every problem of names and weights; paths are not looked at.
    """
    key, sources, problems = "data", list(one_source(options.data)), []
    if options.data_blend is not None:
        key = "data_blend"
        sources, problems = _read_blend(options.data_blend)
        if options.data:
            rule = "says what to train on a second time, beside --data"
            problems.append(Problem(key, options.data_blend, rule, "Give one of the two"))
    elif any(_weighted(path) for path in options.data):
        sources, problems = _weighted_paths(options.data)
    problems += [] if problems else _weight_problems(key, sources)
    if problems:
        raise JobError(problems)
    total = sum(source.weight for source in sources)
    return tuple(SourceSpec(source.name, source.paths, source.weight / total) for source in sources)


def validation_sets(options: Options) -> tuple[SourceSpec, ...]:
    """The named validation sets, in the order of their first mention.

    Raises:
        JobError: an entry is not NAME=PATH.
    """
    sets: dict[str, tuple[str, ...]] = {}
    problems = []
    for entry in options.validation:
        name, equals, path = entry.partition("=")
        if not equals or not path or not _NAME.fullmatch(name):
            rule = "is not NAME=PATH with a name of letters, digits, dots, dashes and underscores"
            problems.append(
                Problem(
                    "validation", readable(entry), rule, "Write, for example, --validation books=books.txt"
                )
            )
        else:
            sets[name] = (*sets.get(name, ()), path)
    if problems:
        raise JobError(problems)
    return tuple(SourceSpec(name, paths) for name, paths in sets.items())


def path_problems(key: str, sources: Iterable[SourceSpec], written: Sequence[str]) -> Iterator[Problem]:
    """Everything that is wrong with the sources' paths, found without reading the data, and what is left out.

    Args:
        key: The option that messages name.
        written: Folders that the run writes to.
    """
    for source in sources:
        yield from (replace(problem, key=key) for problem in data_problems(source.paths, written))
        for prefix in filter(None, map(token_prefix, source.paths)):
            yield from (replace(problem, key=key) for problem in _remarked(prefix))


def data_settings(job: Job) -> DataSettings:
    """How a job's tokens become its samples."""
    spec = job.data
    return DataSettings(
        sequence_length=job.batch.sequence_length,
        seed=job.seed,
        eval_fraction=spec.held_out_fraction,
        eval_limit=spec.held_out_limit,
        vocab_size=job.model.vocab_size,
        cache_folder=Path(job.output_dir) / "data",
        document_mask=spec.document_mask,
        mask_document_end=spec.mask_document_end,
        rules=Rules(spec.text_field, spec.on_bad_record, spec.document_separator, spec.on_lost_characters),
        written=(job.output_dir, spec.cache_folder),
    )


def _remarked(prefix: str) -> list[Problem]:
    """What was found when token files were prepared."""
    try:
        return [
            Problem("data", prefix, line.removeprefix("WARNING: "), "", "warning")
            for line in described_remarks(prefix)
        ]
    except JobError as error:
        return list(error.problems)


def _weighted(entry: str) -> tuple[str, Fraction] | None:
    """PATH and WEIGHT of an entry that has both. A file whose name ends in =NUMBER is a path, and so is an
    address with a query."""
    path, equals, weight = entry.rpartition("=")
    if not equals or not path or not _NUMBER.fullmatch(weight) or exists(entry):
        return None
    if is_remote(entry) and "?" in path:
        return None
    if not abs(float(weight)) < HEAVIEST:  # of thousands of digits no fraction is made
        return path, Fraction(HEAVIEST)
    return path, Fraction(weight)


def _weighted_paths(entries: Sequence[str]) -> tuple[list[SourceSpec], list[Problem]]:
    pairs = {entry: _weighted(entry) for entry in entries}
    sources = [SourceSpec(readable(pair[0]), (pair[0],), pair[1]) for pair in map(_weighted, entries) if pair]
    rule = "has no weight, and other paths have one"
    remedy = "Write PATH=WEIGHT for each path, or use --data_blend for sources of several paths"
    problems = [
        Problem("data", readable(entry), rule, remedy) for entry, pair in pairs.items() if pair is None
    ]
    return sources, problems


@dataclass(frozen=True, slots=True)
class BlendSource(Record):
    """One source of a blend file."""

    data: PathName | Annotated[list[PathName], Limits(filled=True)] = described(
        meaning="Path, or list of paths."
    )
    weight: float = described(meaning="Share of the samples.")
    name: Name | None = described(
        None, "For the console, the metrics and the checkpoint.", default_text="its paths"
    )

    @property
    def spec(self) -> SourceSpec:
        paths = (self.data,) if isinstance(self.data, str) else tuple(self.data)
        return SourceSpec(self.name or ", ".join(map(readable, paths)), paths, Fraction(str(self.weight)))


@dataclass(frozen=True, slots=True)
class Blend(Record):
    """A blend file."""

    sources: Annotated[list[BlendSource], Limits(filled=True)] = described(
        meaning="Where documents come from."
    )


def _read_blend(path: str) -> tuple[list[SourceSpec], list[Problem]]:
    document = read_json(Path(path), "data_blend", "a JSON of sources and weights")
    problems = [*document.problems] or [*check(Blend, document.values, document.where)]
    entries = [] if problems else document.values["sources"]
    return [build(BlendSource, entry, entry).spec for entry in entries], problems


def _weight_problems(key: str, sources: Sequence[SourceSpec]) -> list[Problem]:
    problems = [
        Problem(key, f"{source.name}={float(source.weight):g}", _WEIGHT, "Change it, or leave it out")
        for source in sources
        if not 0 < source.weight < HEAVIEST
    ]
    problems += [
        Problem(key, name, "is named twice", "Add its weights up, or give the sources names of their own")
        for name in _repeated(source.name for source in sources)
    ]
    total = sum(source.weight for source in sources)
    if not problems and abs(total - 1) > SUM_TOLERANCE:
        shares = ", ".join(f"{source.name} {float(source.weight / total):.6f}" for source in sources)
        weights = " + ".join(f"{float(source.weight):g}" for source in sources)
        rule = f"the weights add up to {float(total):g}, not 1"
        problems.append(Problem(key, weights, rule, f"In the same proportions they are {shares}"))
    return problems


def _repeated(names: Iterable[str]) -> list[str]:
    seen, twice = set(), []
    for name in names:
        if name in seen:
            twice.append(name)
        seen.add(name)
    return twice
