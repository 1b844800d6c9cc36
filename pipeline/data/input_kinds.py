"""Kinds of inputs, told by name: text, JSON lines, Parquet, saved datasets, token files. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from pipeline.base.problems import JobError, Problem
from pipeline.base.user_input import exists, is_file

Kind = Literal["text", "jsonl", "parquet", "arrow"]

# Plain text and source code, as they are. Other kinds of files would be learned with their markup.
_PROSE = (".txt", ".text", ".md", ".rst", ".tex")
_CODE = (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".sh")
TEXT_SUFFIXES = _PROSE + _CODE
_JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
RECORD_SUFFIXES = (*_JSONL_SUFFIXES, ".parquet")

_HUB = "hub:"
# The slices that `datasets` knows, train[:10%], would be ignored: its files hold the whole split.
_SPLIT = re.compile(r"[\w.-]+")
_STATE = "state.json"
_DATASET_DICT = "dataset_dict.json"


def kind_of(path: str) -> Kind | None:
    """How a file of this name is read; None where it is not."""
    name = path.lower()
    if name.endswith(TEXT_SUFFIXES):
        return "text"
    if name.endswith(_JSONL_SUFFIXES):
        return "jsonl"
    return {".parquet": "parquet", ".arrow": "arrow"}.get(Path(name).suffix)  # type: ignore[return-value]


def token_prefix(path: str) -> str | None:
    """PREFIX, where `path` is the PREFIX of token files, or either file; None for anything else.

    One file of the two is enough, so that the other one can be missed by name.
    """
    if path.endswith((".bin", ".idx")):
        path = path[:-4]
    elif exists(path):
        return None
    return path if is_file(f"{path}.idx") or is_file(f"{path}.bin") else None


def is_saved_dataset(folder: Path) -> bool:
    """Whether it is what ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` makes."""
    saved = is_file(folder / _STATE) and is_file(folder / "dataset_info.json")
    return saved or is_file(folder / _DATASET_DICT)


def arrow_files(folder: Path) -> list[str]:
    """The files of a saved dataset, in order.

    Raises:
        JobError: several splits, a row order kept beside the rows, or a description that cannot be read.
    """
    try:
        if (folder / _DATASET_DICT).is_file():
            splits = json.loads((folder / _DATASET_DICT).read_text(encoding="utf-8"))["splits"]
            rule = f"is a dataset of the splits {', '.join(splits)}"
            raise JobError([Problem("data", str(folder), rule, f"Name one: {folder / splits[0]}")])
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        if state.get("_indices_data_files"):
            rule = "keeps the order of its rows in a file of its own, as old versions of datasets did"
            remedy = "Load it with datasets and save_to_disk it again"
            raise JobError([Problem("data", str(folder), rule, remedy)])
        return [str(folder / file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, JobError):
            raise
        rule = f"its description cannot be read ({type(error).__name__}: {error})"
        raise JobError([Problem("data", str(folder), rule, "Save the dataset again")]) from error


def is_hub_name(path: str) -> bool:
    """Whether it names a dataset of the hub."""
    return path.startswith(_HUB)


def hub_problem(path: str) -> Problem | None:
    """What is wrong with hub:NAME[:SPLIT], as far as the name tells."""
    name, colon, split = path.removeprefix(_HUB).partition(":")
    if name and (_SPLIT.fullmatch(split) or not colon):
        return None
    rule = "is not hub:NAME or hub:NAME:SPLIT with the name of a whole split"
    return Problem("data", path, rule, "Write, for example, hub:NAME:train")


def hub_files(path: str) -> list[str]:
    """Download hub:NAME[:SPLIT] (split train, if none is said) into the cache of `datasets`; its files.

    Raises:
        JobError: the hub cannot be reached, or has no such dataset or split.
    """
    from datasets import load_dataset

    name, _, split = path.removeprefix(_HUB).partition(":")
    try:
        dataset = load_dataset(name, split=split or "train")
    except Exception as error:  # any of the network's layers raised it; it is named
        rule = (
            f"the dataset cannot be loaded ({type(error).__name__}: {str(error).partition(chr(10))[0][:300]})"
        )
        remedy = "Correct its name and split (hub:NAME:SPLIT), or save it where the hub is reachable"
        raise JobError([Problem("data", path, rule, remedy)]) from error
    return [file["filename"] for file in dataset.cache_files]
