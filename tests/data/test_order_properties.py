"""Properties of the sample order for any sizes: packing, exactly once, proportions, resumption."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import blend
from pipeline.data import order as sample_order
from pipeline.data.blend import Blend, BlendSchedule, BlendSource, BlendState, resume_blend
from pipeline.data.order import Complement, Order, split_documents
from pipeline.data.packing import PackedDataset, Packing

quick = settings(max_examples=30, deadline=None)
weights = st.lists(st.integers(1, 1000).map(Fraction), min_size=1, max_size=7)
lengths = st.lists(st.integers(0, 30), min_size=1, max_size=25)


def packed(sizes: list[int], sequence: int, seed: int = 0, **options: bool) -> PackedDataset:
    """Documents of these sizes; token t of the file is t, so that each occurs once."""
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    return PackedDataset(
        np.arange(offsets[-1]), offsets, np.arange(len(sizes)), Packing(sequence, seed, **options)
    )


@quick
@given(size=st.integers(1, 3000), key=st.integers())
def test_the_bijection_without_a_table_is_one_for_every_size(size: int, key: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_order, "TABLE_SIZE", 0)
        order = Order(size, key)
    assert np.array_equal(np.sort(order(np.arange(size))), np.arange(size))
    assert order(np.arange(size)[size // 2 :]).tolist() == order(np.arange(size))[size // 2 :].tolist()


def test_the_bijection_spreads_neighbours_and_numbers_without_a_table() -> None:
    """Of 5,000 places of 2^40: neighbours land apart, no bit is preferred, keys give other orders."""
    size, places = 1 << 40, np.arange(5000)
    numbers = Order(size, 1, "samples")(places)
    assert numbers.min() >= 0
    assert numbers.max() < size
    assert len(np.unique(numbers)) == 5000
    distances = np.abs(np.diff(numbers)) / size
    assert abs(distances.mean() - 1 / 3) < 0.02  # the mean distance of two random points of [0, 1]
    for bit in range(40):  # each bit is set in half of the numbers: 2,500, standard deviation 35
        assert abs(int((numbers >> bit & 1).sum()) - 2500) < 6 * 36
    assert not np.array_equal(numbers, Order(size, 2, "samples")(places))


@quick
@given(total=st.integers(1, 200), data=st.data())
def test_all_but_lists_the_rest(total: int, data: st.DataObject) -> None:
    left_out = np.array(sorted(data.draw(st.sets(st.integers(0, total - 1)))), dtype=np.int64)
    rest = Complement(total, left_out)
    assert rest[np.arange(len(rest))].tolist() == sorted(set(range(total)) - set(left_out.tolist()))


@quick
@given(weights=weights, number=st.integers(1, 300))
def test_turns_keep_their_weights_within_one_at_every_prefix(weights: list[Fraction], number: int) -> None:
    total, again = sum(weights), BlendSchedule(weights)
    had = [0] * len(weights)
    for place, (source, own) in enumerate(BlendSchedule(weights).take(0, number).T.tolist(), start=1):
        assert own == had[source], "its own turns come in order, each once"
        had[source] += 1
        assert all(abs(n - w / total * place) < 1 for n, w in zip(had, weights, strict=True))
        assert again.counts(place) == had


@quick
@given(weights=weights, place=st.integers(0, 400), number=st.integers(1, 60))
def test_turns_walked_through_are_those_of_the_table(
    weights: list[Fraction], place: int, number: int
) -> None:
    table = BlendSchedule(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "_TABLE_SIZE", 0)
        patch.setattr(blend, "_MARK_EVERY", 16)
        walked, late = BlendSchedule(weights), BlendSchedule(weights, place, table.counts(place))
    for other in (walked, late):
        assert np.array_equal(other.take(place, number), table.take(place, number))
        assert np.array_equal(other.take(place, 1), table.take(place, 1)), "also back again"
        assert other.counts(place + number) == table.counts(place + number)


def test_turns_that_begin_late_do_not_guess_what_was_before() -> None:
    weights = [Fraction(1, 3_000_001), Fraction(2, 3_000_017)]  # no short period
    late = BlendSchedule(weights, 100, BlendSchedule(weights).counts(100))
    with pytest.raises(ValueError, match="place 99 is before 100"):
        late.take(99, 1)


@quick
@given(sizes=lengths, sequence=st.integers(1, 12), keep_tail=st.booleans(), epoch=st.sampled_from([0, 1, 7]))
def test_every_token_once_per_epoch_and_documents_by_their_boundaries(
    sizes: list[int], sequence: int, keep_tail: bool, epoch: int
) -> None:
    if sum(sizes) <= sequence:
        sizes = [*sizes, sequence + 1]
    dataset = packed(sizes, sequence, keep_tail=keep_tail, find_documents=True)
    count = dataset.samples_per_epoch
    samples = dataset.read(np.arange(epoch * count, (epoch + 1) * count))
    used = np.arange(sequence + 1) <= samples.num_labels[:, None]
    labels = samples.tokens[:, 1:][used[:, 1:]]
    assert len(set(labels.tolist())) == len(labels) == sum(sizes) - 1 - dataset.dropped_tokens
    assert dataset.dropped_tokens < sequence
    assert not samples.tokens[~used].any(), "padding"
    document_of = np.repeat(np.arange(len(sizes)), sizes)
    for tokens, documents, row_used in zip(samples.tokens, samples.documents, used, strict=True):
        same = np.diff(document_of[tokens]) == 0
        assert documents[0] == 0
        assert np.array_equal((np.diff(documents) == 0)[row_used[1:]], same[row_used[1:]])
        assert (np.diff(documents) >= 0).all()
        if not row_used.all():
            assert documents[~row_used].min() > documents[row_used].max(), "padding is no part of a document"


@quick
@given(sizes=lengths, sequence=st.integers(1, 12))
def test_masked_document_ends_are_the_first_tokens_of_the_next_document(
    sizes: list[int], sequence: int
) -> None:
    sizes = [*sizes, sequence + 1]
    dataset = packed(sizes, sequence, mask_document_end=True)
    samples = dataset.read(np.arange(dataset.samples_per_epoch))
    starts = set((np.cumsum(sizes) - sizes).tolist())
    assert samples.documents is None
    assert np.array_equal(samples.counted, ~np.isin(samples.tokens[:, 1:], list(starts)))


def sources(sizes: list[list[int]], weights: list[int], sequence: int = 3) -> list[BlendSource]:
    return [
        BlendSource(f"s{n}", Fraction(weight), packed([*each, sequence + 1], sequence, seed=n), f"{n}")
        for n, (each, weight) in enumerate(zip(sizes, weights, strict=True))
    ]


blends = st.integers(1, 4).flatmap(
    lambda k: st.tuples(
        st.lists(lengths, min_size=k, max_size=k), st.lists(st.integers(1, 20), min_size=k, max_size=k)
    )
)


@quick
@given(blend=blends, cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_any_batches_give_the_same_order_and_each_source_in_its_own(
    blend: tuple[list[list[int]], list[int]], cuts: list[int]
) -> None:
    whole = Blend(sources(*blend)).read(np.arange(sum(cuts)))
    parts, first = [], 0
    for cut in cuts:
        parts.append(Blend(sources(*blend)).read(np.arange(first, first + cut)))
        first += cut
    assert np.array_equal(np.concatenate([part.tokens for part in parts]), whole.tokens)
    for number, source in enumerate(sources(*blend)):
        rows = whole.sources == number
        expected = source.dataset.read(np.arange(int(rows.sum())))
        assert np.array_equal(whole.tokens[rows], expected.tokens)
        assert np.array_equal(whole.indices[rows], expected.indices)


@quick
@given(blend=blends, runs=st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers()), max_size=6))
def test_weights_and_sources_change_and_nothing_repeats(
    blend: tuple[list[list[int]], list[int]], runs: list[tuple[int, bool, int]]
) -> None:
    """Starts with other weights, and without or again with a source: every source is read front to back."""
    saved, position, seen = None, 0, {}
    for length, leave_out, seed in runs:
        dice = np.random.default_rng(abs(seed))
        known = blend[0]
        here = sources(known, dice.integers(1, 9, len(known)).tolist())
        if leave_out and len(here) > 1:
            here.pop(int(dice.integers(1, len(here))))
        order = resume_blend(here, saved, position)
        samples = order.blend.read(np.arange(position, position + length))
        for source, index in zip(samples.sources.tolist(), samples.indices.tolist(), strict=True):
            seen.setdefault(order.blend.sources[source].name, []).append(index)
        position += length
        saved = BlendState.from_json(order.state(position))
    for source in sources(*blend):
        indices = seen.get(source.name, [])
        assert indices == source.dataset.read(np.arange(len(indices))).indices.tolist()


@quick
@given(blend=blends, stop=st.integers(0, 60), length=st.integers(1, 30))
def test_the_same_blend_goes_on_as_if_it_had_not_stopped(
    blend: tuple[list[list[int]], list[int]], stop: int, length: int
) -> None:
    whole = resume_blend(sources(*blend), None, 0)
    saved = BlendState.from_json(whole.state(stop))
    reordered = sources(*blend)[::-1]
    again = resume_blend(reordered, saved, stop)
    assert again.changes == ()
    assert again.blend.start == 0
    expected, found = (each.blend.read(np.arange(stop, stop + length)) for each in (whole, again))
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.sources, expected.sources)
    assert again.state(stop + length) == whole.state(stop + length)


def test_a_shared_index_gives_the_same_samples_and_old_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_order, "SHARED_SIZE", 10)
    monkeypatch.setattr(sample_order, "_INDEX_CHUNK", 7)
    offsets = np.concatenate(([0], np.cumsum(np.random.default_rng(1).integers(1, 9, 40))))
    train, _ = split_documents(40, 0.2, 3)
    arguments = (np.arange(offsets[-1]), offsets, train, Packing(5, 3))
    alone = PackedDataset(*arguments)
    monkeypatch.setattr(sample_order, "_INDEX_CHUNK", 1 << 18)
    shared = [PackedDataset(*arguments, index_stem=tmp_path / "order") for _ in range(2)]
    positions = np.arange(4 * alone.samples_per_epoch)
    assert np.array_equal(shared[0].read(positions).tokens, alone.read(positions).tokens)
    assert sorted(path.name for path in tmp_path.glob("*.npy")) == ["order.epoch2.npy", "order.epoch3.npy"]
    made = (tmp_path / "order.epoch3.npy").stat()
    last = positions[-alone.samples_per_epoch :]
    assert np.array_equal(shared[1].read(last).tokens, alone.read(last).tokens)
    assert (tmp_path / "order.epoch3.npy").stat().st_mtime_ns == made.st_mtime_ns, "made once, read by both"


def test_split_of_many_documents_needs_no_list_of_them() -> None:
    train, held_out = split_documents(10**11, 1e-9, 5)
    assert len(held_out) == 100
    assert len(train) == 10**11 - 100
    assert not set(train[held_out - np.arange(100)].tolist()) & set(held_out.tolist())
