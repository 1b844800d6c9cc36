"""What a host is like, found out on the host itself. One file, standard library only, no torch.

It is sent over ssh as an argument and run with ``python -I -c``, so that it needs nothing to be installed and
no shared file system, and is the same everywhere; agents start it as a file of the project. A line of
standard input says what is asked. It prints one line of JSON, leaves a token in each folder that may be
shared and listens on the port of the rendezvous; then a second line makes it look for the others' tokens and
connect to the rendezvous, which it tells in a second line. When its input ends, it takes its tokens away and
ends.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import pwd
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "HOST-PROBE:"
REQUEST = "HOST-REQUEST:"
TOKEN = ".host-check-"
NVIDIA_SMI_SECONDS = 30
CONNECT_SECONDS = 5
MOST_FILES = 200_000
# Of the others' doors one host tries so many, so that each is tried by as many.
MOST_DOORS = 32
_SIOCGIFADDR = 0x8915
PACKAGES = ("deepspeed", "transformers", "numpy", "datasets", "accelerate")
GPU_FIELDS = ("index", "name", "memory.total", "memory.free", "driver_version", "compute_cap")
# Variables that change how a rank computes or finds its peers. None of them is a secret.
_TELLING = re.compile(r"(NCCL|GLOO|TORCH|CUDA|DS|OMP|UCX|PYTORCH)_[A-Z0-9_]*|LD_LIBRARY_PATH|LD_PRELOAD")
Request = dict[str, Any]


def user(request: Request) -> dict[str, Any]:
    """Who the login made us."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return {"name": name, "home": str(_home())}


def _home() -> Path:
    """Where libraries take the home folder to be: a folder called ~ for a user who has none."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("~")


def machine(request: Request) -> dict[str, Any]:
    """Its own name, its processor, what tells it from every other running machine, and its address."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # sandboxes have none; the name must do
        boot = ""
    # "client port server port": the address by which the one who asks reaches this host.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    address = address_to(request.get("launch", "")) or (connection[2] if len(connection) == 4 else None)
    return {"host": socket.gethostname(), "arch": platform.machine(), "boot": boot, "address": address}


def address_to(other: str) -> str | None:
    """This host's address on the way to another, which that one will see. Nothing is sent."""
    if not other:
        return None
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(address)
            return str(way.getsockname()[0]).removeprefix("::ffff:")
    return None


def python(request: Request) -> dict[str, Any]:
    """The interpreter that runs this, by the name that the asker has for it, if there it is, too."""
    asked, path = Path(request.get("python", sys.executable)), Path(sys.executable)
    same = asked.parent == path.parent and asked.exists()
    return {"version": platform.python_version(), "path": str(asked if same else path)}


def packages(request: Request) -> dict[str, Any]:
    """Versions, without importing any of them."""
    found = {name: _version(name) for name in PACKAGES}
    found["torch"], found["cuda"] = _torch()
    nccl = [_version(f"nvidia-nccl-cu{major}") for major in (13, 12, 11)]
    found["nccl"] = next((version for version in nccl if version), None)
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> tuple[str | None, str | None]:
    """torch's full version and the CUDA version it is built for, read from its version.py."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    try:
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        return distribution.version, None
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return version.group(1) if version else distribution.version, cuda.group(1) if cuda else None


def project(request: Request) -> dict[str, Any]:
    """A digest of the code, by path and content, None where it is missing; whether ranks can start there."""
    root, digest = Path(request["project"]), hashlib.sha256()
    found = (path.relative_to(root) for path in (root / "pipeline").rglob("*.py"))
    code = sorted(path for path in found if "/." not in str(path))  # editors' hidden copies and marks
    for path in code:
        digest.update(str(path).encode() + b"\0" + (root / path).read_bytes() + b"\0")
    can_enter = Path(request["cwd"]).is_dir() and os.access(request["cwd"], os.X_OK)
    return {"digest": digest.hexdigest()[:12] if code else None, "cwd": can_enter}


def files(request: Request) -> dict[str, Any]:
    """A digest of each file of the job's description; None where it cannot be read."""
    return {path: _digest(Path(path)) for path in request["files"]}


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def data(request: Request) -> dict[str, Any]:
    """Of each path: the number of files, their bytes and a digest of names and sizes; None if missing."""
    return {path: _describe(Path(path)) for path in request["data"]}


def _describe(path: Path) -> dict[str, Any] | None:
    found = sorted(_sizes(path))
    if not found:
        return None
    digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:12]
    return {"files": len(found), "bytes": sum(size for _, size in found), "digest": digest}


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    if path.is_file():
        yield path.name, path.stat().st_size
    elif not path.is_dir():  # the PREFIX of a pair of files
        pair = [Path(f"{path}{suffix}") for suffix in (".bin", ".idx")]
        yield from ((each.name, each.stat().st_size) for each in pair if each.is_file())
    else:
        inside = (each for each in path.rglob("*") if each.is_file())
        for each, _ in zip(inside, range(MOST_FILES), strict=False):
            yield str(each.relative_to(path)), each.stat().st_size


def gpus(request: Request) -> dict[str, Any]:
    """Each GPU as nvidia-smi tells, and the processes on them. "smi" is None where there is no nvidia-smi."""
    smi = shutil.which("nvidia-smi")
    driver = Path("/proc/driver/nvidia/version").exists() or any(Path("/dev").glob("nvidia[0-9]*"))
    answer = {"smi": smi, "driver": driver, "cards": _cards(), "failed": None, "gpus": [], "processes": []}
    if smi is None:
        return answer
    try:
        rows = _ask(smi, f"--query-gpu={','.join(GPU_FIELDS)}")
        answer["gpus"] = [{name: row[place] for place, name in enumerate(GPU_FIELDS)} for row in rows]
        answer["processes"] = _ask(smi, "--query-compute-apps=pid,process_name,used_memory")
    except subprocess.TimeoutExpired:  # a broken driver makes it hang
        answer["failed"] = f"nvidia-smi does not answer within {NVIDIA_SMI_SECONDS} s"
    except subprocess.CalledProcessError as error:
        answer["failed"] = (error.stdout + error.stderr).decode(errors="replace").strip()[:200]
    return answer


def _cards() -> int:
    """NVIDIA's display controllers on the bus, with a driver or without."""
    found = 0
    for card in Path("/sys/bus/pci/devices").glob("*"):
        vendor, kind = ((card / name).read_text(encoding="ascii") for name in ("vendor", "class"))
        found += vendor.strip() == "0x10de" and kind.startswith("0x03")
    return found


def _ask(smi: str, query: str) -> list[list[str]]:
    command = [smi, query, "--format=csv,noheader,nounits"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=NVIDIA_SMI_SECONDS, check=True
    )
    rows = csv.reader(done.stdout.decode(errors="replace").splitlines())
    return [[cell.strip() for cell in row] for row in rows if row]


def memory(request: Request) -> dict[str, Any]:
    """Cores that may be used; memory in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    cores = len(os.sched_getaffinity(0))
    return {"cores": cores, "total": sizes["MemTotal"], "free": sizes["MemAvailable"]}


def limits(request: Request) -> dict[str, Any]:
    """(soft, hard) of each limit, None for no limit; the network cards that need locked memory."""
    named = {"files": resource.RLIMIT_NOFILE, "locked": resource.RLIMIT_MEMLOCK}
    found: dict[str, Any] = {name: resource.getrlimit(limit) for name, limit in named.items()}
    shown = {
        name: [None if value == resource.RLIM_INFINITY else value for value in pair]
        for name, pair in found.items()
    }
    return {**shown, "rdma": sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))}


def shared_memory(request: Request) -> dict[str, Any]:
    """Space of /dev/shm in bytes."""
    return _space(Path("/dev/shm"))


def folders(request: Request) -> dict[str, Any]:
    """Of each folder: the nearest one that exists, its free space and kind, and if it can be written."""
    return {path: _folder(_nearest(path)) for path in request["folders"]}


def _folder(nearest: Path) -> dict[str, Any]:
    writable = os.access(nearest, os.W_OK | os.X_OK)
    return {**_space(nearest), "nearest": str(nearest), "writable": writable, "type": _file_system(nearest)}


def _nearest(path: str) -> Path:
    return next(each for each in (Path(path), *Path(path).parents) if each.is_dir())


def _space(path: Path) -> dict[str, int]:
    found = os.statvfs(path)
    return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def _file_system(path: Path) -> str:
    """Its type, such as ext4 or nfs4."""
    best, kind = Path("/"), "unknown"
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].replace("\\040", " "))
        if mount in (path, *path.parents) and len(mount.parts) >= len(best.parts):
            best, kind = mount, after.split()[0]
    return kind


def locks(request: Request) -> list[dict[str, Any]]:
    """Lock files of ops that torch compiles; "held" if a process of this host has the file open.

    The process that compiles keeps its lock open. One that nobody has open was left by a killed process, and
    every later one waits for it without end.
    """
    environ = {**os.environ, **request["environment"]}
    cache = Path(environ.get("XDG_CACHE_HOME") or _home() / ".cache")
    root = Path(environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    found = sorted({*root.glob("*/lock"), *root.glob("*/*/lock")})
    opened = _opened() if found else set()
    return [
        {"path": str(path), "age": time.time() - path.stat().st_mtime, "held": str(path.resolve()) in opened}
        for path in found
    ]


def _opened() -> set[str]:
    """Files that processes of this user have open."""
    opened = set()
    for process in Path("/proc").glob("[0-9]*"):
        # Processes end meanwhile, close files, and may be another user's.
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    opened.add(str(link.readlink()))
    return opened


def names(request: Request) -> list[str]:
    """The addresses that this host has for its own name; none if it does not know it."""
    return sorted(set(own_addresses()))


def own_addresses() -> list[str]:
    """The same, in the order in which gloo tries them."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
        return [str(each[4][0]) for each in found]
    return []


def environment(request: Request) -> dict[str, Any]:
    """What this login sets of the variables that change how ranks compute or find each other."""
    return {name: value for name, value in sorted(os.environ.items()) if _TELLING.fullmatch(name)}


def commands(request: Request) -> dict[str, Any]:
    """Where each program is that the launcher starts here; None where it is not."""
    return {name: shutil.which(name) for name in request["commands"]}


FACTS = (
    user, machine, python, packages, project, files, data, gpus, memory, limits, shared_memory, folders,
    locks, names, environment, commands,
)  # fmt: skip


def ask(request: Request) -> dict[str, Any]:
    """Every fact by name; {"error": text} for one that could not be found out."""
    answer: dict[str, Any] = {}
    for fact in FACTS:
        try:
            answer[fact.__name__] = fact(request)
        except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            answer[fact.__name__] = {"error": f"{type(error).__name__}: {error}"}
    return answer


def leave_tokens(request: Request) -> list[Path]:
    """The files made, one in each folder, or in the nearest one that exists."""
    made = []
    for path in request["folders"]:
        token = _nearest(path) / f"{TOKEN}{request['run']}-{request['index']}"
        try:
            token.touch(exist_ok=False)
        except OSError:  # it cannot be written, which its fact says; or two folders are one
            continue
        made.append(token)
    return made


def see_tokens(request: Request) -> dict[str, list[int]]:
    """The places of the hosts whose tokens are in each folder."""
    seen = {}
    for path in request["folders"]:
        tokens = _nearest(path).glob(f"{TOKEN}{request['run']}-*")
        seen[path] = sorted(int(token.name.rpartition("-")[2]) for token in tokens)
    return seen


def listen(port: int | None) -> tuple[socket.socket | None, int | str | None]:
    """A listening socket and its port, or None and the reason.

    Port 0 is a free one below those given to outgoing connections, so that nobody takes it before the job.
    """
    if port is None:
        return None, None
    reason = ""
    for tried in [port] if port else random.SystemRandom().sample(range(15_000, 32_768), 50):
        try:
            if socket.has_dualstack_ipv6():  # names may lead to addresses of either kind
                every = ("::", tried)
                return socket.create_server(every, family=socket.AF_INET6, dualstack_ipv6=True), tried
            return socket.create_server(("", tried)), tried
        except OSError as error:
            reason = _why(error)
    return None, reason


def connect(address: list[Any] | None, who: bytes | None = None) -> str | None:
    """None if somebody listens at (host, port), or there is nothing to try; else why not. `who`: what is said
    there first, where it must be a certain host."""
    if address is None:
        return None
    try:
        with socket.create_connection((address[0], address[1]), CONNECT_SECONDS) as stream:
            if who is not None and stream.recv(len(who)) != who:
                return "another host answers there"
    except OSError as error:
        return _why(error)
    return None


class Doors:
    """Where the others try to reach this host: at its own name, on whose address gloo listens, and at its
    address on the network by which it was asked. Who comes is told which host it is.

    Attributes:
        told: (address, port) of both, None where there is none, and the second one's interface.
    """

    def __init__(self, request: Request) -> None:
        self._who = _who(request["run"], request["index"])
        address = machine(request)["address"]
        own, net = self._listen(own_addresses()), self._listen([address] if address else [])
        self.told = {"own": own, "net": net, "interface": address and interface_of(address)}

    def _listen(self, addresses: list[str]) -> tuple[str, int] | None:
        """On the first of them that is this host's, as gloo does."""
        for address in addresses:
            with contextlib.suppress(OSError):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                door = socket.create_server((address, 0), family=family)
                threading.Thread(target=self._answer, args=(door,), daemon=True).start()
                return address, door.getsockname()[1]
        return None

    def _answer(self, door: socket.socket) -> None:
        while True:  # as long as this process
            with contextlib.suppress(OSError), door.accept()[0] as stream:
                stream.sendall(self._who)


def _who(run: str, place: int) -> bytes:
    return f"{run}-{place}\n".encode()


def interface_of(address: str) -> str | None:
    """The network interface that has an address, if it is an interface's first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def look_around(request: Request, line: dict[str, Any]) -> dict[str, Any]:
    """What of the others can be reached from here, all at once: the rendezvous, the launch, and the doors of
    the hosts that follow this one."""
    hosts, place = line.get("doors", []), request["index"]
    others = [(place + step) % len(hosts) for step in range(1, min(len(hosts), MOST_DOORS + 1))]
    tries = [(kind, other) for kind in ("own", "net") for other in (others if place < len(hosts) else ())]
    with concurrent.futures.ThreadPoolExecutor(max_workers=2 * MOST_DOORS + 2) as pool:
        single = [pool.submit(connect, line[name]) for name in ("reached", "reports")]
        each = pool.map(lambda it: connect(hosts[it[1]][it[0]], _who(request["run"], it[1])), tries)
        unreached: dict[str, dict[str, str]] = {"own": {}, "net": {}}
        for (kind, other), why in zip(tries, each, strict=True):
            if why is not None:
                unreached[kind][str(other)] = why
        return {"reached": single[0].result(), "reports": single[1].result(), "unreached": unreached}


def _why(error: OSError) -> str:
    """Without what Python adds to the system's words; name resolution has words of its own."""
    return os.strerror(error.errno) if (error.errno or 0) > 0 else str(error)


def read_request() -> Request:
    """What is asked; lines before it were for prompts of the shell."""
    for line in sys.stdin:
        _, mark, text = line.partition(REQUEST)
        if mark:
            return json.loads(text)
    sys.exit("nothing was asked")


def say(answer: dict[str, Any]) -> None:
    """One answer, in one write."""
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def main() -> None:
    """Answer, wait for the word that all have, look for the others, and leave nothing behind."""
    began = time.time()
    # A connection that is cut without notice would leave this waiting, and listening, for ever.
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("no second request came"))
    signal.alarm(int(sys.argv[1]))
    request = read_request()
    tokens = leave_tokens(request)
    server, port = listen(request["listen"])
    doors = Doors(request)
    try:
        say({**ask(request), "began": began, "port": port, "doors": doors.told})
        if line := sys.stdin.readline():
            say({"seen": see_tokens(request), **look_around(request, json.loads(line))})
            sys.stdin.readline()
    finally:
        for token in tokens:
            token.unlink(missing_ok=True)
        if server is not None:
            server.close()


if __name__ == "__main__":
    main()
