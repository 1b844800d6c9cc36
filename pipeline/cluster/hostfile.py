"""A strict reader for hostfiles, and the launcher's host filters.

A hostfile has one line per host, ``name slots=N``, where N is the number of devices (ranks) to use there.
Blank lines and lines that start with ``#`` are skipped. Everything else is refused: DeepSpeed's own reader
takes ``slots=2.9`` as 2, keeps hosts with ``slots=0``, and trains on one machine when the file is missing.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

from pipeline.base.problems import Problem
from pipeline.base.user_input import lines_of, read_text, unusual_space
from pipeline.base.words import few, ranges
from pipeline.job.world import Host

# Host names pass through ssh and two shells on their way: nothing in them may mean something to a shell.
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_USER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_LINE = "a line is `host slots=N`"
# More devices than any host has, fewer than would exhaust a check.
MAX_SLOTS = 4096


def read_hostfile(path: str | Path) -> tuple[tuple[Host, ...], tuple[Problem, ...]]:
    """The hosts of a file in its order, and everything that is wrong with it.

    A line with a problem gives no host. The file being missing, unreadable or empty is a problem, too.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        is_decoding = isinstance(error, UnicodeDecodeError)
        reason = "it is not text" if is_decoding else getattr(error, "strerror", None) or str(error)
        rule = f"the named hostfile cannot be read ({reason})"
        return (), (Problem("hostfile", str(path), rule, "Correct the path, or leave --hostfile out"),)
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "//")):
        rule = "is JSON, and a hostfile has a line for each host"
        remedy = f"If it is the DeepSpeed JSON, give it as --deepspeed_config {path}"
        return (), (Problem("hostfile", str(path), rule, remedy),)
    hosts, problems = _parse_lines(text, str(path))
    if not hosts and not problems:
        remedy = f"Add one line per host ({_LINE})"
        problems.append(Problem("hostfile", str(path), "the hostfile names no host", remedy))
    return tuple(hosts), tuple(problems)


def _parse_lines(text: str, path: str) -> tuple[list[Host], list[Problem]]:
    hosts: list[Host] = []
    problems: list[Problem] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines_of(text), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parsed = _parse_line(line)
        if isinstance(parsed, Host) and (earlier := first_line.get(_machine(parsed))):
            rule = f"host {parsed.name} is listed on line {earlier} already"
            parsed = (rule, "Keep one line per host and put the sum of its slots there")
        if isinstance(parsed, Host):
            first_line[_machine(parsed)] = number
            hosts.append(parsed)
        else:
            problems.append(Problem(f"{path} line {number}", line.strip(), *parsed))
    return hosts, problems


def _machine(host: Host) -> str:
    """Its name without a user, in the one case that names have."""
    return host.name.rpartition("@")[2].lower()


def _parse_line(line: str) -> Host | tuple[str, str]:
    """The host of one line, or (rule, remedy) of the first thing wrong with it."""
    if space := unusual_space(line):
        return f"the character {space} separates nothing here", "Use blanks or tabs, and ends of lines"
    name, *rest = line.split()
    if _is_ipv6(name.rpartition("@")[2]):
        rule = f"'{name}' is an IPv6 address, whose colons launchers take for those before slots"
        return rule, "Give the host a name, in DNS or in every host's /etc/hosts"
    if wrong := host_name_rule(name):
        return wrong, "Use letters, digits, '.', '_' and '-', with user@ in front if needed"
    if not rest:
        return "the slot count is missing", f"Write `{name} slots=N` with the host's number of devices"
    key, equals, value = rest[0].partition("=")
    if not equals or not value:
        return f"{_LINE}, without spaces around '='", f"Write `{name} slots=N`"
    if key != "slots":
        return f"unknown key '{key}'; {_LINE}", f"Write `{name} slots=N`"
    if not re.fullmatch(r"-?[0-9]+", value):
        return f"slots must be a whole number, not '{value}'", f"Write `{name} slots=N`"
    if value.startswith("-") or not value.strip("0"):
        return f"slots must be at least 1, not {value}", "Remove the line to leave the host out"
    if len(value) > len(str(MAX_SLOTS)) or int(value) > MAX_SLOTS:
        return f"slots must be at most {MAX_SLOTS}", f"Write `{name} slots=N`"
    if len(rest) > 1:
        return f"'{' '.join(rest[1:])}' follows the slot count", "Put comments on lines of their own"
    return Host(name, int(value))


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.strip("[]")).version == 6
    except ValueError:
        return False


def address_rule(address: str) -> str | None:
    """What is wrong with an address at which programs of other hosts are to find one, or None."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        if "@" in address:
            return "an address has no user"
        return host_name_rule(address)
    if isinstance(found, ipaddress.IPv6Address) and found.scope_id is not None:
        return f"'%{found.scope_id}' is an interface of one machine"
    return None


def host_name_rule(name: str) -> str | None:
    """What is wrong with a host's name, or None. ``user@`` in front is allowed."""
    user, at, host = name.rpartition("@")
    if at and not _USER_NAME.fullmatch(user):
        return f"'{user}' is not a user name"
    if not _HOST_NAME.fullmatch(host):
        return f"'{host}' is not a host name that is safe in a shell command"
    return None


def select_hosts(
    hosts: tuple[Host, ...],
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> tuple[tuple[Host, ...], tuple[Problem, ...]]:
    """The hosts and devices left by the launcher's filters, in the order of `hosts`.

    The meaning is DeepSpeed's: ``--include`` and ``--exclude`` take ``host[:slot,slot]`` joined by ``@``;
    ``--num_nodes`` takes the first hosts, ``--num_gpus`` the first slots of each. Where DeepSpeed would
    silently oversubscribe, trim or ignore, there is a problem instead.
    """
    filters = (("include", include), ("exclude", exclude))
    given_filters = [(key, text) for key, text in filters if text]
    given_counts = [
        (key, n) for key, n in (("num_nodes", num_nodes), ("num_gpus", num_gpus)) if n is not None
    ]
    if len(given_filters) + bool(given_counts) > 1:
        key, value = given_filters[-1]
        others = " or ".join(f"--{other}" for other, _ in (*given_filters[:-1], *given_counts))
        return hosts, (Problem(key, value, f"cannot be combined with {others}", "Give one of them"),)
    if given_filters:
        return _filter(hosts, *given_filters[0])
    return _first(hosts, num_nodes, num_gpus)


def _filter(hosts: tuple[Host, ...], key: str, text: str) -> tuple[tuple[Host, ...], tuple[Problem, ...]]:
    chosen, problems = _parse_filter(hosts, key, text)
    if problems:
        return hosts, tuple(problems)
    kept = []
    for host in hosts:
        named = set(chosen.get(host.name, ()))
        devices = [device for device in host.devices if (device in named) == (key == "include")]
        if devices:
            kept.append(Host(host.name, len(devices), tuple(devices)))
    if not kept:
        return hosts, (Problem(key, text, "no slot is left", "Leave at least one slot in"),)
    return tuple(kept), ()


def _parse_filter(
    hosts: tuple[Host, ...], key: str, text: str
) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    """Devices named for each host in ``host[:slot,slot][@host...]``, and what is wrong with it."""
    devices_of = {host.name: host.devices for host in hosts}
    chosen: dict[str, tuple[int, ...]] = {}
    problems: list[Problem] = []
    the_hosts = f"The hosts are {few(f'{host.name} (slots {ranges(host.devices)})' for host in hosts)}"
    for name, slots in _split_filter(text, devices_of):
        remedy = the_hosts
        if name not in devices_of:
            rule = f"there is no host '{name}'"
        elif name in chosen:
            rule, remedy = f"host '{name}' is named twice", "Name it once, with all its slots"
        elif slots and not re.fullmatch(r"[0-9]+(,[0-9]+)*", slots[1:]):
            rule, remedy = f"'{slots[1:]}' is not a list of slots", f"Write {name}:0,1 for slots 0 and 1"
        else:
            chosen[name] = tuple(int(s) for s in slots[1:].split(",")) if slots else devices_of[name]
            unknown = [str(slot) for slot in chosen[name] if slot not in devices_of[name]]
            repeated = len(set(chosen[name])) < len(chosen[name])
            if not unknown and not repeated:
                continue
            rule = f"host '{name}' has no slot {few(unknown)}" if unknown else "a slot is named twice"
        problems.append(Problem(key, text, rule, remedy))
    return chosen, problems


def _split_filter(text: str, names: dict[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """(host, ``:slots`` or empty) of each part. ``@`` separates parts, but occurs in user@host, too."""
    parts: list[str] = []
    for piece in text.split("@"):
        joined = f"{parts[-1]}@{piece}" if parts else ""
        if joined.partition(":")[0] in names and parts[-1].partition(":")[0] not in names:
            parts[-1] = joined
        else:
            parts.append(piece)
    return [(name, colon + slots) for name, colon, slots in (part.partition(":") for part in parts)]


def _first(
    hosts: tuple[Host, ...], num_nodes: int | None, num_gpus: int | None
) -> tuple[tuple[Host, ...], tuple[Problem, ...]]:
    problems = []
    if num_nodes is not None and not 1 <= num_nodes <= len(hosts):
        rule = f"must be from 1 to the number of hosts, {len(hosts)}"
        remedy = "Give such a number, or add hosts to the hostfile"
        problems.append(Problem("num_nodes", num_nodes, rule, remedy))
    elif num_nodes is not None:
        hosts = hosts[:num_nodes]
    smallest = min((host.slots for host in hosts), default=0)
    if num_gpus is not None and not 1 <= num_gpus <= smallest:
        rule = f"must be from 1 to the smallest host's slots, {smallest}"
        problems.append(Problem("num_gpus", num_gpus, rule, "Give such a number, or correct the hostfile"))
    elif num_gpus is not None:
        hosts = tuple(Host(host.name, num_gpus, host.devices[:num_gpus]) for host in hosts)
    return hosts, tuple(problems)
