import numpy as np
import pytest

from pipeline.data.tokenizer import ByteTokenizer, vocabulary_problems


@pytest.mark.parametrize("text", ["", "def f(): pass\n", "naïve Grüße", "日本語 🙂", "\r\n\x00"])
def test_ids_are_the_utf8_bytes_and_decode_inverts_them(text: str) -> None:
    tokens = ByteTokenizer().encode(text)
    assert tokens.tolist() == list(text.encode("utf-8"))
    assert ByteTokenizer().decode(tokens) == text


def test_decode_shows_document_ends_and_broken_characters() -> None:
    half_a_character = "é".encode()[:1]
    tokens = [*b"a", 256, *b"b", *half_a_character]
    assert ByteTokenizer().decode(np.array(tokens)) == "a\n\nb\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("token", [-1, 257, 383])
def test_decode_refuses_an_id_that_does_not_exist(token: int) -> None:
    with pytest.raises(ValueError, match=rf"token id {token}.*0 \.\. 256"):
        ByteTokenizer().decode([token])


def test_model_must_have_a_row_for_every_id() -> None:
    assert vocabulary_problems(ByteTokenizer(), 257) == ()
    (problem,) = vocabulary_problems(ByteTokenizer(), 256)
    assert problem.value == 256
    assert "257" in problem.remedy
