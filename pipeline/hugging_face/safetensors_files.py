"""What safetensors files hold, from their headers alone: names, formats, shapes and offsets. No torch.

A file begins with the length of its header (8 bytes, little-endian) and the header, a JSON object of
``name: {"dtype", "shape", "data_offsets": [begin, end]}``; the tensors' bytes follow. The library checks it;
read here are the offsets, which it does not tell. Of several files, ``model.safetensors.index.json`` says
under ``weight_map`` which tensor is in which.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Bytes per element of the formats that weights are read from and written in.
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class Stored(NamedTuple):
    """A tensor in a file, whose values are its bytes ``begin .. end - 1``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's weights, by name.

    Raises:
        ValueError: a file is missing or damaged, or does not hold what the index says; or there are weights
            in one file and in several, which may not be the same.
        OSError: one cannot be read.
    """
    if not (folder / INDEX).exists():
        return read_header(folder / WEIGHTS)
    places = _weight_map(folder / INDEX)
    found: dict[str, Stored] = {}
    for file in sorted(set(places.values())):
        if not (folder / file).is_file():
            raise ValueError(f"{INDEX} names {file}, which is missing")
        found.update(read_header(folder / file))
    astray = [name for name, file in places.items() if name not in found or found[name].file.name != file]
    if astray:
        raise ValueError(f"{INDEX} says of {listed(astray)} that {places[astray[0]]} has it, which is not so")
    if (folder / WEIGHTS).exists() and WEIGHTS not in places.values():
        raise ValueError(f"{WEIGHTS} and {INDEX} both name weights, and only one of them can be meant")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        right = isinstance(places, dict) and all(isinstance(file, str) for file in places.values())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read ({type(error).__name__}: {error})") from error
    if not right or any("/" in file for file in places.values()):
        raise ValueError(f"{path.name}: weight_map does not say which file of the folder has which tensor")
    return places


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors in one file, which the library finds whole.

    Raises:
        ValueError: it is no safetensors file, or not all of it is there.
        OSError: it cannot be read.
    """
    try:
        with safe_open(path, framework="np"):  # it checks the header against the size of the file
            pass
    except SafetensorError as error:
        raise ValueError(f"{path.name} is no whole safetensors file: {error}") from error
    with path.open("rb") as file:
        first = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(first - 8))
    header.pop("__metadata__", None)
    return {name: _stored(path, entry, first) for name, entry in header.items()}


def _stored(path: Path, entry: dict[str, Any], first: int) -> Stored:
    """A tensor by its entry in the header; the tensors' bytes begin at `first`."""
    begin, end = entry["data_offsets"]
    return Stored(path, entry["dtype"], tuple(entry["shape"]), first + begin, first + end)


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first of some names, and how many there are beside."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
