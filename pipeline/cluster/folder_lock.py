"""One job at a time in an output folder: two would write the same files and checkpoints.

Rank 0 holds a lock on ``<output_dir>/lock`` while it runs; the system gives it up when that process ends,
however it ends. The launch looks first, so that a second start is refused before its ranks are started.
Some file systems do not pass locks on to other hosts, and some have none at all, so there is a lease beside
the lock, which a dead host cannot hold for longer than 45 seconds:

    lease.json   {"holder": "5b1f..", "host": "node1", "boot": "..", "processes": "..", "pid": 7,
                  "started": 1712345678.9, "beat": 42}

The holder renews the file every few seconds by counting `beat` up. Whoever else wants the folder watches the
file: if it stays the same for long enough, by the watcher's own clock, its holder is gone. Clocks of two
hosts are never compared. Where the holder ran on this very system, its process shows at once whether it is.

The new holder writes its own lease, waits a moment and looks whether it is still there: of two that came at
the same time the later writer stays. A holder that finds another's lease in place of its own has been taken
for dead (a host that slept, say), and ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

import psutil

from pipeline.base.command import say
from pipeline.base.files import is_local, lock_now, this_system
from pipeline.base.json_reader import parse_saved
from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.user_input import open_regular

LOCK_FILE = "lock"
LEASE_FILE = "lease.json"


@dataclass(frozen=True)
class Lease:
    """The content of the file.

    Attributes:
        holder: Drawn by chance, once for each start.
        boot: Names one run of the holder's operating system.
        processes: Names the space that `pid` belongs to: containers have their own.
        started: When that process was started, so that another one with its number is recognised.
        beat: How often it was renewed.
    """

    holder: str
    host: str
    boot: str
    processes: str
    pid: int
    started: float
    beat: int = 0


def own_lease() -> Lease:
    """A lease for this process."""
    process = psutil.Process()
    boot, processes = this_system()
    holder, host = secrets.token_hex(8), socket.gethostname()
    return Lease(holder, host, boot, processes, process.pid, process.create_time())


@dataclass(frozen=True)
class Timing:
    """Seconds, all on one host's own clock.

    Attributes:
        beat: Between two renewals.
        expiry: How long a lease must stay the same for its holder to be gone; nine beats.
        look: Between two looks of a watcher. A look that hangs counts as two: a file system that stood still
            for the watcher did so for the holder.
        settle: Before a new holder looks whether it is the only one.
    """

    beat: float = 5.0
    expiry: float = 45.0
    look: float = 1.0
    settle: float = 2.0


class LeaseTaken(Exception):
    """Somebody else works in the folder.

    Attributes:
        lease: Whose it is; None where the file is not readable, but changes.
    """

    def __init__(self, lease: Lease | None) -> None:
        super().__init__(lease)
        self.lease = lease


def _end_at_once(message: str) -> None:
    os.write(2, f"{message}\n".encode())
    os._exit(1)  # from a thread, and before the next write into the folder


@dataclass
class FolderLease:
    """The lease on `folder`, from `take` to `release`.

    Attributes:
        lock_decides: A lock of this host's system was got, and nobody on other systems can write there.
        own: This process's lease.
        lost: What is done, in a thread, when another has taken the folder.
    """

    folder: Path
    lock_decides: bool
    lock_works: bool = True
    own: Lease = field(default_factory=own_lease)
    timing: Timing = Timing()
    lost: Callable[[str], object] = _end_at_once
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def path(self) -> Path:
        return self.folder / LEASE_FILE

    def take(self) -> None:
        """Become the holder.

        Raises:
            LeaseTaken: another one is alive, or came at the same time.
            OSError: the lease cannot be written.
        """
        content = _content(self.path)
        verdict = self._verdict(parse(content))
        if verdict == "alive":
            raise LeaseTaken(parse(content))
        if content is not None and verdict == "unknown":
            self._watch(content)
        self._write()
        if not self.lock_decides:
            time.sleep(self.timing.settle)
            if not self._holds():
                raise LeaseTaken(parse(_content(self.path)))
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the folder up, if it is still this process's."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            if self._holds():
                self.path.unlink()

    def _verdict(self, lease: Lease | None) -> str:
        """What is known of a lease without waiting: alive, gone or unknown."""
        if lease is None:
            return "unknown"
        if lease.boot and lease.boot == self.own.boot:
            if self.lock_works:
                return "gone"  # the same system gave us the lock
            return verdict_of_process(lease, self.own)
        rebooted = lease.host == self.own.host != "localhost"
        return "gone" if rebooted and self.lock_decides else "unknown"

    def _watch(self, content: bytes) -> None:
        """Return when the lease has stayed as it is for long enough, or is gone."""
        lease = parse(content)
        holder = f"a job on {lease.host}" if lease else "another job"
        say(f"{self.folder} may be in use by {holder}; watching it for {self.timing.expiry:g} s")
        unchanged = 0.0
        while unchanged < self.timing.expiry:
            begin = time.monotonic()
            time.sleep(self.timing.look)
            now = _content(self.path)
            if now is None:
                return
            if now != content:
                raise LeaseTaken(parse(now))
            unchanged += min(time.monotonic() - begin, 2 * self.timing.look)

    def _renew(self) -> None:
        while not self._ended.wait(self.timing.beat):
            try:
                if self._holds(missing=True):
                    self._write()
                else:
                    self.lost(f"another job has taken {self.folder}: this one ends at once")
                    return
            except OSError as error:
                # Of a mount that is away the next beat tries again.
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self._write_in_place()

    def _holds(self, missing: bool = False) -> bool:
        """Whether the lease is this process's; `missing` is the answer where there is none."""
        content = _content(self.path)
        if content is None:
            return missing
        lease = parse(content)
        return lease is not None and lease.holder == self.own.holder

    def _write_in_place(self) -> None:
        """Where the disk is full for another file, this one still takes as many bytes as it has. Who reads it
        half written sees that it changes."""
        with contextlib.suppress(OSError), self.path.open("r+b") as file:
            file.write(_line(self.own))

    def _write(self) -> None:
        self.own = replace(self.own, beat=self.own.beat + 1)
        # Not `replaced_atomically`: a beat must not wait for a busy disk, nobody needs it after a crash, and
        # two hosts may have one process id.
        new = self.path.with_name(f"{LEASE_FILE}.{self.own.holder}")
        try:
            new.write_bytes(_line(self.own))
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)


def _line(lease: Lease) -> bytes:
    return json.dumps(asdict(lease)).encode() + b"\n"


def verdict_of_process(lease: Lease, here: Lease) -> str:
    """Whether the process of a lease of this system is alive, gone, or in a container that hides it."""
    if lease.processes != here.processes or not lease.processes:
        return "unknown"
    try:
        alive = psutil.Process(lease.pid).create_time() == lease.started
    except psutil.Error:
        return "gone"
    return "alive" if alive else "gone"


def parse(content: bytes | None) -> Lease | None:
    """A lease from the file's content; None for anything else."""
    try:
        lease = Lease(**parse_saved(content or b""))
    except (ValueError, TypeError):
        return None
    kinds = {"pid": int, "started": int | float, "beat": int}
    right = all(isinstance(value, kinds.get(name, str)) for name, value in asdict(lease).items())
    return lease if right and 0 <= lease.pid < 2**31 and 0 <= lease.started < 2**40 else None


def read_lease(folder: Path) -> Lease | None:
    """The lease on a folder, alive or not."""
    return parse(_content(folder / LEASE_FILE))


def _content(path: Path) -> bytes | None:
    """The file's bytes, opened anew, which network file systems answer from the server; None: no file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def only_job(output_dir: str | Path, timing: Timing = Timing()) -> Iterator[None]:
    """Be the job that runs in this folder, which is made if it is missing.

    Takes up to 45 seconds where a job on another host, or in another container, did not end by itself.

    Raises:
        JobError: another job runs in it, or it cannot be written.
    """
    folder = Path(output_dir)
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / LOCK_FILE).open("a"))
            works = _lock(file, folder)
            decides = works and is_local(folder)
            lease = FolderLease(folder, lock_decides=decides, lock_works=works, timing=timing)
            lease.take()
        except OSError as error:
            rule = f"cannot be written: {error.strerror}"
            remedy = "Choose another --output_dir, or correct its permissions"
            raise job_error("output_dir", str(output_dir), rule, remedy) from error
        except LeaseTaken as taken:
            raise JobError([_taken(folder, taken.lease)]) from taken
        stack.callback(lease.release)
        yield


def _lock(file: IO[str], folder: Path) -> bool:
    """Lock a file; False where the file system has no locks.

    Raises:
        JobError: another job has it.
    """
    try:
        is_free = lock_now(file)
    except OSError:
        return False
    if not is_free:
        raise JobError([_taken(folder, read_lease(folder))])
    return True


def running_problems(output_dir: str | Path) -> list[Problem]:
    """Says whether a job is known to run in this folder now. Writes nothing, and does not wait: what only
    watching can tell, the start finds."""
    folder = Path(output_dir)
    try:
        file = open_regular(folder / LOCK_FILE)
        lease = read_lease(folder)
    except (OSError, ValueError):
        return []
    with file:
        try:
            is_free = lock_now(file, shared=True)
        except OSError:
            here = own_lease()
            is_free = lease is None or (lease.boot, verdict_of_process(lease, here)) != (here.boot, "alive")
    return [] if is_free else [_taken(folder, lease)]


def _taken(folder: Path, lease: Lease | None) -> Problem:
    by = ""
    if lease:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lease.started))
        by = f" (process {lease.pid} on {lease.host}, since {since})"
    remedy = "Wait for its end, stop it, or choose another --output_dir"
    return Problem("output_dir", str(folder), f"another job is running in this folder{by}", remedy)
