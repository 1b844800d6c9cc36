"""Text is tokenized once per cache folder, whoever comes first, and never reused for other text. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pipeline.data.corpus import Corpus
from pipeline.data.locking import file_lock
from pipeline.data.token_file import FORMAT, TokenFile, open_token_file, sync_folder, write_token_file
from pipeline.data.tokenizer import Tokenizer

DEFAULT_WAIT = 1800.0


def cache_identity(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """Hash of all that the tokens are made from: format, tokenizer, and each file's path, size and time."""
    description = {
        "format": FORMAT,
        "tokenizer": tokenizer.identity,
        "files": [
            [str(Path(file.path).absolute()), file.size, file.mtime_ns, file.named] for file in corpus.files
        ],
        "skipped": [[entry.path, entry.reason] for entry in corpus.skipped],
    }
    return hashlib.blake2b(json.dumps(description).encode(), digest_size=12).hexdigest()


def cached_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    report: Callable[[str], None],
    time_limit: float = DEFAULT_WAIT,
) -> TokenFile:
    """The tokens of `corpus`, made under `folder` if they are not there yet.

    Every rank of a host calls it. One makes the tokens in a temporary folder, which gets its name only
    when it is complete and on the disk; the others wait, with messages to `report`, at most
    `time_limit` seconds. A process that is killed leaves no lock behind, and its temporary folder is
    removed by the next.

    Raises:
        JobError: text that cannot be used, or a damaged cache.
        TimeoutError: the process at work did not finish in time.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    identity = cache_identity(corpus, tokenizer)
    finished = folder / identity
    if not finished.is_dir():
        with file_lock(folder / f"{identity}.lock", time_limit, report):
            if not finished.is_dir():
                _make(finished, corpus, tokenizer, report)
    return open_token_file(finished)


def _make(finished: Path, corpus: Corpus, tokenizer: Tokenizer, report: Callable[[str], None]) -> None:
    """Write the token folder and let it appear at once. Called with the lock held."""
    prefix = f"{finished.name}.tmp-"
    for leftover in finished.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    report(f"tokenizing {len(corpus.files):,} files of {corpus.name}")
    temporary = finished.parent / f"{prefix}{os.getpid()}"
    temporary.mkdir()
    try:
        write_token_file(temporary, corpus, tokenizer, report)
        temporary.rename(finished)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    sync_folder(finished.parent)
