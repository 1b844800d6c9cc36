"""Which layers go to which pipeline chunk.

A chunk is a stage's consecutive layers; DualPipeV gives each stage two chunks. Every chunk must hold a
layer with weights: one without has nothing to train, and its rank would wait for gradients that never
come. Layers without weights (rotary positions) ride along with a neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.words import did_you_mean
from pipeline.model.counts import LayerSize

METHODS = ("parameters", "uniform")

# Cost of one run of layers, [start, end).
RunCost = Callable[[int, int], float]
# Joins the cost of the first run and that of the rest.
Combine = Callable[[float, float], float]
# The least cost of a partition, and its boundaries.
Optimum = tuple[float, tuple[int, ...]]


def partition(
    layers: Sequence[LayerSize],
    chunks: int,
    method: str | Sequence[int] = "parameters",
    *,
    key: str = "pipeline.partition",
    chunks_key: str = "pipeline.stages",
) -> tuple[int, ...]:
    """Boundaries of `chunks` runs of consecutive layers.

    Args:
        layers: The layer list.
        chunks: How many runs.
        method: ``parameters`` makes the largest chunk as small as possible, counting weights; ``uniform``
            the same, counting layers, larger chunks first; a list gives the layers of each chunk.
        key, chunks_key: What problems call `method` and `chunks`.

    Returns:
        chunks + 1 numbers from 0 to len(layers): chunk c holds layers b[c] .. b[c + 1] - 1.

    Raises:
        JobError: more chunks than layers with weights, an unknown method, or a list that does not fit.
    """
    problems = _chunk_problems(layers, chunks, chunks_key)
    if problems:
        raise JobError(problems)
    if not isinstance(method, str):
        return _listed(layers, chunks, method, key)
    if method not in METHODS:
        raise job_error(key, method, "there is no such partition", did_you_mean(method, METHODS))
    costs = [layer.held if method == "parameters" else 1 for layer in layers]
    return _balanced(costs, [layer.held > 0 for layer in layers], chunks)


def _chunk_problems(layers: Sequence[LayerSize], chunks: int, key: str) -> list[Problem]:
    carrying = sum(layer.held > 0 for layer in layers)
    if 1 <= chunks <= carrying:
        return []
    rule = f"the model has {carrying} layers with weights, and each of {chunks} chunks needs one"
    if chunks < 1:
        rule = "must be at least 1"
    return [Problem(key, chunks, rule, f"Use 1 to {carrying} chunks")]


def _listed(layers: Sequence[LayerSize], chunks: int, counts: Sequence[int], key: str) -> tuple[int, ...]:
    """Boundaries from layer counts, checked."""
    value = list(counts)
    if not all(type(count) is int and count >= 1 for count in value):
        rule, remedy = "each chunk has at least one layer, as a whole number", "Correct the list"
        raise job_error(key, value, rule, remedy)
    problems = []
    if len(value) != chunks:
        rule = f"has {len(value)} entries for {chunks} chunks"
        problems.append(Problem(key, value, rule, f"Give {chunks} layer counts"))
    if sum(value) != len(layers):
        rule = f"adds up to {sum(value)}, and the model has {len(layers)} layers ({_described(layers)})"
        problems.append(Problem(key, value, rule, f"Give counts that add up to {len(layers)}"))
    boundaries = tuple(sum(value[:chunk]) for chunk in range(len(value) + 1))
    if not problems:
        problems = _weightless(layers, boundaries, value, key)
    if problems:
        raise JobError(problems)
    return boundaries


def _weightless(
    layers: Sequence[LayerSize], boundaries: tuple[int, ...], value: list[int], key: str
) -> list[Problem]:
    return [
        Problem(
            key,
            value,
            f"chunk {chunk} has no weights, only {', '.join(layer.name for layer in layers[start:end])}",
            "Move a neighbouring layer into it",
        )
        for chunk, (start, end) in enumerate(pairwise(boundaries))
        if not any(layer.held for layer in layers[start:end])
    ]


def _described(layers: Sequence[LayerSize]) -> str:
    blocks = sum(layer.name.startswith("block") for layer in layers)
    others = [layer.name for layer in layers if not layer.name.startswith("block")]
    return f"{blocks} blocks, {', '.join(others)}"


def _balanced(costs: Sequence[int], carrying: Sequence[bool], chunks: int) -> tuple[int, ...]:
    """The partition whose largest chunk is smallest; among those the most even one (least sum of
    squares); among those the one whose first chunks have most layers, as DeepSpeed's uniform.

    Dynamic programming from the end of the list, at most layers^2 * chunks steps; runs that cost more than
    the best one found are left out, so that 100 layers take about 0.1 s in any number of chunks.
    """
    cost_before = _running_sum(costs)
    carrying_before = _running_sum(carrying)

    def cost(start: int, end: int) -> float:
        if carrying_before[end] == carrying_before[start]:
            return inf
        return cost_before[end] - cost_before[start]

    limit = _solve(len(costs), chunks, cost, max)[0]

    def squared(start: int, end: int) -> float:
        one = cost(start, end)
        return one * one if one <= limit else inf

    return _solve(len(costs), chunks, squared, lambda one, rest: one + rest)[1]


def _running_sum(values: Sequence[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _solve(layers: int, chunks: int, cost: RunCost, combine: Combine) -> Optimum:
    """Least combined cost of `chunks` runs over all layers, and its boundaries.

    best[start] is the optimum for the layers from `start` on, in the number of chunks reached so far.
    """
    best: list[Optimum] = [(inf, ()) for _ in range(layers)] + [(0, (layers,))]
    for _ in range(chunks):
        best = [_first_run(start, layers, best, cost, combine) for start in range(layers)] + [(inf, ())]
    return best[0]


def _first_run(start: int, layers: int, rest: list[Optimum], cost: RunCost, combine: Combine) -> Optimum:
    """The best first run that begins at `start`; the longest of equally good ones."""
    best = (inf, -layers)
    for end in range(start + 1, layers + 1):
        own = cost(start, end)
        if own > best[0]:  # and so are all longer runs
            break
        best = min(best, (combine(own, rest[end][0]), -end))
    value, end = best
    return value, (start, *rest[-end][1])
