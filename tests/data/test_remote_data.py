"""Remote objects: an S3 server and web servers on loopback, and this process's memory."""

from __future__ import annotations

import hashlib
import json
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pytest

from pipeline import prepare
from pipeline.data import remote_cache
from pipeline.data.corpus import data_problems, find_corpus
from pipeline.data.remote import RemoteStore, is_remote, remote_problem
from pipeline.data.remote_cache import RemoteCache
from pipeline.data.sources import source_problems, training_sources
from pipeline.data.token_file import open_token_file
from pipeline.job.options import Options
from pipeline.job.problems import JobError

PROJECT = Path(__file__).resolve().parents[2]
SECRET = "hush-hush-secret-key"
CONTENT = bytes(range(256)) * 4096  # one megabyte


class Web(ThreadingHTTPServer):
    """Serves `files`; can cut answers short, refuse, and lack ranges."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.ranges, self.versions = True, True
        self.cut_after: list[int] = []  # bytes of each further GET before the connection breaks
        self.refusals = 0  # how many further requests get a 503

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def gets(self) -> list[str | None]:
        """The range of each GET."""
        return [wanted for method, wanted in self.requests if method == "GET"]

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke is what some tests want."""


class _Handler(BaseHTTPRequestHandler):
    server: Web

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.requests.append((self.command, wanted))
        if server.refusals:
            server.refusals -= 1
            self.send_error(503)
            return
        content = server.files.get(urlsplit(self.path).path)
        if content is None:
            self.send_error(404)
            return
        begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges else 0
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        if server.versions:
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.end_headers()
        if body:
            cut = server.cut_after.pop(0) if server.cut_after else None
            self.wfile.write(content[begin:][:cut])
            if cut is not None:
                self.wfile.flush()
                # A client that sees the end first forgets what it has not read yet.
                time.sleep(0.3 if cut else 0.0)
                self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    """An empty bucket `books`, and credentials in the environment, a standard place."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    system.mkdir("books")
    yield system
    system.rm("books", recursive=True)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


class Cache(RemoteCache):
    """A small cache whose messages are kept and which does not wait."""

    def __init__(self, folder: Path, limit: int = 1 << 30) -> None:
        self.messages: list[str] = []
        super().__init__(folder, limit, self.messages.append, RemoteStore(self.messages.append, pause=0.0))

    def one(self, url: str) -> Path:
        return Path(self.localize([url])[0])


def refused(cache: Cache, url: str) -> str:
    """The text of the only problem."""
    with pytest.raises(JobError) as caught:
        cache.localize([url])
    (problem,) = caught.value.problems
    return f"{problem.key}: {problem.value} {problem.rule}. {problem.remedy}"


# Addresses


def test_local_paths_stay_as_they_are(tmp_path: Path):
    paths = ("a.txt", "/b/c", "hub:name", "C:/x.txt")
    assert Cache(tmp_path).localize(paths) == paths
    assert not any(is_remote(path) for path in paths)


@pytest.mark.parametrize(
    "url, rule",
    [
        ("azure://box/a.txt", "is none of s3://"),
        ("http://host/", "lists no folder"),
        ("https://host/folder/", "lists no folder"),
        ("s3://", "names nothing"),
        ("http://[::1/a.txt", "is no address"),
        (f"https://user:{SECRET}@host/a.txt", "holds credentials"),
        (f"https://host/a.txt?X-Amz-Signature={SECRET}", "holds credentials"),
        (f"https://host/a.txt?a=b&access_token={SECRET}", "holds credentials"),
        (f"https://host/a.txt?sig={SECRET}", "holds credentials"),
    ],
)
def test_wrong_addresses_are_told_without_a_connection(url: str, rule: str):
    (problem,) = data_problems([url])
    assert rule in problem.rule
    assert SECRET not in str(problem)


def test_no_message_shows_a_query(tmp_path: Path):
    secret = f"https://host/a.txt?sig={SECRET}"
    blend = tmp_path / "blend.json"
    blend.write_text(json.dumps({"sources": [{"data": secret, "weight": 0.5}]}), encoding="utf-8")
    for options in (
        Options(data=(secret, "b=0.5")),
        Options(validation=(secret,)),
        Options(data_blend=str(blend)),
    ):
        problems = list(source_problems(options))
        assert problems and not any("sig=" in str(problem) for problem in problems)


def test_queries_are_no_weights_and_addresses_may_have_them():
    assert training_sources(Options(data=("https://host/a.txt?part=2",)))[0].paths == (
        "https://host/a.txt?part=2",
    )
    first, second = training_sources(Options(data=("https://host/a.txt=0.5", "s3://b/k.txt=0.5")))
    assert (first.paths, second.paths) == (("https://host/a.txt",), ("s3://b/k.txt",))


def test_right_addresses_pass_without_a_connection():
    addresses = [
        "s3://b/k.jsonl",
        "https://nowhere.invalid/x.txt?download=1",
        "memory://a/b",
        "s3://b/prefix",
    ]
    assert data_problems(addresses) == ()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install gcsfs" in str(remote_problem("gs://bucket/a.txt"))


# S3


def test_s3_file_folder_and_token_prefix(s3: fsspec.AbstractFileSystem, tmp_path: Path):
    s3.pipe({"books/a/one.txt": b"one", "books/a/b/two.jsonl": b'{"text": "two"}\n'})
    s3.pipe({"books/a/.hidden.txt": b"x", "books/a/picture.png": b"x", "books/ab/other.txt": b"x"})
    s3.pipe({"books/tok.bin": b"\0\1" * 8, "books/tok.idx": b"index", "books/tok.json": b"{}"})
    s3.pipe("books/plain", b"no suffix")
    cache = Cache(tmp_path)
    assert cache.one("s3://books/a/one.txt").read_bytes() == b"one"
    assert cache.one("s3://books/plain").read_bytes() == b"no suffix"
    assert cache.one("s3://books/a") == cache.one("s3://books/a/")
    for address in ("s3://books/a", "s3://books/a/"):
        folder = cache.one(address)
        found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        assert found == ["b/two.jsonl", "one.txt"]
    assert [Path(file.path).name for file in find_corpus([str(folder)]).files] == ["one.txt", "two.jsonl"]
    for address in ("s3://books/tok", "s3://books/tok.bin", "s3://books/tok.idx"):
        prefix = cache.one(address)
        assert [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")] == [
            b"\0\1" * 8,
            b"index",
            b"{}",
        ]


def test_s3_missing_and_forbidden_objects_are_named(
    s3: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for url in ("s3://books/none.txt", "s3://no-such-bucket/a.txt", "s3://books/none", "s3://books/t.bin"):
        text = refused(Cache(tmp_path), url)
        assert "does not exist" in text and url.rpartition(".")[0] in text
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "Give credentials" in refused(Cache(tmp_path), "s3://books/a.txt")


def test_s3_unreachable_is_tried_again_and_named(
    s3: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as taken:
        port = taken.server_address[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    cache = Cache(tmp_path)
    text = refused(cache, "s3://books/a.txt")
    assert "s3://books/a.txt" in text and "failed 5 times" in text
    assert len(cache.messages) == 4
    assert SECRET not in text + "".join(cache.messages)


def test_s3_damage_is_found_by_the_md5(s3: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch):
    s3.pipe("books/a.txt", b"right")
    cache, reads = Cache(tmp_path), []

    def damaged(self, wanted, begin):
        reads.append(begin)
        yield b"wrong" if len(reads) == 1 else b"right"

    monkeypatch.setattr(RemoteStore, "_read", damaged)
    assert cache.one("s3://books/a.txt").read_bytes() == b"right"
    assert len(reads) == 2 and any("checksum" in message for message in cache.messages)


def test_s3_multipart_upload_has_no_md5(s3: fsspec.AbstractFileSystem, tmp_path: Path):
    content = CONTENT * 12
    with s3.open("books/big.txt", "wb", block_size=5 << 20) as file:
        file.write(content)
    assert "-" in s3.info("books/big.txt")["ETag"]
    assert Cache(tmp_path).one("s3://books/big.txt").read_bytes() == content


# The web


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
    assert "tells neither a version" in refused(Cache(tmp_path), web.url("/a.txt"))


# Resuming


def interrupted(web: Web, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A download that got to 600,000 bytes, and was given up: its .part file."""
    web.files["/a.txt"], web.cut_after = CONTENT, [600_000, 0, 0, 0, 0, 0]
    refused(Cache(folder), web.url("/a.txt"))
    web.cut_after, web.requests = [], []
    (part,) = folder.rglob("a.txt.part")
    return part


def test_next_start_continues_a_download(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    part = interrupted(web, tmp_path, monkeypatch)
    had = part.stat().st_size
    assert had > 0
    cache = Cache(tmp_path)
    assert cache.one(web.url("/a.txt")).read_bytes() == CONTENT
    assert web.gets() == [f"bytes={had}-"] and any("continuing" in message for message in cache.messages)
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
cache = remote_cache.RemoteCache(Path({str(tmp_path)!r}), 10**9, print, Killed(print))
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


def test_prepare_takes_addresses(web: Web, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    web.files["/a.jsonl"] = b'{"text": "one"}\n{"text": "two"}\n'
    prefix = tmp_path / "tokens"
    assert prepare.main([web.url("/a.jsonl"), "--output", str(prefix), "--workers", "1"]) == 0
    tokens = open_token_file(str(prefix))
    assert bytes(tokens.tokens[:3].astype("u1")) == b"one" and tokens.num_documents == 2
    assert (tmp_path / "tokens.remote").is_dir()
    assert prepare.main([web.url("/none.jsonl"), "--output", str(tmp_path / "other")]) == 2
    assert web.url("/none.jsonl") in capsys.readouterr().err.replace("\n", "")


def test_token_files_train_from_an_address(memory: fsspec.AbstractFileSystem, tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text", encoding="utf-8")
    assert prepare.main([str(tmp_path / "a.txt"), "--output", str(tmp_path / "tok"), "--workers", "1"]) == 0
    for suffix in ("bin", "idx", "json"):
        memory.pipe(f"/data/tok.{suffix}", (tmp_path / f"tok.{suffix}").read_bytes())
    local = Cache(tmp_path / "cache").one("memory://data/tok")
    assert find_corpus([str(local)]).token_files == (str(local),)
    assert open_token_file(str(local)).fingerprint == open_token_file(str(tmp_path / "tok")).fingerprint


def test_entry_tells_no_query(web: Web, tmp_path: Path):
    web.files["/a.txt"] = CONTENT
    Cache(tmp_path).one(web.url("/a.txt?page=7"))
    (note,) = (tmp_path / "entries").glob("*.json")
    assert json.loads(note.read_text())["url"] == web.url("/a.txt")
    assert not [path for path in tmp_path.rglob("*") if "page" in path.name]
