"""From the options of a run to its two sets of samples. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.data.corpus import Corpus, find_corpus
from pipeline.data.packing import PackedDataset
from pipeline.data.shuffle import permutation
from pipeline.data.token_cache import DEFAULT_WAIT, cached_tokens
from pipeline.data.token_file import TokenFile
from pipeline.data.tokenizer import ByteTokenizer, Tokenizer, vocabulary_problems
from pipeline.job.problems import JobError, Problem


@dataclass(frozen=True)
class TrainingData:
    """What a run reads.

    Attributes:
        corpus: The files, and those left aside while listing them.
        tokenizer: Made the tokens; decodes a model's samples.
        train: Endless shuffled samples; its tail is dropped in each epoch.
        held_out: Other documents, tail kept; None where nothing is held out.
        token_file: The tokens of both, with the files that were skipped.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    train: PackedDataset
    held_out: PackedDataset | None
    token_file: TokenFile

    @property
    def fingerprint(self) -> str:
        """Equal on all hosts that read the same tokens; a checkpoint keeps it to recognise its data."""
        return self.token_file.fingerprint

    def summary(self) -> tuple[str, ...]:
        """Lines for the console: both sets, and what is not used."""
        lines = [
            f"data: {self.corpus.name}",
            f"training: {_size(self.train)}, {self.train.samples_per_epoch:,} samples per epoch, "
            f"{self.train.dropped_tokens:,} tokens of the tail dropped",
            f"held out: {_size(self.held_out)}" if self.held_out else "held out: nothing",
        ]
        skipped = self.token_file.skipped
        if skipped:
            shown = "; ".join(f"{entry.path} ({entry.reason})" for entry in skipped[:5])
            lines.append(f"skipped {len(skipped):,} files: {shown}{'; ...' if len(skipped) > 5 else ''}")
        if self.corpus.num_other:
            lines.append(f"left out {self.corpus.num_other:,} files of other kinds than plain text")
        return tuple(lines)


def load_data(
    paths: Sequence[str],
    cache_folder: Path,
    *,
    sequence_length: int,
    seed: int,
    eval_fraction: float,
    vocab_size: int,
    report: Callable[[str], None],
    time_limit: float = DEFAULT_WAIT,
) -> TrainingData:
    """Tokenize what is new, split it by documents, and pack it. Every rank calls it and gets the same.

    Args:
        paths: Files and folders; none means the standard library's source text.
        cache_folder: Where token files are kept.
        sequence_length: Inputs per sample.
        seed: Chooses the held-out documents and the sample order.
        eval_fraction: Share of the documents that is held out, 0 to below 1; 0 holds out nothing.
        vocab_size: The model's, unpadded; must hold every id of the tokenizer.
        report: Receives messages about long work; silent on all ranks but one.
        time_limit: Seconds to wait for the process that tokenizes.

    Raises:
        JobError: paths, texts or sizes that cannot be used.
        TimeoutError, OSError: see `cached_tokens`.
    """
    tokenizer = ByteTokenizer()
    if problems := vocabulary_problems(tokenizer, vocab_size):
        raise JobError(problems)
    corpus = find_corpus(paths)
    file = cached_tokens(corpus, tokenizer, cache_folder, report, time_limit)
    train, held_out = split_documents(file.num_documents, eval_fraction, seed)
    return TrainingData(
        corpus,
        tokenizer,
        _pack(file, train, sequence_length, seed, corpus.name),
        PackedDataset(file.tokens, file.offsets, held_out, sequence_length, seed, keep_tail=True)
        if len(held_out)
        else None,
        file,
    )


def split_documents(num_documents: int, eval_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the training and of the held-out documents, each sorted.

    A document is never on both sides. The held-out side has `eval_fraction` of the documents, rounded,
    but at least one, and leaves at least one to train on. It does not depend on epoch or layout.

    Raises:
        JobError: fewer than two documents, where something is to be held out.
    """
    if eval_fraction == 0:
        return np.arange(num_documents), np.arange(0)
    if num_documents < 2:
        rule = "documents are held out whole, and the data is a single document"
        raise JobError(
            [Problem("eval_fraction", eval_fraction, rule, "Set it to 0, or give the data in several files")]
        )
    count = min(max(round(num_documents * eval_fraction), 1), num_documents - 1)
    shuffled = permutation(num_documents, seed, "held out")
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def _pack(
    file: TokenFile, documents: np.ndarray, sequence_length: int, seed: int, name: str
) -> PackedDataset:
    try:
        return PackedDataset(file.tokens, file.offsets, documents, sequence_length, seed)
    except ValueError as error:
        rule = f"{len(documents)} training documents: {error}"
        raise JobError([Problem("data", name, rule, "Give more text, or a smaller --seq_length")]) from error


def _size(dataset: PackedDataset) -> str:
    return f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens"
