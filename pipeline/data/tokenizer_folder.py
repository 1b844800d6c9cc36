"""What the files of a tokenizer's folder say, read in milliseconds without the `tokenizers` library, and
such a folder written:

    tokenizer.json         the tokenizer itself, as the `tokenizers` library writes it
    tokenizer_config.json  among others eos_token, which ends a document
    more                   that goes wherever the tokenizer goes (`pipeline.hugging_face.folder_files`)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.base.files import replaced_atomically
from pipeline.base.json_reader import parse_saved
from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.user_input import is_folder, read_text
from pipeline.data.inputs import token_prefix
from pipeline.hugging_face.folder_files import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    files_beside,
    json_object,
    local_folder,
)

BYTES = "bytes"
# The token that ends a document, of the byte tokenizer and of tokenizers trained here.
END = "<|endoftext|>"
# Behind the PREFIX of token files: the folder with their tokenizer.
BESIDE_TOKENS = ".tokenizer"
TOKENIZER = "tokenizer.json"
# What the library adds when it encodes, which is turned off here: it is no part of a tokenizer's identity.
_NOT_IDENTITY = ("truncation", "padding", "post_processor")
NOTHING: Mapping[str, bytes] = MappingProxyType({})
# Of a tokenizer.json; the largest that are published take 40 MB.
_MOST_BYTES = 2**30
# What reading a file of another form raises.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError)
SAVE_AGAIN = "Save the tokenizer again with a current transformers or tokenizers"


@dataclass(frozen=True)
class TokenizerFacts:
    """What the files of a tokenizer say.

    Attributes:
        name: The folder, for messages.
        identity: ``bytes``, or a hash of everything that decides the ids of a text and of its end.
        vocab_size: Highest id + 1, added tokens included.
        end_of_document: Id of eos_token.
        eos_token: Its text.
        json: Content of tokenizer.json.
        files: The other files of its folder that go wherever it goes (`pipeline.hugging_face.folder_files`).
    """

    name: str
    identity: str
    vocab_size: int
    end_of_document: int
    eos_token: str
    json: str = field(repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    @property
    def model_config(self) -> dict[str, Any]:
        """The config.json beside it; where that has none, the ids of its own bos and pad tokens."""
        found = dict(reversed(list(_vocabulary(json.loads(self.json)))))  # of two, the added one
        named = _named_tokens(self.files)
        keys = [key for key in ("bos_token", "pad_token") if named.get(key) in found]
        return {f"{key}_id": found[named[key]] for key in keys} | json_object(self.files, MODEL_CONFIG)

    @property
    def markers(self) -> tuple[str, ...]:
        """The tokens that its files name: of end, beginning, padding, and of what is unknown."""
        return (self.eos_token, *_named_tokens(self.files).values())

    @property
    def runs_code(self) -> bool:
        """Whether its folder names a class whose code is there, too, which is never run."""
        return bool(json_object(self.files, TOKENIZER_CONFIG).get("auto_map"))

    @property
    def generation_config(self) -> dict[str, Any]:
        """The generation_config.json beside it; empty where there is none."""
        return json_object(self.files, GENERATION_CONFIG)


def tokenizer_facts(name: str | None) -> TokenizerFacts:
    """What is known of the tokenizer `name`: ``bytes`` (also for None), a Hugging Face folder or hub:NAME.

    Raises:
        JobError: as `local_folder`; no folder, no tokenizer.json in it, no eos_token named, or one that has
            no id.
    """
    if name is None or name == BYTES:
        return _facts(BYTES, byte_tokenizer_json(), END)
    name = local_folder("tokenizer", name)
    folder = Path(name)
    try:
        text = read_text(folder / TOKENIZER, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise JobError([_no_folder(folder, error)]) from error
    try:
        files = files_beside(folder)
        return _facts(name, text, _eos_token(folder, text, files), files)
    except JobError:
        raise
    except MALFORMED as error:
        rule = f"{TOKENIZER} cannot be read ({type(error).__name__}: {error})"
        raise job_error("tokenizer", name, rule, SAVE_AGAIN) from error


def chosen_tokenizer(name: str | None, paths: Sequence[str], default: str | None = None) -> str | None:
    """The tokenizer for data: `name` if given, else the one saved beside the token files among `paths`, else
    `default`. None is the byte tokenizer."""
    if name is not None:
        return name
    prefixes = (token_prefix(path) for path in paths)
    folders = (f"{prefix}{BESIDE_TOKENS}" for prefix in prefixes if prefix is not None)
    return next((folder for folder in folders if is_folder(folder)), default)


def _facts(name: str, text: str, eos_token: str, files: Mapping[str, bytes] = NOTHING) -> TokenizerFacts:
    ids, eos, digest = _parsed(text, eos_token)
    if eos is None:
        rule = f"its eos_token {eos_token!r}, which ends a document, has no id"
        raise job_error("tokenizer", name, rule, f"Give a token of the vocabulary in {TOKENIZER_CONFIG}")
    identity = BYTES if digest == _byte_digest() else f"sha256:{digest}"
    return TokenizerFacts(name, identity, ids, eos, eos_token, text, dict(files))


@lru_cache(maxsize=4)
def _parsed(text: str, eos_token: str) -> tuple[int, int | None, str]:
    """Vocabulary size, id of the end of a document, digest."""
    content = parse_saved(text)
    tokens = list(_vocabulary(content))
    eos = next((number for token, number in tokens if token == eos_token), None)
    for key in _NOT_IDENTITY:
        content.pop(key, None)
    canonical = json.dumps([content, eos], sort_keys=True).encode()
    return max((number for _, number in tokens), default=-1) + 1, eos, hashlib.sha256(canonical).hexdigest()


@lru_cache(maxsize=1)
def _byte_digest() -> str:
    return _parsed(byte_tokenizer_json(), END)[2]


def _eos_token(folder: Path, text: str, files: Mapping[str, bytes]) -> str:
    if token := _named_tokens(files).get("eos_token") or _token_of_model(text, files):
        return token
    place = folder / TOKENIZER_CONFIG
    rule = f"names no eos_token in {TOKENIZER_CONFIG}, and a token must end each document"
    raise job_error("tokenizer", str(folder), rule, f'Add "eos_token": "<the token>" to {place}')


def _named_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """The texts of the end, beginning, padding and unknown tokens, of those that are named."""
    named: dict[str, str] = {}
    for file in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        content = json_object(files, file)
        for key in ("eos_token", "bos_token", "pad_token", "unk_token"):
            if token := content.get(key):
                named.setdefault(key, token["content"] if isinstance(token, dict) else token)
    return named


def _token_of_model(text: str, files: Mapping[str, bytes]) -> str | None:
    """The token whose id config.json gives as eos_token_id: older folders name it nowhere else."""
    eos = json_object(files, MODEL_CONFIG).get("eos_token_id")
    return next((token for token, number in _vocabulary(json.loads(text)) if number == eos), None)


def _vocabulary(content: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The tokens of a tokenizer.json with their ids, added ones first."""
    for token in content["added_tokens"]:
        yield token["content"], token["id"]
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    else:  # a unigram model: [token, score] in the order of ids
        yield from ((token, number) for number, (token, _) in enumerate(vocabulary))


def _no_folder(folder: Path, error: Exception) -> Problem:
    if not is_folder(folder):
        rule = f"is neither {BYTES} nor a folder"
        return Problem("tokenizer", str(folder), rule, "Give a folder with a tokenizer.json in it")
    rule = f"the folder has no {TOKENIZER} that can be read ({type(error).__name__})"
    remedy = "Open it with transformers.AutoTokenizer and save_pretrained it, which writes that file"
    return Problem("tokenizer", str(folder), rule, remedy)


def write_tokenizer_folder(
    folder: Path, text: str, eos_token: str, files: Mapping[str, bytes] = NOTHING
) -> None:
    """Write a tokenizer and the files beside it so that AutoTokenizer opens it; each file appears whole."""
    content = {**files, TOKENIZER_CONFIG: _described(eos_token, files), TOKENIZER: text.encode()}
    for name, values in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with replaced_atomically(folder / name) as file:
            file.write(values)


def _described(eos_token: str, files: Mapping[str, bytes]) -> bytes:
    """Content of tokenizer_config.json: as it was, if it says what AutoTokenizer needs."""
    config = json_object(files, TOKENIZER_CONFIG)
    if not config:
        config = {"clean_up_tokenization_spaces": False, "model_max_length": int(1e30)}
    needed = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
    # A class whose code is in the folder has the ids of tokenizer.json, which any other class reads.
    changed = {key: value for key, value in needed.items() if not config.get(key)}
    if config.pop("auto_map", None):
        changed["tokenizer_class"] = needed["tokenizer_class"]
    elif not changed:
        return files[TOKENIZER_CONFIG]
    return (json.dumps({**config, **changed}, indent=2, ensure_ascii=False) + "\n").encode()


def _bytes_as_characters() -> list[str]:
    """The printable character for each byte in byte-level vocabularies (Radford et al., GPT-2, 2019): itself
    if it is printable and no space, else the next free one from U+0100 on."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(0x100, 0x200))
    return [chr(byte if byte in kept else next(free)) for byte in range(256)]


@lru_cache(maxsize=1)
def byte_tokenizer_json() -> str:
    """The byte tokenizer in the `tokenizers` library's form: byte-level BPE without a single merge."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": 256, "content": END, "single_word": False, "lstrip": False, "rstrip": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(_bytes_as_characters())},
        "merges": [],
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    return json.dumps(content, ensure_ascii=False)
