"""Preparing on several processes, killed, continued, out of space: always the same files, or none."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.base.files import file_lock
from pipeline.base.problems import JobError
from pipeline.data import records, token_writer
from pipeline.data.corpus import Corpus, find_corpus
from pipeline.data.encoding import Encoder
from pipeline.data.preparation import PreparationProgress, Rules, write_tokens
from pipeline.data.records import Task
from pipeline.data.token_file import open_token_file
from pipeline.data.token_writer import TokenWriter
from pipeline.data.tokenizer import ByteTokenizer
from tests.data.megatron_files import read_documents

ROOT = Path(__file__).parents[2]
FILES = ("bin", "idx")


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A few hundred documents of every kind, in tasks of a few records each."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [json.dumps({"text": f"record {number} " + "x" * (number % 50)}) + "\n" for number in range(200)]
    (folder / "a.jsonl").write_text("".join(lines[:100]))
    packed = pa.compress("".join(lines[100:]).encode(), codec="zstd", asbytes=True)
    (folder / "b.jsonl.zst").write_bytes(packed)
    for number in range(20):
        (folder / f"text{number}.txt").write_text(f"text {number}\n" * (number + 1))
    return folder


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "TASK_BYTES", 500)
    monkeypatch.setattr(records, "PART_BYTES", 100)
    monkeypatch.setattr(token_writer, "_COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of commits, and no power cut to fear


def prepare(prefix: Path, folder: Path, workers: int = 1, rules: Rules | None = None) -> dict[str, object]:
    corpus = find_corpus([str(folder)])
    return write_tokens(str(prefix), corpus, ByteTokenizer(), rules or Rules(), workers)


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in FILES]


def names(folder: Path, prefix: str = "tokens") -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(prefix))


def test_the_files_do_not_depend_on_the_number_of_workers(inputs: Path, tmp_path: Path) -> None:
    one = prepare(tmp_path / "one", inputs, workers=1)
    two = prepare(tmp_path / "two", inputs, workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert len(read_documents(tmp_path / "one")) == one["documents"] == two["documents"] == 220


def test_the_description_tells_what_is_there(inputs: Path, tmp_path: Path) -> None:
    described = prepare(tmp_path / "tokens", inputs)
    saved = json.loads((tmp_path / "tokens.json").read_text())
    assert saved == described
    documents = read_documents(tmp_path / "tokens")
    assert saved["documents"] == len(documents)
    assert saved["tokens"] == sum(map(len, documents))
    assert saved["characters"] == saved["tokens"] - saved["documents"]
    assert saved["longest"] == max(map(len, documents))
    assert saved["max_token"] == 256
    assert saved["tokenizer"] == {"identity": "bytes", "vocab_size": 257, "end_of_document": 256}
    assert [Path(file["path"]).name for file in saved["files"]][:2] == ["a.jsonl", "b.jsonl.zst"]


STORIES = "one\n<|endoftext|>\n two\r\n<|endoftext|>\r\n<|endoftext|>three<|endoftext|>\n \n<|endoftext|>\n"


@pytest.mark.parametrize("padding", [0, 50, 120, 333])
@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_a_separator_ends_documents_and_unsplit_it_is_said(tmp_path: Path, form: str, padding: int) -> None:
    """In files of any length: parts of a long one are cut anywhere."""
    stories = "".join(STORIES.replace("two", "two" + f" {n}\nx" * padding) for n in range(20))
    path = tmp_path / f"in.{form}"
    path.write_bytes((stories if form == "txt" else json.dumps({"text": stories}) + "\n").encode())
    whole = prepare(tmp_path / "whole", path)
    assert (whole["documents"], whole["end_markers"]) == (1, 100)
    (line,) = open_token_file(str(tmp_path / "whole")).remarks
    assert "100 times" in line and "--document_separator" in line
    rules = Rules(document_separator="<|endoftext|>")
    split = prepare(tmp_path / "split", path, rules=rules)
    expected = [
        text for n in range(20) for text in ("one\n", " two" + f" {n}\nx" * padding + "\r\n", "three")
    ]
    assert [bytes(document[:-1]).decode() for document in read_documents(tmp_path / "split")] == expected
    assert (split["end_markers"], split["num_skipped"]) == (0, 0)
    assert split["rules"] == {
        "text_field": "text",
        "on_bad_record": "stop",
        "document_separator": "<|endoftext|>",
    }
    assert open_token_file(str(tmp_path / "split")).remarks == ()
    assert "document_separator" not in whole["rules"]


class Killed(BaseException):
    """Ends a preparation at a chosen place, as a kill would: nothing is cleaned up."""


def interrupted_at(monkeypatch: pytest.MonkeyPatch, calls: int, target: type, name: str) -> None:
    real, left = getattr(target, name), [calls]

    def call(*args: object) -> object:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return real(*args)

    monkeypatch.setattr(target, name, call)


@pytest.mark.parametrize("calls", [0, 1, 5, 30])
def test_a_killed_preparation_is_continued_to_the_same_bytes(
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    calls: int,
) -> None:
    prepare(tmp_path / "whole", inputs)
    with monkeypatch.context() as patch:
        interrupted_at(patch, calls, Encoder, "__call__")
        with pytest.raises(Killed):
            prepare(tmp_path / "tokens", inputs)
    assert not {"tokens.bin", "tokens.idx", "tokens.json"} & set(names(tmp_path))
    with Path(tmp_path / "tokens.bin.partial").open("ab") as stream:
        stream.write(b"half a write")  # not known to be on the disk: dropped
    caplog.set_level(logging.INFO, "pipeline")
    caplog.clear()
    read: list[int] = []
    real = Encoder.__call__
    monkeypatch.setattr(
        Encoder, "__call__", lambda self, task: read.append(len(task.records)) or real(self, task)
    )
    write_tokens(str(tmp_path / "tokens"), find_corpus([str(inputs)]), ByteTokenizer(), Rules(), 1)
    assert content(tmp_path / "tokens") == content(tmp_path / "whole")
    assert names(tmp_path) == ["tokens.bin", "tokens.idx", "tokens.json"]
    if calls >= 5:
        assert caplog.messages[0].startswith("continuing after")
        assert sum(read) < 220


@pytest.mark.parametrize("renames", range(3))
def test_a_kill_while_the_files_take_their_names(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    prepare(tmp_path / "whole", inputs)
    with monkeypatch.context() as patch:
        left, rename = [renames], Path.replace

        def replace(self: Path, target: Path) -> Path:
            if self.name.endswith(".partial"):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
            return rename(self, target)

        patch.setattr(Path, "replace", replace)
        with pytest.raises(Killed):
            prepare(tmp_path / "tokens", inputs)
    assert "tokens.idx" not in names(tmp_path)
    prepare(tmp_path / "tokens", inputs)
    assert content(tmp_path / "tokens") == content(tmp_path / "whole")
    assert names(tmp_path) == ["tokens.bin", "tokens.idx", "tokens.json"]


def test_a_changed_input_starts_anew(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupted_at(patch, 30, Encoder, "__call__")
        with pytest.raises(Killed):
            prepare(tmp_path / "tokens", inputs)
    (inputs / "a.jsonl").write_text('{"text": "other"}\n')
    prepare(tmp_path / "tokens", inputs)
    assert bytes(read_documents(tmp_path / "tokens")[0][:-1]) == b"other"


def test_the_same_command_again_does_nothing_and_another_one_is_refused(inputs: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "tokens", inputs)
    before = (tmp_path / "tokens.bin").stat().st_mtime_ns
    prepare(tmp_path / "tokens", inputs)
    assert (tmp_path / "tokens.bin").stat().st_mtime_ns == before
    with pytest.raises(JobError, match=r"tokens\.idx exists already, made from other inputs"):
        prepare(tmp_path / "tokens", inputs, rules=Rules("title"))
    (tmp_path / "taken.bin").write_bytes(b"somebody's")
    with pytest.raises(JobError, match=r"taken\.bin exists already"):
        prepare(tmp_path / "taken", inputs)


def test_two_at_once_do_not_mix(inputs: Path, tmp_path: Path) -> None:
    with (
        token_writer.TokenWriter(str(tmp_path / "tokens"), np.dtype("<u2"), "other"),
        pytest.raises(JobError, match="another process is writing these token files"),
    ):
        prepare(tmp_path / "tokens", inputs)


def test_a_full_disk_is_said_and_what_is_written_counts(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path / "whole", inputs)
    with monkeypatch.context() as patch:
        commit, left = token_writer.TokenWriter.commit, [20]

        def full(self: token_writer.TokenWriter) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            commit(self)

        patch.setattr(token_writer.TokenWriter, "commit", full)
        with pytest.raises(JobError, match=r"output = .*the disk is full.*start again, which continues"):
            prepare(tmp_path / "tokens", inputs)
    assert not {"tokens.bin", "tokens.idx", "tokens.json"} & set(names(tmp_path))
    prepare(tmp_path / "tokens", inputs)
    assert content(tmp_path / "tokens") == content(tmp_path / "whole")


def test_a_bad_record_leaves_nothing_behind(inputs: Path, tmp_path: Path) -> None:
    (inputs / "a.jsonl").write_text('{"text": "one"}\n' * 50 + "broken\n")
    for workers in (1, 2):
        with pytest.raises(JobError, match=r"a\.jsonl:51"):
            prepare(tmp_path / "tokens", inputs, workers)
        assert names(tmp_path) == []


def test_the_first_bad_record_in_the_order_of_the_inputs_is_named(inputs: Path, tmp_path: Path) -> None:
    (inputs / "a.jsonl").write_text(
        '{"text": "x"}\n' * 30 + "broken\n" + '{"text": "x"}\n' * 30 + "broken\n" * 9
    )
    for workers in (1, 2):
        with pytest.raises(JobError) as caught:
            prepare(tmp_path / "tokens", inputs, workers)
        assert str(caught.value.problems[0].value).endswith("a.jsonl:31")


def test_a_killed_worker_is_an_error_not_a_hang(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match="a worker process was killed"):
        write_tokens(str(tmp_path / "tokens"), find_corpus([str(inputs)]), Deadly(), Rules(), 2)


class Deadly(ByteTokenizer):
    """Kills the process that uses it, as the system does where memory runs out."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGKILL)
        return []


def test_progress_is_told(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.data import preparation

    monkeypatch.setattr(preparation, "_PROGRESS_SECONDS", 0.0)
    told: list[PreparationProgress] = []
    corpus: Corpus = find_corpus([str(inputs)])
    write_tokens(str(tmp_path / "t"), corpus, ByteTokenizer(), Rules(), 1, told.append)
    shares = [progress.share for progress in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert told[-1].seconds_left == 0
    assert all(progress.tokens_per_second > 0 for progress in told[1:])


def test_records_do_not_pile_up(inputs: Path) -> None:
    """Tasks hold about as many bytes as they should, whatever the file's size."""
    tasks: list[Task] = list(
        records.read_tasks(find_corpus([str(inputs)]).files, "text", records.ReadPosition(), True)
    )
    assert len(tasks) > 20
    assert max(sum(map(len, task.records)) for task in tasks) < 700  # type: ignore[arg-type]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_preparation_on_processes_killed_from_outside_continues_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    line = json.dumps({"text": "some text of a document, again and again. " * 20}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 30_000)
    corpus = find_corpus([str(tmp_path / "a.jsonl")])
    code = (
        "import os, sys; from pipeline.data import token_writer; token_writer._COMMIT_SECONDS = 0.1\n"
        "os.fsync = lambda _: None\n"
        "from pipeline import prepare; sys.exit(prepare.main(sys.argv[1:]))"
    )
    prefix = tmp_path / "tokens"
    command = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "a.jsonl"),
        "--output",
        str(prefix),
        "--workers",
        "2",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    progress = Path(f"{prefix}.progress.json")
    wait_for(progress.exists)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not _alive(process.pid))
    assert not Path(f"{prefix}.idx").exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "continuing after" in done.stdout
    write_tokens(str(tmp_path / "whole"), corpus, ByteTokenizer(), Rules(), 1)
    assert content(prefix) == content(tmp_path / "whole")
    assert open_token_file(str(prefix)).num_documents == 30_000


def _alive(session: int) -> bool:
    """Whether a process of that session is left."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "-s", str(session)], capture_output=True, text=True, check=False
    )
    return bool(found.stdout.strip())


def test_the_lock_is_held_until_the_last_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    class Watched(io.BufferedWriter):
        def close(self) -> None:
            if self.closed:
                return
            super().close()
            with pytest.raises(TimeoutError), file_lock(tmp_path / "t.sizes.partial"):
                pass
            held.append(True)

    plain = Path.open

    def opened(path: Path, mode: str = "r", **arguments: Any) -> Any:
        return Watched(io.FileIO(path, "ab")) if mode == "ab" else plain(path, mode, **arguments)

    monkeypatch.setattr(Path, "open", opened)
    with TokenWriter(str(tmp_path / "t"), np.dtype("<u2"), "id") as writer:
        writer.write(np.array([1, 2]), [2], closed=True)
        writer.commit()
    assert held == [True, True], "tokens and sizes"
