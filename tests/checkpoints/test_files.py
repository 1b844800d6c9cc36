"""Files on the disk: a large one goes there while it is written, and what the disk refuses is an error."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from pipeline.checkpoints import files
from pipeline.checkpoints.files import DigestStream, digest_of, synced

PORTION = 1000


@pytest.fixture(autouse=True)
def _small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PORTION", PORTION)


def write(folder: Path, portions: int) -> None:
    with synced(folder, "file") as file:
        stream = DigestStream(file)
        for number in range(portions):
            stream.write(bytes([number]) * PORTION)
        stream.written("file")


def early_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("early-sync")]


@pytest.mark.parametrize("portions", [0, 1, 5])
def test_all_bytes_are_there_and_no_thread_is_left(portions: int, tmp_path: Path):
    write(tmp_path, portions)
    content = (tmp_path / "file").read_bytes()
    assert content == b"".join(bytes([number]) * PORTION for number in range(portions))
    assert early_threads() == []


def test_a_large_file_is_sent_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sent = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: sent.set())
    with synced(tmp_path, "file") as file:
        file.write(b"a" * (PORTION - 1))
        assert early_threads() == []  # a small file has no thread
        file.write(b"b")
        assert sent.wait(5)


def test_the_last_bytes_are_sent_by_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (sizes.append(os.fstat(number).st_size), fsync(number)))
    write(tmp_path, 3)
    assert sizes == [3 * PORTION]


def test_what_the_disk_refuses_early_is_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The system reports a failed write-back once; a later fsync of the same file would succeed."""
    refused = threading.Event()

    def refuse(_: int) -> None:
        refused.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(OSError, match="Input/output error") as caught, synced(tmp_path, "file") as file:
        file.write(b"a" * PORTION)
        assert refused.wait(5)
    assert caught.value.filename == str(tmp_path / "file")
    assert early_threads() == []


def test_an_error_in_the_block_ends_the_thread(tmp_path: Path):
    with pytest.raises(ValueError, match="mine"), synced(tmp_path, "file") as file:
        file.write(b"a" * PORTION)
        raise ValueError("mine")
    assert early_threads() == []


def test_a_save_that_outlives_its_program_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A thread that writes in the background is waited for when the interpreter ends, and gets no other."""

    def refuse(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(files.ThreadPoolExecutor, "submit", refuse)
    write(tmp_path, 3)
    assert (tmp_path / "file").stat().st_size == 3 * PORTION


def test_the_digest_is_that_of_the_file(tmp_path: Path):
    with synced(tmp_path, "file") as file:
        stream = DigestStream(file)
        stream.write(b"a" * (3 * PORTION + 1))
        entry = stream.written("file")
    assert (entry.bytes, entry.digest) == (3 * PORTION + 1, digest_of(tmp_path / "file"))
