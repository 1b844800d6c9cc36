"""Which addresses are taken, and what is loaded from them: S3, the web, this process's memory."""

from __future__ import annotations

import json
import logging
import socketserver
from pathlib import Path

import fsspec
import pytest

from pipeline import prepare
from pipeline.data.corpus import data_problems, find_corpus
from pipeline.data.inputs import is_remote, remote_problem
from pipeline.data.remote import RemoteStore
from pipeline.data.token_file import open_token_file
from pipeline.job.data_sources import training_sources
from pipeline.job.options import Options
from tests.data.remote_objects import CONTENT, SECRET, Cache, Web, refused
from tests.job.drafts import draft

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
    for options in ({"data": (secret, "b=0.5")}, {"validation": (secret,)}, {"data_blend": str(blend)}):
        problems = draft(tmp_path, {}, **options).errors
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
    s3: fsspec.AbstractFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, "pipeline")
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as taken:
        port = taken.server_address[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    cache = Cache(tmp_path)
    text = refused(cache, "s3://books/a.txt")
    assert "s3://books/a.txt" in text and "failed 5 times" in text
    assert len(caplog.messages) == 4
    assert SECRET not in text + "".join(caplog.messages)


def test_s3_damage_is_found_by_the_md5(
    s3: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "pipeline")
    s3.pipe("books/a.txt", b"right")
    cache, reads = Cache(tmp_path), []

    def damaged(self, wanted, begin):
        reads.append(begin)
        yield b"wrong" if len(reads) == 1 else b"right"

    monkeypatch.setattr(RemoteStore, "_read", damaged)
    assert cache.one("s3://books/a.txt").read_bytes() == b"right"
    assert len(reads) == 2 and any("checksum" in message for message in caplog.messages)


def test_s3_multipart_upload_has_no_md5(s3: fsspec.AbstractFileSystem, tmp_path: Path):
    content = CONTENT * 12
    with s3.open("books/big.txt", "wb", block_size=5 << 20) as file:
        file.write(content)
    assert "-" in s3.info("books/big.txt")["ETag"]
    assert Cache(tmp_path).one("s3://books/big.txt").read_bytes() == content


# Data


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
