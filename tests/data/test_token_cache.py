"""The token folder: what it holds, that it appears at once, and that one process makes it."""

import fcntl
import itertools
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.base.command import show_messages
from pipeline.base.files import file_lock
from pipeline.base.problems import JobError
from pipeline.data.corpus import find_corpus
from pipeline.data.preparation import cache_identity, cached_tokens, token_dtype
from pipeline.data.tokenizer import ByteTokenizer

TEXTS = {"a.txt": "first\n", "b.txt": "zweites Stück", "c.txt": "3"}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_tokens_are_documents_in_order_each_with_its_end(texts: Path, tmp_path: Path) -> None:
    for _ in range(2):  # made, then opened
        file = cached_tokens(find_corpus([str(texts)]), ByteTokenizer(), tmp_path / "cache")
        assert file.num_documents == len(TEXTS)
        for number, text in enumerate(TEXTS.values()):
            document = file.tokens[file.offsets[number] : file.offsets[number + 1]]
            assert document.tolist() == [*text.encode(), 256]
        assert len(file.tokens) == file.offsets[-1]
        assert isinstance(file.tokens, np.memmap)
        assert not file.tokens.flags.writeable


def test_second_use_makes_nothing(texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipeline")
    first = cached_tokens(find_corpus([str(texts)]), ByteTokenizer(), tmp_path)
    assert [message.split()[0] for message in caplog.messages] == ["tokenizing", "tokenized"]
    second = cached_tokens(find_corpus([str(texts)]), ByteTokenizer(), tmp_path)
    assert len(caplog.messages) == 2
    assert first.fingerprint == second.fingerprint


class OtherTokenizer(ByteTokenizer):
    identity = "other"


def change_size(texts: Path) -> None:
    (texts / "a.txt").write_text("longer than before")


def change_time(texts: Path) -> None:
    os.utime(texts / "a.txt", ns=(1, 1))


def add_file(texts: Path) -> None:
    (texts / "d.txt").write_text("4")


def rename_file(texts: Path) -> None:
    (texts / "a.txt").rename(texts / "z.txt")


@pytest.mark.parametrize("change", [change_size, change_time, add_file, rename_file])
def test_changed_text_never_meets_an_old_cache(texts: Path, change: Callable[[Path], None]) -> None:
    before = cache_identity(find_corpus([str(texts)]), ByteTokenizer())
    assert before == cache_identity(find_corpus([str(texts)]), ByteTokenizer())
    change(texts)
    assert before != cache_identity(find_corpus([str(texts)]), ByteTokenizer())


def test_another_tokenizer_is_another_cache(texts: Path) -> None:
    corpus = find_corpus([str(texts)])
    assert cache_identity(corpus, ByteTokenizer()) != cache_identity(corpus, OtherTokenizer())


def test_fingerprint_is_that_of_the_tokens_not_of_the_files(texts: Path, tmp_path: Path) -> None:
    def fingerprint() -> str:
        return cached_tokens(find_corpus([str(texts)]), ByteTokenizer(), tmp_path).fingerprint

    before = fingerprint()
    change_time(texts)
    assert fingerprint() == before
    (texts / "a.txt").write_text("fir\nst")  # same bytes, another order
    assert fingerprint() != before


def test_what_is_not_utf8_is_skipped_by_name_or_refused(texts: Path, tmp_path: Path) -> None:
    bad = texts / "b.txt"
    bad.write_bytes("Stück".encode("latin-1"))
    file = cached_tokens(find_corpus([str(texts)]), ByteTokenizer(), tmp_path / "cache")
    texts_left = [file.tokens[begin : end - 1].tobytes() for begin, end in itertools.pairwise(file.offsets)]
    assert texts_left == [TEXTS[name].encode("utf-16-le") for name in ("a.txt", "c.txt")]
    assert [(Path(s.path).name, s.reason) for s in file.skipped] == [("b.txt", "not UTF-8 at byte 2")]
    bad.write_bytes(b"x" * 70_000 + b"\xfc ")  # beyond what is looked at before a start
    with pytest.raises(JobError, match=r"b\.txt.*is not UTF-8 at byte 70000"):
        cached_tokens(find_corpus([str(bad)]), ByteTokenizer(), tmp_path / "named")
    for name in ("a.txt", "c.txt"):
        (texts / name).write_bytes(b"\xff")
    with pytest.raises(JobError, match=r"there is no text in it .*a\.txt: not UTF-8 at byte 0"):
        cached_tokens(find_corpus([str(texts)]), ByteTokenizer(), tmp_path / "none")
    assert folders(tmp_path / "named") == folders(tmp_path / "none") == []


class FullDisk(ByteTokenizer):
    """Fails at the second document."""

    def __init__(self) -> None:
        self.documents = 0

    def encode(self, text: str) -> np.ndarray:
        self.documents += 1
        if self.documents == 2:
            raise OSError(28, "No space left on device")
        return super().encode(text)


def test_a_failure_half_way_leaves_nothing(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(JobError, match=r"the disk is full.*Free some space and start again"):
        cached_tokens(find_corpus([str(texts)]), FullDisk(), cache)
    assert folders(cache) == []
    assert cached_tokens(find_corpus([str(texts)]), ByteTokenizer(), cache).num_documents == 3


@pytest.mark.parametrize("damage", ["truncated", "no tokens", "no index", "broken index"])
def test_a_damaged_cache_says_so(texts: Path, tmp_path: Path, damage: str) -> None:
    corpus = find_corpus([str(texts)])
    cached_tokens(corpus, ByteTokenizer(), tmp_path)
    folder = tmp_path / cache_identity(corpus, ByteTokenizer())
    if damage == "truncated":
        os.truncate(folder / "tokens.bin", 10)
    elif damage == "no tokens":
        (folder / "tokens.bin").unlink()
    elif damage == "no index":
        (folder / "tokens.idx").unlink()
    else:
        (folder / "tokens.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(JobError, match=r"cache is damaged.*Delete this folder"):
        cached_tokens(corpus, ByteTokenizer(), tmp_path)


def test_ids_choose_the_width() -> None:
    assert [token_dtype(size).str for size in (257, 65536, 65537)] == ["<u2", "<u2", "<i4"]


class Slow(ByteTokenizer):
    """The byte tokenizer, caught at work: it goes on when the file `until` is there."""

    facts = ByteTokenizer().facts

    def __init__(self, until: Path) -> None:
        self.until = until

    def encode(self, text: str) -> np.ndarray:
        while not self.until.exists():
            time.sleep(0.01)
        return super().encode(text)


def make_slowly(texts: str, cache: str, until: Path, messages: multiprocessing.Queue) -> None:
    """One process of a host."""
    show_messages(messages.put)
    file = cached_tokens(find_corpus([texts]), Slow(until), Path(cache), time_limit=60)
    messages.put(f"fingerprint {file.fingerprint}")


def start(texts: Path, cache: Path, until: Path, messages: multiprocessing.Queue) -> multiprocessing.Process:
    process = multiprocessing.get_context("spawn").Process(
        target=make_slowly, args=(str(texts), str(cache), until, messages)
    )
    process.start()
    return process


@pytest.mark.slow
def test_one_process_works_and_the_others_wait(texts: Path, tmp_path: Path) -> None:
    messages = multiprocessing.get_context("spawn").Queue()
    cache = tmp_path / "cache"
    until = tmp_path / "go on"
    processes = [start(texts, cache, until, messages) for _ in range(3)]
    said = [messages.get(timeout=60)]
    while sum(text.startswith("waiting") for text in said) < 2:
        said.append(messages.get(timeout=60))
    until.touch()
    while sum(text.startswith("fingerprint") for text in said) < 3:
        said.append(messages.get(timeout=60))
    for process in processes:
        process.join(10)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    kinds = [text.split()[0] for text in said]
    assert kinds.count("tokenizing") == kinds.count("tokenized") == 1
    assert len({text for text in said if text.startswith("fingerprint")}) == 1
    assert folders(cache) == [cache_identity(find_corpus([str(texts)]), ByteTokenizer())]


def test_a_killed_process_leaves_neither_lock_nor_half_a_cache(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    identity = cache_identity(find_corpus([str(texts)]), ByteTokenizer())
    messages = multiprocessing.get_context("spawn").Queue()
    process = start(texts, cache, tmp_path / "never", messages)
    end = time.monotonic() + 30
    while not list(cache.glob("*/tokens.bin.partial")) and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.join(10)
    assert folders(cache) == [f"{identity}.partial"]
    file = cached_tokens(find_corpus([str(texts)]), ByteTokenizer(), cache, time_limit=1)
    assert file.num_documents == 3
    assert folders(cache) == [identity]


def test_waiting_has_a_limit_and_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipeline")
    path = tmp_path / "lock"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(TimeoutError, match=rf"{path} for more than 0 s"),
            file_lock(path, 0.25),
        ):
            raise AssertionError("the lock was not exclusive")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("waiting for another process")
    with file_lock(path):
        pass
    assert len(caplog.messages) == 1
