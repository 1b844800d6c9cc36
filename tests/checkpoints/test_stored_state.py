"""Reading a parameter from shards of any layout, as any slice of it."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.checkpoints.stored import MASTER, Slice, StoredState

SHAPE = (8, 4)
# Where the flattened part of a rank is divided into shards.
BOUNDARIES = {1: (0, 5, 11, 32), 2: (0, 1, 16), 4: (0, 8)}


def values(key: str) -> Tensor:
    return torch.arange(32.0).view(SHAPE) + (100.0 if key == "exp_avg" else 0.0)


def write(path: Path, dim: int | None, parts: int, stages: int = 1) -> list[dict[str, Any]]:
    """Shards of a parameter divided into `parts` along `dim`, which each of `stages` holds; of the copies
    only the first stage's is right. Each shard begins with three elements of something else."""
    ranks = []
    for stage, tensor in itertools.product(range(stages), range(parts)):
        bounds = BOUNDARIES[1 if dim is None else parts]
        shards = []
        for number, (first, end) in enumerate(itertools.pairwise(bounds)):
            file = f"{stage}-{tensor}-{number}.pt"
            content = {}
            for key in (MASTER, "exp_avg"):
                part = values(key) if dim is None else values(key).chunk(parts, dim)[tensor]
                flat = part.flatten()[first:end] * (stage == 0)
                content[key] = torch.cat([torch.full((3,), -1.0), flat])
            state = {"exp_avg": content["exp_avg"], "step": torch.tensor(7.0), "momentum_buffer": None}
            torch.save({"weights": [content[MASTER]], "state": {0: state}}, path / file)
            place = {"weights_at": (file, ("weights", 0)), "state_at": (file, ("state", 0))}
            shards.append({**place, "fragments": [("w", first, end - first, 3)]})
        ranks.append({"stage": stage, "tensor": tensor, "parameters": {"w": (SHAPE, dim)}, "shards": shards})
    return ranks


def stored(path: Path, ranks: list[dict[str, Any]]) -> StoredState:
    # Ranks in the order of their numbers say nothing about their parts.
    content = {"skipped_steps": 0, "ranks": ranks[::-1]}
    (path / "shards.json").write_text(json.dumps(content), encoding="utf-8")
    return StoredState(path)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("dim", "parts"), [(None, 1), (None, 2), (0, 2), (0, 4), (1, 2), (1, 4)])
def test_every_range_of_every_part_is_read(dim: int | None, parts: int, stages: int, tmp_path: Path):
    state = stored(tmp_path, write(tmp_path, dim, parts, stages))
    assert state.state_names("w") == ["exp_avg"]
    assert state.scalars("w") == {"step": 7.0}
    # A reader may slice along the same dimension; what is stored whole, along any.
    for wanted, count in itertools.product((0, 1) if dim is None else (dim,), (1, 2, 4)):
        for index, key in itertools.product(range(count), (MASTER, "exp_avg")):
            part = values(key).chunk(count, wanted)[index].flatten()
            for start, end in itertools.combinations(range(0, len(part) + 1, 1), 2):
                where = Slice(None if count == 1 else wanted, count, index, start, end - start)
                assert torch.equal(state.read("w", key, where), part[start:end])


def test_a_hole_is_an_error(tmp_path: Path):
    ranks = write(tmp_path, 0, 2)
    ranks[1]["shards"][0]["fragments"] = []
    with pytest.raises(RuntimeError, match="does not cover w once: 1 follows 0"):
        stored(tmp_path, ranks)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_part_is_an_error(missing: int, tmp_path: Path):
    ranks = write(tmp_path, 0, 2)
    ranks[missing]["shards"] = []
    with pytest.raises(RuntimeError, match="covers 16 of the 32 elements of w"):
        stored(tmp_path, ranks)


def test_a_parameter_that_nobody_holds_is_an_error(tmp_path: Path):
    ranks = write(tmp_path, None, 1)
    ranks[0]["shards"] = []
    with pytest.raises(RuntimeError, match="covers 0 of the 32 elements of w"):
        stored(tmp_path, ranks)


def test_files_are_let_go_with_the_state(tmp_path: Path):
    """At once, without the garbage collector: a file that was removed takes disk space while it is mapped."""

    def mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    state = stored(tmp_path, write(tmp_path, None, 1))
    gc.disable()
    try:
        state.read("w", MASTER, Slice(None, 1, 0, 0, 1))
        assert mapped()
        del state
        assert not mapped()
    finally:
        gc.enable()
