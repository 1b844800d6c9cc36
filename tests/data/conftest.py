"""Where remote objects lie: web servers and an S3 server on loopback, and this process's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import fsspec
import pytest

from tests.data.remote_objects import Web, s3_bucket


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture
def s3() -> Iterator[fsspec.AbstractFileSystem]:
    """An empty bucket `books`, and credentials in the environment, a standard place."""
    with s3_bucket() as (system, _):
        yield system


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]
