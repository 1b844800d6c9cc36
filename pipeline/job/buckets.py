"""The size of ZeRO's gradient bucket where the JSON leaves it open."""

from __future__ import annotations

from itertools import pairwise

from pipeline.job.facts import Facts
from pipeline.job.job import Resolved
from pipeline.model.parameter_counts import layer_parameters, stage_parameters

KEY = "zero_optimization.reduce_bucket_size"
DEEPSPEED_DEFAULT = 500_000_000
# On CPUs nothing overlaps a reduction, and a bucket that stays in the cache is copied faster: 4 to 6 % of a
# step in benchmarks/README.md.
ON_CPU = 1_000_000


def reduce_bucket(facts: Facts, stages: tuple[int, ...]) -> Resolved | None:
    """Elements to reduce at a time; None where the JSON says it or nothing reads it.

    DeepSpeed allocates the bucket whatever the model's size: 2 GB of fp32 for its default of 5e8 elements. No
    bucket needs to hold more than a rank's parameters.
    """
    if facts.config.given(KEY) or facts.zero_stage == 0 or facts.uses_bf16_optimizer:
        return None
    layers = layer_parameters(facts.model)
    chunks = [layers[start:end] for start, end in pairwise(stages)]
    if facts.schedule == "dualpipev":  # rank r holds chunk r and its mirror
        chunks = [chunk + mirror for chunk, mirror in zip(chunks, reversed(chunks), strict=True)]
    largest = -(-max(stage_parameters(chunk) for chunk in chunks) // facts.tensor)
    usual, why = (ON_CPU, "CPU ranks") if facts.world.device == "cpu" else (DEEPSPEED_DEFAULT, "usual")
    if largest < usual:
        return Resolved(KEY, largest, "a rank's parameters")
    return Resolved(KEY, usual, why)
