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
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.base.json_reader import parse_saved
from pipeline.base.problems import JobError, Problem

HUB = "hub:"

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
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")


def is_hub_name(name: str | None) -> bool:
    """Whether it names something on the hub: a dataset, a model or a tokenizer."""
    return name is not None and name.startswith(HUB)


def plain_hub_name(name: str) -> str:
    """NAME of hub:NAME and hub:NAME@REVISION."""
    return name.removeprefix(HUB).partition("@")[0]


def local_folder(key: str, name: str) -> str:
    """A model's or tokenizer's name, with its folder in the hub's cache in place of hub:NAME.

    Raises:
        JobError: as `hub_folder` says.
    """
    if not is_hub_name(name):
        return name
    found = hub_folder(key, name)
    if isinstance(found, Problem):
        raise JobError([found])
    return str(found)


@lru_cache
def hub_folder(key: str, name: str) -> Path | Problem:
    """The folder of hub:NAME[@REVISION], called as its commit: config.json, tokenizer and, for ``model``,
    weights as safetensors; no pickle and no code. Downloaded into the hub's cache of the host, whose locks
    let one process fetch a file while others wait; used from there where the hub cannot be reached.

    Args:
        key: ``model`` or ``tokenizer``, the option that names it.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.removeprefix(HUB).partition("@")
    wanted = [*_CARRIED, "tokenizer.json", *(_WEIGHTS if key == "model" else ())]
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
    except Exception as error:  # noqa: BLE001  (of any layer of the network)
        return _hub_problem(key, name, error)
    if key == "model" and not any(folder.glob("model*.safetensors")):
        rule = "has no weights as safetensors, and pickles, which may run code, are not fetched"
        remedy = (
            "Open it with transformers' AutoModelForCausalLM, save_pretrained it, then --model FOLDER; "
            f"or give --model {folder / MODEL_CONFIG} to start from random weights"
        )
        return Problem(key, name, rule, remedy)
    return folder


def _hub_problem(key: str, name: str, error: Exception) -> Problem:
    """What the hub says of a name, or that it cannot be reached."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    not_here = isinstance(error, LocalEntryNotFoundError)
    cause = (error.__cause__ or error) if not_here else error
    reason = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
    if not not_here and isinstance(error, (HfHubHTTPError, HFValidationError)):
        remedy = "Correct the name; of a gated or private one, accept its terms and run hf auth login"
        return Problem(key, name, f"the hub does not give it ({reason})", remedy)
    repository, _, revision = name.removeprefix(HUB).partition("@")
    version = f" --revision {revision}" if revision else ""
    command = f"hf download {repository}{version} --local-dir FOLDER"
    remedy = f"Where it can be reached: {command}; bring FOLDER here and give --{key} FOLDER"
    return Problem(key, name, f"the hub cannot be reached, and its cache here lacks it ({reason})", remedy)


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
