"""A bounded copy of remote objects on this host, shared by its processes and runs.

    FOLDER/s3/BUCKET/DIR/VERSION/NAME     a complete object; VERSION is a hash of address, sizes and versions
    FOLDER/s3/BUCKET/DIR/VERSION/NAME.part and .part.json    one under way, and how far it can be trusted
    FOLDER/entries/VERSION.json           what is there, and the checksums
    FOLDER/locks/                         who loads and who uses what

A changed object has another VERSION, and so never meets its old copy. What no process uses is removed, least
recently used first, when room is needed.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from pipeline.base.files import file_lock, replaced_atomically
from pipeline.base.problems import JobError, Problem
from pipeline.data.inputs import is_remote, shown
from pipeline.data.remote import Bundle, RemoteObject, RemoteStore

logger = logging.getLogger(__name__)

# Bytes after which what has arrived is forced to the disk and can be continued from.
_CHECKPOINT = 64 << 20
# Seconds to wait for another process that downloads the same.
_WAIT = 24 * 3600.0
# The time of all files in the cache. Their version is in their path; times of their own would differ between
# hosts, and any other time shows that someone wrote to a file.
_TIME_NS = 10**18


@dataclass(frozen=True)
class _Checked:
    """A checksum of a file's first `size` bytes: ours, and the one that some stores tell."""

    size: int
    blake2b: str
    md5: str


class RemoteCache:
    """Local copies. A copy is safe from removal while the cache that handed it out is open.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others remove the copies."""
        self._in_use.close()

    def localize(self, paths: Sequence[str]) -> tuple[str, ...]:
        """`paths` with each address replaced by the path of its local copy, which is made if need be.

        Raises:
            JobError: an object that cannot be had (it is named), or more than the cache or the disk holds.
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
            raise JobError([Problem("cache_dir", str(self.folder), rule, remedy)]) from error

    def _load(self, entry: _Entry) -> None:
        objects = entry.bundle.objects
        size = sum(each.size for each in objects)
        logger.info(f"loading {len(objects):,} objects, {size / 1e6:,.1f} MB, of {shown(entry.bundle.url)}")
        checked = {each.name: self._load_object(each, entry.path_of(each)) for each in objects}
        entry.complete(checked)

    def _load_object(self, wanted: RemoteObject, target: Path) -> str:
        """Download into `target`, which appears when it is complete; its checksum.

        An MD5 that is only likely the content's is overruled by a second download with the same bytes.
        """
        if target.exists():
            found = _check(target, target.stat().st_size)
            if found.size == wanted.size and wanted.md5 in (None, found.md5):
                return found.blake2b
        target.parent.mkdir(parents=True, exist_ok=True)
        first = None
        while True:
            part = target.with_name(f"{target.name}.part")
            checked = self._fill(part, wanted)
            sure = wanted.md5 in (None, checked.md5)
            if sure or (not wanted.md5_is_sure and first == checked.blake2b):
                break
            part.unlink()
            if first is not None:
                rule = f"arrived damaged twice: its MD5 is not the store's {wanted.md5}"
                raise JobError(
                    [Problem("data", shown(wanted.url), rule, "Look at the store, and the network")]
                )
            logger.info(f"{shown(wanted.url)}: its checksum is not the store's; loading it again")
            first = checked.blake2b
        if not self.store.is_current(wanted):
            part.unlink()
            rule = "changed while it was downloaded"
            raise JobError(
                [Problem("data", shown(wanted.url), rule, "Start again when nothing writes to it")]
            )
        os.utime(part, ns=(_TIME_NS, _TIME_NS))
        part.rename(target)
        return checked.blake2b

    def _fill(self, part: Path, wanted: RemoteObject) -> _Checked:
        """Complete `part`, from as far as its contents can be trusted; the checksum of all of it."""
        begin, hashes = _trusted(part)
        if begin:
            logger.info(
                f"{shown(wanted.url)}: continuing at {begin / 1e6:,.1f} of {wanted.size / 1e6:,.1f} MB"
            )
        note = part.with_name(f"{part.name}.json")
        with part.open("r+b" if part.exists() else "w+b") as file:
            file.truncate(begin)
            file.seek(begin)
            at = saved = begin

            def save() -> None:
                _sync(file)
                _write_json(note, {"size": at, "blake2b": hashes.blake2b.hexdigest()})

            try:
                for block in self.store.blocks(wanted, begin):
                    file.write(block)
                    hashes.update(block)
                    at += len(block)
                    if at - saved >= _CHECKPOINT or at == wanted.size:
                        save()
                        saved = at
            except JobError:
                save()
                raise
            if at != wanted.size:
                rule = f"sent {at:,} bytes, and not {wanted.size:,}"
                raise JobError([Problem("data", shown(wanted.url), rule, "Look at the store")])
            _sync(file)
        note.unlink(missing_ok=True)
        return hashes.checked(at)

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
                raise JobError(
                    [Problem("cache_size", self.limit / 1e9, rule, "Raise it, or prepare the data elsewhere")]
                )
            entry.reserve()


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
        # The bundle's own name is kept as it is, since it tells the kind.
        return self.place.joinpath(*_parts(wanted.name))

    def is_complete(self) -> bool:
        """Whether all objects are there as they were written; one that was touched must have its checksum."""
        known = _read_json(self.note) if self.note.exists() else {}
        if not known.get("complete"):
            return False
        return all(self._is_intact(each, known["blake2b"].get(each.name)) for each in self.bundle.objects)

    def _is_intact(self, wanted: RemoteObject, blake2b: str | None) -> bool:
        path = self.path_of(wanted)
        if not path.is_file() or path.stat().st_size != wanted.size:
            return False
        if path.stat().st_mtime_ns != _TIME_NS:
            if _check(path, wanted.size).blake2b != blake2b:
                path.unlink()
                return False
            os.utime(path, ns=(_TIME_NS, _TIME_NS))
        return True

    def reserve(self) -> None:
        self._write({"complete": False})

    def complete(self, checksums: dict[str, str]) -> None:
        self._write({"complete": True, "blake2b": checksums})

    def touch(self) -> None:
        """It is the most recently used one now."""
        now = time.time_ns()  # finer than the time that the system itself would take
        os.utime(self.note, ns=(now, now))

    def _write(self, more: dict[str, Any]) -> None:
        place = str(self.place.relative_to(self.folder))
        _write_json(self.note, {"url": shown(self.bundle.url), "bytes": self.size, "place": place, **more})


class _Hashes:
    def __init__(self) -> None:
        self.blake2b = hashlib.blake2b(digest_size=16)
        self.md5 = hashlib.md5(usedforsecurity=False)

    def update(self, block: bytes) -> None:
        self.blake2b.update(block)
        self.md5.update(block)

    def checked(self, size: int) -> _Checked:
        return _Checked(size, self.blake2b.hexdigest(), self.md5.hexdigest())


def _version(bundle: Bundle) -> str:
    content = [[each.url, each.name, each.size, each.version] for each in bundle.objects]
    return hashlib.blake2b(json.dumps([bundle.url, content]).encode(), digest_size=10).hexdigest()


def _parts(path: str) -> list[str]:
    """Names of folders and file that are safe on a disk: no .., nothing longer than a name may be."""
    names = [quote(part, safe=" ()+,=@~")[-120:] for part in path.split("/") if part]
    return [name if name.strip(".") else "_" + name for name in names]


def _trusted(part: Path) -> tuple[int, _Hashes]:
    """How many bytes at the beginning of an unfinished download are what was noted, and their checksum."""
    note = part.with_name(f"{part.name}.json")
    if part.exists() and note.exists():
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged note vouches for nothing
            known = json.loads(note.read_text(encoding="utf-8"))
            hashes, size = _hash(part, known["size"])
            if size == known["size"] and hashes.blake2b.hexdigest() == known["blake2b"]:
                return size, hashes
    return 0, _Hashes()


def _check(path: Path, size: int) -> _Checked:
    hashes, found = _hash(path, size)
    return hashes.checked(found)


def _hash(path: Path, size: int) -> tuple[_Hashes, int]:
    """Of the first `size` bytes, and how many there were."""
    hashes, left = _Hashes(), size
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 1 << 20))):
            hashes.update(block)
            left -= len(block)
    return hashes, size - left


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
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with replaced_atomically(path) as file:
        file.write(json.dumps(content).encode())
