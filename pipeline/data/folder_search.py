"""What of a folder is data: its files of kinds that are read. The rest is counted by ending.

What this program writes is not data: the run's own folders, those of other runs and of models, and what lies
around the PREFIX of token files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.base.words import few
from pipeline.data.inputs import holds_json_lines, is_json, is_packed, kind_of

# What may lie around PREFIX.bin and PREFIX.idx.
_AROUND_TOKENS = (".bin", ".idx", ".json", ".tokenizer", ".remote")
# One of these beside run.json makes a folder that of a run.
_OF_A_RUN = frozenset({"checkpoints", "metrics.jsonl", "tokenizer"})
_LONGEST_ENDING = 12


@dataclass
class Found:
    """What a folder holds.

    Attributes:
        files: Those that are read, folder after folder, sorted by name in each; linked folders come last.
        left_out: How many others there are, by ending or another reason.
    """

    files: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def search(root: str | Path, written: Sequence[str] = (), without: Set[str] = frozenset()) -> Found:
    """The files below `root`. A folder that links lead to is searched once, wherever it lies.

    Args:
        written: Folders that this program writes to.
        without: Names of folders that are passed over.

    Raises:
        OSError: a folder cannot be listed, or a .json file not be opened.
    """
    found, folders, links = Found(), [str(root)], list[str]()
    own, seen = {os.path.realpath(path) for path in written}, set[str]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        with os.scandir(folder) as listing:
            entries = sorted(
                (each for each in listing if each.name not in without), key=lambda each: each.name
            )
        if reason := _written_by_program({each.name for each in entries}, real in own, folder == str(root)):
            found.left_out[reason] += 1
            continue
        inside = _take(entries, found)
        links += [each.path for each in inside if each.is_symlink()]
        folders += [each.path for each in reversed(inside) if not each.is_symlink()]
    return found


def left_out_text(left_out: Mapping[str, int]) -> str:
    """``left out: 12 .csv, 3 hidden``."""
    by_number = sorted(left_out.items(), key=lambda each: (-each[1], each[0]))
    return f"left out: {few(f'{number:,} {reason}' for reason, number in by_number)}"


def _written_by_program(names: Set[str], own: bool, is_root: bool) -> str | None:
    """What a folder of these names is, if this program wrote it."""
    if own:
        return "folder that this run writes to"
    if "run.json" in names and names & _OF_A_RUN:
        return "folder of a run"
    is_model = "config.json" in names and any(name.endswith(".safetensors") for name in names)
    return "folder of a model" if is_model and not is_root else None


def _take(entries: Sequence[os.DirEntry[str]], found: Found) -> list[os.DirEntry[str]]:
    """Add the files of a folder; the folders in it."""
    names = {entry.name for entry in entries}
    prefixes = {name[:-4] for name in names if name.endswith(".idx")} & {
        name[:-4] for name in names if name.endswith(".bin")
    }
    around_tokens = {f"{prefix}{suffix}" for prefix in prefixes for suffix in _AROUND_TOKENS}
    folders = []
    for entry in entries:
        if entry.name.startswith("."):
            found.left_out["hidden"] += 1
        elif entry.name in around_tokens:
            found.left_out["of token files, which are named by their PREFIX"] += 1
        elif _is(entry.is_dir):
            folders.append(entry)
        elif reason := _no_data(entry):
            found.left_out[reason] += 1
        else:
            found.files.append(str(Path(entry.path)))
    return folders


def _no_data(entry: os.DirEntry[str]) -> str | None:
    """Why a file is not read."""
    if not _is(entry.is_file):
        return "without a file behind the name"
    if kind_of(entry.name) is None:
        return _ending(entry.name)
    if is_json(entry.name) and not holds_json_lines(entry.path):
        return f"{_ending(entry.name)} without an object on each line"
    return None


def _is(ask: Callable[[], bool]) -> bool:
    """The answer; no for links in a circle."""
    try:
        return ask()
    except OSError:
        return False


def _ending(name: str) -> str:
    """``.csv``, ``.tar.gz``."""
    suffixes = Path(name.lower()).suffixes
    ending = "".join(suffixes[-2:] if is_packed(name) else suffixes[-1:])
    return ending if ending and len(ending) <= _LONGEST_ENDING else "without a known ending"
