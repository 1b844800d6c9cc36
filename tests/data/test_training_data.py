import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.base.problems import JobError
from pipeline.data.order import split_documents
from pipeline.data.split import SplitRule, split_source
from pipeline.data.tokenizer import ByteTokenizer
from pipeline.data.training_data import DataSettings, TrainingData, load_data
from pipeline.job.data_sources import one_source
from pipeline.training.summary import repetition_lines


@pytest.mark.parametrize(
    ("documents", "fraction", "held_out"),
    [(100, 0.05, 5), (100, 0.0, 0), (2, 0.01, 1), (2, 0.99, 1), (10, 0.001, 1), (10, 0.999, 9), (1, 0.0, 0)],
)
def test_split_is_a_partition_with_a_document_on_each_side(
    documents: int, fraction: float, held_out: int
) -> None:
    train, evaluation = split_documents(documents, fraction, seed=3)
    assert sorted([*train[np.arange(len(train))], *evaluation]) == list(range(documents))
    assert len(evaluation) == held_out
    assert len(train) >= 1


def test_split_depends_on_the_seed_alone() -> None:
    first, again, other = (split_documents(1000, 0.1, seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again != other


def load(
    folder: Path, *, sequence_length: int = 16, fraction: float = 0.25, vocab_size: int = 257
) -> TrainingData:
    settings = DataSettings(sequence_length, 1, fraction, vocab_size, cache_folder=folder / "cache")
    return load_data(one_source([str(folder)]), settings)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for number in range(20):  # document n is written in the letter n alone
        (tmp_path / f"{number:02d}.txt").write_text(chr(ord("a") + number) * (10 + number))
    return tmp_path


def letters(tokens: np.ndarray) -> set[int]:
    return set(tokens.ravel().tolist()) - {0, 256}


def test_no_held_out_token_is_ever_trained_on(texts: Path) -> None:
    data = load(texts)
    (held_out,) = (each.dataset for each in data.evaluation)
    train = data.train.read(np.arange(4 * data.train.sources[0].dataset.samples_per_epoch))
    evaluation = held_out.read(np.arange(held_out.samples_per_epoch))
    assert letters(train.tokens).isdisjoint(letters(evaluation.tokens))
    assert len(letters(evaluation.tokens)) == 5
    assert letters(train.tokens) | letters(evaluation.tokens) == set(b"abcdefghijklmnopqrst")


def test_nothing_is_held_out_when_asked(texts: Path) -> None:
    data = load(texts, fraction=0)
    assert data.evaluation == ()
    assert data.train.sources[0].dataset.num_documents == 20
    assert "validation: nothing" in data.summary()


def test_summary_names_sizes_the_tail_and_what_is_left_aside(texts: Path) -> None:
    (texts / "bad.txt").write_bytes(b"\xff")
    (texts / "none.txt").touch()
    (texts / "table.csv").touch()
    data = load(texts)
    said = "\n".join(data.summary())
    assert f"{data.train.num_tokens:,} tokens" in said
    assert (
        f"{data.train.sources[0].dataset.dropped_tokens:,} tokens of an incomplete last sample left out"
        in said
    )
    assert "skipped 2 documents" in said
    assert "bad.txt (not UTF-8 at byte 0)" in said
    assert "none.txt (empty)" in said
    assert "left out: 1 .csv" in said


def test_a_resume_says_that_a_folder_gives_more_than_before(texts: Path) -> None:
    """As one of an earlier version does, which did not read lines of JSON in files that end in .json."""
    settings = DataSettings(16, 1, 0.25, 257, cache_folder=texts / "cache")
    paths = sorted(map(str, texts.glob("*.txt")))
    before = load_data(one_source([str(texts)]), settings)
    saved = before.order.state(3)
    (texts / "lines.json").write_text('{"text": "more"}\n{"text": "and more"}\n')
    with pytest.raises(JobError, match=r"holds other tokens .*name each of the earlier ones"):
        load_data(one_source([str(texts)]), settings, saved=saved, position=3)
    resumed = load_data(one_source(paths), settings, saved=saved, position=3)
    assert resumed.fingerprint == before.fingerprint


@pytest.mark.parametrize(
    ("steps", "said"),
    [(10, "0.5 times over {}"), (81, "4.0 times over {} and will overfit: give it more")],
)
def test_a_run_says_how_often_it_repeats_each_source(texts: Path, steps: int, said: str) -> None:
    data = load(texts, fraction=0)
    samples = data.train.sources[0].dataset.samples_per_epoch
    batch = SimpleNamespace(tokens_per_step=samples * 16 // 20, sequence_length=16)
    job: Any = SimpleNamespace(train_steps=steps, batch=batch)
    assert repetition_lines(job, data) == [f"this run goes {said.format(texts)}"]


def test_one_text_is_split_where_a_line_begins(tmp_path: Path) -> None:
    lines = "".join(f"{number:02d} {'-' * (number % 17)}\n" for number in range(100))
    (tmp_path / "input.txt").write_text(lines)
    data = load(tmp_path, fraction=0.05)
    (held,) = data.evaluation
    assert 0.025 * len(lines) < held.dataset.num_tokens < 0.075 * len(lines)
    assert held.dataset.num_tokens + data.train.num_tokens == len(lines) + 1
    assert any(line.startswith("one document is split where a line begins") for line in held.aside)
    train = bytes(data.train.sources[0].dataset._tokens[: data.train.num_tokens].astype(np.uint8))
    assert train.endswith(b"\n")
    assert lines.startswith(train.decode())
    assert held.dataset._offsets[held.dataset._documents].tolist() == [len(train)]


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.95])
def test_the_held_out_share_is_of_tokens_whatever_the_documents_lengths(
    tmp_path: Path, fraction: float
) -> None:
    for seed in range(6):
        file = SimpleNamespace(
            offsets=np.cumsum([0, 5000, 200, 3, 900]), num_documents=4, tokens=np.zeros(6103, np.uint16)
        )
        split = split_source(file, SplitRule(fraction), seed, ByteTokenizer())  # type: ignore[arg-type]
        sets = [each[np.arange(len(each))] for each in (split.train, split.held_out)]
        assert sorted(np.concatenate(sets)) == [*range(len(split.offsets) - 1)]
        held = int((split.offsets[sets[1] + 1] - split.offsets[sets[1]]).sum())
        assert fraction * 0.99 <= held / 6103 <= min(fraction * 1.5, 0.9999)


def test_the_held_out_tokens_are_capped_and_a_checkpoint_keeps_the_cap(texts: Path) -> None:
    settings = DataSettings(16, 1, 0.25, 257, cache_folder=texts / "cache", eval_limit=40)
    source = one_source([str(texts)])
    before = load_data(source, settings)
    assert 40 <= before.evaluation[0].dataset.num_tokens <= 60
    assert before.evaluation[0].aside[-1].startswith("capped: 25.0% would be 102 tokens")
    uncapped = load_data(source, replace(settings, eval_limit=None), saved=before.state(3), position=3)
    assert uncapped.train.num_tokens == before.train.num_tokens


def test_a_run_of_before_keeps_its_whole_documents(tmp_path: Path) -> None:
    """Its checkpoints say nothing of a split: the share was of documents, each of them whole."""
    folder = _two_texts(tmp_path / "far", 5000, 200)
    settings = DataSettings(16, 1, 0.05, 257, cache_folder=folder / "cache")
    saved = load_data(one_source([str(folder)]), settings).order.state(3)
    data = load_data(one_source([str(folder)]), settings, saved=saved, position=3)
    assert {data.train.num_tokens, data.evaluation[0].dataset.num_tokens} == {5001, 201}
    assert "split" not in data.state(5)
    assert re.search(r"WARNING: that is (96|3\.9)\S*% of the tokens", "\n".join(data.summary()))


def _two_texts(folder: Path, first: int, second: int) -> Path:
    folder.mkdir()
    for name, size in (("a", first), ("b", second)):
        (folder / f"{name}.txt").write_text(name * size)
    return folder


def test_less_text_than_one_sample_is_a_problem(texts: Path) -> None:
    total = sum(10 + n + 1 for n in range(20))
    assert load(texts, fraction=0, sequence_length=total - 1).train.sources[0].dataset.samples_per_epoch == 1
    with pytest.raises(
        JobError, match=rf"{total} tokens do not fill one sample of {total} .*smaller --seq_length"
    ):
        load(texts, fraction=0, sequence_length=total)


def test_a_vocabulary_that_is_too_small_is_a_problem(texts: Path) -> None:
    with pytest.raises(JobError, match=r"vocab_size = 256: the tokenizer \(bytes\) has ids 0 \.\. 256"):
        load(texts, vocab_size=256)
    assert not (texts / "cache").exists()
