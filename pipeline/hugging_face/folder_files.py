"""What a model folder has beside weights and tokenizer.json, as a run and its exports keep it. No torch.

tokenizer_config.json, special_tokens_map.json,   special tokens, padding and truncation side, longest text,
added_tokens.json                                 flags of added tokens
chat_template.jinja, chat_template.json,          how a conversation becomes a text
additional_chat_templates/
tokenizer.model, spiece.model                     the vocabulary in SentencePiece's form, for converters
generation_config.json                            ids that end a text, and how tokens are drawn
config.json                                       of it the same ids, and what no computation reads
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.base.json_reader import parse_saved
from pipeline.base.problems import JobError, Problem

TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
MODEL_CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_OBJECTS = (TOKENIZER_CONFIG, SPECIAL_TOKENS, MODEL_CONFIG, GENERATION_CONFIG)
_CARRIED = (
    *_OBJECTS,
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("tokenizer.model", "spiece.model"),
)
# What a run reads or an export has of its own, what tokenizer.json says as well, and texts for people.
_NOT_MISSED = (
    *(
        "*.safetensors",
        "*.index.json",
        "*.bin",
        "*.pth",
        "*.pt",
        "*.ckpt",
        "*.h5",
        "*.msgpack",
        "*.gguf",
        "*.onnx",
    ),
    "tokenizer.json",
    *("vocab.json", "merges.txt", "vocab.txt", "README*", "LICENSE*", "NOTICE*", "USE_POLICY*", "*.md", ".*"),
    *(MODEL_CONFIG, "additional_chat_templates"),
)


def files_beside(folder: Path) -> dict[str, bytes]:
    """The content of each such file, by its name relative to `folder`.

    Raises:
        JobError: one cannot be read, or is no JSON object where it must be.
    """
    paths = sorted(path for pattern in _CARRIED for path in folder.glob(pattern) if path.is_file())
    files, problems = {}, []
    for path in paths:
        name = path.relative_to(folder).as_posix()
        try:
            files[name] = path.read_bytes()
            if name in _OBJECTS:
                json_object(files, name)
        except (OSError, ValueError) as error:
            rule = f"cannot be read ({type(error).__name__}: {error})"
            problems.append(Problem("tokenizer", str(path), rule, "Correct the file, or remove it"))
    if problems:
        raise JobError(problems)
    return files


def json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The content of one of the files; empty where it is not there.

    Raises:
        ValueError: it is no JSON object.
    """
    content = parse_saved(files.get(name, b"{}"))
    if not isinstance(content, dict):
        raise ValueError("is no object {...}")
    return content


def left_behind(folder: Path, carried: Collection[str]) -> list[str]:
    """The names in a model folder that a run with the files `carried` does not take along."""
    there = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    return [
        name
        for name in there
        if name not in carried and not any(fnmatch(name.rstrip("/"), pattern) for pattern in _NOT_MISSED)
    ]
