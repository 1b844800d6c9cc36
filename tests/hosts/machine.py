"""One host: its files outside, its namespaces, its cable."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.hosts.requirements import NAMESPACES

BOOT = Path(__file__).with_name("boot.sh")
BOOT_SECONDS = 20.0


def nsenter(pid: int, *namespaces: str) -> list[str]:
    """The front of a command line that runs the rest in namespaces of process `pid`."""
    return ["nsenter", "-t", str(pid), *namespaces, "--"]


def only_child(pid: int) -> int:
    """The child of a process that has one; waits until it has.

    Raises:
        TimeoutError: there is none.
    """
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            return psutil.Process(pid).children()[0].pid
        time.sleep(0.01)
    raise TimeoutError(f"process {pid} started nothing")


@dataclass
class Machine:
    """One host.

    Attributes:
        name: Its host name.
        address: Its address on the bridge.
        state: Folder outside, with its /etc files, home and log.
        cable: Name of the bridge's end of its cable.
        mounts: (folder outside, folder inside) for each of its own disks.
        init: Process id of its first process, as seen from outside; None while it is down.
    """

    name: str
    address: str
    state: Path
    cable: str
    mounts: list[tuple[Path, Path]] = field(default_factory=list)
    init: int | None = None
    _launched: subprocess.Popen | None = None
    _namespace: str = ""

    def boot(self, outer: int, sshd_config: Path) -> None:
        """Start it inside the namespaces of process `outer`; it answers a moment later."""
        mounts = [str(path) for pair in self.mounts for path in pair]
        command = [
            *nsenter(outer, "-n", "-m", "-p"),
            *("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
            *(str(BOOT), self.name, self.address, str(self.state), str(sshd_config), *mounts),
        ]
        with self.log.open("ab") as log:
            self._launched = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.init = only_child(only_child(self._launched.pid))
        self._namespace = _pid_namespace(self.init)
        # A process id means something only in the namespace where it is read: eth0 is handed over from here.
        on_bridge = [*nsenter(outer, "-n"), "ip", "link"]
        # After a crash the kernel removes the old one in its own time.
        subprocess.run([*on_bridge, "delete", self.cable], check=False, capture_output=True)
        # Its own for ever, as a network card has it: the others may remember it.
        card = f"02:00:00:00:01:{int(self.address.rpartition('.')[2]):02x}"
        peer = ["type", "veth", "peer", "name", "eth0", "address", card, "netns", str(self.init)]
        subprocess.run([*on_bridge, "add", self.cable, *peer], check=True)
        subprocess.run([*on_bridge, "set", self.cable, "master", "br0", "up"], check=True)

    @property
    def log(self) -> Path:
        """What its start and its sshd say."""
        return self.state / "log"

    def running(self) -> int:
        """Its first process, which is certainly its own.

        Raises:
            RuntimeError: the host is down.
        """
        if self.init is None or _pid_namespace(self.init) != self._namespace:
            raise RuntimeError(f"{self.name} is down\n{self.log.read_text()[-2000:]}")
        return self.init

    def crash(self) -> None:
        """Kill everything in it at once."""
        os.kill(self.running(), signal.SIGKILL)
        self.wait()
        self.init = None

    def wait(self) -> None:
        """Wait for the end of it; at once where it never began."""
        if self._launched is not None:
            self._launched.wait()

    def forget_neighbours(self) -> None:
        """Ask again for the others' addresses on the cable, the fixed ones included."""
        enter = [*nsenter(self.running(), "-n"), "ip", "neighbour", "flush", "dev", "eth0", "nud"]
        for state in ("permanent", "all"):
            subprocess.run([*enter, state], check=True, capture_output=True)

    def processes(self) -> list[tuple[psutil.Process, list[str]]]:
        """All that runs in it but sshd and what has ended without being collected, with command lines."""
        if self.init is None:
            return []
        inside = (each for each in psutil.process_iter() if _pid_namespace(each.pid) == self._namespace)
        commands = ((process, _command_line(process)) for process in inside if process.pid != self.init)
        return [(process, command) for process, command in commands if command]


def _pid_namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _command_line(process: psutil.Process) -> list[str]:
    """Of what was started in a host; nothing for its sshd, and for what has ended."""
    try:
        return [] if process.name() == "sshd" else process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def make_keys(folder: Path, names: Sequence[str]) -> None:
    """One ssh key pair per name."""
    for name in names:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)], check=True
        )
