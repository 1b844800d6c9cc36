"""`python -m pipeline.prepare` as it is used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeline.data.preparation import PreparationProgress
from pipeline.data.token_file import open_token_file
from pipeline.data.token_writer import Counts
from pipeline.data.tokenizer import load_tokenizer
from pipeline.prepare import main
from tests.data.megatron_files import read_documents, write_documents


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"the number is {n} " * n}) + "\n" for n in range(1, 40)))
    return path


def test_trains_a_tokenizer_prepares_and_inspects(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "out/tokens"
    command = [str(texts), "--output", str(prefix), "--train_tokenizer", "300", "--inspect"]
    assert main(command) == 0
    said = capsys.readouterr().out
    tokenizer = load_tokenizer(f"{prefix}.tokenizer")
    documents = read_documents(prefix)
    assert tokenizer.decode(documents[1][:-1]) == "the number is 2 the number is 2 "
    assert {document[-1] for document in documents} == {tokenizer.end_of_document}
    assert open_token_file(str(prefix)).tokenizer_hash == tokenizer.identity
    assert f"39 documents, {sum(map(len, documents)):,} tokens" in said
    assert f"most {max(map(len, documents)):,}" in said
    assert "document 0: 'the number is 1 <|endoftext|>'" in said
    assert re.search(r"ids: 0 to \d+, \d+ of the tokenizer's \d+ are used", said)
    histogram = [int(count) for count in re.findall(r"\d+ to \d+ +(\d+) #", said)]
    assert sum(histogram) == 39
    assert main(command) == 0
    assert "using the tokenizer that was trained before" in capsys.readouterr().out


def test_another_tokenizer_is_not_written_over(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(texts), "--output", str(tmp_path / "t"), "--train_tokenizer", "300"]) == 0
    assert main([str(texts), "--output", str(tmp_path / "t")]) == 2
    assert main([str(texts), "--output", str(tmp_path / "t"), "--train_tokenizer", "280"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "holds another tokenizer" in error
    assert "holds a tokenizer that was made from other inputs" in error


def test_uses_a_tokenizer_folder_and_saves_it_beside(texts: Path, tmp_path: Path) -> None:
    assert main([str(texts), "--output", str(tmp_path / "t"), "--train_tokenizer", "300"]) == 0
    folder = f"{tmp_path}/t.tokenizer"
    assert main([str(texts), "--output", str(tmp_path / "u"), "--tokenizer", folder, "--workers", "2"]) == 0
    assert read_documents(tmp_path / "u") == read_documents(tmp_path / "t")
    assert load_tokenizer(f"{tmp_path}/u.tokenizer").identity == load_tokenizer(folder).identity


def test_skipped_records_are_counted(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts.write_text(texts.read_text() + "broken\n")
    command = [str(texts), "--output", str(tmp_path / "t")]
    assert main(command) == 2
    assert "a.jsonl:40" in "".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("t.*"))
    assert main([*command, "--on_bad_record", "skip"]) == 0
    assert "skipped 1 files or records" in capsys.readouterr().out


def test_inspects_files_of_other_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "t", [[[104, 105, 256]], [[50_000]]], code=4)
    assert main([str(tmp_path / "t.idx"), "--inspect"]) == 0
    said = capsys.readouterr().out
    assert "2 documents, 4 tokens, 0.0 MB of int32" in said
    assert "tokenizer: unknown" in said
    assert "WARNING: ids above 256" in said
    assert "document 0: 'hi\\n\\n'" in said


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        ("", ["inputs = '': there are none", "output = None: is required"]),
        ("missing --output x", ["'missing': does not exist"]),
        ("{texts}", ["output = None"]),
        ("{texts} --inspect", ["is no PREFIX of token files"]),
        ("{texts} --output .", ["output = '.': is a folder", "Give --output tokens"]),
        ("{texts} --output new/", ["output = 'new/': is a folder", "Give --output new/tokens"]),
        ("{texts} --output {texts}", ["is a file, which --data would read in place of the tokens"]),
        ("{texts} --output x.bin", ["is the name of a token file", "Give --output x."]),
        ("{texts} --output x --workers 0", ["workers = 0: must be at least 1"]),
        ("{texts} --output x --on_bad_record no", ["on_bad_record = 'no'"]),
        ("{texts} --output x --train_tokenizer 256", ["257 ids already"]),
        ("{texts} --output x --train_tokenizer 300 --tokenizer bytes", ["is not used where one is trained"]),
        ("{texts} --output x --tokenizer nowhere", ["is neither bytes nor a folder"]),
        (
            "missing --output x --workers 0 --tokenizer nowhere",
            ["does not exist", "at least 1", "neither bytes"],
        ),
    ],
)
def test_wrong_commands_are_refused_with_all_problems(
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    problems: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments.format(texts=texts).split()) == 2
    error = " ".join(capsys.readouterr().err.split())
    for problem in problems:
        assert problem in error
    assert not list(tmp_path.glob("x*"))


def test_a_place_that_cannot_be_written_is_named(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    assert main([str(texts), "--output", str(tmp_path / "taken" / "tokens")]) == 2
    assert f"cannot be written: {tmp_path / 'taken'} is a file" in capsys.readouterr().err


def test_the_progress_line_has_speeds_and_the_time_left() -> None:
    counts = Counts(documents=1000, tokens=2_000_000)
    text = str(PreparationProgress(0.25, 1234.4, 56_789.1, 3725, counts))
    assert text == " 25.0%  1,000 documents (1,234/s)  2,000,000 tokens (56,789/s)  1:02:05 left"
