"""Messages between the processes of a job: JSON objects, one a line, over a stream socket.

Neither side ever waits for the other: what cannot be sent at once is kept, and what has arrived is handed
out in whole messages. Whoever sends anything else than agents and coordinator do is disconnected: it would
otherwise end the process that reads it. Last, whose process is at the other end, where that is on this
machine. Linux.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import resource
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pipeline.base.command import STOP_SIGNALS
from pipeline.cluster.agent.rank_table import Phase
from pipeline.cluster.outcome import Kind, Status

Message = dict[str, Any]

# The stacks of a rank, or a piece of its log, are the longest messages. More is no message of this project.
MAX_MESSAGE = 8 * 2**20
# A peer that does not read is not waited for longer than this many bytes.
MAX_UNSENT = 256 * 2**20
_PIECE = 2**16
# What one call takes at most, so that a peer that never pauses holds nobody up.
_PIECES_PER_CALL = 256
# All ranks connect within a moment; the system takes its own maximum where that is less.
_BACKLOG = 4096


class Connection:
    """One end of a connection.

    Attributes:
        closed: The other end is gone, or sent what is no message; nothing more can be exchanged. The
            descriptor stays open until `close`, so that a selector can unregister it first.
        heard: Time of the last arrival, by `time.monotonic`.

    Args:
        most: Longest message that is taken, in bytes.
    """

    def __init__(self, stream: socket.socket, most: int = MAX_MESSAGE) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._most = most
        self._received = bytearray()
        self._unsent = bytearray()
        self.closed = False
        self.heard = time.monotonic()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def peer(self) -> str:
        """The other end's address; empty when it is gone."""
        try:
            return str(self._stream.getpeername()[0]).removeprefix("::ffff:")
        except (OSError, IndexError):
            return ""

    def take_all(self) -> None:
        """Take messages of any length from now on: the other end is known."""
        self._most = MAX_MESSAGE

    @property
    def unsent(self) -> int:
        """Bytes that the other end has not taken yet."""
        return len(self._unsent)

    def send(self, **message: Any) -> None:
        """Send a message, now or with a later `flush`; to an other end that is gone nothing is sent."""
        if self.closed:
            return
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much of what is left as the other end takes."""
        while self._unsent and not self.closed:
            try:
                sent = self._stream.send(self._unsent[:_PIECE])
            except BlockingIOError:
                break
            except OSError:
                # Nothing more is sent; what the other end has sent before it left can still be received.
                self._unsent.clear()
                with contextlib.suppress(OSError):
                    self._stream.shutdown(socket.SHUT_RDWR)
                return
            del self._unsent[:sent]
        if len(self._unsent) > MAX_UNSENT:
            self.closed = True

    def receive(self) -> list[Message]:
        """The messages that have arrived since the last call, or the first of them if they are many; sets
        `closed` at the end of the stream."""
        for _ in range(_PIECES_PER_CALL):
            if self.closed:
                break
            try:
                piece = self._stream.recv(_PIECE)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            if not piece:
                self.closed = True
                break
            self.heard = time.monotonic()
            self._received += piece
            if len(self._received) > self._most + _PIECE:
                break
        return self._split()

    def _split(self) -> list[Message]:
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # no process of this project
                message = None
            if not isinstance(message, dict):
                self.closed = True
                break
            messages.append(message)
        if len(rest) > self._most:
            self.closed = True
        return messages

    def close(self) -> None:
        """End it. May be called twice."""
        self.closed = True
        self._stream.close()


def listen(port: int, everywhere: bool) -> socket.socket:
    """A listening socket, on all of this machine's addresses or on the loopback one. Port 0: any free one.

    Raises:
        OSError: the port is taken.
    """
    if everywhere and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
        )
    return socket.create_server(("" if everywhere else "127.0.0.1", port), backlog=_BACKLOG)


def route_address(host: str) -> str:
    """The address by which `host` would see this machine. Nothing is sent.

    Raises:
        OSError: the name is unknown, or there is no way to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


_NONE = type(None)
_TEXT, _NUMBER, _SECONDS = (str,), (int,), (int, float)
Fields = Mapping[str, tuple[type, ...]]

# By "is", from an agent.
REPORTS: dict[str, Fields] = {
    "beat": {},
    "progress": {"phase": _TEXT, "step": _NUMBER},
    "saved": {"step": _NUMBER},
    "folder": {"path": _TEXT},
    "answer": {"line": _TEXT},
    "ending": {"status": _TEXT, "step": _NUMBER, "message": _TEXT},
    "failure": {"kind": _TEXT, "step": _NUMBER, "message": _TEXT},
    "signal": {"signal": _TEXT},
    "log": {"text": _TEXT},
    "trouble": {"text": _TEXT},
    "missing": {"ranks": (list,)},
    "stacks": {"text": _TEXT},
    "ended": {"code": (int, _NONE), "by_agent": (bool,), "tail": _TEXT},
}
# By "do", from the coordinator.
ORDERS: dict[str, Fields] = {
    "accept": {"proof": _TEXT},
    "refuse": {"reason": _TEXT, "wrong_job": (bool,)},
    "beat": {},
    "start": {
        "address": _TEXT, "port": _NUMBER, "environment": (dict,), "arguments": (list,), "logs": (str, _NONE),
        "mark": _TEXT,
    },
    "ask": {"line": _TEXT},
    "together": {},
    "stop": {"signal": _TEXT},
    "stacks": {},
    "end": {"grace": _SECONDS},
    "log": {"logs": _TEXT, "mark": _TEXT},
    "keep": {"rank": _NUMBER, "text": _TEXT},
    "release": {"outcome": (dict,), "lost": (list,)},
}  # fmt: skip
_WORDS = {
    "phase": get_args(Phase),
    "status": get_args(Status),
    "kind": get_args(Kind),
    "signal": tuple(each.name for each in STOP_SIGNALS),
}


def is_report(message: Message) -> bool:
    """Whether it is a message of an agent."""
    return _fits(message, REPORTS.get(str(message.get("is"))))


def is_order(message: Message) -> bool:
    """Whether it is a message of the coordinator."""
    return _fits(message, ORDERS.get(str(message.get("do"))))


def _fits(message: Message, fields: Fields | None) -> bool:
    if fields is None:
        return False
    return all(
        type(message.get(name)) in types and message[name] in _WORDS.get(name, (message[name],))
        for name, types in fields.items()
    ) and isinstance(message.get("text", ""), str)


def make_room(descriptors: int) -> None:
    """Raise the soft limit, usually 1,024, as far as is needed and the hard one allows."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        wanted = descriptors if most == resource.RLIM_INFINITY else min(descriptors, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), most))


# Whose process is at the other end of a connection inside this machine.
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED, _LISTENS = "01", "0A"
Endpoint = tuple[str, int]


def is_inside(stream: socket.socket) -> bool:
    """Whether both ends are on this machine: then they have one address."""
    try:
        return _plain(stream.getsockname()[0]) == _plain(stream.getpeername()[0])
    except OSError:
        return False


def comes_from_another_user(stream: socket.socket, own: int) -> bool:
    """Whether a connection that was accepted comes from a process of this machine that is not user `own`'s.

    One that has left already counts as such where only this machine could have made it.
    """
    try:
        here, there = stream.getsockname()[:2], stream.getpeername()[:2]
    except OSError:
        return True
    ends = (_plain(there[0]), there[1]), (_plain(here[0]), here[1])
    users = {
        user for state, local, remote, user in _rows() if state == _ESTABLISHED and (local, remote) == ends
    }
    return bool(users - {own}) or (not users and ipaddress.ip_address(ends[0][0]).is_loopback)


def leads_to_another_user(stream: socket.socket, own: int) -> bool:
    """Whether a connection that was made leads to a process of this machine that is not user `own`'s. The
    socket that listens tells: one that has just been accepted may not have an owner yet."""
    if not is_inside(stream):
        return False
    port = stream.getpeername()[1]
    users = {user for state, local, _, user in _rows() if state == _LISTENS and local[1] == port}
    return users != {own}


def _rows() -> Iterator[tuple[str, Endpoint, Endpoint, int]]:
    """State, this end, other end and user of every TCP socket of this network namespace."""
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:  # a system without IPv6
            continue
        for words in map(str.split, lines):
            yield words[3], _endpoint(words[1]), _endpoint(words[2]), int(words[7])


def _endpoint(word: str) -> Endpoint:
    """Address and port of ``0100007F:1F90``: words of 32 bits in the machine's order."""
    address, _, port = word.partition(":")
    packed = bytes.fromhex(address)
    if sys.byteorder == "little":
        packed = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))
    return _plain(str(ipaddress.ip_address(packed))), int(port, 16)


def _plain(address: str) -> str:
    """As text that can be compared: an IPv4 address inside an IPv6 one is the former."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
