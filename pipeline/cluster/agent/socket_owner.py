"""Whose process is at the other end of a connection inside this machine. Linux; no torch."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED, _LISTENS = "01", "0A"
Place = tuple[str, int]


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


def _rows() -> Iterator[tuple[str, Place, Place, int]]:
    """State, this end, other end and user of every TCP socket of this network namespace."""
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:  # a system without IPv6
            continue
        for words in map(str.split, lines):
            yield words[3], _place(words[1]), _place(words[2]), int(words[7])


def _place(word: str) -> Place:
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
