"""Tokenizers of the `tokenizers` library: folders, their identity, and texts that would end themselves."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.problems import JobError
from pipeline.check import main as check
from pipeline.data.corpus import find_corpus
from pipeline.data.preparation import Rules, write_tokens
from pipeline.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer, unlike_its_text
from pipeline.data.tokenizer_folder import byte_tokenizer_json, chosen_tokenizer, tokenizer_facts
from pipeline.data.tokenizer_training import train_tokenizer

ROOT = Path(__file__).parents[2]
TEXT = "def lower(word):\n    return word.lower()  # the lowest of the words\n\nnaïve Grüße 日本語 🙂\r\n"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a BPE of 300 ids."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text(TEXT * 20)
    corpus = find_corpus([str(folder / "text.txt")])
    train_tokenizer(corpus, Rules(), 300, folder / "tokenizer")
    return folder / "tokenizer"


def test_a_trained_tokenizer_is_a_hugging_face_folder(bpe: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(str(bpe)), AutoTokenizer.from_pretrained(bpe)
    assert (ours.vocab_size, ours.end_of_document) == (300, theirs.eos_token_id) == (len(theirs), 0)
    assert ours.encode(TEXT).tolist() == theirs(TEXT)["input_ids"]
    assert len(ours.encode(TEXT)) < len(TEXT.encode())
    assert ours.decode(ours.encode(TEXT)) == TEXT == theirs.decode(ours.encode(TEXT))


def test_bytes_of_a_text_are_known_from_its_ids_where_these_keep_it(bpe: Path, tmp_path: Path) -> None:
    for ours in (load_tokenizer(str(bpe)), ByteTokenizer()):
        ids = np.append(ours.encode(TEXT), ours.end_of_document)
        assert unlike_its_text(ours) is None
        assert ours.num_bytes(ids) == len(TEXT.encode())
    shutil.copytree(bpe, tmp_path / "lower")
    content = json.loads((bpe / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "lower" / "tokenizer.json").write_text(json.dumps(content))
    assert "decodes 'A probe" in str(unlike_its_text(load_tokenizer(str(tmp_path / "lower"))))


def test_the_byte_tokenizer_is_one_too(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ByteTokenizer().save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(theirs), theirs.eos_token_id) == (257, 256)
    assert theirs(TEXT)["input_ids"] == list(TEXT.encode())
    assert theirs.decode(list(TEXT.encode())) == TEXT
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        assert isinstance(load_tokenizer(str(folder)), ByteTokenizer)


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_the_byte_tokenizer_has_the_librarys_ids(text: str) -> None:
    library = HuggingFaceTokenizer(tokenizer_facts(None))
    assert library.encode(text).tolist() == ByteTokenizer().encode(text).tolist()
    assert library.decode(ByteTokenizer().encode(text)) == text


def test_a_text_cannot_end_its_document(bpe: Path) -> None:
    for tokenizer in (load_tokenizer(str(bpe)), HuggingFaceTokenizer(tokenizer_facts(None))):
        ids = tokenizer.encode("a <|endoftext|> b").tolist()
        assert tokenizer.end_of_document not in ids
        assert tokenizer.decode(ids) == "a <|endoftext|> b"


@pytest.mark.parametrize("marked", ["in the vocabulary", "added", "added as special"])
@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "BPE", "BPE of whole words", "Unigram"])
def test_no_marker_comes_from_a_text_whatever_the_model(tmp_path: Path, kind: str, marked: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    markers = {"eos": "</s>", "bos": "<s>", "pad": "<pad>", "unk": "<unk>"}
    pieces = ["a", "b", "<", "/", "s", ">", "p", "d", "</", "</s", "<s", *markers.values()]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("<", "/"), ("</", "s"), ("</s", ">"), ("<", "s"), ("<s", ">")]
    model = {
        "WordLevel": lambda: models.WordLevel(vocabulary, unk_token="<unk>"),
        "WordPiece": lambda: models.WordPiece(vocabulary, unk_token="<unk>"),
        "BPE": lambda: models.BPE(vocabulary, merges, unk_token="<unk>"),
        "BPE of whole words": lambda: models.BPE(vocabulary, [], unk_token="<unk>", ignore_merges=True),
        "Unigram": lambda: models.Unigram([(piece, -1.0 / len(piece)) for piece in pieces], len(pieces) - 1),
    }[kind]()
    library = Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if marked == "added":
        library.add_tokens(list(markers.values()))
    elif marked == "added as special":
        library.add_special_tokens(list(markers.values()))
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    names = {f"{use}_token": marker for use, marker in markers.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == len(pieces) == tokenizer.end_of_document + 4
    ids = tokenizer.encode("a </s> b a</s>b <s> <pad> s<pad>s </s>").tolist()
    assert not {vocabulary[markers[use]] for use in ("eos", "bos", "pad")} & set(ids)
    assert [vocabulary["a"], vocabulary["b"]] == tokenizer.encode("a b").tolist()
    assert "</s>" in tokenizer.decode([vocabulary["</s>"]])


def test_an_end_that_is_an_ordinary_token_is_refused_where_it_ends_a_document(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.BPE({"a": 0, "\n": 1, "?": 2}, [], unk_token="?"))
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    (tmp_path / "text.txt").write_text("aa\naa")
    corpus = find_corpus([str(tmp_path / "text.txt")])
    for eos, text in (("\n", "aa\naa"), ("?", "aaé")):
        (tmp_path / "text.txt").write_text(text)
        corpus = find_corpus([str(tmp_path / "text.txt")])
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        tokenizer = load_tokenizer(str(tmp_path))
        with pytest.raises(JobError, match=r"its end of a document, id \d, inside the text of .*text\.txt"):
            write_tokens(str(tmp_path / "t"), corpus, tokenizer, Rules(), 1)


def test_parts_cut_before_a_line_break_have_the_ids_of_the_whole(bpe: Path) -> None:
    tokenizer = load_tokenizer(str(bpe))
    assert tokenizer.cuts_at_lines
    whole = tokenizer.encode(TEXT).tolist()
    for place in range(1, len(TEXT)):
        if TEXT[place] == "\n" and TEXT[place - 1].isalnum():
            assert [*tokenizer.encode(TEXT[:place]), *tokenizer.encode(TEXT[place:])] == whole


def test_a_tokenizer_that_marks_beginnings_is_not_cut(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {
        "<s>": 0,
        "▁word": 1,
        "word": 2,
        "\n": 3,
        "▁": 4,
        **{c: n for n, c in enumerate("wordnexta", 5)},
    }
    library = Tokenizer(models.BPE(vocabulary, [], unk_token="<s>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert not load_tokenizer(str(tmp_path)).cuts_at_lines


def test_an_object_can_go_to_another_process(bpe: Path) -> None:
    ours = load_tokenizer(str(bpe))
    copy = pickle.loads(pickle.dumps(ours))
    text = "lower <|endoftext|> words"
    assert copy.encode(text).tolist() == ours.encode(text).tolist()
    assert copy.identity == ours.identity


def test_the_identity_is_that_of_the_ids_not_of_the_folder(bpe: Path, tmp_path: Path) -> None:
    ours = load_tokenizer(str(bpe))
    ours.save(tmp_path / "copy")
    assert tokenizer_facts(str(tmp_path / "copy")).identity == ours.identity
    content = json.loads((bpe / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (tmp_path / "copy/tokenizer.json").write_text(json.dumps(content, indent=2))
    same = load_tokenizer(str(tmp_path / "copy"))
    assert same.identity == ours.identity
    assert same.encode(TEXT).tolist() == ours.encode(TEXT).tolist()
    content["model"]["merges"].pop()
    (tmp_path / "copy/tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_facts(str(tmp_path / "copy")).identity != ours.identity


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        (None, "is neither bytes nor a folder"),
        ({}, "has no tokenizer.json that can be read"),
        (
            {"tokenizer.json": "{", "tokenizer_config.json": '{"eos_token": "a"}'},
            "tokenizer.json cannot be read",
        ),
        ({"tokenizer.json": byte_tokenizer_json()}, "names no eos_token"),
        (
            {"tokenizer.json": byte_tokenizer_json(), "tokenizer_config.json": '{"eos_token": "</s>"}'},
            "'</s>', which ends a document, has no id",
        ),
    ],
)
def test_a_folder_that_lacks_something_is_a_problem(
    tmp_path: Path, files: dict[str, str] | None, rule: str
) -> None:
    folder = tmp_path / "tokenizer"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(JobError) as caught:
        load_tokenizer(str(folder))
    assert rule in caught.value.problems[0].rule
    assert caught.value.problems[0].remedy


def test_eos_is_found_in_every_form(tmp_path: Path) -> None:
    content = json.loads(byte_tokenizer_json())
    content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0]]}
    content["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    facts = tokenizer_facts(str(tmp_path))
    assert (facts.vocab_size, facts.end_of_document) == (3, 1)


def test_the_run_takes_the_tokenizer_that_lies_beside_its_tokens(tmp_path: Path) -> None:
    for name in ("t.bin", "t.idx"):
        (tmp_path / name).touch()
    prefix = str(tmp_path / "t")
    assert chosen_tokenizer(None, [prefix]) is None
    (tmp_path / "t.tokenizer").mkdir()
    assert chosen_tokenizer(None, ["text", prefix]) == f"{prefix}.tokenizer"
    assert chosen_tokenizer("bytes", [prefix]) == "bytes"


def test_the_check_needs_the_tokenizers_library_only(bpe: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pipeline.check import main; code = main(sys.argv[1:])\n"
        "slow = ('transformers', 'torch', 'pyarrow')\n"
        "sys.exit(code or any(name in sys.modules for name in slow))"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "--tokenizer",
        str(bpe),
        "--world_size",
        "1",
        "--model",
        "gpt2-124m",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_refuses_what_the_run_would(bpe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["--world_size", "1", "--tokenizer", "nowhere", "--on_bad_record", "ignore"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "tokenizer = 'nowhere': is neither bytes nor a folder" in said
    assert "on_bad_record = 'ignore': must be one of stop, skip" in said
    assert check(["--world_size", "1", "--tokenizer", str(bpe), "--model", "tiny"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "tiny has 257 token ids, and the tokenizer" in said
    assert "config.json whose vocab_size is at least" in said
    assert "needs 300" in said
