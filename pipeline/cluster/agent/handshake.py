"""How an agent and the coordinator recognise each other: each proves that it holds the key of the start.

    agent ── hello, nonce, proof of an agent ──► coordinator
          ◄──── accept, proof of the coordinator ──────

A proof is HMAC-SHA256 (RFC 2104) of who speaks and the agent's nonce. The key itself never travels on that
connection, and is on no command line: agents read it from a file that only this user can read. A
coordinator that cannot prove itself is not obeyed, since it may tell an agent to set any variable for its
rank.

Anybody on the network can connect: a port scanner, a client that has lost its way, another job. None of them
may keep a rank out, or use up the coordinator's memory and descriptors: until a connection has proved itself
it gets little time, room and attention.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import selectors
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pipeline.cluster.agent.connection import Connection, Message, comes_from_another_user, listen, make_room
from pipeline.cluster.agent.owned_process import new_file_in_memory

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


# An agent speaks as soon as it is connected.
HANDSHAKE_SECONDS = 10.0
# Unverified connections beside as many as there are ranks, which may all come at once.
MORE_UNVERIFIED = 64
# The problems of a job that an agent refuses are the longest first message.
MAX_HELLO = 2**16
_ACCEPTS_PER_TURN = 256
_DESCRIPTORS_BESIDE = 256


class HandshakeListener:
    """A listening socket, and the connections that have not proved anything yet.

    Args:
        key: Of the start. With `is_public` everybody can know it: then processes of other users of this
            machine are turned away, and of other machines all are let in.
        world_size: Ranks that will come.
        selector: Where connections are registered, with themselves as data.

    Raises:
        OSError: the port is taken.
    """

    def __init__(
        self,
        key: str,
        is_public: bool,
        world_size: int,
        selector: selectors.BaseSelector,
        port: int,
        everywhere: bool,
    ) -> None:
        self._key = key
        self._is_public = is_public
        self._most = world_size + MORE_UNVERIFIED
        self._selector = selector
        make_room(self._most + world_size + _DESCRIPTORS_BESIDE)
        self.socket = listen(port, everywhere)
        self.socket.setblocking(False)
        self.port: int = self.socket.getsockname()[1]
        self._unverified: dict[Connection, tuple[float, str]] = {}  # since when, from where
        self._nonces: set[str] = set()
        selector.register(self.socket, selectors.EVENT_READ)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._unverified

    def accept(self) -> None:
        """Take those who wait outside."""
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                stream, _ = self.socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_place()
                return
            if self._is_public and comes_from_another_user(stream, os.geteuid()):
                stream.close()
                continue
            if len(self._unverified) >= self._most:
                self._make_place()
            connection = Connection(stream, MAX_HELLO)
            self._unverified[connection] = (time.monotonic(), connection.peer)
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def _make_place(self) -> None:
        """Close the oldest of the address that has the most."""
        if not self._unverified:
            return
        (busiest, _), *_ = Counter(peer for _, peer in self._unverified.values()).most_common(1)
        self.drop(next(each for each, (_, peer) in self._unverified.items() if peer == busiest))

    def is_agent(self, connection: Connection, hello: Message) -> bool:
        """Whether a first message proves that its sender holds the key. A nonce counts once."""
        nonce = hello.get("nonce")
        if not is_proven(hello, self._key, "agent", nonce) or nonce in self._nonces:
            return False
        self._nonces.add(nonce)
        connection.send(do="accept", proof=proof(self._key, "coordinator", nonce))
        return True

    def admit(self, connection: Connection) -> None:
        """It is verified."""
        del self._unverified[connection]
        connection.take_all()

    def refuse(self, connection: Connection, reason: str, is_wrong_job: bool = False) -> None:
        """Tell it why it is not taken, and close it."""
        connection.send(do="refuse", reason=reason, wrong_job=is_wrong_job)
        self.drop(connection)

    def sweep(self, now: float) -> None:
        """Close those whose other end is gone, and those that have had their time."""
        for connection, (since, _) in list(self._unverified.items()):
            connection.flush()
            if connection.closed or now - since > HANDSHAKE_SECONDS:
                self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Close an unverified connection."""
        del self._unverified[connection]
        self._selector.unregister(connection)
        connection.close()

    def close(self) -> None:
        """Close all connections and the socket. May be called twice."""
        if self.socket.fileno() < 0:
            return
        for connection in list(self._unverified):
            self.drop(connection)
        self._selector.unregister(self.socket)
        self.socket.close()
