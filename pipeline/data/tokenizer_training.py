"""Byte-level BPE, trained on the same inputs that will be tokenized."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.base.files import replaced_atomically
from pipeline.base.json_reader import saved_json
from pipeline.base.problems import JobError, job_error
from pipeline.data.corpus import Corpus
from pipeline.data.encoding import BadRecord, split_text, text_of
from pipeline.data.preparation import Rules, bad_record, cache_identity
from pipeline.data.records import read_texts
from pipeline.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from pipeline.data.tokenizer_folder import END, write_tokenizer_folder

logger = logging.getLogger(__name__)

# The 256 bytes and the end of a document: the smallest vocabulary that encodes every text.
SMALLEST = 257
# The library sets memory aside for each id, 66 bytes and more, and ends the process where there is none.
LARGEST = 2**22
_NOTE = "trained_on.json"
_BATCH = 1000


def train_tokenizer(corpus: Corpus, rules: Rules, vocab_size: int, folder: Path) -> Tokenizer:
    """A byte-level BPE that splits words as GPT-2 does, saved as a Hugging Face folder.

    The result of an earlier call with the same inputs is used as it is.

    Args:
        corpus: Its files are read from beginning to end.
        rules: Where the text is, and whether a bad record is skipped.
        vocab_size: Ids to reach, end of document included; fewer where the text has no more pairs.
        folder: Where it is saved.

    Raises:
        JobError: too small or large a size, no text, a bad record, or another tokenizer in `folder`.
    """
    _check(corpus, vocab_size)
    note = {"inputs": cache_identity(corpus, ByteTokenizer(), rules), "vocab_size": vocab_size}
    if _is_trained(folder, note):
        logger.info(f"using the tokenizer that was trained before, {folder}")
        return load_tokenizer(str(folder))
    logger.info(f"training a tokenizer of {vocab_size:,} ids on {corpus.name}")
    text = _train(_batches(corpus, rules), vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    _write_note(folder, {**note, "finished": False})
    write_tokenizer_folder(folder, text, END)
    _write_note(folder, {**note, "finished": True})
    tokenizer = load_tokenizer(str(folder))
    logger.info(f"trained {tokenizer.vocab_size:,} ids, saved as {folder}")
    return tokenizer


def _check(corpus: Corpus, vocab_size: int) -> None:
    if vocab_size < SMALLEST:
        rule = f"the 256 bytes and the end of a document are {SMALLEST} ids already"
        remedy = f"Train at least {SMALLEST + 1}, or use --tokenizer bytes"
        raise job_error("train_tokenizer", vocab_size, rule, remedy)
    if vocab_size > LARGEST:
        rule = f"must be at most {LARGEST:,} ids"
        raise job_error("train_tokenizer", vocab_size, rule, "Train as many as texts of this size need")
    if not corpus.files:
        rule = "there is no text to train on, only token files"
        raise job_error("train_tokenizer", vocab_size, rule, "Give the text they were made from")


def _is_trained(folder: Path, note: dict[str, Any]) -> bool:
    """Whether `folder` holds the finished tokenizer of this note.

    Raises:
        JobError: it holds another one.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return False
    try:
        state = saved_json(folder / _NOTE)
    except (OSError, ValueError):
        state = None
    if state not in ({**note, "finished": True}, {**note, "finished": False}):
        rule = "holds a tokenizer that was made from other inputs or options"
        raise job_error("output", str(folder), rule, "Remove it, or use another PREFIX")
    return state["finished"]


def _write_note(folder: Path, note: dict[str, Any]) -> None:
    with replaced_atomically(folder / _NOTE) as file:
        file.write(json.dumps(note).encode())


def _train(batches: Iterator[list[str]], vocab_size: int) -> str:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    backend.train_from_iterator(batches, trainer)
    return backend.to_str()


def _batches(corpus: Corpus, rules: Rules) -> Iterator[list[str]]:
    batch: list[str] = []
    separator = rules.document_separator
    for name, record in read_texts(corpus.files, rules.text_field, separator):
        try:
            batch += split_text(text_of(record, rules.text_field), separator)
        except BadRecord as error:
            if rules.on_bad_record == "stop":
                raise JobError([bad_record(name, str(error))]) from error
        if len(batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
