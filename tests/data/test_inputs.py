"""Every kind of input, alone and mixed: the documents it gives, and what is said about bad ones."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from pipeline.base.problems import JobError
from pipeline.data import records
from pipeline.data.corpus import data_problems, find_corpus
from pipeline.data.preparation import Rules, cached_tokens
from pipeline.data.token_file import TokenFile
from pipeline.data.tokenizer import ByteTokenizer
from tests.data.megatron_files import write_documents

TEXTS = ["first", "zweites Stück\nmit zwei Zeilen", "日本語 🙂", "4"]


def json_lines(texts: list[Any], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in texts)


def write_plain(path: Path) -> str:
    path = path.with_suffix(".jsonl")
    path.write_bytes(json_lines(TEXTS))
    return str(path)


def write_gz(path: Path) -> str:
    path = path.with_suffix(".jsonl.gz")
    content = json_lines(TEXTS)
    path.write_bytes(gzip.compress(content[:50]) + gzip.compress(content[50:]))  # as appended logs are
    return str(path)


def write_json(path: Path) -> str:
    path = path.with_suffix(".json.gz")
    path.write_bytes(gzip.compress(json_lines(TEXTS)))
    return str(path)


def write_ndjson(path: Path) -> str:
    path = path.with_suffix(".ndjson")
    path.write_bytes(json_lines(TEXTS))
    return str(path)


def write_zst(path: Path) -> str:
    path = path.with_suffix(".jsonl.zst")
    content = json_lines(TEXTS)
    frames = (pa.compress(part, codec="zstd", asbytes=True) for part in (content[:50], content[50:]))
    path.write_bytes(b"".join(frames))
    return str(path)


def write_parquet(path: Path) -> str:
    path = path.with_suffix(".parquet")
    parquet.write_table(pa.table({"id": range(4), "text": TEXTS}), path, row_group_size=3)
    return str(path)


def write_dataset(path: Path) -> str:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS, "id": range(4)}).save_to_disk(path, num_shards=2)
    return str(path)


def write_tokens_of_others(path: Path) -> str:
    write_documents(path, [[[*text.encode(), 256]] for text in TEXTS])
    return str(path)


WRITERS = [
    write_plain,
    write_gz,
    write_zst,
    write_parquet,
    write_dataset,
    write_json,
    write_ndjson,
    write_tokens_of_others,
]


def prepared(cache: Path, *paths: str, rules: Rules | None = None) -> TokenFile:
    return cached_tokens(find_corpus(paths), ByteTokenizer(), cache, rules=rules)


def texts_of(file: TokenFile) -> list[str]:
    bounds = itertools.pairwise(file.offsets.tolist())
    documents = [file.tokens[begin:end].tolist() for begin, end in bounds]
    assert all(document[-1] == 256 for document in documents)
    return [bytes(document[:-1]).decode() for document in documents]


@pytest.mark.parametrize("write", WRITERS)
def test_a_document_for_each_record_in_order(tmp_path: Path, write: Callable[[Path], str]) -> None:
    assert texts_of(prepared(tmp_path, write(tmp_path / "data"))) == TEXTS


def test_all_kinds_mix_and_token_files_come_last(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text("prose")
    paths = [write(tmp_path / f"data{number}") for number, write in enumerate(WRITERS)]
    order = [paths[-1], str(tmp_path / "prose.txt"), *paths[:-1]]
    assert texts_of(prepared(tmp_path / "cache", *order)) == ["prose", *TEXTS * len(WRITERS)]
    assert texts_of(prepared(tmp_path / "cache", f"{paths[-1]}.bin")) == TEXTS


def test_folders_are_searched_for_all_kinds_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "table.csv").touch()
    write_zst(folder / "b")
    write_parquet(folder / "c")
    assert texts_of(prepared(tmp_path / "cache", str(folder))) == ["a", *TEXTS, *TEXTS]
    assert find_corpus([str(folder)]).left_out == {".csv": 1}


def test_the_field_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["one"], "content"))
    parquet.write_table(pa.table({"content": ["two"]}), tmp_path / "b.parquet")
    assert texts_of(prepared(tmp_path / "cache", str(tmp_path), rules=Rules("content"))) == ["one", "two"]
    with pytest.raises(JobError, match=r"a\.jsonl:1.*no field 'text'; it has 'id', 'content'"):
        prepared(tmp_path / "cache", str(tmp_path / "a.jsonl"))
    with pytest.raises(
        JobError, match=r"text_field = 'text'.*b\.parquet has no column of that name; it has content"
    ):
        prepared(tmp_path / "cache", str(tmp_path / "b.parquet"))


BAD_LINES = {
    b'{"text": "cut off\n': r"not JSON: (Unterminated string|Invalid control character)",
    b'["text"]\n': "a JSON list, where an object is expected",
    b'{"other": "x"}\n': "no field 'text'; it has 'other'",
    b"{}\n": "no field 'text'; it has none",
    b'{"text": 7}\n': "field 'text' holds int, where text is expected",
    b'{"text": null}\n': "field 'text' holds NoneType",
    b'{"text": "\xff"}\n': "not UTF-8 at byte 10 of the line",
    b'{"text": "\\ud800"}\n': "half a character",
    b"[" * 100_000 + b"\n": "not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:12].decode(errors="replace"))
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["one"]) + b"\n" + line + json_lines(["two"]))
    with pytest.raises(JobError, match=r"a\.jsonl:3'?: .*" + BAD_LINES[line] + r".*--on_bad_record skip"):
        prepared(tmp_path / "cache", str(path))
    assert not list((tmp_path / "cache").glob("*/"))
    file = prepared(tmp_path / "cache", str(path), rules=Rules(on_bad_record="skip"))
    assert texts_of(file) == ["one", "two"]
    assert (file.num_skipped, file.skipped[0].path) == (1, f"{path}:3")


def test_a_row_without_text_or_utf8_is_bad_too(tmp_path: Path) -> None:
    column = pa.array([b"one", None, b"\xff", b"", b"two"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    file = prepared(tmp_path / "cache", str(tmp_path / "a.parquet"), rules=Rules(on_bad_record="skip"))
    assert texts_of(file) == ["one", "two"]
    reasons = {entry.path.rpartition(":")[2]: entry.reason for entry in file.skipped}
    assert reasons["2"] == "the row has no text (null)"
    assert "not UTF-8" in reasons["3"]
    assert reasons["4"] == "empty"
    with pytest.raises(JobError, match=r"a\.parquet:2'?: the row has no text"):
        prepared(tmp_path / "cache", str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())])
def test_text_as_bytes_or_in_a_dictionary_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": pa.array([*TEXTS, TEXTS[0], None]).cast(kind)}), path)
    file = prepared(tmp_path / "cache", str(path), rules=Rules(on_bad_record="skip"))
    assert (texts_of(file), file.num_skipped) == ([*TEXTS, TEXTS[0]], 1)


def test_a_column_of_numbers_is_no_text(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(JobError, match="holds values of type int64 there, not text"):
        prepared(tmp_path / "cache", str(tmp_path / "a.parquet"))


def test_empty_documents_are_counted_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["", "one", ""]))
    file = prepared(tmp_path / "cache", str(tmp_path / "a.jsonl"))
    assert texts_of(file) == ["one"]
    assert [(entry.path.rpartition(":")[2], entry.reason) for entry in file.skipped] == [
        ("1", "empty"),
        ("3", "empty"),
    ]
    (tmp_path / "b.jsonl").write_bytes(json_lines([""]))
    with pytest.raises(JobError, match=r"there is no text in it .*b\.jsonl:1: empty"):
        prepared(tmp_path / "cache", str(tmp_path / "b.jsonl"))


@pytest.mark.parametrize("write", [write_gz, write_zst, write_parquet])
def test_a_file_cut_off_in_transfer_is_not_taken_for_a_shorter_one(
    tmp_path: Path, write: Callable[[Path], str]
) -> None:
    path = Path(write(tmp_path / "a"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(JobError, match=rf"{path.name}.*(damaged or cut off|is damaged or no parquet file)"):
        prepared(tmp_path / "cache", str(path), rules=Rules(on_bad_record="skip"))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_another_kind_of_file_under_that_name_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"neither packed nor a table")
    with pytest.raises(JobError, match=r"damaged"):
        prepared(tmp_path / "cache", str(path))


def test_a_long_text_is_read_in_parts_that_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"Zeile {number} é 🙂\r\n\n  eingerückt\nund weiter\n" for number in range(200))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.txt").write_bytes(b"no line ends here " * 1000)
    monkeypatch.setattr(records, "PART_BYTES", 101)
    files = find_corpus([str(tmp_path)]).files
    parts = [task for task in records.read_tasks(files, "text", records.ReadPosition(), True) if task.records]
    assert len(parts) > 50
    assert texts_of(prepared(tmp_path / "cache", str(tmp_path))) == [text, "no line ends here " * 1000]


def test_a_long_text_that_turns_out_to_be_none_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PART_BYTES", 100)
    folder = tmp_path / "in"
    folder.mkdir()
    for name, end in (("a", b""), ("b", b"\xe9 wrong"), ("c", b"")):
        (folder / f"{name}.txt").write_bytes(f"{name} line\n".encode() * 100 + end)
    file = prepared(tmp_path / "cache", str(folder))
    assert texts_of(file) == ["a line\n" * 100, "c line\n" * 100]
    assert file.skipped[0].reason == "not UTF-8 at byte 700"
    (folder / "d.txt").write_bytes(b"d line\n" * 10_000 + b"\xe9 wrong")  # beyond what is looked at before
    with pytest.raises(JobError, match=r"d\.txt.*not UTF-8 at byte 70000"):
        prepared(tmp_path / "cache", str(folder / "d.txt"))


def test_saved_splits_want_a_choice(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    part = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": part, "test": part.select([0])}).save_to_disk(tmp_path / "both")
    (problem,) = data_problems([str(tmp_path / "both")])
    assert "the splits train, test" in problem.rule
    assert str(tmp_path / "both/train") in problem.remedy
    assert texts_of(prepared(tmp_path / "cache", str(tmp_path / "both/test"))) == TEXTS[:1]


def test_a_selection_of_rows_is_saved_as_such(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).select([3, 1]).save_to_disk(tmp_path / "some")
    assert texts_of(prepared(tmp_path / "cache", str(tmp_path / "some"))) == [TEXTS[3], TEXTS[1]]


def test_a_dataset_by_name_goes_through_the_datasets_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    (tmp_path / "named").mkdir()
    (tmp_path / "named/train.jsonl").write_bytes(json_lines(TEXTS))
    assert data_problems(["hub:some/name"]) == ()
    assert texts_of(prepared(tmp_path / "cache", f"hub:{tmp_path}/named")) == TEXTS
    assert texts_of(prepared(tmp_path / "cache", f"hub:{tmp_path}/named:train")) == TEXTS
    for wrong in ("hub:", "hub:name:", "hub:name:train[:2]"):
        with pytest.raises(JobError, match="is not hub:NAME"):
            find_corpus([wrong])


def test_a_dataset_that_cannot_be_had_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, split: str) -> None:
        raise ConnectionError(f"no route to {name} {split}\nlong trace")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        JobError, match=r"hub:org/set.*ConnectionError: no route to org/set train\)"
    ) as caught:
        find_corpus(["hub:org/set"])
    assert "long trace" not in str(caught.value)


@pytest.mark.parametrize("write", [write_plain, write_zst, write_parquet])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, write: Callable[[Path], str]
) -> None:
    path = write(tmp_path / "a")
    corpus = find_corpus([path])
    os.utime(path, ns=(0, 0))
    with pytest.raises(JobError, match="changed while it was read"):
        cached_tokens(corpus, ByteTokenizer(), tmp_path / "cache")


def test_options_and_kinds_belong_to_the_caches_identity(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "title": "two"}\n')
    assert texts_of(prepared(tmp_path / "cache", str(path))) == ["one"]
    assert texts_of(prepared(tmp_path / "cache", str(path), rules=Rules("title"))) == ["two"]
    assert len(list((tmp_path / "cache").glob("*/"))) == 2


@pytest.mark.parametrize(("cut", "rest"), [(1, b""), (0, b"no frame"), (None, b"")])
def test_a_zstd_file_of_many_frames_is_whole_or_damaged(tmp_path: Path, cut: int | None, rest: bytes) -> None:
    frames = [pa.compress(json_lines([f"line {n}"]), codec="zstd", asbytes=True) for n in range(500)]
    content = b"".join(frames)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes((content if cut is None else content[: len(content) - cut]) + rest)
    if cut is None:
        assert prepared(tmp_path / "cache", str(path)).num_documents == 500
    else:
        with pytest.raises(JobError, match=r"damaged or cut off"):
            prepared(tmp_path / "cache", str(path))
