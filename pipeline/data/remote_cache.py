"""A bounded copy of remote objects on this host, shared by its processes and runs.

    FOLDER/s3/BUCKET/DIR/VERSION/NAME     a complete object; VERSION is a hash of address, sizes and versions
    FOLDER/s3/BUCKET/DIR/VERSION/NAME.part and .part.json    an unfinished one, and how far it is on the disk
    FOLDER/entries/VERSION.json           size, place and checksums of a copy
    FOLDER/locks/                         held by processes that download or use a copy

A changed object has another VERSION, so that its old copy is never taken for it. When room is needed, copies
that no process uses are removed, the least recently used first.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from pipeline.base.files import file_lock, replaced_atomically
from pipeline.base.json_reader import saved_json
from pipeline.base.problems import JobError, job_error
from pipeline.data.inputs import is_remote, shown
from pipeline.data.remote import Bundle, RemoteObject, RemoteStore

logger = logging.getLogger(__name__)

# Bytes after which a download is flushed to the disk, so that it can be continued from there.
_CHECKPOINT = 64 << 20
# Seconds to wait for another process that downloads the same.
_WAIT = 24 * 3600.0
# The modification time of all files in the cache: equal on all hosts (the version is in the path), and any
# other time shows that a file was written to.
_TIME_NS = 10**18


class RemoteCache:
    """Local copies. A copy is not removed while the cache that returned it is open.

    Args:
        folder: Where they are, on a disk of this host.
        limit: Bytes that they may take.
        store: Where objects come from.
    """

    def __init__(self, folder: Path, limit: int, store: RemoteStore | None = None) -> None:
        self.folder, self.limit = folder.absolute(), limit
        self.store = store or RemoteStore()
        self._in_use = ExitStack()

    def __enter__(self) -> RemoteCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Allow the copies to be removed."""
        self._in_use.close()

    def localize(self, paths: Sequence[str]) -> tuple[str, ...]:
        """`paths` with each address replaced by the path of its local copy, which is made if need be.

        Raises:
            JobError: an object that cannot be read, or more than the cache or the disk holds.
            TimeoutError: another process did not finish the same download in a day.
        """
        return tuple(self._local(path) if is_remote(path) else path for path in paths)

    def _local(self, url: str) -> str:
        bundle = self.store.find(url)
        version = _version(bundle)
        for name in ("entries", "locks"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        with file_lock(self.folder / "locks" / f"{version}.load", _WAIT), ExitStack() as in_use:
            in_use.enter_context(file_lock(self.folder / "locks" / f"{version}.use", _WAIT, shared=True))
            entry = _Entry(self.folder, version, bundle)
            self._complete(entry)
            self._in_use.push(in_use.pop_all())
        return str(entry.place / bundle.name if bundle.name else entry.place)

    def _complete(self, entry: _Entry) -> None:
        try:
            if not entry.is_complete():
                self._make_room(entry)
                self._load(entry)
            entry.touch()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            rule = f"the disk of the cache {self.folder} is full; what has arrived is kept"
            remedy = "Free some space and start again, which continues; or choose another --cache_dir"
            raise job_error("cache_dir", str(self.folder), rule, remedy) from error

    def _load(self, entry: _Entry) -> None:
        objects = entry.bundle.objects
        size = sum(each.size for each in objects)
        logger.info(
            f"downloading {len(objects):,} objects, {size / 1e6:,.1f} MB, of {shown(entry.bundle.url)}"
        )
        entry.record({each.name: self._load_object(each, entry.path_of(each)) for each in objects})

    def _load_object(self, wanted: RemoteObject, target: Path) -> str:
        """Download into `target`, which appears when it is complete; its checksum.

        An MD5 that is not sure to be the content's is ignored if a second download has the same bytes.
        """
        if target.exists():
            found = _Checksum.of(target, target.stat().st_size)
            if found.size == wanted.size and wanted.md5 in (None, found.md5):
                return found.blake2b
        target.parent.mkdir(parents=True, exist_ok=True)
        part, name, first = target.with_name(f"{target.name}.part"), shown(wanted.url), None
        while True:
            checked = self._fill(part, wanted)
            sure = wanted.md5 in (None, checked.md5)
            if sure or (not wanted.md5_is_sure and first == checked.blake2b):
                break
            part.unlink()
            if first is not None:
                rule = f"arrived damaged twice: its MD5 is not the store's {wanted.md5}"
                raise job_error("data", name, rule, "Check the store and the network")
            logger.info(f"{name}: its checksum is not the store's; downloading it again")
            first = checked.blake2b
        if not self.store.is_current(wanted):
            part.unlink()
            rule, remedy = "changed while it was downloaded", "Start again when nothing writes to it"
            raise job_error("data", name, rule, remedy)
        os.utime(part, ns=(_TIME_NS, _TIME_NS))
        part.rename(target)
        return checked.blake2b

    def _fill(self, part: Path, wanted: RemoteObject) -> _Checksum:
        """Complete `part`, from as far as its content can be trusted; the checksum of all of it."""
        found, name = _trusted(part), shown(wanted.url)
        if found.size:
            logger.info(f"{name}: continuing at {found.size / 1e6:,.1f} of {wanted.size / 1e6:,.1f} MB")
        note = part.with_name(f"{part.name}.json")
        with part.open("r+b" if part.exists() else "w+b") as file:

            def save() -> None:
                _sync(file)
                _write_json(note, {"size": found.size, "blake2b": found.blake2b})

            saved = found.size
            file.truncate(saved)
            file.seek(saved)
            try:
                for block in self.store.blocks(wanted, saved):
                    file.write(block)
                    found.update(block)
                    if found.size - saved >= _CHECKPOINT or found.size == wanted.size:
                        save()
                        saved = found.size
            except JobError:
                save()
                raise
            if found.size != wanted.size:
                rule = f"the store sent {found.size:,} bytes instead of {wanted.size:,}"
                raise job_error("data", name, rule, "Check the store")
            _sync(file)
        note.unlink(missing_ok=True)
        return found

    def _make_room(self, entry: _Entry) -> None:
        """Reserve the entry's bytes, and remove others until all reservations fit."""
        with file_lock(self.folder / "locks" / "room", _WAIT):
            others = {path: _read_json(path) for path in (self.folder / "entries").glob("*.json")}
            others.pop(entry.note, None)
            total = entry.size + sum(each["bytes"] for each in others.values())
            for path in sorted(others, key=lambda path: path.stat().st_mtime_ns):
                if total <= self.limit:
                    break
                if _remove(self.folder, path, others[path]):
                    total -= others[path]["bytes"]
            if total > self.limit:
                used = total - entry.size
                rule = (
                    f"{shown(entry.bundle.url)} needs {entry.size / 1e9:.3f} GB, and {used / 1e9:.3f} GB of "
                    f"{self.limit / 1e9:.3f} are in use"
                )
                remedy = "Raise it, or prepare the data on another host"
                raise job_error("cache_size", self.limit / 1e9, rule, remedy)
            entry.record()


class _Entry:
    """One bundle's place in the cache."""

    def __init__(self, folder: Path, version: str, bundle: Bundle) -> None:
        parts = urlsplit(bundle.url)
        directory = f"{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/").rpartition("/")[0]
        self.folder, self.bundle = folder, bundle
        self.place = folder.joinpath(parts.scheme, *_parts(directory), version)
        self.note = folder / "entries" / f"{version}.json"
        self.size = sum(each.size for each in bundle.objects)

    def path_of(self, wanted: RemoteObject) -> Path:
        # The object's own name is kept, since its suffix is its kind.
        return self.place.joinpath(*_parts(wanted.name))

    def is_complete(self) -> bool:
        """Whether all objects are there as written; if a file's time differs, its checksum decides."""
        known = _read_json(self.note) if self.note.exists() else {}
        if not known.get("complete"):
            return False
        return all(self._is_intact(each, known["blake2b"].get(each.name)) for each in self.bundle.objects)

    def _is_intact(self, wanted: RemoteObject, blake2b: str | None) -> bool:
        path = self.path_of(wanted)
        if not path.is_file() or path.stat().st_size != wanted.size:
            return False
        if path.stat().st_mtime_ns != _TIME_NS:
            if _Checksum.of(path, wanted.size).blake2b != blake2b:
                path.unlink()
                return False
            os.utime(path, ns=(_TIME_NS, _TIME_NS))
        return True

    def touch(self) -> None:
        """Mark it as the most recently used one."""
        now = time.time_ns()  # finer than the time that the system itself would set
        os.utime(self.note, ns=(now, now))

    def record(self, checksums: dict[str, str] | None = None) -> None:
        """Reserve its bytes; with the checksums of all objects it is complete."""
        place = str(self.place.relative_to(self.folder))
        content = {"url": shown(self.bundle.url), "bytes": self.size, "place": place}
        state = {"complete": False} if checksums is None else {"complete": True, "blake2b": checksums}
        _write_json(self.note, content | state)


class _Checksum:
    """Of the bytes so far: our checksum, and the one that some stores publish."""

    def __init__(self) -> None:
        self.size = 0
        self._blake2b, self._md5 = hashlib.blake2b(digest_size=16), hashlib.md5(usedforsecurity=False)

    @classmethod
    def of(cls, path: Path, size: int) -> _Checksum:
        """Of a file's first `size` bytes, or of as many as there are."""
        found = cls()
        with path.open("rb") as file:
            while block := file.read(min(size - found.size, 1 << 20)):
                found.update(block)
        return found

    def update(self, block: bytes) -> None:
        self.size += len(block)
        self._blake2b.update(block)
        self._md5.update(block)

    @property
    def blake2b(self) -> str:
        return self._blake2b.hexdigest()

    @property
    def md5(self) -> str:
        return self._md5.hexdigest()


def _version(bundle: Bundle) -> str:
    content = [[each.url, each.name, each.size, each.version] for each in bundle.objects]
    return hashlib.blake2b(json.dumps([bundle.url, content]).encode(), digest_size=10).hexdigest()


def _parts(path: str) -> list[str]:
    """Names of folders and file that are safe on a disk: no .., none too long."""
    names = [quote(part, safe=" ()+,=@~")[-120:] for part in path.split("/") if part]
    return [name if name.strip(".") else "_" + name for name in names]


def _trusted(part: Path) -> _Checksum:
    """Of the beginning of an unfinished download, as far as it is what was noted about it."""
    note = part.with_name(f"{part.name}.json")
    if part.exists() and note.exists():
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged note: nothing is trusted
            known = _read_json(note)
            found = _Checksum.of(part, known["size"])
            if (found.size, found.blake2b) == (known["size"], known["blake2b"]):
                return found
    return _Checksum()


def _remove(folder: Path, note: Path, known: dict[str, Any]) -> bool:
    """Remove an entry, unless a process uses it."""
    with ExitStack() as unused:
        try:
            unused.enter_context(file_lock(folder / "locks" / f"{note.stem}.use"))
        except TimeoutError:
            return False
        place = folder / known["place"]
        if place.exists():
            shutil.rmtree(place)
        note.unlink()
    return True


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _read_json(path: Path) -> dict[str, Any]:
    return saved_json(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with replaced_atomically(path) as file:
        file.write(json.dumps(content).encode())
