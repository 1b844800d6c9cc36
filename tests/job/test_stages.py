"""The pipeline partition: optimal, deterministic, and never a chunk without weights."""

import random
from itertools import combinations, pairwise

import pytest

from pipeline.base.problems import JobError
from pipeline.job.models import PRESETS
from pipeline.job.stages import partition
from pipeline.model.counts import LayerSize, layer_parameters


def _layers(*sizes):
    return [LayerSize(f"block {index}", size) for index, size in enumerate(sizes)]


def _chunk_sums(boundaries, costs):
    return [sum(costs[start:end]) for start, end in pairwise(boundaries)]


def _every_partition(sizes, chunks):
    """All boundaries whose chunks hold weights."""
    for inner in combinations(range(1, len(sizes)), chunks - 1):
        boundaries = (0, *inner, len(sizes))
        if all(sum(sizes[start:end]) for start, end in pairwise(boundaries)):
            yield boundaries


def test_parameters_against_every_possible_partition():
    generator = random.Random(0)
    for _ in range(60):
        sizes = [generator.choice([0, 1, 2, 3, 5, 8, 50]) for _ in range(generator.randint(2, 9))]
        chunks = generator.randint(1, max(1, sum(size > 0 for size in sizes)))
        if not any(sizes):
            continue
        found = partition(_layers(*sizes), chunks)
        candidates = list(_every_partition(sizes, chunks))
        assert found in candidates
        costs = {boundaries: _chunk_sums(boundaries, sizes) for boundaries in candidates}
        best = min((max(sums), sum(cost * cost for cost in sums)) for sums in costs.values())
        assert (max(costs[found]), sum(cost * cost for cost in costs[found])) == best


def test_uniform_against_every_possible_partition():
    generator = random.Random(1)
    for _ in range(60):
        sizes = [generator.choice([0, 1, 1, 9]) for _ in range(generator.randint(2, 9))]
        if not any(sizes):
            continue
        chunks = generator.randint(1, sum(size > 0 for size in sizes))
        found = partition(_layers(*sizes), chunks, "uniform")
        lengths = [_chunk_sums(b, [1] * len(sizes)) for b in _every_partition(sizes, chunks)]
        best = min((max(each), sum(length**2 for length in each)) for each in lengths)
        own = _chunk_sums(found, [1] * len(sizes))
        assert (max(own), sum(length**2 for length in own)) == best


@pytest.mark.parametrize("layers", range(1, 30))
def test_uniform_is_deepspeeds_where_every_layer_has_weights(layers):
    # DeepSpeed deals layers // chunks to each chunk and one more to the first ones.
    for chunks in range(1, layers + 1):
        each, more = divmod(layers, chunks)
        counts = [each + 1] * more + [each] * (chunks - more)
        expected = tuple(sum(counts[:chunk]) for chunk in range(chunks + 1))
        assert partition(_layers(*[7] * layers), chunks, "uniform") == expected


def test_a_layer_without_weights_never_stands_alone():
    layers = _layers(10, 0, 10, 10)
    for method in ("parameters", "uniform"):
        assert partition(layers, 3, method) in ((0, 2, 3, 4), (0, 1, 3, 4))
    with pytest.raises(JobError, match="3 layers with weights, and each of 4 chunks needs one"):
        partition(layers, 4)


def test_one_heavy_layer_gets_a_chunk_to_itself():
    # DeepSpeed's partition_balanced makes 100 + four 1s of this, and an idle stage of one layer.
    assert _chunk_sums(partition(_layers(100, 1, 1, 1, 1, 100), 3), [100, 1, 1, 1, 1, 100]) == [100, 4, 100]


def test_a_tied_output_layer_carries_its_copy():
    model = PRESETS["gpt2-124m"].model
    layers = layer_parameters(model)
    boundaries = partition(layers, len(layers))
    assert boundaries == tuple(range(len(layers) + 1))


def test_uneven_layer_counts():
    layers = layer_parameters(PRESETS["tiny"].model)
    assert partition(layers, 2, [3, 4]) == (0, 3, 7)
    assert partition(layers, 1, [7]) == (0, 7)


@pytest.mark.parametrize(
    ("chunks", "method", "message"),
    [
        (2, [3, 3], "adds up to 6, and the model has 7 layers"),
        (2, [3, 2, 2], "has 3 entries for 2 chunks"),
        (2, [7, 0], "at least one layer"),
        (2, [3, True], "at least one layer"),
        (3, [1, 1, 5], "chunk 1 has no weights, only positions"),
        (2, "parameter", "parameters"),
        (0, "parameters", "must be at least 1"),
        (8, "parameters", "6 layers with weights"),
    ],
)
def test_refusals(chunks, method, message):
    layers = [LayerSize("embedding", 5), LayerSize("positions", 0)]
    layers += [LayerSize(f"block {index}", 9) for index in range(3)]
    layers += [LayerSize("final norm", 1), LayerSize("output", 0, tied=5)]
    with pytest.raises(JobError, match=message) as caught:
        partition(layers, chunks, method)
    assert all(problem.key in ("pipeline.partition", "pipeline.stages") for problem in caught.value.problems)


def test_a_wrong_list_reports_everything_at_once():
    with pytest.raises(JobError) as caught:
        partition(_layers(1, 1, 1, 1), 2, [1, 1, 1])
    assert len(caught.value.problems) == 2


def test_large_models_are_partitioned_quickly():
    import time

    layers = layer_parameters(PRESETS["gpt3-175b"].model)
    start = time.process_time()  # about half a second; a busy machine does not lengthen it
    for chunks in (1, 8, 32, 64, 96):
        assert len(partition(layers, chunks)) == chunks + 1
        assert len(partition(layers, chunks, "uniform")) == chunks + 1
    assert time.process_time() - start < 4.0
