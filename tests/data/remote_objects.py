"""Servers on loopback whose objects tests load, and a small cache."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pytest

from pipeline.base.problems import JobError
from pipeline.data.remote import RemoteStore
from pipeline.data.remote_cache import RemoteCache

SECRET = "hush-hush-secret-key"
CONTENT = bytes(range(256)) * 4096  # one megabyte


@contextmanager
def s3_bucket() -> Iterator[tuple[fsspec.AbstractFileSystem, dict[str, str]]]:
    """An S3 server with an empty bucket `books`, and the environment that reaches it, which is set meanwhile.

    The bucket is removed at the end: all servers of a process hold the same objects.
    """
    server = pytest.importorskip("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "reader",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir("books")
        try:
            yield system, environment
        finally:
            system.rm("books", recursive=True)
            server.stop()


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


class Cache(RemoteCache):
    """A small cache that does not wait."""

    def __init__(self, folder: Path, limit: int = 1 << 30) -> None:
        super().__init__(folder, limit, RemoteStore(pause=0.0))

    def one(self, url: str) -> Path:
        return Path(self.localize([url])[0])


def refused(cache: Cache, url: str) -> str:
    """The text of the only problem."""
    with pytest.raises(JobError) as caught:
        cache.localize([url])
    (problem,) = caught.value.problems
    return f"{problem.key}: {problem.value} {problem.rule}. {problem.remedy}"
