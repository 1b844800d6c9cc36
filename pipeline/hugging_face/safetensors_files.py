"""What safetensors files hold, from their headers alone: names, formats, shapes and offsets. No torch.

A file begins with the length of its header (8 bytes, little-endian) and the header, a JSON object of
``name: {"dtype", "shape", "data_offsets": [begin, end]}``; the tensors' bytes follow. The library checks the
header but does not return the offsets, which are read here. For several files the ``weight_map`` of
``model.safetensors.index.json`` says which tensor is in which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from pipeline.base.json_reader import parse_saved, saved_json
from pipeline.base.words import few

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
            both in one file and in several, which may differ.
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
        raise ValueError(f"{INDEX} names {places[astray[0]]} for {few(astray)}, which the file does not hold")
    if (folder / WEIGHTS).exists() and WEIGHTS not in places.values():
        raise ValueError(f"{WEIGHTS} and {INDEX} both describe weights, and they may differ")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places = saved_json(path)["weight_map"]
        right = isinstance(places, dict) and all(isinstance(file, str) for file in places.values())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} cannot be read ({type(error).__name__}: {error})") from error
    if not right or any("/" in file for file in places.values()):
        raise ValueError(f"{path.name}: weight_map does not say which file of the folder has which tensor")
    return places


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors in one file, after the library has checked its header and size.

    Raises:
        ValueError: it is no safetensors file, or an incomplete one.
        OSError: it cannot be read.
    """
    try:
        with safe_open(path, framework="np"):  # it checks the header against the size of the file
            pass
    except SafetensorError as error:
        raise ValueError(f"{path.name} is not a complete safetensors file: {error}") from error
    with path.open("rb") as file:
        first = 8 + int.from_bytes(file.read(8), "little")
        header = parse_saved(file.read(first - 8))
    header.pop("__metadata__", None)
    return {name: _stored(path, entry, first) for name, entry in header.items()}


def _stored(path: Path, entry: dict[str, Any], first: int) -> Stored:
    """A tensor by its entry in the header; the tensors' bytes begin at `first`."""
    begin, end = entry["data_offsets"]
    return Stored(path, entry["dtype"], tuple(entry["shape"]), first + begin, first + end)
