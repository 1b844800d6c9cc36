"""What kind of file system a folder lies on. Linux; no torch."""

from __future__ import annotations

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
# Disks of one machine: whoever writes there runs on this system, or has the disk by its network service.
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})


def file_system_of(folder: Path) -> str:
    """The type, such as ``ext4`` or ``nfs4``, of the mount that holds a folder; empty where nobody says."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    path, found, kind = folder.resolve(), -1, ""
    for line in lines:
        # 36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/sda1 rw
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split()[4]))
        if point == path or point in path.parents:
            depth = len(point.parts)
            if depth >= found:  # of two mounts on one point the later one is seen
                found, kind = depth, after.split()[0]
    return kind


def _unescaped(text: str) -> str:
    """Blanks and the like are written in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def is_local(folder: Path) -> bool:
    """Whether a folder lies on a disk of this machine."""
    return file_system_of(folder) in LOCAL
