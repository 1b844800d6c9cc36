"""Blends of real files: documents in batches, validation sets, changed files, ids beyond the vocabulary."""

from __future__ import annotations

import json
import os
import struct
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.base.problems import JobError
from pipeline.data.blend import Blend, BlendSource, BlendState, resume_blend
from pipeline.data.corpus import SourceSpec
from pipeline.data.loader import BatchLoader, EvalBatches, MicroBatch, digest, micro_batch, read_step
from pipeline.data.order import Complement
from pipeline.data.packing import PackedDataset, Packing, TokenError
from pipeline.data.token_file import WatchedFile, open_token_file
from pipeline.data.training_data import DataSettings, TrainingData, load_data
from pipeline.job.data_sources import one_source
from tests.data.sizes import Sizes


def write(folder: Path, name: str, letter: str, documents: int = 12, length: int = 40) -> str:
    (folder / name).mkdir(parents=True)
    for number in range(documents):
        (folder / name / f"{number:02}.txt").write_text(letter * (length + number))
    return str(folder / name)


def load(folder: Path, sources: list[SourceSpec], **options: object) -> TrainingData:
    keys = ("validation", "saved", "position")
    more = {key: options.pop(key) for key in keys if key in options}
    settings = DataSettings(
        **{"sequence_length": 8, "seed": 1, "eval_fraction": 0.25, "vocab_size": 257} | options,
        cache_folder=folder / "cache",
    )
    return load_data(sources, settings, **more)


def write_index(path: Path, documents: int, length: int) -> None:
    """Megatron's index of documents of one length, of 16-bit tokens."""
    with path.open("wb") as stream:
        stream.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        stream.write(np.full(documents, length, "<i4").tobytes())
        stream.write((np.arange(documents) * 2 * length).astype("<i8").tobytes())
        stream.write(np.arange(documents + 1, dtype="<i8").tobytes())


@pytest.fixture
def two(tmp_path: Path) -> list[SourceSpec]:
    return [
        SourceSpec("a", (write(tmp_path, "a", "a"),), Fraction(3, 4)),
        SourceSpec("b", (write(tmp_path, "b", "b"),), Fraction(1, 4)),
    ]


def letters(samples: np.ndarray) -> list[str]:
    return [chr(row[row < 256][0]) for row in samples]


def test_samples_come_from_the_sources_by_weight(two: list[SourceSpec], tmp_path: Path) -> None:
    data = load(tmp_path, two)
    found = "".join(letters(data.train.read(np.arange(400)).tokens))
    for end in range(1, 401):
        assert abs(found[:end].count("a") - 0.75 * end) < 1
    said = "\n".join(data.summary())
    assert "dataset: a, weight 0.75" in said
    assert "dataset: b, weight 0.25" in said
    assert said.count("tokens of an incomplete last sample left out") == 2


def test_each_source_holds_documents_out_and_is_evaluated_by_name(
    two: list[SourceSpec], tmp_path: Path
) -> None:
    data = load(tmp_path, two)
    assert [each.name for each in data.evaluation] == ["a", "b"]
    assert [each.dataset.num_documents for each in data.evaluation] == [3, 3]
    assert [each.name for each in load(tmp_path, two[:1]).evaluation] == [None]


def test_named_validation_sets_are_evaluated_whole(two: list[SourceSpec], tmp_path: Path) -> None:
    extra = SourceSpec("exam", (write(tmp_path, "exam", "x", documents=2),))
    data = load(tmp_path, two, validation=[extra], eval_fraction=0.0)
    ((name, dataset),) = [(each.name, each.dataset) for each in data.evaluation]
    assert (name, dataset.num_documents) == ("exam", 2)
    labels = sum(int(batch.mask.sum()) for batch in EvalBatches(dataset, 1000, 3, 0, 1))
    assert labels == dataset.num_tokens - 1


def test_what_a_validation_set_leaves_out_is_told(two: list[SourceSpec], tmp_path: Path) -> None:
    folder = tmp_path / "held"
    folder.mkdir()
    (folder / "good.txt").write_text("some other text, long enough for a sample")
    (folder / "bad.txt").write_bytes(b"\xff")
    data = load(tmp_path, two, validation=[SourceSpec("v", (str(folder),))], eval_fraction=0.0)
    lines = data.summary()
    place = next(number for number, line in enumerate(lines) if line.startswith("v: 1 documents"))
    assert "skipped 1 documents" in lines[place + 1] and "bad.txt" in lines[place + 1]


def test_a_validation_set_that_is_trained_on_is_refused(two: list[SourceSpec], tmp_path: Path) -> None:
    with pytest.raises(JobError, match="validation = 'v': holds the same tokens as the training source b"):
        load(tmp_path, two, validation=[SourceSpec("v", two[1].paths)])


def test_the_same_tokens_twice_are_refused(two: list[SourceSpec], tmp_path: Path) -> None:
    twice = [two[0], SourceSpec("again", two[0].paths, Fraction(1, 4))]
    with pytest.raises(JobError, match="'again': holds the same tokens as a"):
        load(tmp_path, twice)


def test_a_source_smaller_than_one_sample_is_named(two: list[SourceSpec], tmp_path: Path) -> None:
    small = SourceSpec("small", (write(tmp_path, "small", "s", documents=2, length=2),), Fraction(1))
    with pytest.raises(
        JobError, match=r"'small': 1 training documents: \d tokens do not fill one sample of 8"
    ):
        load(tmp_path, [*two, small])


def test_two_sources_with_different_tokenizers_are_refused(two: list[SourceSpec], tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "other.bin")
    write_index(tmp_path / "other.idx", 4, 25)
    tokenizer = {"identity": "sha256:another", "vocab_size": 100}
    description = {"format": "MMIDIDX 1", "tokenizer": tokenizer}
    (tmp_path / "other.json").write_text(json.dumps(description))
    other = SourceSpec("other", (str(tmp_path / "other"),), Fraction(1, 2))
    with pytest.raises(JobError, match="made with the tokenizer sha256:another, and the run's is bytes"):
        load(tmp_path, [*two, other])


def test_changed_weights_and_a_new_source_are_printed_and_continue(
    two: list[SourceSpec], tmp_path: Path
) -> None:
    data = load(tmp_path, two)
    before = data.train.read(np.arange(100))
    saved = data.order.state(100)
    new = SourceSpec("c", (write(tmp_path, "c", "c"),), Fraction(1, 2))
    changed = [
        SourceSpec(two[1].name, two[1].paths, Fraction(1, 4)),
        SourceSpec("a", two[0].paths, Fraction(1, 4)),
        new,
    ]
    resumed = load(tmp_path, changed, saved=saved, position=100)
    said = "\n".join(resumed.summary())
    assert "other sources or weights from sample 100 on" in said
    per_epoch = data.train.sources[0].dataset.samples_per_epoch
    assert (
        f"a: weight 0.75 -> 0.25, continues at sample {75 % per_epoch} of its epoch {75 // per_epoch}" in said
    )
    assert "c: new, weight 0.5" in said
    after = resumed.train.read(np.arange(100, 300))
    assert [letters(after.tokens).count(each) for each in "abc"] == [50, 50, 100]
    for number, name in ((0, "a"), (1, "b")):
        rows = [s.indices[s.sources == n].tolist() for s, n in ((before, number), (after, number))]
        assert resumed.train.sources[number].name == name
        everything = data.train.sources[number].dataset.read(np.arange(len(rows[0]) + len(rows[1])))
        assert rows[0] + rows[1] == everything.indices.tolist()


def test_a_source_left_out_is_said_and_goes_on_when_it_returns(two: list[SourceSpec], tmp_path: Path) -> None:
    first = load(tmp_path, two)
    alone = load(tmp_path, one_source(two[0].paths), saved=first.order.state(40), position=40)
    assert "b: left out after 10 samples" in "\n".join(alone.summary())
    again = load(tmp_path, two, saved=alone.order.state(60), position=60)
    assert [source.begun for source in again.train.sources] == [50, 10]
    same = load(tmp_path, two, saved=again.order.state(70), position=70)
    assert same.order.changes == ()


def test_other_tokens_under_a_known_name_are_refused(two: list[SourceSpec], tmp_path: Path) -> None:
    saved = load(tmp_path, two).order.state(8)
    Path(two[1].paths[0], "00.txt").write_text("something else")
    with pytest.raises(JobError, match=r"'b': holds other tokens .*than the checkpoint was trained on"):
        load(tmp_path, two, saved=saved, position=8)
    other = SourceSpec("other", (write(tmp_path, "other", "o"),))
    with pytest.raises(JobError, match=r"none of the sources that the checkpoint was trained on \(a, b\)"):
        load(tmp_path, [other], saved=saved, position=8)


def test_progress_is_plain_json(two: list[SourceSpec], tmp_path: Path) -> None:
    order = load(tmp_path, two).order
    saved = json.loads(json.dumps(order.state(9)))
    assert BlendState.from_json(saved).to_json() == order.state(9)
    assert [(each["name"], each["weight"], each["taken"]) for each in saved["sources"]] == [
        ("a", "3/4", 7),
        ("b", "1/4", 2),
    ]


# Batches


def labelled(dataset: PackedDataset | Blend) -> MicroBatch:
    return micro_batch(dataset.read(np.arange(6)))


def test_documents_and_masks_reach_the_batch_by_position() -> None:
    """End-of-document ids inside a document (9) neither end it nor leave the loss."""
    tokens = np.array([1, 9, 9, 2, 9, 3, 3, 9, 4, 4, 4, 9, 9])
    offsets = np.array([0, 5, 8, 13])
    plain = PackedDataset(tokens, offsets, [0, 1, 2], Packing(4, 0, keep_tail=True))
    marked = PackedDataset(
        tokens, offsets, [0, 1, 2], Packing(4, 0, keep_tail=True, find_documents=True, mask_document_end=True)
    )
    expected, found = (micro_batch(each.read(np.arange(3))) for each in (plain, marked))
    assert expected.documents is None
    assert expected.mask.all(), "12 labels, none of them padding, whatever their ids"
    assert torch.equal(found.tokens, expected.tokens)
    changes = found.documents[:, 1:] != found.documents[:, :-1]
    assert torch.equal(found.mask[:, :-1], ~changes), "the label before a new document's first input"
    assert int((~found.mask).sum()) == 2, "three documents in a row of the order: two edges"


def test_the_digest_sees_documents_and_sources() -> None:
    def step(**options: bool) -> int:
        offsets = np.arange(0, 101, 10)
        dataset = PackedDataset(
            np.zeros(100, dtype=np.int64), offsets, np.arange(10), Packing(8, 0, **options)
        )
        sources = [BlendSource("a", Fraction(1), dataset, "a"), BlendSource("b", Fraction(1), dataset, "b")]
        return digest(read_step(Blend(sources), Sizes(4, 2, 2), 0, 1, 0))

    assert len({step(), step(find_documents=True), step(mask_document_end=True)}) == 3


def test_evaluation_rows_of_padding_have_documents_too() -> None:
    dataset = PackedDataset(
        np.arange(20), np.array([0, 6, 20]), [0, 1], Packing(8, 0, keep_tail=True, find_documents=True)
    )
    for batch in (*EvalBatches(dataset, 10, 2, 0, 2), *EvalBatches(dataset, 10, 2, 1, 2)):
        assert batch.documents.shape == batch.tokens.shape


def test_a_token_id_beyond_the_vocabulary_stops_when_it_is_read() -> None:
    tokens = np.array([1, 2, 3, 4, 700, 5, 6, 7, 8])
    dataset = PackedDataset(tokens, np.array([0, 9]), [0], Packing(4, 0, vocab_size=257))
    with pytest.raises(TokenError, match=r"token id 700.*ids 0 \.\. 256"):
        dataset.read([0, 1])
    negative = PackedDataset(-tokens, np.array([0, 9]), [0], Packing(4, 0, vocab_size=257))
    with pytest.raises(TokenError, match="token id -700"):
        negative.read([0, 1])


# Files under a run


@pytest.mark.parametrize("change", ["written", "longer", "replaced", "gone"])
def test_a_token_file_that_changes_under_the_run_stops_it(change: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(100, dtype=np.uint16).tofile(path)
    os.utime(path, ns=(1, 1))
    tokens = np.memmap(path, np.uint16, "r")
    dataset = PackedDataset(tokens, np.array([0, 100]), [0], Packing(8, 0))
    source = BlendSource("s", Fraction(1), dataset, "s", (WatchedFile.of(path),))
    with BatchLoader(Blend([source]), Sizes(1, 1, 1), 0, 1, prefetch=1) as loader:
        next(loader)
        if change == "gone":
            path.unlink()
        elif change == "replaced":
            (tmp_path / "new").write_bytes(path.read_bytes())
            os.utime(tmp_path / "new", ns=(1, 1))
            (tmp_path / "new").replace(path)
        else:
            with path.open("r+b") as stream:
                stream.seek(0, os.SEEK_END if change == "longer" else os.SEEK_SET)
                stream.write(b"ab")
        with pytest.raises(TokenError, match=r"tokens\.bin.*(changed during the run|cannot be read)"):
            for _ in range(5):
                next(loader)


# Size


@pytest.mark.alone
def test_a_trillion_tokens_open_in_a_second_and_serve_their_end(tmp_path: Path) -> None:
    """A sparse file of 2 TB: every product and offset is beyond 32 bits, the last ones beyond 2^39."""
    path, size, document = tmp_path / "tokens.bin", 10**12, 10**9
    with path.open("wb") as stream:
        stream.truncate(2 * size)
        stream.seek(2 * (size - 3000))
        stream.write(np.arange(3000, dtype=np.uint16).tobytes())
    write_index(tmp_path / "tokens.idx", size // document, document)
    begin = time.perf_counter()
    file = open_token_file(str(tmp_path / "tokens"))
    everything = Complement(file.num_documents, np.arange(0))
    dataset = PackedDataset(file.tokens, file.offsets, everything, Packing(2048, seed=3, find_documents=True))
    count = dataset.samples_per_epoch
    samples = dataset.read([0, count - 1, 7 * count, 10**10])
    seconds = time.perf_counter() - begin
    assert count == (size - 1) // 2048
    assert seconds < 1
    assert samples.indices.min() >= 0
    # The samples that hold the file's end: the last document's place in the epoch says which they are.
    epoch = dataset._epoch(0)
    place = int(np.flatnonzero(epoch.documents(np.arange(1000)) == 999)[0])
    end = int(epoch.begins[place + 1])
    number = (end - 1000) // 2048
    assert number * 2048 < end - 1
    row = np.zeros((1, 2049), dtype=np.int64)
    dataset._fill(row, None, np.array([0]), epoch, np.array([number]))
    first = number * 2048 - (end - 3000)
    inside = min(2049, end - number * 2048)
    assert row[0, max(0, -first) : inside].tolist() == list(range(max(first, 0), first + inside))


def test_resume_far_out_needs_no_walk_from_the_start() -> None:
    """Weights without a short period, 10^12 samples in: the checkpoint's counts are the start."""
    dataset = PackedDataset(np.arange(100), np.array([0, 100]), [0], Packing(8, 0))
    weights = (Fraction(1_000_003, 3_000_017), Fraction(2_000_014, 3_000_017))
    sources = [BlendSource(f"{n}", weight, dataset, f"{n}") for n, weight in enumerate(weights)]
    position = 10**12
    taken = [int(position * weights[0])]
    taken.append(position - taken[0])
    entries = [
        {"name": s.name, "fingerprint": s.fingerprint, "weight": str(s.weight), "begun": 0, "taken": count}
        for s, count in zip(sources, taken, strict=True)
    ]
    order = resume_blend(sources, BlendState.from_json({"start": 0, "sources": entries}), position)
    begin = time.perf_counter()
    found, _ = order.blend.locate(np.arange(position, position + 1000))
    assert time.perf_counter() - begin < 1
    assert abs(int((found == 0).sum()) - 1000 / 3) <= 2
