"""Memory that has run out: what an error says of it, and what the kernel does. No torch."""

from __future__ import annotations

import contextlib
import errno
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.base.words import size

_SIZE = r"([\d.]+) (bytes|B|[KMGTPE]iB)"
_UNITS = {"bytes": 1, "B": 1} | {f"{unit}iB": 2 ** (10 * power) for power, unit in enumerate("KMGTPE", 1)}
# torch's allocators of devices and of the host, and numpy's.
_ASKED = re.compile(rf"(?:[Tt]ried to allocate|Unable to allocate) {_SIZE}")
_DEVICE = re.compile(rf"(GPU \d+) has a total capacity of {_SIZE} of which {_SIZE} is free")
# Of CUDA itself and its libraries, which do not say how much.
_OF_DEVICE = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|_STATUS_ALLOC_FAILED|Cuda failure.*memory"
)
_OF_HOST = re.compile(r"can't allocate memory|not enough memory|[Cc]annot allocate memory|std::bad_alloc")


@dataclass(frozen=True)
class Shortage:
    """Memory that was asked for and was not there.

    Attributes:
        where: ``GPU 0``, ``host``.
        on_host: It is no device's.
        asked: Bytes; None where nobody says.
        held, limit: Bytes in use there, and how many there are; None where nobody says.
    """

    where: str
    on_host: bool
    asked: int | None = None
    held: int | None = None
    limit: int | None = None

    @property
    def missing(self) -> int | None:
        """Bytes that there were too few, at that moment."""
        if self.asked is None or self.held is None or self.limit is None:
            return None
        return max(0, self.asked - (self.limit - self.held))

    def __str__(self) -> str:
        parts = []
        if self.asked is not None:
            parts.append(f"{size(self.asked)} asked for")
        if self.held is not None and self.limit is not None:
            parts.append(f"{size(self.held)} of {size(self.limit)} in use")
        return ": ".join([f"out of memory ({self.where})", *([", ".join(parts)] if parts else [])])


def shortage_of(error: BaseException) -> Shortage | None:
    """What ran out, where `error` says that memory did; the host's figures are those of now."""
    text = str(error)
    asked = (found := _ASKED.search(text)) and _bytes(*found.groups())
    device = _DEVICE.search(text)
    if device is not None or _OF_DEVICE.search(text) or type(error).__name__ == "OutOfMemoryError":
        if device is None:
            return Shortage("GPU", False, asked)
        limit, free = _bytes(*device.groups()[1:3]), _bytes(*device.groups()[3:])
        return Shortage(device[1], False, asked, limit - free, limit)
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if (
        isinstance(error, MemoryError)
        or of_system
        or (isinstance(error, RuntimeError) and _OF_HOST.search(text))
    ):
        where, held, limit = min(_places(), key=lambda place: place[2] - place[1])
        return Shortage(where, True, asked, held, limit)
    return None


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _places() -> Iterator[tuple[str, int, int]]:
    """What bounds this process's memory: name, bytes in use, bytes there are."""
    machine = psutil.virtual_memory()
    yield "host", machine.total - machine.available, machine.total
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        yield "ulimit -v", psutil.Process().memory_info().vms, most
    group = memory_group()
    if group is not None and None not in (group.used, group.limit):
        yield "control group", group.used, group.limit  # type: ignore[misc]


@dataclass(frozen=True)
class MemoryGroup:
    """The kernel's control group that bounds a process's memory, by version 1 or 2 of their interface."""

    folder: Path
    version: int

    @property
    def used(self) -> int | None:
        """Bytes."""
        return self._number("memory.usage_in_bytes" if self.version == 1 else "memory.current")

    @property
    def limit(self) -> int | None:
        """Bytes; None without a limit."""
        return self._number("memory.limit_in_bytes" if self.version == 1 else "memory.max")

    @property
    def kills(self) -> int | None:
        """Processes of it that the kernel has killed because memory ran out."""
        return self._number("memory.oom_control" if self.version == 1 else "memory.events", "oom_kill ")

    def _number(self, file: str, name: str = "") -> int | None:
        with contextlib.suppress(OSError):
            for line in (self.folder / file).read_text().splitlines():
                value = line.removeprefix(name)
                if line.startswith(name) and value.isdecimal() and int(value) < 2**62:
                    return int(value)
        return None


def memory_group(root: Path = Path("/")) -> MemoryGroup | None:
    """The one of this process; None where the system shows none. `root`: of the file system."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            version, top = (2, "sys/fs/cgroup") if kinds == "" else (1, "sys/fs/cgroup/memory")
            if version == 1 and "memory" not in kinds.split(","):
                continue
            # In a container the path may be the host's, and the group what is mounted there.
            for folder in (root / top / path.lstrip("/"), root / top):
                group = MemoryGroup(folder, version)
                if group.kills is not None:
                    return group
    return None
