"""Token files, against bytes written down by hand and a reader made from the format's description."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.problems import JobError
from pipeline.data import token_file
from pipeline.data.corpus import find_corpus
from pipeline.data.preparation import Rules, write_tokens
from pipeline.data.token_file import TokenFile, join_token_files, open_token_file, token_problems
from pipeline.data.token_writer import TokenWriter
from pipeline.data.tokenizer import ByteTokenizer
from tests.data.megatron_files import LETTERS, read_documents, write_documents


def documents_of(file: TokenFile) -> list[list[int]]:
    bounds = file.offsets.tolist()
    return [file.tokens[begin:end].tolist() for begin, end in itertools.pairwise(bounds)]


def write_ours(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> None:
    with TokenWriter(str(prefix), np.dtype(dtype), "test") as writer:
        for document in documents:
            writer.write(np.array(document, dtype=np.int64), [len(document)], closed=True)
        writer.finish({"format": "MMIDIDX 1"})


def test_golden_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hi")
    (tmp_path / "b.txt").write_text("é\n")
    prefix = str(tmp_path / "tokens")
    write_tokens(prefix, find_corpus([str(tmp_path)]), ByteTokenizer(), Rules(), 1)
    # h i end, c3 a9 newline end
    assert Path(f"{prefix}.bin").read_bytes().hex() == "680069000001c300a9000a000001"
    assert Path(f"{prefix}.idx").read_bytes().hex(" ", 1) == " ".join(
        (
            "4d 4d 49 44 49 44 58 00 00",  # MMIDIDX
            "01 00 00 00 00 00 00 00",  # version
            "08",  # uint16
            "02 00 00 00 00 00 00 00",  # sequences
            "03 00 00 00 00 00 00 00",  # boundaries
            "03 00 00 00 04 00 00 00",  # sizes
            "00 00 00 00 00 00 00 00 06 00 00 00 00 00 00 00",  # pointers
            "00 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00",  # documents
        )
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=20), min_size=1, max_size=20))
def test_an_independent_reader_finds_what_we_wrote(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("format") / "tokens"
    write_ours(prefix, documents)
    assert read_documents(prefix) == documents
    assert documents_of(open_token_file(str(prefix))) == documents


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=3), min_size=1, max_size=10),
    st.sampled_from(sorted(LETTERS)),
)
def test_files_of_other_programs_load_unchanged(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], code: int
) -> None:
    """Documents of several sequences or of none, and every integer type."""
    prefix = tmp_path_factory.mktemp("format") / "tokens"
    write_documents(prefix, documents, code)
    file = open_token_file(str(prefix))
    flat = [[token for sequence in document for token in sequence] for document in documents]
    assert documents_of(file) == flat == read_documents(prefix)
    assert file.tokens.dtype == np.dtype(f"<{LETTERS[code]}")
    assert (file.tokenizer_hash, file.vocab_size) == (None, None)
    assert file.max_token == max((token for document in flat for token in document), default=0)


def test_a_document_too_long_for_one_sequence_has_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "LONGEST_SEQUENCE", 5)
    documents = [list(range(n)) for n in (0, 1, 5, 6, 17, 4, 10)]
    write_ours(tmp_path / "tokens", documents)
    head = (tmp_path / "tokens.idx").read_bytes()
    assert struct.unpack_from("<Q", head, 18)[0] == 1 + 1 + 1 + 2 + 4 + 1 + 2
    assert read_documents(tmp_path / "tokens") == documents
    assert documents_of(open_token_file(str(tmp_path / "tokens"))) == documents


def test_many_documents_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "_CHUNK", 7)
    documents = [[number % 100] * (number % 5) for number in range(100)]
    write_ours(tmp_path / "tokens", documents)
    assert read_documents(tmp_path / "tokens") == documents
    assert documents_of(open_token_file(str(tmp_path / "tokens"))) == documents


def test_parts_of_a_document_and_one_taken_back(tmp_path: Path) -> None:
    with TokenWriter(str(tmp_path / "tokens"), np.dtype("<i4"), "test") as writer:
        writer.write(np.array([1, 2, 3, 70000]), [1, 3], closed=False)
        writer.write(np.array([5]), [1], closed=False)
        writer.write(np.array([6, 7, 8, 9]), [2, 2], closed=False)
        writer.abandon()
        writer.write(np.array([10]), [1], closed=True)
        writer.finish({"format": "MMIDIDX 1"})
    assert read_documents(tmp_path / "tokens") == [[1], [2, 3, 70000, 5, 6, 7], [10]]


def test_a_trillion_tokens_open_at_once_and_read_at_their_end(tmp_path: Path) -> None:
    """Sparse: nothing is stored but the last tokens, and nothing overflows 32 bits."""
    sizes = np.full(466, 2**31 - 1, dtype="<i4")
    total = int(sizes.astype(np.int64).sum())
    assert total > 10**12
    pointers = (np.cumsum(sizes.astype(np.int64)) - sizes) * 2
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 466, 467)
    bounds = np.arange(467, dtype="<i8")
    (tmp_path / "t.idx").write_bytes(
        head + sizes.tobytes() + pointers.astype("<i8").tobytes() + bounds.tobytes()
    )
    with (tmp_path / "t.bin").open("wb") as stream:
        try:
            stream.truncate(2 * total)
        except OSError:
            pytest.skip("this file system has no sparse files of 2 TB")
        stream.seek(2 * total - 4)
        stream.write(struct.pack("<HH", 123, 456))
    begin = time.perf_counter()
    file = open_token_file(str(tmp_path / "t"))
    assert time.perf_counter() - begin < 1
    assert file.offsets[-1] == total
    assert file.tokens[file.offsets[-1] - 2 : file.offsets[-1]].tolist() == [123, 456]


def patched(path: Path, place: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[place : place + len(content)] = content
    path.write_bytes(data)


# Two documents of 3 and 2 tokens: sizes at 34, pointers at 42, boundaries at 58, the end at 82.
DAMAGES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "no .bin": (lambda bin, idx: bin.unlink(), r"t\.bin is missing"),
    "no .idx": (lambda bin, idx: idx.unlink(), r"t\.idx is missing"),
    "short .bin": (lambda bin, idx: bin.write_bytes(bin.read_bytes()[:-1]), "9 bytes, and its index says 10"),
    "long .bin": (lambda bin, idx: bin.write_bytes(bin.read_bytes() * 2), "20 bytes, and its index says 10"),
    "short .idx": (lambda bin, idx: idx.write_bytes(idx.read_bytes()[:-8]), "74 bytes, and 82 by its own"),
    "cut in the header": (lambda bin, idx: idx.write_bytes(b"MMIDIDX"), "does not begin like an index"),
    "another file": (lambda bin, idx: patched(idx, 0, b"TNTIDX\0\0"), "does not begin like an index"),
    "another version": (lambda bin, idx: patched(idx, 9, b"\x02"), "version 2"),
    "floats": (lambda bin, idx: patched(idx, 17, b"\x07"), "ids are float32"),
    "an unknown type": (lambda bin, idx: patched(idx, 17, b"\x63"), "type code 99"),
    "wider ids": (lambda bin, idx: patched(idx, 17, b"\x04"), "do not follow each other"),
    "a negative size": (lambda bin, idx: patched(idx, 34, b"\xff\xff\xff\xff"), "do not follow each other"),
    "a wrong pointer": (lambda bin, idx: patched(idx, 50, b"\x08"), "do not follow each other"),
    "documents out of order": (lambda bin, idx: patched(idx, 66, b"\x05"), "documents are not in order"),
    "documents lost": (lambda bin, idx: patched(idx, 74, b"\x01"), "documents are not in order"),
    "a broken description": (lambda bin, idx: bin.with_suffix(".json").write_text("{"), "JSONDecodeError"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused_with_the_reason(tmp_path: Path, damage: str) -> None:
    write_documents(tmp_path / "t", [[[1, 2, 3]], [[4, 5]]])
    assert open_token_file(str(tmp_path / "t")).num_documents == 2
    act, reason = DAMAGES[damage]
    act(tmp_path / "t.bin", tmp_path / "t.idx")
    with pytest.raises(JobError, match=reason) as caught:
        open_token_file(str(tmp_path / "t"))
    assert caught.value.problems[0].value == str(tmp_path / "t")


def test_the_fingerprint_is_that_of_tokens_and_documents(tmp_path: Path) -> None:
    contents = {
        "a": [[[1, 2, 3]], [[4, 5]]],
        "same": [[[1, 2, 3]], [[4, 5]]],
        "other tokens": [[[1, 2, 3]], [[4, 6]]],
        "other documents": [[[1, 2]], [[3, 4, 5]]],
    }
    prints = {}
    for name, documents in contents.items():
        write_documents(tmp_path / name, documents)
        prints[name] = open_token_file(str(tmp_path / name)).fingerprint
    assert prints["a"] == prints["same"]
    assert len(set(prints.values())) == 3


def test_tokens_of_another_tokenizer_or_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "foreign", [[[1, 300]]])
    foreign = open_token_file(str(tmp_path / "foreign"))
    assert token_problems("foreign", foreign, "bytes", 301) == []
    (problem,) = token_problems("foreign", foreign, "bytes", 300)
    assert "token id 300, and the tokenizer has ids 0 .. 299" in problem.rule
    (tmp_path / "x.txt").write_text("text")
    write_tokens(str(tmp_path / "ours"), find_corpus([str(tmp_path / "x.txt")]), ByteTokenizer(), Rules(), 1)
    ours = open_token_file(str(tmp_path / "ours"))
    assert (ours.tokenizer_hash, ours.vocab_size, ours.max_token) == ("bytes", 257, 256)
    (problem,) = token_problems("ours", ours, "sha256:1", 1000)
    assert "was made with the tokenizer bytes, and the run's is sha256:1" in problem.rule
    write_documents(tmp_path / "negative", [[[1, -1]]], code=4)
    assert token_problems("n", open_token_file(str(tmp_path / "negative")), "bytes", 257)


def test_several_files_read_as_one(tmp_path: Path) -> None:
    names, parts = ["a", "b", "c"], [[[[1, 2]], [[3]]], [[[9]]], [[[5, 6, 7]], [[8]]]]
    for name, documents in zip(names, parts, strict=True):
        write_documents(tmp_path / name, documents, code=8 if name != "b" else 4)
    file = join_token_files(names, [open_token_file(str(tmp_path / name)) for name in names])
    assert documents_of(file) == [[1, 2], [3], [9], [5, 6, 7], [8]]
    everything = [1, 2, 3, 9, 5, 6, 7, 8]
    for begin in range(9):
        for end in range(begin, 9):
            assert file.tokens[begin:end].tolist() == everything[begin:end]
    assert len(file.tokens) == 8


def test_files_of_two_tokenizers_do_not_join(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [[[1]]])
    file = open_token_file(str(tmp_path / "a"))
    one, other = (TokenFile(file.tokens, file.offsets, "f", name) for name in ("one", "other"))
    with pytest.raises(JobError, match="different tokenizers: a with one, b with other"):
        join_token_files(["a", "b"], [one, other])
