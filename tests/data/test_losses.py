"""What a tokenizer loses of a text is counted, told and refused, of every normalizer, splitter and model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from pipeline.base.problems import JobError
from pipeline.check import main as check
from pipeline.data import preparation
from pipeline.data.corpus import find_corpus
from pipeline.data.losses import Losses
from pipeline.data.preparation import Rules, cached_tokens, write_tokens
from pipeline.data.token_file import open_token_file
from pipeline.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from pipeline.prepare import main as prepare

Splitter = pre_tokenizers.PreTokenizer | None
Normalizer = normalizers.Normalizer | None

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["</s>", "?", *LETTERS, "▁", " ", "\n", ",", "the", "cat", "fi"]
IDS = {piece: number for number, piece in enumerate(PIECES)}
BYTES = {f"<0x{byte:02X}>": len(PIECES) + byte for byte in range(256)}
LEVEL = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 2)}
WORDS = {
    piece: number
    for number, piece in enumerate(["</s>", "?", "the", "cat", "a", "b", "ab", "é", "fi", "new york"])
}
SPACES = pre_tokenizers.WhitespaceSplit()


def bpe(**options: Any) -> Callable[[], Any]:
    return lambda: models.BPE(IDS, [], **options)


def bytewise(lacks: str = "") -> Callable[[], Any]:
    known = {piece: number for piece, number in LEVEL.items() if piece not in lacks}
    return lambda: models.BPE({"</s>": 0, "?": 1, **known}, [])


def unigram(**options: Any) -> Callable[[], Any]:
    more = list(BYTES) if options.get("byte_fallback") else []
    return lambda: models.Unigram([(piece, -1.0) for piece in PIECES + more], 1, **options)


def wordpiece() -> Any:
    pieces = [*PIECES, *(f"##{letter}" for letter in LETTERS)]
    ids = {piece: number for number, piece in enumerate(pieces)}
    return models.WordPiece(ids, unk_token="?", max_input_chars_per_word=20)


def words() -> Any:
    return models.WordLevel(WORDS, unk_token="?")


def folder(path: Path, library: Tokenizer, eos: str = "</s>") -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(library.to_str())
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return str(path)


def made(path: Path, model: Any, splitter: Splitter = None, normalizer: Normalizer = None) -> Any:
    library = Tokenizer(model)
    if splitter is not None:
        library.pre_tokenizer = splitter
    if normalizer is not None:
        library.normalizer = normalizer
    return load_tokenizer(folder(path, library))


BERT = normalizers.BertNormalizer()
IN_ORDER = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
NO_LINKS = normalizers.Replace(Regex("http[a-z]+"), "")
LETTERS_ALONE = pre_tokenizers.Split(Regex("[a-z]+"), "removed", invert=True)
NO_PAIRS = pre_tokenizers.Split(Regex("xx"), "removed")
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTE_LEVEL_BEFORE = pre_tokenizers.ByteLevel(add_prefix_space=True)
META = pre_tokenizers.Metaspace()
BERT_WORDS = pre_tokenizers.BertPreTokenizer()
NO_MARKS = pre_tokenizers.Punctuation("removed")


@pytest.mark.parametrize(
    ("model", "splitter", "normalizer", "text", "lost", "unknown"),
    [
        # byte-level BPE: all bytes, or not the second one of é
        (bytewise(), BYTE_LEVEL, None, "the é 日本 \x00\u200b\n", 0, 0),
        (bytewise(), BYTE_LEVEL_BEFORE, normalizers.NFC(), "e\u0301 é", 0, 0),
        (bytewise("©"), BYTE_LEVEL, None, "the é é日", 2, 0),
        (bytewise(), BYTE_LEVEL, IN_ORDER, "É \u0301", 1, 0),
        (bytewise(), BYTE_LEVEL, NO_LINKS, "see httpabc xhttpy", 12, 0),
        # BPE of characters: leaves out, or makes unknown; with bytes it has all
        (bpe(), None, None, "the 日本 cat é", 3, 0),
        (bpe(unk_token="?"), None, None, "the 日本 cat é", 3, 3),
        (bpe(unk_token="?", fuse_unk=True), None, None, "the 日本 cat é", 3, 2),
        (bpe(unk_token="?"), META, None, "the cat", 0, 0),
        (bpe(unk_token="?"), None, normalizers.Lowercase(), "The Éa", 1, 1),
        (bpe(unk_token="?"), None, IN_ORDER, "The Éa", 0, 0),
        (bpe(unk_token="?"), None, normalizers.NFKC(), "ﬁ \uff12", 1, 1),
        (bpe(unk_token="?"), None, normalizers.Replace("2", "b"), "2 3", 1, 1),
        (bpe(unk_token="?"), None, normalizers.Replace("x", ""), "xa ax", 2, 0),
        (bytewise(), BYTE_LEVEL, NO_LINKS, "\n\nhttpab\n", 6, 0),
        (words, pre_tokenizers.Split(Regex("ab"), "removed"), None, "b x", 2, 1),
        (bpe(), LETTERS_ALONE, None, "the, cat, 3", 3, 0),
        (bpe(), NO_PAIRS, None, "axxb x", 2, 0),
        (bpe(), NO_PAIRS, normalizers.NFC(), "axxb x", 2, 0),
        (bpe(), None, NO_LINKS, "ahttpab xhttpc日", 12, 0),
        (lambda: models.BPE(IDS | BYTES, [], unk_token="?", byte_fallback=True), None, None, "the é日", 0, 0),
        (lambda: models.BPE(IDS | BYTES, [], byte_fallback=True), NO_PAIRS, None, "exx b", 2, 0),
        # Unigram
        (unigram(), META, None, "the 日本 cat é", 3, 2),
        (unigram(byte_fallback=True), META, None, "the 日本 cat é", 0, 0),
        (unigram(), META, normalizers.NFKC(), "ﬁ ﬁ日", 1, 1),
        # words: the whole word is lost
        (wordpiece, SPACES, None, "the cat 日本 theé xé", 8, 3),
        (wordpiece, SPACES, IN_ORDER, "The CAT é xé", 0, 0),
        (wordpiece, SPACES, IN_ORDER, "The e\u0301 日e\u0301", 4, 1),
        (wordpiece, BERT_WORDS, BERT, "The cat, Éa \x07\ufffd a日b", 3, 1),
        (wordpiece, SPACES, None, "a" * 21 + " " + "a" * 20, 21, 1),
        (words, SPACES, None, "the  cat\nsat on", 5, 2),
        (words, pre_tokenizers.Whitespace(), None, "the cat, a", 1, 1),
        (words, NO_MARKS, None, "the,,", 2, 0),
        (words, SPACES, normalizers.NFC(), "e\u0301 cat sa\u0301t", 3, 1),
        (words, SPACES, normalizers.NFD(), "한한 한", 3, 2),
        (words, SPACES, normalizers.NFKC(), "ﬁ ﬁ", 0, 0),
        (bpe(unk_token="?"), None, normalizers.NFC(), "\u1112\u1161\u11ab", 1, 1),
        (words, SPACES, normalizers.Replace("a b", "ab"), "a b the sat", 3, 1),
        (words, META, None, "the", 3, 1),
    ],
)  # fmt: skip
def test_what_is_lost_is_counted(
    tmp_path: Path,
    model: Callable[[], Any],
    splitter: Any,
    normalizer: Any,
    text: str,
    lost: int,
    unknown: int,
) -> None:
    tokenizer = made(tmp_path, model(), splitter, normalizer)
    ids = tokenizer.encode_batch([text, "", text])
    found = tokenizer.losses([text, "", text], ids)
    assert (found.characters, found.unknown) == (2 * lost, 2 * unknown)


def test_examples_are_those_lost_most_often(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, bpe()())
    texts = ["the ééé 日日", "日日日 本 cat"]
    found = tokenizer.losses(texts, tokenizer.encode_batch(texts))
    assert found == Losses(9, 0, "日é本")
    assert ByteTokenizer().losses(texts, []) == Losses()


def corpus_of(path: Path, *texts: str) -> Any:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (path / "texts.jsonl").write_text(lines)
    return find_corpus([str(path / "texts.jsonl")])


def test_losses_are_kept_and_told_from_a_thousandth_on(tmp_path: Path) -> None:
    tokenizer = made(tmp_path / "t", bpe()())
    for name, text, told in (("few", "a" * 1999 + "日", False), ("some", "a" * 999 + "日", True)):
        described = write_tokens(str(tmp_path / name), corpus_of(tmp_path, text), tokenizer, Rules(), 1)
        saved = json.loads((tmp_path / f"{name}.json").read_text())
        assert (saved["lost_characters"], saved["unknown_tokens"], saved["lost_examples"]) == (1, 0, "日")
        assert saved == described
        remarks = open_token_file(str(tmp_path / name)).remarks
        assert len(remarks) == told
        assert not told or "1 of 1,000 characters (0.10%), '日' among them" in remarks[0]


def test_from_a_fifth_on_texts_are_refused_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = made(tmp_path / "t", bpe()())
    corpus = corpus_of(tmp_path, "aaaa日")
    for make in (
        lambda rules: write_tokens(str(tmp_path / "tokens"), corpus, tokenizer, rules, 1),
        lambda rules: cached_tokens(corpus, tokenizer, tmp_path / "cache", rules),
    ):
        for _ in range(2):
            with pytest.raises(
                JobError, match=r"1 of 5 characters \(20\.00%\).*--on_lost_characters continue"
            ):
                make(Rules())
        assert make(Rules(on_lost_characters="continue"))
    assert not list((tmp_path / "cache").glob("*.partial"))
    monkeypatch.setattr(preparation, "_ENOUGH", 5)
    long = corpus_of(tmp_path, *["日" * 2000] * 300)
    with pytest.raises(JobError, match=r" of 17\d,\d\d\d characters"):  # of the first task
        write_tokens(str(tmp_path / "long"), long, tokenizer, Rules(), 1)


def test_documents_that_become_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    tokenizer = made(tmp_path / "t", words(), SPACES)
    described = write_tokens(
        str(tmp_path / "tokens"), corpus_of(tmp_path, "the cat", " \n", "a b"), tokenizer, Rules(), 1
    )
    assert (described["documents"], described["tokens"], described["num_skipped"]) == (2, 6, 1)
    assert described["skipped"][0]["path"].endswith("texts.jsonl:2")
    assert described["skipped"][0]["reason"] == "the tokenizer keeps nothing of it"


@pytest.mark.parametrize(
    "model",
    [
        lambda: models.WordPiece({"</s>": 0, "the": 1}, unk_token="[UNK]"),
        lambda: models.WordLevel({"</s>": 0, "the": 1}, unk_token="[UNK]"),
        lambda: models.BPE({"</s>": 0, "t": 1, "h": 2, "e": 3}, [], unk_token="[UNK]"),
        lambda: models.Unigram([(piece, -1.0) for piece in ("</s>", *"the")], None),
    ],
)
def test_a_model_without_an_unknown_token_is_an_error_where_it_needs_one(
    tmp_path: Path, model: Callable[[], Any]
) -> None:
    tokenizer = made(tmp_path / "t", model(), SPACES)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    write_tokens(str(tmp_path / "fits"), corpus_of(tmp_path, "the the"), tokenizer, Rules(), 1)
    with pytest.raises(JobError, match=r"no id for 'qéx'.*unk_token of its model"):
        write_tokens(str(tmp_path / "not"), corpus_of(tmp_path, "the the qéx"), tokenizer, Rules(), 1)


def test_every_command_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = Tokenizer(models.BPE(IDS, [], unk_token="?"))
    name = folder(tmp_path / "tokenizer", library)
    corpus_of(tmp_path, *["aa日本é the cat"] * 20)
    command = [str(tmp_path / "texts.jsonl"), "--output", str(tmp_path / "tokens"), "--tokenizer", name]
    assert prepare(command) == 2
    assert "60 of 260 characters (23.08%)" in " ".join(capsys.readouterr().err.split())
    assert prepare([*command, "--on_lost_characters", "continue"]) == 0
    assert "WARNING: the tokenizer does not keep 60 of 260" in " ".join(capsys.readouterr().out.split())
    options = ["--data", str(tmp_path / "tokens"), "--world_size", "1", "--output_dir", str(tmp_path / "run")]
    assert check(options) == 0
    assert "the tokenizer does not keep 60 of 260" in " ".join(capsys.readouterr().out.split())
