"""The hosts of a test: made, connected, broken and ended as one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.hosts.machine import BOOT_SECONDS, Machine, make_keys, nsenter, only_child
from tests.hosts.process import HOME, HostProcess, command_inside
from tests.hosts.trouble import TROUBLES

NETWORK = "10.77.0"
LOGIN_HOST = "h0"
# Longer than any test: the last resort where the process that made the hosts hangs without an end.
LIFETIME_SECONDS = 3600
SSHD_CONFIG = """\
HostKey {state}/host_key
AuthorizedKeysFile /run/home/.ssh/authorized_keys
StrictModes no
PermitRootLogin yes
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
"""


class Hosts:
    """A login host ``h0`` and `count` workers ``h1``, ``h2``, ...; a context manager.

    Args:
        count: Number of workers.
        folder: Where the hosts' jobs write; default: a new folder, removed at the end.
        shared: Whether that folder is the same on all hosts. If not, each host has its own disk there, empty
            and of `disk` bytes, which outlives a crash of the host; `path` shows it from outside.
        disk: Size of such a disk.

    Raises:
        RuntimeError: a host does not answer.
    """

    def __init__(
        self, count: int, folder: Path | None = None, *, shared: bool = True, disk: int = 512 * 2**20
    ) -> None:
        self.shared = shared
        self._stack = contextlib.ExitStack()
        self._started: list[HostProcess] = []
        self._state = Path(self._stack.enter_context(_temporary_folder("hosts-")))
        self.folder = folder or Path(self._stack.enter_context(_temporary_folder("hosts-work-")))
        names = [f"h{number}" for number in range(count + 1)]
        self._machines = {name: self._describe(number) for number, name in enumerate(names)}
        try:
            self._start(disk)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every host and remove what was made for them."""
        self._stack.close()
        for process in self._started:
            process.kill()

    # Setting up

    def _describe(self, number: int) -> Machine:
        state = self._state / f"h{number}"
        return Machine(f"h{number}", f"{NETWORK}.{number + 1}", state, f"cable{number}")

    def _start(self, disk: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        make_keys(self._state, ["host_key", "user_key"])
        (self._state / "sshd_config").write_text(SSHD_CONFIG.format(state=self._state))
        for machine in self._machines.values():
            self._stack.callback(machine.wait)
        self._outer = self._stack.enter_context(_outer_namespace())
        self._on_bridge("ip link add br0 type bridge && ip link set br0 up")
        # Where nobody listens.
        self._on_bridge(f"ip address add {NETWORK}.254/24 dev br0")
        for machine in self._machines.values():
            self._write_files(machine)
            if not self.shared:
                self._add_disk(machine, disk)
            self._boot(machine)
        for name in self._machines:
            self._wait_for(name)

    def _write_files(self, machine: Machine) -> None:
        etc, ssh = machine.state / "etc", machine.state / "home" / ".ssh"
        etc.mkdir(parents=True)
        ssh.mkdir(parents=True, mode=0o700)
        names = "".join(f"{other.address} {other.name}\n" for other in self._machines.values())
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        # A name that is not in that file is unknown, at once.
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        # ssh and sshd take root's home from here, so the real one stays where it is, and untouched.
        (etc / "passwd").write_text(
            f"root:x:0:0:root:{HOME}:/bin/bash\n" + Path("/etc/passwd").read_text().partition("\n")[2]
        )
        shutil.copy(self._state / "user_key", ssh / "id_ed25519")
        shutil.copy(self._state / "user_key.pub", ssh / "authorized_keys")
        key = " ".join((self._state / "host_key.pub").read_text().split()[:2])
        known = (f"{other.name},{other.address} {key}\n" for other in self._machines.values())
        (ssh / "known_hosts").write_text("".join(known))

    def _add_disk(self, machine: Machine, size: int) -> None:
        disk = self._state / "disks" / machine.name
        disk.mkdir(parents=True)
        self._on_bridge(f"mount -t tmpfs -o size={size} tmpfs {disk}")
        machine.mounts.append((disk, self.folder))

    def _boot(self, machine: Machine) -> None:
        machine.boot(self._outer, self._state / "sshd_config")

    def _wait_for(self, host: str) -> None:
        machine = self._machines[host]
        probe = ["bash", "-c", f"</dev/tcp/{machine.address}/22"]
        deadline = time.monotonic() + BOOT_SECONDS
        while self.run(host, probe, timeout=5).returncode != 0:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{host} does not answer\n{machine.log.read_text()}")
            time.sleep(0.02)

    def _on_bridge(self, script: str) -> None:
        subprocess.run([*nsenter(self._outer, "-n", "-m"), "sh", "-c", script], check=True)

    # Use

    @property
    def names(self) -> list[str]:
        """The workers' names."""
        return [name for name in self._machines if name != LOGIN_HOST]

    @property
    def all_names(self) -> list[str]:
        """The names of the login host and the workers."""
        return list(self._machines)

    def address(self, host: str) -> str:
        """A host's address."""
        return self._machines[host].address

    def start(
        self,
        host: str,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
    ) -> HostProcess:
        """Start a command on a host, with the environment of a login and `env`. It ends with the hosts."""
        process = HostProcess(command_inside(self._machines[host].running(), command, env, cwd))
        self._started.append(process)
        return process

    def run(
        self,
        host: str,
        command: Sequence[str | Path],
        timeout: float,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end.

        Raises:
            AssertionError: it takes longer than `timeout` seconds. It is ended; the message has its output.
        """
        process = self.start(host, command, env=env, cwd=cwd)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(list(command), code, process.stdout, process.stderr)

    def write_hostfile(self, slots: int, hosts: Sequence[str] | None = None, name: str = "hostfile") -> Path:
        """A hostfile of these workers (default: all); it lies where every host sees it."""
        path = self._state / name
        path.write_text("".join(f"{host} slots={slots}\n" for host in hosts or self.names))
        return path

    def new_folder(self, name: str) -> Path:
        """A folder for files that every host sees, which are not in `folder`."""
        path = self._state / "files" / name
        path.mkdir(parents=True)
        return path

    def path(self, host: str, path: str | Path) -> Path:
        """A file or folder of a running host, as this process reaches it."""
        return Path(f"/proc/{self._machines[host].running()}/root", *Path(path).parts[1:])

    def processes(self, host: str) -> list[str]:
        """Command lines of all that runs on a host; nothing where it is down."""
        return [" ".join(command) for _, command in self._machines[host].processes()]

    def inside(self, host: str, word: str) -> list[psutil.Process]:
        """The processes of a host with `word` in their command line, as this process sees them."""
        found = self._machines[host].processes()
        return [process for process, command in found if any(word in argument for argument in command)]

    def wait_until(
        self, condition: Callable[[], object], timeout: float, what: str = "the condition"
    ) -> None:
        """Wait until `condition()` is true.

        Raises:
            AssertionError: it is not after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
            time.sleep(0.05)

    # Breaking

    def crash(self, host: str, *, power_loss: bool = False) -> None:
        """Kill a host at once. Its peers see closed connections, or after a power loss nothing any more."""
        if power_loss:
            self.unplug(host)
        self._machines[host].crash()

    def boot(self, host: str) -> None:
        """Start a crashed host again; files outside its disk, /run and /dev/shm are as they were."""
        self._boot(self._machines[host])
        self._wait_for(host)

    def unplug(self, host: str) -> None:
        """Pull a host's cable: nothing arrives and nobody is told."""
        self._on_bridge(f"ip link set {self._machines[host].cable} down")

    def plug(self, host: str) -> None:
        """Put the cable back."""
        self._on_bridge(f"ip link set {self._machines[host].cable} up")

    @contextlib.contextmanager
    def ssh_trouble(self, host: str, kind: str) -> Iterator[None]:
        """Something is wrong between the login host and `host`; a key of `tests.hosts.trouble.TROUBLES`."""
        login, other = self._machines[LOGIN_HOST], self._machines[host]
        files = [login.state / "etc" / "hosts", *(m.state / "home/.ssh" for m in (login, other))]
        files = [file for path in files for file in (path.iterdir() if path.is_dir() else [path])]
        before = {file: file.read_bytes() for file in files}
        try:
            TROUBLES[kind](self, login, other)
            yield
        finally:
            for file, content in before.items():
                file.write_bytes(content)
            self.plug(host)
            login.forget_neighbours()

    def fill_disk(self, host: str) -> None:
        """Leave no free byte on a host's own disk.

        Raises:
            ValueError: the hosts share one file system.
        """
        if self.shared:
            raise ValueError("hosts with one file system have no disks of their own")
        script = f"cat /dev/zero > {self.folder}/.filling 2>/dev/null; test -s {self.folder}/.filling"
        assert self.run(host, ["sh", "-c", script], timeout=60).returncode == 0

    def empty_disk(self, host: str) -> None:
        """Take back what `fill_disk` wrote."""
        self.path(host, self.folder / ".filling").unlink()

    def lead_astray(self, host: str, address: str = "10.1.9.2") -> None:
        """Give a host, until it ends, a network that no other has, and let its own name lead there; one of
        127.0.0.0/8 it has already."""
        if not address.startswith("127."):
            card = "ip link add net1 type veth peer name net1p && ip link set net1 up && ip link set net1p up"
            script = f"{card} && ip address add {address}/24 dev net1"
            assert self.run(host, ["sh", "-c", script], timeout=10).returncode == 0
        file = self.path(host, "/etc/hosts")
        lines = [line for line in file.read_text().splitlines() if line.split()[1] != host]
        file.write_text("\n".join([*lines, f"{address} {host}", ""]))

    def replace_file(self, host: str, path: Path, content: str) -> None:
        """Give one host another version of a file, such as one of the project's, until it ends."""
        other = self._machines[host].state / "files" / "-".join(path.parts[1:])
        other.parent.mkdir(exist_ok=True)
        other.write_text(content)
        assert self.run(host, ["mount", "--bind", other, path], timeout=10).returncode == 0


@contextlib.contextmanager
def _temporary_folder(prefix: str) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix=prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _outer_namespace() -> Iterator[int]:
    """The process that all hosts live and die with.

    It waits for the end of a pipe that only this process holds, and is killed with the `unshare` above it.
    """
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    wait = ["bash", "-c", f"read -r -t {LIFETIME_SECONDS}"]
    process = subprocess.Popen([*command, *wait], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield only_child(process.pid)
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
