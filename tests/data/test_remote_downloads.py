"""Downloads from a web server: once, continued after a break, and removed to make room."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from pipeline.data import remote_cache
from pipeline.data.remote import RemoteStore
from tests.data.remote_objects import CONTENT, Cache, Web, refused

PROJECT = Path(__file__).resolve().parents[2]

# Loading


def test_http_is_downloaded_once(web: Web, tmp_path: Path):
    web.files["/a.txt"] = CONTENT
    cache = Cache(tmp_path)
    path = cache.one(web.url("/a.txt"))
    assert path.read_bytes() == CONTENT and path.name == "a.txt"
    assert cache.one(web.url("/a.txt")) == Cache(tmp_path).one(web.url("/a.txt")) == path
    assert web.gets() == [None]


def test_http_changed_object_has_another_path(web: Web, tmp_path: Path):
    web.files["/a.txt"] = b"before"
    before = Cache(tmp_path).one(web.url("/a.txt"))
    web.files["/a.txt"] = b"behind"
    after = Cache(tmp_path).one(web.url("/a.txt"))
    assert before != after and (before.read_bytes(), after.read_bytes()) == (b"before", b"behind")


def test_http_broken_connection_continues(web: Web, tmp_path: Path):
    web.files["/a.txt"] = CONTENT
    web.cut_after = [300_000, 200_000]
    assert Cache(tmp_path).one(web.url("/a.txt")).read_bytes() == CONTENT
    begins = [int(wanted[6:-1]) for wanted in web.gets() if wanted]
    assert len(begins) == 2 and 0 < begins[0] <= 300_000 and begins[0] < begins[1] <= 500_000


def test_http_without_ranges_still_continues(web: Web, tmp_path: Path):
    web.files["/a.txt"] = CONTENT
    web.cut_after, web.ranges = [300_000], False
    assert Cache(tmp_path).one(web.url("/a.txt")).read_bytes() == CONTENT


def test_http_refusals_are_tried_again_then_named(web: Web, tmp_path: Path):
    web.files["/a.txt"] = CONTENT
    web.refusals = 4
    assert Cache(tmp_path / "1").one(web.url("/a.txt")).read_bytes() == CONTENT
    web.refusals = 1000
    text = refused(Cache(tmp_path / "2"), web.url("/a.txt?page=7"))
    assert "failed 5 times" in text and "503" in text and web.url("/a.txt") in text and "page=7" not in text
    web.refusals, web.requests = 0, []
    assert "does not exist" in refused(Cache(tmp_path / "2"), web.url("/none.txt"))
    assert len(web.requests) <= 2  # HEAD and GET: what is not there does not get there by asking again


def test_http_vanished_under_the_download(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    web.files["/a.txt"] = CONTENT
    cache = Cache(tmp_path)
    read = RemoteStore._read

    def vanish(self, wanted, begin):
        web.files.clear()
        return read(self, wanted, begin)

    monkeypatch.setattr(RemoteStore, "_read", vanish)
    assert web.url("/a.txt") in refused(cache, web.url("/a.txt"))


def test_http_changed_under_the_download(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    web.files["/a.txt"] = b"before"
    read = RemoteStore._read

    def change(self, wanted, begin):
        yield from read(self, wanted, begin)
        web.files["/a.txt"] = b"behind"

    monkeypatch.setattr(RemoteStore, "_read", change)
    assert "changed while" in refused(Cache(tmp_path), web.url("/a.txt"))
    assert not list(tmp_path.rglob("a.txt"))


def test_http_without_any_version_is_refused(web: Web, tmp_path: Path):
    web.files["/a.txt"], web.versions = CONTENT, False
    assert "reports no version" in refused(Cache(tmp_path), web.url("/a.txt"))


# Resuming


def interrupted(web: Web, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A download that got to 600,000 bytes, and was given up: its .part file."""
    web.files["/a.txt"], web.cut_after = CONTENT, [600_000, 0, 0, 0, 0, 0]
    refused(Cache(folder), web.url("/a.txt"))
    web.cut_after, web.requests = [], []
    (part,) = folder.rglob("a.txt.part")
    return part


def test_next_start_continues_a_download(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "pipeline")
    part = interrupted(web, tmp_path, monkeypatch)
    had = part.stat().st_size
    assert had > 0
    cache = Cache(tmp_path)
    assert cache.one(web.url("/a.txt")).read_bytes() == CONTENT
    assert web.gets() == [f"bytes={had}-"] and any("continuing" in message for message in caplog.messages)
    assert not part.exists() and not list(tmp_path.rglob("*.part*"))


def test_killed_download_continues_from_what_is_on_the_disk(web: Web, tmp_path: Path):
    web.files["/a.txt"] = CONTENT
    script = f"""
import os
from pathlib import Path
from pipeline.data import remote, remote_cache
remote_cache._CHECKPOINT, remote._STREAM_BLOCK = 100_000, 10_000
class Killed(remote.RemoteStore):
    def blocks(self, wanted, begin):
        for number, block in enumerate(super().blocks(wanted, begin)):
            if number == 55:
                os.kill(os.getpid(), 9)
            yield block
cache = remote_cache.RemoteCache(Path({str(tmp_path)!r}), 10**9, Killed())
cache.localize([{web.url("/a.txt")!r}])
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=False).returncode == -9
    web.requests = []
    assert Cache(tmp_path).one(web.url("/a.txt")).read_bytes() == CONTENT
    (wanted,) = web.gets()
    assert wanted is not None and 500_000 <= int(wanted[6:-1]) <= 550_000


@pytest.mark.parametrize("damage", ["content", "note", "shorter"])
def test_damaged_beginning_is_loaded_again(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
):
    part = interrupted(web, tmp_path, monkeypatch)
    if damage == "note":
        part.with_name("a.txt.part.json").write_text("{")
    else:
        with part.open("r+b") as file:
            file.truncate(1000) if damage == "shorter" else file.write(b"damage")
    assert Cache(tmp_path).one(web.url("/a.txt")).read_bytes() == CONTENT
    assert web.gets() == [None]


def test_bytes_after_the_noted_ones_are_dropped(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    part = interrupted(web, tmp_path, monkeypatch)
    with part.open("ab") as file:
        file.write(b"\0" * 1000)
    assert Cache(tmp_path).one(web.url("/a.txt")).read_bytes() == CONTENT


def test_copy_that_was_written_to_is_loaded_again(web: Web, tmp_path: Path):
    web.files["/a.txt"] = CONTENT
    path = Cache(tmp_path).one(web.url("/a.txt"))
    with path.open("r+b") as file:
        file.write(b"damage")
    assert Cache(tmp_path).one(web.url("/a.txt")).read_bytes() == CONTENT
    path.touch()  # the time alone is no damage
    web.requests = []
    assert Cache(tmp_path).one(web.url("/a.txt")) == path and web.gets() == []


# Room


def test_least_recently_used_copies_make_room(memory: fsspec.AbstractFileSystem, tmp_path: Path):
    for name in "abc":
        memory.pipe(f"/{name}.txt", name.encode() * 400)

    def load(name: str) -> Path:
        with Cache(tmp_path, limit=1000) as cache:
            return cache.one(f"memory://{name}.txt")

    a, b = load("a"), load("b")
    load("a")
    c = load("c")
    assert (a.exists(), b.exists(), c.exists()) == (True, False, True)
    assert load("b").read_bytes() == b"b" * 400


def test_copies_in_use_are_not_removed(memory: fsspec.AbstractFileSystem, tmp_path: Path):
    for name in "abc":
        memory.pipe(f"/{name}.txt", name.encode() * 400)
    cache = Cache(tmp_path, limit=1000)
    paths = [cache.one("memory://a.txt"), cache.one("memory://b.txt")]
    text = refused(Cache(tmp_path, limit=1000), "memory://c.txt")
    assert text.startswith("cache_size") and "memory://c.txt" in text and "in use" in text
    assert all(path.exists() for path in paths)
    cache.close()
    assert Cache(tmp_path, limit=1000).one("memory://c.txt").exists() and not paths[0].exists()


def test_object_larger_than_the_cache_is_refused_before_loading(web: Web, tmp_path: Path):
    web.files["/a.txt"] = CONTENT
    assert "cache_size" in refused(Cache(tmp_path, limit=1000), web.url("/a.txt"))
    assert web.gets() == []


def test_unfinished_downloads_count_and_are_removed(web: Web, tmp_path: Path, monkeypatch):
    part = interrupted(web, tmp_path, monkeypatch)
    web.files["/b.txt"] = CONTENT
    Cache(tmp_path, limit=len(CONTENT) + 10).one(web.url("/b.txt"))
    assert not part.exists()


def test_full_disk_is_told(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    web.files["/a.txt"] = CONTENT

    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote_cache, "_sync", full)
    assert "disk of the cache" in refused(Cache(tmp_path), web.url("/a.txt"))


def test_two_at_once_load_once(web: Web, tmp_path: Path):
    web.files["/a.txt"] = CONTENT
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(Cache(tmp_path).one(web.url("/a.txt"))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 4 and web.gets() == [None]


def test_names_cannot_leave_the_cache(memory: fsspec.AbstractFileSystem, tmp_path: Path):
    memory.store["/x/../../up.txt"] = fsspec.implementations.memory.MemoryFile(
        memory, "/x/../../up.txt", b"up"
    )
    folder = tmp_path / "cache"
    path = Cache(folder).one("memory://x/../../up.txt")
    assert path.read_bytes() == b"up" and path.resolve().is_relative_to(folder.resolve())


def test_entry_tells_no_query(web: Web, tmp_path: Path):
    web.files["/a.txt"] = CONTENT
    Cache(tmp_path).one(web.url("/a.txt?page=7"))
    (note,) = (tmp_path / "entries").glob("*.json")
    assert json.loads(note.read_text())["url"] == web.url("/a.txt")
    assert not [path for path in tmp_path.rglob("*") if "page" in path.name]
