"""What goes wrong with ssh between two hosts, by name."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hosts.machine import Machine, make_keys, nsenter

if TYPE_CHECKING:
    from tests.hosts.hosts import Hosts


def _wrong_host_key(hosts: Hosts, login: Machine, other: Machine) -> None:
    """The login host knows the other by another key, as after a new installation, or an attack."""
    folder = login.state / "other_key"
    if not folder.exists():
        folder.mkdir()
        make_keys(folder, ["key"])
    key = " ".join((folder / "key.pub").read_text().split()[:2])
    _forget(login, other)
    with _known_hosts(login).open("a") as file:
        file.write(f"{other.name},{other.address} {key}\n")


def _unknown_host_key(hosts: Hosts, login: Machine, other: Machine) -> None:
    """The login host has never seen the other: ssh asks whether to go on."""
    _forget(login, other)


def _password(hosts: Hosts, login: Machine, other: Machine) -> None:
    """The other host does not take the login host's key: ssh asks for a password."""
    (other.state / "home/.ssh/authorized_keys").write_text("")


def _unresolvable(hosts: Hosts, login: Machine, other: Machine) -> None:
    """The login host does not find the other's name."""
    _resolve(login, other, None)


def _refused(hosts: Hosts, login: Machine, other: Machine) -> None:
    """Where the name leads, no sshd listens."""
    _resolve(login, other, f"{other.address.rpartition('.')[0]}.254")


def _down(hosts: Hosts, login: Machine, other: Machine) -> None:
    """The other host is off: no route to it after three seconds."""
    hosts.unplug(other.name)


def _silent(hosts: Hosts, login: Machine, other: Machine) -> None:
    """The other host swallows everything, as behind a firewall: a connection is never refused."""
    neighbour = ["ip", "neighbour", "replace", other.address, "lladdr", "02:00:00:00:00:01"]
    enter = nsenter(login.running(), "-n")
    subprocess.run([*enter, *neighbour, "dev", "eth0", "nud", "permanent"], check=True)
    hosts.unplug(other.name)


def _forget(login: Machine, other: Machine) -> None:
    lines = _known_hosts(login).read_text().splitlines(keepends=True)
    _known_hosts(login).write_text("".join(line for line in lines if not line.startswith(f"{other.name},")))


def _known_hosts(login: Machine) -> Path:
    return login.state / "home/.ssh/known_hosts"


def _resolve(login: Machine, other: Machine, address: str | None) -> None:
    file = login.state / "etc" / "hosts"
    lines = [line for line in file.read_text().splitlines() if line.split()[1] != other.name]
    file.write_text("\n".join([*lines, *([f"{address} {other.name}"] if address else []), ""]))


Trouble = Callable[["Hosts", Machine, Machine], None]
TROUBLES: dict[str, Trouble] = {
    "wrong_host_key": _wrong_host_key,
    "unknown_host_key": _unknown_host_key,
    "password": _password,
    "unresolvable": _unresolvable,
    "refused": _refused,
    "down": _down,
    "silent": _silent,
}
