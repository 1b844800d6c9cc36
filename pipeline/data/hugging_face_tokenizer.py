"""A tokenizer of the `tokenizers` library, as a Hugging Face folder holds it. No torch, no transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend

from pipeline.base.problems import JobError, Problem
from pipeline.data.tokenizer_files import TOKENIZER, TokenizerFacts, write_tokenizer_folder


class HuggingFaceTokenizer:
    """Ids of a tokenizer.json, plain: no special tokens put around a text, no truncation, no padding.

    The text of a special token inside a document is encoded as the text it is. A document can
    therefore not end itself.

    Raises:
        JobError: the library cannot read the file.
    """

    def __init__(self, facts: TokenizerFacts) -> None:
        self.facts = facts
        self.identity = facts.identity
        self.vocab_size = facts.vocab_size
        self.end_of_document = facts.end_of_document
        self._dtype = np.uint16 if facts.vocab_size <= 1 << 16 else np.int32
        try:
            self.backend = Backend.from_str(facts.json)
        except Exception as error:  # the library raises plain Exception
            if not isinstance(error, ValueError) and type(error) is not Exception:
                raise
            rule = f"{TOKENIZER} cannot be read: {error}"
            remedy = "Save the tokenizer again with a current transformers or tokenizers"
            raise JobError([Problem("tokenizer", facts.name, rule, remedy)]) from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.cuts_at_lines = self._cuts_at_lines()

    def __reduce__(self) -> tuple[type[HuggingFaceTokenizer], tuple[TokenizerFacts]]:
        return HuggingFaceTokenizer, (self.facts,)

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens], of the narrowest type of token files."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each, on the library's threads."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`; special tokens are shown."""
        return self.backend.decode([int(token) for token in tokens], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json as it was, and what AutoTokenizer needs beside it."""
        write_tokenizer_folder(folder, self.facts.json, self.facts.eos_token)

    def _cuts_at_lines(self) -> bool:
        """Whether the texts below, where a mark of the beginning or a merge over lines would show, have
        the ids of their parts."""
        for left, right in (("word", "\nnext"), ("end 12", "\n\n  indented"), ("a", "\n")):
            parts = np.concatenate(self.encode_batch([left, right]))
            if not np.array_equal(self.encode(left + right), parts):
                return False
        return True
