"""What a tokenizer does not keep of its texts: characters that no id stands for, or only the unknown one.

A character is lost where the normalizer or pre-tokenizer removes it, where the model has no id for it, and
where its word becomes the unknown token. White space is not counted: word tokenizers leave it out by design.
What is changed (to lower case, without its accent) is not lost.

Each distinct character is tried once, and texts are only counted, which takes a hundredth of the time of
encoding them. Losses of whole words, which depend on what stands around a character, are found by a sum: of
the units (characters, or a byte-level tokenizer's bytes) that the texts give to the model, less those of the
ids' pieces.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

# Shares of characters or ids from which losses are told, and from which tokens are not made unless asked for.
TOLD, REFUSED = 0.001, 0.2
# Examples of lost characters.
_SHOWN = 5
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_WHOLE_WORDS = {"WordPiece", "WordLevel"}
# Normalizers of which a text gives as many units as its characters do one by one.
_BY_CHARACTER = {"BertNormalizer", "Lowercase", "NFD", "NFKD", "StripAccents", "Nmt", "Strip", "ByteLevel"}


@dataclass(frozen=True)
class Losses:
    """What is not kept of some texts.

    Attributes:
        characters: How many are lost.
        unknown: How many ids are the unknown token.
        examples: Some of the characters, those lost most often first; none where whole words are unknown.
    """

    characters: int = 0
    unknown: int = 0
    examples: str = ""

    def __add__(self, other: Losses) -> Losses:
        examples = "".join(dict.fromkeys(self.examples + other.examples))[:_SHOWN]
        return Losses(self.characters + other.characters, self.unknown + other.unknown, examples)

    def share(self, characters: int, tokens: int) -> float:
        """The larger of the shares: of so many characters, and of so many ids."""
        return max(self.characters / max(characters, 1), self.unknown / max(tokens, 1))

    def told(self, characters: int, tokens: int) -> str:
        """A clause for messages."""
        shown = ", ".join(map(repr, self.examples))
        return (
            f"the tokenizer does not keep {self.characters:,} of {characters:,} characters "
            f"({self.characters / max(characters, 1):.2%})"
            + (f", {shown} among them" if shown else "")
            + f"; {self.unknown / max(tokens, 1):.2%} of the ids are its unknown token"
        )


class LossCounter:
    """Counts what a tokenizer of the `tokenizers` library loses.

    Args:
        backend: The library's object.
        content: Its tokenizer.json.
    """

    def __init__(self, backend: Any, content: Mapping[str, Any]) -> None:
        self._backend, model = backend, content["model"]
        self._unknown = _unknown_id(model)
        self._whole_words = model["type"] in _WHOLE_WORDS
        steps = list(_steps(content.get("normalizer"), content.get("pre_tokenizer")))
        self._removes_patterns = any("pattern" in step and _removes(step) for step in steps)
        self._by_character = all(
            step["type"] in _BY_CHARACTER or (step["type"] == "Replace" and _keeps_sums(step))
            for step in _steps(content.get("normalizer"))
        )
        self._spaces = set(self._given(" "))
        self._alphabet = None if self._whole_words else _alphabet(model)
        self._bytes = _fallback_bytes(model)
        self._content = content
        # Of each character: units it gives the model, -1 where that is not known yet; whether it is lost.
        self._units = np.full(sys.maxunicode + 1, -1, np.int16)
        self._lost = np.zeros(sys.maxunicode + 1, bool)

    def __call__(self, texts: Sequence[str], ids: Sequence[np.ndarray]) -> Losses:
        """What is lost of `texts`.

        Args:
            texts: As they were encoded.
            ids: Of each, [tokens].
        """
        if not texts:
            return Losses()
        counts = np.bincount(np.frombuffer("".join(texts).encode("utf-32-le"), "<u4"))
        letters = np.flatnonzero(counts)
        for letter in letters[self._units[letters] < 0].tolist():
            self._units[letter], self._lost[letter] = self._try(chr(letter))
        lost = letters[self._lost[letters]]
        characters = int(counts[lost].sum())
        tokens = np.concatenate(ids)
        unknown = 0 if self._unknown is None else int(np.count_nonzero(tokens == self._unknown))
        if self._removes_patterns or (self._whole_words and unknown):
            missing = int(counts[letters] @ self._units[letters]) - int(self._sizes[tokens].sum())
            if missing > 0:
                characters += missing if self._by_character else sum(map(self._without_piece, texts))
        most = lost[np.argsort(-counts[lost], kind="stable")][:_SHOWN]
        return Losses(characters, unknown, "".join(map(chr, most.tolist())))

    def _try(self, letter: str) -> tuple[int, bool]:
        """The units that a character gives the model (0 where it is lost, or white space), and whether it is
        lost."""
        if letter.isspace():
            return 0, False
        between, without = self._given(f"a{letter}a"), self._given("aa")
        if between == without:
            return 0, True
        if self._alphabet is None:
            return self._size(between) - self._size(without), False
        units = [unit for unit in self._given(letter) if unit not in self._spaces]
        known = [unit in self._alphabet or self._bytes >= {*unit.encode()} for unit in units]
        if not all(known):
            return 0, True
        return sum(1 if unit in self._alphabet else len(unit.encode()) for unit in units), False

    def _given(self, text: str) -> str:
        """What the model is given of a text."""
        normalizer, splitter = self._backend.normalizer, self._backend.pre_tokenizer
        text = text if normalizer is None else normalizer.normalize_str(text)
        return text if splitter is None else "".join(piece for piece, _ in splitter.pre_tokenize_str(text))

    def _size(self, piece: str) -> int:
        return sum(unit not in self._spaces and not unit.isspace() for unit in piece)

    @cached_property
    def _sizes(self) -> np.ndarray:
        """Units of each id's piece, [ids]; 0 of the unknown token."""
        model, found = self._content["model"], dict[int, int]()
        prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
        for piece, number in _vocabulary(model):
            is_byte = model.get("byte_fallback") and _byte_of(piece) is not None
            found[number] = 1 if is_byte else self._size(piece.removeprefix(prefix).removesuffix(suffix))
        for token in self._content["added_tokens"]:
            found[token["id"]] = self._size(token["content"])
        if self._unknown is not None:
            found[self._unknown] = 0
        sizes = np.zeros(max(found, default=-1) + 1, np.int64)
        sizes[list(found)] = list(found.values())
        return sizes

    def _without_piece(self, text: str) -> int:
        """Characters of a text that no id stands for, beside those lost wherever they stand; slow."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        kept = np.zeros(len(text), bool)
        for number, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            kept[begin:end] |= number != self._unknown
        left = 0
        for place in np.flatnonzero(~kept).tolist():
            if place and kept[place - 1] and unicodedata.combining(text[place]):
                kept[place] = True  # composed with the character before, to which the library counts it
            else:
                left += not text[place].isspace() and not self._lost[ord(text[place])]
        return left


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    """The id of the unknown token; None where the model has none."""
    if model["type"] == "Unigram":
        return model.get("unk_id")
    return None if model.get("unk_token") is None else model["vocab"].get(model["unk_token"])


def _steps(*roots: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of normalizers and pre-tokenizers, sequences resolved."""
    for root in filter(None, roots):
        inner = root.get("normalizers", root.get("pretokenizers"))
        if inner is None:
            yield root
        else:
            yield from _steps(*inner)


def _removes(step: Mapping[str, Any]) -> bool:
    return step.get("content") == "" or step.get("behavior") == "Removed"


def _keeps_sums(replacement: Mapping[str, Any]) -> bool:
    """Whether a replacement shows in the sum of units only where it removes something."""
    return replacement["content"] == "" or len(replacement["pattern"].get("String", "")) == 1


def _vocabulary(model: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, Mapping):
        return iter(vocabulary.items())
    return ((piece, number) for number, (piece, _) in enumerate(vocabulary))  # Unigram


def _alphabet(model: Mapping[str, Any]) -> set[str]:
    """Units for which a BPE or Unigram model has ids."""
    pieces = (piece for piece, _ in _vocabulary(model))
    if model["type"] == "Unigram":
        return set().union(*pieces)
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    shorn = (piece.removeprefix(prefix).removesuffix(suffix) for piece in pieces)
    return {piece for piece in shorn if len(piece) == 1}


def _fallback_bytes(model: Mapping[str, Any]) -> set[int]:
    """The bytes that stand for characters without a piece."""
    if not model.get("byte_fallback"):
        return set()
    return {byte for piece, _ in _vocabulary(model) if (byte := _byte_of(piece)) is not None}


def _byte_of(piece: str) -> int | None:
    """The byte of a piece such as <0x0A>."""
    found = _BYTE.fullmatch(piece)
    return None if found is None else int(found[1], 16)
