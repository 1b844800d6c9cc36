"""Digests of files, as manifests hold them: ``"sha256:<hex>"`` or ``"xxh3_128:<hex>"``. No torch.

Both find every accident (a flipped bit, a truncated or mixed-up file). xxh3_128 reads at memory speed and is
what a save writes; it is no proof against somebody who forges a file on purpose, for whom there is the list
of types that a file may hold (`pipeline.checkpoints.unpickling`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

DEFAULT = "xxh3_128"
ALGORITHMS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}
PIECE = 1 << 23  # bytes that are read at once


def digest_steps(path: Path, algorithm: str = DEFAULT) -> Iterator[str | None]:
    """Digest a file piece by piece: None after each 8 MiB, the digest at the end.

    Raises:
        OSError: it cannot be read.
        KeyError: an algorithm that is not in `ALGORITHMS`.
    """
    state = ALGORITHMS[algorithm]()
    memory = memoryview(bytearray(PIECE))  # one for all pieces: fresh memory costs as much as the digest
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(memory):
            state.update(memory[:count])
            yield None
    yield f"{algorithm}:{state.hexdigest()}"


def digest_of(path: Path, algorithm: str = DEFAULT) -> str:
    """The digest of a whole file; raises as `digest_steps`."""
    found = None
    for found in digest_steps(path, algorithm):  # noqa: B007  (the last one counts)
        pass
    assert found is not None
    return found
