"""Objects in remote stores, through fsspec: what an address names, and its bytes.

Credentials come from where each store's own tools look for them (environment, ~/.aws, ~/.netrc, an instance's
role), never from the address, and appear in no message.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pipeline.base.problems import JobError, job_error
from pipeline.data.inputs import file_name, kind_of, remote_problem, shown

logger = logging.getLogger(__name__)

# What stores call the version of an object's content, the most reliable first.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "Last-Modified", "LastModified", "updated", "created")
# Bytes per request of an object store, and per read of a stream.
_BLOCK = 8 << 20
_STREAM_BLOCK = 1 << 20
_ATTEMPTS = 5

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteObject:
    """One object.

    Attributes:
        url: Its address.
        name: Its path relative to the bundle that it belongs to.
        size: Bytes.
        version: Changes with the content.
        md5: Of the content, hexadecimal; None where the store does not report it.
        md5_is_sure: False for the ETag of S3, which is the MD5 only without multipart uploads and KMS keys.
    """

    url: str
    name: str
    size: int
    version: str
    md5: str | None = None
    md5_is_sure: bool = True


@dataclass(frozen=True)
class Bundle:
    """What one address of ``--data`` stands for.

    Attributes:
        url: The address.
        objects: A file, the files of a folder, or the two or three of a token file's PREFIX.
        name: Path of file or PREFIX below the folder that objects are put in; empty for a folder.
    """

    url: str
    objects: tuple[RemoteObject, ...]
    name: str


@dataclass
class RemoteStore:
    """Finds and reads objects; retries after errors that may be temporary.

    Args:
        pause: Seconds before the second attempt, doubled before each further one.
    """

    pause: float = 1.0
    _systems: dict[str, Any] = field(default_factory=dict)

    def find(self, url: str) -> Bundle:
        """What `url` stands for.

        Raises:
            JobError: nothing is there, it may not be read, or the store cannot be reached.
        """
        if problem := remote_problem(url):
            raise JobError([problem])
        name = file_name(url)
        if name.endswith((".bin", ".idx")):
            return self._tokens(url[:-4], name[:-4])
        if kind_of(name) is not None:
            return Bundle(url, (self._object(url, name),), name)
        if url.endswith("/"):
            return self._folder(url.rstrip("/"))
        if not urlsplit(url).query and self._info(f"{url}.idx") is not None:
            return self._tokens(url, name)
        if self._info(url) is not None:
            return Bundle(url, (self._object(url, name),), name)
        return self._folder(url)

    def is_current(self, wanted: RemoteObject) -> bool:
        """Whether the object is still the one that was found."""
        now = self._object(wanted.url, wanted.name)
        return (now.size, now.version) == (wanted.size, wanted.version)

    def blocks(self, wanted: RemoteObject, begin: int) -> Iterator[bytes]:
        """The object's bytes from `begin` on. After a failure the download continues where it stopped.

        Raises:
            JobError: the object is gone, or several attempts in a row brought no byte.
        """
        at, failures = begin, 0
        while at < wanted.size:
            try:
                for block in self._read(wanted, at):
                    yield block
                    at, failures = at + len(block), 0
                if at < wanted.size:
                    raise OSError(f"it ended at byte {at:,} of {wanted.size:,}")
            except Exception as error:  # noqa: BLE001  (any layer of the network; logged or raised)
                failures += 1
                self._wait_or_raise(wanted.url, error, failures)

    def _tokens(self, url: str, name: str) -> Bundle:
        objects = [self._object(f"{url}{suffix}", f"{name}{suffix}") for suffix in (".bin", ".idx")]
        if self._info(f"{url}.json") is not None:
            objects.append(self._object(f"{url}.json", f"{name}.json"))
        return Bundle(url, tuple(objects), name)

    def _folder(self, url: str) -> Bundle:
        """The files below `url` that can be read, without hidden ones."""
        if urlsplit(url).scheme.startswith("http"):
            raise _missing(url)
        system, scheme = self._system(url), urlsplit(url).scheme
        found = self._retried(url, lambda: system.find(url, detail=True))
        # fsspec lists paths without their scheme.
        base = system._strip_protocol(url).rstrip("/") + "/"
        objects = [
            _described(f"{scheme}://{path.lstrip('/')}", name, info)
            for path, info in sorted(found.items())
            if path.startswith(base) and kind_of(name := path.removeprefix(base)) is not None
            if not any(part.startswith(".") for part in name.split("/"))
        ]
        if not objects:
            raise _missing(url)
        return Bundle(url, tuple(objects), "")

    def _object(self, url: str, name: str) -> RemoteObject:
        info = self._info(url)
        if info is None:
            raise _missing(url)
        return _described(url, name, info)

    def _info(self, url: str) -> dict[str, Any] | None:
        """fsspec's description of an object; None if there is none."""
        system = self._system(url)

        def ask() -> dict[str, Any] | None:
            try:
                # Otherwise fsspec would answer from its cache of an earlier listing.
                system.invalidate_cache()
                info = system.info(url)
            except FileNotFoundError as error:
                if _is_temporary(error):
                    raise
                return None
            return info if info.get("type") == "file" else None

        return self._retried(url, ask)

    def _read(self, wanted: RemoteObject, begin: int) -> Iterator[bytes]:
        if urlsplit(wanted.url).scheme.startswith("http"):
            yield from self._stream(wanted, begin)
            return
        system = self._system(wanted.url)
        for at in range(begin, wanted.size, _BLOCK):
            end = min(at + _BLOCK, wanted.size)
            block = system.cat_file(wanted.url, start=at, end=end)
            if len(block) != end - at:
                raise OSError(f"bytes {at:,} to {end:,} are {len(block):,} bytes")
            yield block

    def _stream(self, wanted: RemoteObject, begin: int) -> Iterator[bytes]:
        """One GET for the rest of the file. A server without ranges sends all of it; the start is dropped."""
        headers = {"Accept-Encoding": "identity"}
        if begin:
            headers["Range"] = f"bytes={begin}-"
        with self._system(wanted.url).open(wanted.url, block_size=0, headers=headers) as stream:
            drop = begin if stream.r.status == 200 else 0
            while block := stream.read(_STREAM_BLOCK):
                if len(block) > drop:
                    yield block[drop:]
                drop = max(drop - len(block), 0)

    def _system(self, url: str) -> Any:
        import fsspec

        scheme = urlsplit(url).scheme
        if scheme not in self._systems:
            options: dict[str, Any] = {}
            if scheme.startswith("http"):
                import aiohttp

                # The default ends every download after five minutes. trust_env: proxies and ~/.netrc.
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
                options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
            # skip_instance_cache: another object in this process may use other credentials.
            self._systems[scheme] = fsspec.filesystem(scheme, skip_instance_cache=True, **options)
        return self._systems[scheme]

    def _retried(self, url: str, ask: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                return ask()
            except Exception as error:  # noqa: BLE001  (any layer of the network; logged or raised)
                failures += 1
                self._wait_or_raise(url, error, failures)

    def _wait_or_raise(self, url: str, error: Exception, failures: int) -> None:
        if not _is_temporary(error) or failures >= _ATTEMPTS:
            again = f" {failures} times" if failures > 1 else ""
            rule = f"cannot be read: failed{again} ({_reason(error)})"
            raise job_error("data", shown(url), rule, _remedy(error)) from None
        pause = self.pause * 2 ** (failures - 1)
        logger.info(f"{shown(url)}: {_reason(error)}; trying again in {pause:.0f} s")
        time.sleep(pause)


def _described(url: str, name: str, info: dict[str, Any]) -> RemoteObject:
    """An object from fsspec's description of it.

    Raises:
        JobError: without size or version a change would go unnoticed.
    """
    version = next((f"{key}={info[key]}" for key in _VERSIONS if info.get(key)), None)
    if info.get("size") is None or version is None:
        rule = "the server reports no version (ETag, Last-Modified) or no size"
        raise job_error("data", shown(url), rule, "Download it, and give the local file")
    etag = str(info.get("ETag", "")).strip('"')
    if encoded := info.get("md5Hash") or info.get("Content-MD5"):
        with suppress(binascii.Error):  # not in the form of RFC 1864: no checksum
            return RemoteObject(url, name, info["size"], version, base64.b64decode(encoded).hex())
    if url.startswith("s3://") and re.fullmatch(r"[0-9a-f]{32}", etag):
        return RemoteObject(url, name, info["size"], version, etag, md5_is_sure=False)
    return RemoteObject(url, name, info["size"], version)


def _missing(url: str) -> JobError:
    rule = "does not exist, or holds no file of a kind that is read"
    remedy = "Correct the address: a file, a folder of an object store, or the PREFIX of token files"
    return job_error("data", shown(url), rule, remedy)


def _is_temporary(error: Exception) -> bool:
    """Whether another attempt makes sense."""
    for each in (error, error.__cause__):
        status = getattr(each, "status", None)
        if isinstance(status, int):
            return status >= 500 or status in (408, 425, 429)
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "InvalidURL"):
        return False
    if isinstance(error, FileNotFoundError):
        # For http, fsspec raises this for every failure; the cause is the real one.
        return error.__cause__ is not None and type(error.__cause__).__module__.startswith("aiohttp")
    return not isinstance(error, (PermissionError, IsADirectoryError, ImportError, TypeError, ValueError))


def _reason(error: Exception) -> str:
    """An error in one line, without the queries of addresses, which may hold signatures."""
    real = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
    text = re.sub(r"\?[^\s'\"]+", "?...", str(real).partition("\n")[0])
    return f"{type(real).__name__}: {text[:200]}"


def _remedy(error: Exception) -> str:
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return "Give credentials that may read it in the standard places of its store, or name another object"
    return "Start again when it can be reached, which continues the download; or correct the address"
