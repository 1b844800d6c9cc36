"""Whether this machine can have hosts inside, and the exact reason where it cannot."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

# Commands, and Debian's packages with them. tests/run.sh installs the packages.
PACKAGES = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "pdsh": "pdsh",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
# Root may find these in folders that a user's PATH lacks.
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
# What a host needs of its kernel, tried in namespaces that end with the command.
_TRIAL = (
    "ip link add br0 type bridge && ip link add v0 type veth peer name v1 && mount -t tmpfs none /mnt"
    " && hostname trial"
)


@functools.cache
def why_no_hosts() -> str | None:
    """The reason why there can be no hosts on this machine; None if there can."""
    if sys.platform != "linux":
        return f"hosts need Linux namespaces; this is {sys.platform}"
    if os.geteuid() != 0:
        return "hosts need root (network and mount namespaces, sshd)"
    if missing := [f"{name} (package {PACKAGES[name]})" for name in PACKAGES if not find(name)]:
        return f"hosts need commands that are missing: {', '.join(missing)}"
    command = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "sh", "-c", _TRIAL]
    trial = subprocess.run(command, capture_output=True, text=True, check=False)
    if trial.returncode != 0:
        return f"the kernel refuses namespaces, a bridge or a mount: {trial.stderr.strip()}"
    return None


def find(command: str) -> str | None:
    """The path of a command, the administrator's folders included."""
    return shutil.which(command, path=SEARCH_PATH)
