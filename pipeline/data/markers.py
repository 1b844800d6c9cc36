"""A tokenizer.json from which no text gets the id of a marker: end of a document, beginning, padding.

The library keeps added tokens that are marked special out of a text if it is asked to, but not those that are
not marked, and not what stands in the model's vocabulary: to a Unigram or word-level model, the letters
``</s>`` are the token ``</s>``. Here each marker gets a name in the vocabulary that no text has, and its
letters are encoded as any others.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any


def without_markers(text: str, named: Collection[str]) -> str:
    """The content of a tokenizer.json, changed where a text could otherwise give a marker; ids stay.

    Args:
        text: The content.
        named: Markers beside the added tokens that are special, as the folder names them.
    """
    content = json.loads(text)
    added = content["added_tokens"]
    markers = {*named, *(token["content"] for token in added if token["special"])}
    # A single character is no marker that could be told from a text.
    markers = {marker for marker in markers if len(marker.strip()) > 1}
    plain = [token for token in added if token["content"] in markers and not token["special"]]
    hidden = {marker: f"\0{marker}\0" for marker in markers & _pieces_of_texts(content["model"])}
    if not plain and not hidden:
        return text
    for token in plain:
        token["special"] = True
    for token in added:
        token["content"] = hidden.get(token["content"], token["content"])
    _rename(content["model"], hidden)
    return json.dumps(content, ensure_ascii=False)


def _pieces_of_texts(model: dict[str, Any]) -> set[str]:
    """The vocabulary that the model can give for letters of a text."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram
        return {piece for piece, _ in vocabulary}
    if "merges" not in model or model.get("ignore_merges"):
        return set(vocabulary)
    return {_product(model, merge) for merge in model["merges"]}  # BPE, beside single characters


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _product(model: dict[str, Any], merge: str | list[str]) -> str:
    left, right = _pair(merge)
    return left + right.removeprefix(model.get("continuing_subword_prefix") or "")


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        return
    model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            merge
            for merge in model["merges"]
            if _product(model, merge) not in names and not names.keys() & set(_pair(merge))
        ]
