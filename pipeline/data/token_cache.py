"""Text is tokenized once per cache folder, whoever comes first, and never reused for other text. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pipeline.base.files import file_lock, sync_folder
from pipeline.base.problems import JobError, Problem
from pipeline.data.corpus import Corpus
from pipeline.data.preparation import Rules, cache_identity, usual_workers, write_tokens
from pipeline.data.token_file import TokenFile, join_token_files, open_token_file, token_problems
from pipeline.data.tokenizer import Tokenizer

DEFAULT_WAIT = 1800.0
# The token files inside a cache folder.
_NAME = "tokens"


def cached_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    report: Callable[[str], None],
    time_limit: float = DEFAULT_WAIT,
    rules: Rules | None = None,
    report_work: Callable[[str], None] | None = None,
) -> TokenFile:
    """The tokens of `corpus`: of its text, made under `folder` if not there yet, and of its token files.

    Every rank of a host calls it. One makes the tokens in a temporary folder, which gets its name only
    when it is complete and on the disk; the others wait, with messages to `report`, at most
    `time_limit` seconds. A process that is killed leaves no lock behind, and what it had made is
    continued by the next. What the one at work says goes to `report_work`, by default `report`.

    Raises:
        JobError: inputs that cannot be used, a damaged cache, or token files of another tokenizer.
        TimeoutError: the process at work did not finish in time.
        OSError: the folder cannot be written.
    """
    prefixes = list(corpus.token_files)
    files = [open_token_file(prefix) for prefix in prefixes]
    problems = [
        problem
        for prefix, file in zip(prefixes, files, strict=True)
        for problem in token_problems(prefix, file, tokenizer.identity, tokenizer.vocab_size)
    ]
    if problems:
        raise JobError(problems)
    if corpus.files:
        files.insert(
            0,
            _tokens_of_text(
                corpus, tokenizer, folder, report, report_work or report, time_limit, rules or Rules()
            ),
        )
        prefixes.insert(0, "the text")
    return join_token_files(prefixes, files)


def _tokens_of_text(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    report: Callable[[str], None],
    report_work: Callable[[str], None],
    time_limit: float,
    rules: Rules,
) -> TokenFile:
    folder.mkdir(parents=True, exist_ok=True)
    identity = cache_identity(corpus, tokenizer, rules)
    finished = folder / identity
    if not finished.is_dir():
        with file_lock(folder / f"{identity}.lock", time_limit, report):
            if not finished.is_dir():
                _make(finished, corpus, tokenizer, rules, report_work)
    try:
        return open_token_file(str(finished / _NAME))
    except JobError as error:
        rule = f"the token cache is damaged ({error.problems[0].rule})"
        remedy = "Delete this folder; it is made again"
        raise JobError([Problem("data", str(finished), rule, remedy)]) from error


def _make(
    finished: Path, corpus: Corpus, tokenizer: Tokenizer, rules: Rules, report: Callable[[str], None]
) -> None:
    """Write the token folder and let it appear at once. Called with the lock held."""
    report(f"tokenizing {len(corpus.files):,} files of {corpus.name}")
    temporary = finished.with_name(f"{finished.name}.partial")
    temporary.mkdir(exist_ok=True)
    try:
        write_tokens(str(temporary / _NAME), corpus, tokenizer, rules, usual_workers(corpus), report)
    except JobError:
        # Nothing to go on from; but a full disk or a dead worker leaves what is written to be continued.
        if not (temporary / f"{_NAME}.progress.json").exists():
            shutil.rmtree(temporary)
        raise
    temporary.rename(finished)
    sync_folder(finished.parent)
