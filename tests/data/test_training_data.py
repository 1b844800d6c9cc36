import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.base.problems import JobError
from pipeline.data.order import split_documents
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


def test_a_single_document_cannot_be_split() -> None:
    with pytest.raises(JobError, match=r"eval_fraction = 0\.1.*single document.*Set it to 0"):
        split_documents(1, 0.1, seed=1)


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
    assert f"{data.train.sources[0].dataset.dropped_tokens:,} tokens of the tail dropped" in said
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
    [(10, "0.5 times over {}"), (81, "4.0 times over {} and will memorise it: give it more")],
)
def test_a_run_says_how_often_it_repeats_each_source(texts: Path, steps: int, said: str) -> None:
    data = load(texts, fraction=0)
    samples = data.train.sources[0].dataset.samples_per_epoch
    batch = SimpleNamespace(tokens_per_step=samples * 16 // 20, sequence_length=16)
    job: Any = SimpleNamespace(train_steps=steps, batch=batch)
    assert repetition_lines(job, data) == [f"this run goes {said.format(texts)}"]


def test_a_held_out_share_far_from_what_was_asked_is_said(tmp_path: Path) -> None:
    assert not any(
        "WARNING" in line for line in load(_two_texts(tmp_path / "even", 500, 500), fraction=0.5).summary()
    )
    said = "\n".join(load(_two_texts(tmp_path / "far", 5000, 200), fraction=0.05).summary())
    assert re.search(
        r"WARNING: that is (96|3\.9|4)\S*% of the tokens, where --eval_fraction asks for 5.0%", said
    )


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
