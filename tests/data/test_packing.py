"""Order and exactness of packed samples, on random documents whose tokens are all different."""

import numpy as np
import pytest

from pipeline.data.packing import PackedDataset, Packing

CASES = [pytest.param(seed, id=f"seed{seed}") for seed in range(25)]


def random_dataset(seed: int, keep_tail: bool = False) -> tuple[PackedDataset, list[list[int]]]:
    """A dataset over a random part of random documents, and these documents' tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, random.choice([3, 20, 200]), size=random.integers(2, 40))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.arange(offsets[-1], dtype=np.uint32) + 1000
    documents = np.flatnonzero(random.random(len(lengths)) < 0.8)
    if not len(documents):
        documents = np.array([0, 1])
    sequence_length = int(random.integers(1, max(2, min(40, lengths[documents].sum() - 1))))
    if lengths[documents].sum() <= sequence_length:
        documents = np.arange(len(lengths))
    contents = [tokens[offsets[j] : offsets[j + 1]].tolist() for j in documents]
    return PackedDataset(tokens, offsets, documents, Packing(sequence_length, seed, keep_tail)), contents


def epoch_stream(dataset: PackedDataset, epoch: int) -> list[int]:
    """Every sample of an epoch, put back in the order of their numbers and joined without the overlap."""
    count = dataset.samples_per_epoch
    samples = dataset.read(np.arange(epoch * count, (epoch + 1) * count))
    assert sorted(samples.indices) == list(range(epoch * count, (epoch + 1) * count))
    stream: list[int] = []
    for row in np.argsort(samples.indices):
        tokens = samples.tokens[row, : samples.num_labels[row] + 1].tolist()
        assert not stream or stream[-1] == tokens[0], "windows overlap by exactly one token"
        stream += tokens[1:] if stream else tokens
    return stream


def split_into(stream: list[int], documents: list[list[int]]) -> list[list[int]]:
    """Cut a stream into whole documents, the last of which may be incomplete."""
    by_first = {document[0]: document for document in documents}
    found, place = [], 0
    while place < len(stream):
        document = by_first.pop(stream[place])
        assert stream[place : place + len(document)] == document[: len(stream) - place]
        found.append(document)
        place += len(document)
    return found


@pytest.mark.parametrize("seed", CASES)
def test_an_epoch_is_every_document_once_but_for_the_counted_tail(seed: int) -> None:
    dataset, documents = random_dataset(seed)
    for epoch in (0, 1, 5):
        stream = epoch_stream(dataset, epoch)
        split_into(stream, documents)
        assert len(set(stream)) == len(stream)
        assert len(stream) + dataset.dropped_tokens == sum(map(len, documents)) == dataset.num_tokens
        assert dataset.dropped_tokens < dataset.sequence_length


@pytest.mark.parametrize("seed", CASES)
def test_a_kept_tail_leaves_nothing_out(seed: int) -> None:
    dataset, documents = random_dataset(seed, keep_tail=True)
    stream = epoch_stream(dataset, 0)
    assert sorted(split_into(stream, documents)) == sorted(documents)
    assert dataset.dropped_tokens == 0
    samples = dataset.read(np.arange(dataset.samples_per_epoch))
    padded = np.arange(dataset.sequence_length + 1) > samples.num_labels[:, None]
    assert not samples.tokens[padded].any()
    assert (samples.num_labels < dataset.sequence_length).sum() <= 1


@pytest.mark.parametrize("seed", CASES)
def test_position_alone_decides(seed: int) -> None:
    """Any rows, read in any order by a fresh dataset, are those of one long reading."""
    dataset, _ = random_dataset(seed)
    everything = dataset.read(np.arange(3 * dataset.samples_per_epoch))
    positions = np.random.default_rng(seed).permutation(len(everything.indices))[:50]
    again = random_dataset(seed)[0].read(positions)
    assert np.array_equal(again.tokens, everything.tokens[positions])
    assert np.array_equal(again.indices, everything.indices[positions])


def test_epochs_differ_in_documents_and_in_samples() -> None:
    offsets = np.arange(0, 1001, 10)
    dataset = PackedDataset(np.arange(1000), offsets, np.arange(100), Packing(10, seed=3))
    streams = [epoch_stream(dataset, epoch) for epoch in range(3)]
    assert streams[0] != streams[1] != streams[2] != streams[0]
    count = dataset.samples_per_epoch
    orders = [dataset.read(np.arange(e * count, (e + 1) * count)).indices % count for e in range(3)]
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])


def test_seeds_differ() -> None:
    offsets = np.arange(0, 1001, 10)
    first, second = (
        PackedDataset(np.arange(1000), offsets, np.arange(100), Packing(10, seed=s)) for s in (1, 2)
    )
    assert not np.array_equal(first.read(range(20)).tokens, second.read(range(20)).tokens)


@pytest.mark.parametrize(
    ("num_tokens", "keep_tail", "samples"), [(9, False, 1), (10, False, 1), (2, True, 1)]
)
def test_smallest_sizes(num_tokens: int, keep_tail: bool, samples: int) -> None:
    dataset = PackedDataset(np.arange(num_tokens), np.array([0, num_tokens]), [0], Packing(8, 0, keep_tail))
    assert dataset.samples_per_epoch == samples


@pytest.mark.parametrize(("num_tokens", "keep_tail"), [(8, False), (0, False), (1, True)])
def test_less_than_one_sample_is_refused(num_tokens: int, keep_tail: bool) -> None:
    with pytest.raises(ValueError, match=f"{num_tokens} tokens do not fill one sample of 8"):
        PackedDataset(np.arange(num_tokens), np.array([0, num_tokens]), [0], Packing(8, 0, keep_tail))
