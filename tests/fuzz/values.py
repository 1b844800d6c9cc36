"""Values and texts that nobody should write, and some that one should; all drawn by a seeded generator."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

NUMBERS = (
    "0", "-0", "1", "-1", "2", "3", "7", "0.5", "-0.5", "1.0", "2.5", "1e-400", "1e400", "-1e400", "1e308",
    "nan", "NaN", "inf", "-inf", "Infinity", "4294967296", "2147483648", "9223372036854775807",
    "9223372036854775808", "18446744073709551616", "-9223372036854775809", "1" + "0" * 40, "9" * 5000, "0x10",
    "1_000", "1,000", "\u0663", "\uff11", "²", "1e3", "+1", "1 ", " 1", "1e-30", "0.1", "3h", "1-12:00:00",
    "2x2",
)  # fmt: skip
WORDS = (
    "", " ", "auto", "never", "none", "None", "null", "true", "false", "True", "stop", "skip", "continue",
    "cpu", "cuda", "nvme", "tiny", "gpt2-124m", "bytes", "text", "-", "--", "---", "=", "=1", "a=", "a=b=c",
    "x=nan", "x=0", "x=-1", "x=1e400", ",", "@", ":", "a:b", "a@b", "localhost", "localhost:0", "localhost:9",
    "127.0.0.1", "::1", "[/]", "[/red]", "[bold", "[link=x]y", "\\", "%s", "%(prog)s", "{}", "{0}", "{host}",
    "$", "$UNSET_VARIABLE", "${", "${}", "${UNSET VARIABLE}", "$HOME", "~", "~nobody-has-this-name", "~root",
    "\t", "a\nb", "\r", "\x1b[31m", "\x7f", "\u2028", "\u202e", "\ufeff", "é", "e\u0301", "日本語", "🙂",
    "\udc80",
    "a" * 300, "a/" * 3000, "os.system", "builtins.eval", "..", "...", "none:none", "STOP",
)  # fmt: skip
PATHS = (
    ".", "/", "//", "..", "/dev/null", "/dev/zero", "/dev/full", "/dev/stdin", "/proc/self/mem",
    "/proc/1/root/x", "/proc/self/fd/99", "no/such", "/no/such/folder", "s3://", "s3://a", "s3://a/b", "gs://x/y.txt",
    "http://", "http://[", "http://127.0.0.1:1/x.txt", "https://user:secret@127.0.0.1:1/x", "ftp://x/y",
    "file:///etc/hosts", "hub:", "hub:a", "hub:a/b/c", "hub:a/b@c", "://", "s3://a/../b", "http://127.0.0.1:99999/a.txt",
)  # fmt: skip
EXTREMES = (
    0, 1, -1, 3, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 0.0, -0.0, 1e-300, 0.999999999, 1e308, 5e8,
    1e18, "",
    "auto", " ", [], {}, [1], [0, 0], [1e308, 1e308], True, False, None, "x" * 500, ["a"], [2**62] * 3,
)  # fmt: skip
# Of the folder of a case; `files` makes them.
OWN = (
    "text.txt", "empty.txt", "binary.txt", "half.txt", "fifo.txt", "loop.txt", "dangling.txt", "folder",
    "folder/text.txt", "empty", "lines.jsonl", "bad.jsonl", "lines.json", "list.json", "cut.jsonl.gz",
    "not.jsonl.gz", "rows.parquet", "cut.parquet", "not.parquet", "tokens", "tokens.idx", "tokens.bin",
    "halfidx", "badidx", "badjson", "zero.idx", "linkfolder", "circle", "utf16.txt", "long.jsonl",
    "deep.jsonl",
    "nul.jsonl", "text",
    "ds.json", "run.json", "model.json", "blend.json", "hosts", "hf", "tokenizer", "saved", "arrow",
)  # fmt: skip


def word(random: Random) -> str:
    """Any text that an option may be given."""
    pool = random.choice((NUMBERS, WORDS, WORDS, PATHS, OWN, OWN))
    chosen = random.choice(pool)
    if random.random() < 0.1:
        chosen += random.choice(("=", ":", "@", "/", ",", " ", "")) + random.choice(NUMBERS + WORDS)
    return chosen


def tree(random: Random, depth: int = 0) -> Any:
    """Any value of JSON, and some that only Python's reader takes."""
    simple: Sequence[Callable[[], Any]] = (
        lambda: random.choice((0, 1, -1, 2, 3, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, True, False, None)),
        lambda: random.choice(
            (0.0, -0.0, 0.5, 1e308, 1e-320, float("inf"), float("-inf"), float("nan"), 5e8)
        ),
        lambda: word(random),
        lambda: "auto",
    )
    if depth > 3 or random.random() < 0.75:
        return random.choice(simple)()
    size = random.choice((0, 1, 2, 5))
    if random.random() < 0.5:
        return [tree(random, depth + 1) for _ in range(size)]
    return {word(random): tree(random, depth + 1) for _ in range(size)}


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every place in a value of JSON, its own included."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def changed(random: Random, value: Any, keys: Sequence[str] = ()) -> Any:
    """A copy with some places replaced, removed, or added (under `keys`, dotted, among others)."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        if keys and random.random() < 0.7:
            value = put(value, random.choice(keys), tree(random))
            continue
        *before, last = random.choice(places(value)) or (None,)
        if last is None:
            if random.random() < 0.1:
                return tree(random)
            continue
        holder = value
        for key in before:
            holder = holder[key]
        if random.random() < 0.15:
            del holder[last]
        else:
            holder[last] = tree(random)
    return value


def put(value: Any, key: str, new: Any) -> Any:
    """The value with another one at a dotted key, and the blocks around it."""
    names = key.split(".")
    if not isinstance(value, dict):
        value = {}
    holder = value
    for name in names[:-1]:
        if not isinstance(holder.get(name), dict):
            holder[name] = {}
        holder = holder[name]
    holder[names[-1]] = new
    return value


def written(random: Random, value: Any) -> bytes:
    """JSON as bytes; one time in four damaged."""
    text = json.dumps(value, indent=random.choice((None, 1)), ensure_ascii=random.random() < 0.5)
    data = text.encode("utf-8", "surrogatepass")
    return damaged(random, data) if random.random() < 0.25 else data


_PIECES = (
    *(bytes([each]) for each in b'\0{}[]",:#-\xff'), b"//", b"/*", b"\\u0000", b"\\ud800", b"\xe2\x80\xa8",
    b"NaN", b"1e999",
)  # fmt: skip


def damaged(random: Random, data: bytes) -> bytes:
    """Bytes with something wrong in them."""
    at = random.randrange(len(data) + 1)
    ways: Sequence[Callable[[], bytes]] = (
        lambda: b"",
        lambda: data[:at],
        lambda: data[:at] + bytes([random.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + bytes([random.randrange(256)]) + data[at:],
        lambda: data[:at] + random.choice(_PIECES) + data[at:],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode("utf-8", "replace").encode("utf-16"),
        lambda: data.replace(b"\n", b"\r\n"),
        lambda: data.replace(b'"', b"'"),
        lambda: data + data,
        lambda: b"\0" * len(data),
        lambda: random.randbytes(200),
        lambda: b"[" * 5000 + data,
        lambda: data.replace(b"1", b'{"a":' * 3000 + b"1" + b"}" * 3000, 1),
        lambda: data.replace(b"1", b"9" * 5000, 1),
        lambda: re.sub(rb'("[^"]*": )', rb"\1\1", data, count=1),
        lambda: re.sub(rb'("[^"]*": [^,{}\[\]]*)', rb"\1, \1", data, count=1),
        lambda: b"---\n" + data,
        lambda: data[at:] + data[:at],
        lambda: data[: len(data) // 2],
    )  # fmt: skip
    return random.choice(ways)()
