"""How an agent and the coordinator know each other: each proves that it holds the key of the start. No torch.

    agent ── hello, nonce, proof of an agent ──► coordinator
          ◄──── accept, proof of the coordinator ──────

A proof is HMAC-SHA256 (RFC 2104) of who speaks and the agent's nonce. The key itself never travels on that
connection, and stands on no command line: agents read it from a file that only this user can read. A
coordinator that cannot prove itself is not obeyed, since it may tell an agent to set any variable for its
rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pipeline.cluster.agent.owned_process import new_file_in_memory

Message = dict[str, Any]
_LONGEST_KEY = 256


def new_key() -> str:
    """A key that nobody guesses."""
    return secrets.token_urlsafe(24)


def proof(key: str, role: Literal["agent", "coordinator"], nonce: str) -> str:
    return hmac.new(key.encode(), f"{role} {nonce}".encode(), hashlib.sha256).hexdigest()


def introduce(key: str) -> Message:
    """An agent's part of its first message."""
    nonce = secrets.token_hex(16)
    return {"nonce": nonce, "proof": proof(key, "agent", nonce)}


def is_proven(message: Message, key: str, role: Literal["agent", "coordinator"], nonce: object) -> bool:
    """Whether its sender holds the key."""
    given = message.get("proof")
    if not isinstance(given, str) or not isinstance(nonce, str) or not given.isascii():
        return False
    return hmac.compare_digest(given, proof(key, role, nonce))


@contextlib.contextmanager
def key_in_memory(key: str) -> Iterator[str]:
    """Path of a file with the key, for processes of this user on this machine; it has no place on a disk, and
    ends with this process, however that ends."""
    with new_file_in_memory("launch key") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(key.encode())
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def read_key(path: str) -> str:
    """The key in a file.

    Raises:
        OSError: it is not there, or somebody else's, or others can read it.
    """
    with Path(path).open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(1, "it is not this user's alone")
        return file.read(_LONGEST_KEY).decode()


def forget_key(path: str) -> None:
    """Remove it from this host, where it lies in a folder. Another agent may have done so."""
    if path and not path.startswith("/proc/"):
        with contextlib.suppress(OSError):
            Path(path).unlink(missing_ok=True)
