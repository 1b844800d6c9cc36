"""The kinds of data that a path or address names: files, saved or remote datasets, token files.

s3://BUCKET/KEY, gs://BUCKET/KEY      object stores (packages s3fs, gcsfs)
http://..., https://...               single files
memory://KEY                          this process's memory, for tests
"""

from __future__ import annotations

import codecs
import gzip
import importlib.util
import io
import re
import zlib
from pathlib import Path
from typing import IO, Literal
from urllib.parse import unquote, urlsplit

from pipeline.base.json_reader import saved_json
from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.user_input import exists, is_file
from pipeline.base.words import few
from pipeline.hugging_face.folder_files import HUB

Kind = Literal["text", "jsonl", "parquet", "arrow"]

# Plain text and source code, as they are. Other kinds of files hold markup beside the text.
_PROSE = (".txt", ".text", ".md", ".rst", ".tex")
_CODE = (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".sh")
TEXT_SUFFIXES = _PROSE + _CODE
_PACKED = (".gz", ".zst")
_JSON_SUFFIXES = (".json", *(f".json{packed}" for packed in _PACKED))
_LINES = (".jsonl", ".ndjson")
_JSONL_SUFFIXES = (*_LINES, *(f"{lines}{packed}" for lines in _LINES for packed in _PACKED), *_JSON_SUFFIXES)
RECORD_SUFFIXES = (*_JSONL_SUFFIXES, ".parquet")

# Bytes of a line that are looked at to tell lines of JSON from one value in a file.
_LONGEST_LINE = 1 << 26
# The slices that `datasets` knows, train[:10%], would be ignored: its files hold the whole split.
_SPLIT = re.compile(r"[\w.-]+")
_STATE = "state.json"
_DATASET_DICT = "dataset_dict.json"
# Package that fsspec needs for each scheme, beside itself.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "memory": "fsspec"}
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_SECRET = re.compile(r"signature|token|secret|password|credential|(^|[-_])(sig|key|auth)($|[-_])", re.I)


def kind_of(path: str) -> Kind | None:
    """How a file of this name is read; None where it is not."""
    name = path.lower()
    if name.endswith(TEXT_SUFFIXES):
        return "text"
    if name.endswith(_JSONL_SUFFIXES):
        return "jsonl"
    return {".parquet": "parquet", ".arrow": "arrow"}.get(Path(name).suffix)  # type: ignore[return-value]


def is_json(path: str) -> bool:
    """Whether the name leaves open if a file has an object on each line, which `holds_json_lines` tells."""
    return path.lower().endswith(_JSON_SUFFIXES)


def is_packed(path: str) -> bool:
    """Whether a file of this name is compressed, in a way that is read."""
    return path.lower().endswith(_PACKED)


def holds_json_lines(path: str, least: int = 2) -> bool:
    """Whether a .json file has an object on each line, as far as its first lines tell.

    Args:
        least: Lines from which on that counts; one line may be the whole of another program's file.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        with Path(path).open("rb") as raw:
            stream = unpacked(raw, path) if is_packed(path) else raw
            lines = [stream.readline(_LONGEST_LINE).strip() for _ in range(2)]
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        return True  # damaged, which its reader says
    lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
    objects = [
        line for line in lines if line.startswith(b"{") and (len(line) >= _LONGEST_LINE or line[-1:] == b"}")
    ]
    return len(objects) == len([line for line in lines if line]) >= least


def unpacked(raw: IO[bytes], name: str) -> IO[bytes]:
    """The content of a .gz or .zst file, member after member; reading it raises where the file is cut off."""
    if name.lower().endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    import pyarrow as pa

    # Unlike the reader of `zstandard`, this one does not take the end of a file for the end of the data.
    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), buffer_size=1 << 20)


def token_prefix(path: str) -> str | None:
    """PREFIX, where `path` is the PREFIX of token files, or either file; None for anything else.

    One file of the two is enough, so that a message can name the missing one.
    """
    if path.endswith((".bin", ".idx")):
        path = path[:-4]
    elif exists(path):
        return None
    return path if is_file(f"{path}.idx") or is_file(f"{path}.bin") else None


def is_saved_dataset(folder: Path) -> bool:
    """Whether it is what ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` makes."""
    saved = is_file(folder / _STATE) and is_file(folder / "dataset_info.json")
    return saved or is_file(folder / _DATASET_DICT)


def arrow_files(folder: Path) -> list[str]:
    """The files of a saved dataset, in order.

    Raises:
        JobError: several splits, a row order kept beside the rows, or a description that cannot be read.
    """
    try:
        if (folder / _DATASET_DICT).is_file():
            splits = saved_json(folder / _DATASET_DICT)["splits"]
            rule = f"is a dataset of the splits {few(splits)}"
            raise job_error("data", str(folder), rule, f"Give one of them: {folder / splits[0]}")
        state = saved_json(folder / _STATE)
        if state.get("_indices_data_files"):
            rule = "keeps the order of its rows in a separate file, as old versions of datasets did"
            raise job_error("data", str(folder), rule, "Load it with datasets and save_to_disk it again")
        return [str(folder / file["filename"]) for file in state["_data_files"]]
    except JobError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        rule = f"its description cannot be read ({type(error).__name__}: {error})"
        raise job_error("data", str(folder), rule, "Save the dataset again") from error


def hub_problem(path: str) -> Problem | None:
    """What is wrong with the form of hub:NAME[:SPLIT]."""
    name, colon, split = path.removeprefix(HUB).partition(":")
    if name and (_SPLIT.fullmatch(split) or not colon):
        return None
    rule = "is not hub:NAME or hub:NAME:SPLIT with the name of a whole split"
    return Problem("data", path, rule, "Write, for example, hub:NAME:train")


def hub_files(path: str) -> list[str]:
    """Download hub:NAME[:SPLIT] (split train, if none is given) into the cache of `datasets`; its files.

    Raises:
        JobError: the hub cannot be reached, or has no such dataset or split.
    """
    from datasets import load_dataset

    name, _, split = path.removeprefix(HUB).partition(":")
    try:
        dataset = load_dataset(name, split=split or "train")
    except Exception as error:  # of any layer of the network
        reason = str(error).partition("\n")[0][:300]
        rule = f"the dataset cannot be loaded ({type(error).__name__}: {reason})"
        remedy = "Correct its name and split (hub:NAME:SPLIT), or save it where the hub is reachable"
        raise job_error("data", path, rule, remedy) from error
    return [file["filename"] for file in dataset.cache_files]


def is_remote(path: str) -> bool:
    """Whether `path` is an address, of whatever scheme."""
    return _SCHEME.match(path) is not None


def shown(url: str) -> str:
    """The address for messages: without user, password and query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{url.partition('://')[0]}://..."
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def readable(path: str) -> str:
    """A path as it is, or an address as messages show it."""
    return shown(path) if is_remote(path) else path


def remote_problem(url: str) -> Problem | None:
    """What is wrong with an address, found without a connection."""
    scheme = url.partition("://")[0]
    if scheme not in _PACKAGES:
        rule = f"{scheme}:// is none of {', '.join(f'{known}://' for known in _PACKAGES)}"
        return Problem("data", scheme + "://...", rule, "Copy it to one of these, or to a local path")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return Problem("data", scheme + "://...", f"is no address ({error})", "Correct it")
    package = _PACKAGES[parts.scheme]
    if importlib.util.find_spec(package) is None:
        return Problem("data", shown(url), f"needs the package {package}", f"pip install {package}")
    if problem := credentials_problem(url):
        return problem
    if parts.scheme.startswith("http") and (parts.path in ("", "/") or parts.path.endswith("/")):
        return Problem("data", shown(url), "is no file, and a web server lists no folder", "Give each file")
    if not (parts.netloc + parts.path).strip("/"):
        return Problem("data", shown(url), "names nothing", "Give bucket and key")
    return None


def credentials_problem(url: str) -> Problem | None:
    """Refuses an address with a user, a password or a signature in it."""
    try:
        parts = urlsplit(url)
    except ValueError:  # no address, which is another problem
        return None
    names = [each.partition("=")[0] for each in parts.query.split("&")]
    if "@" not in parts.netloc and not any(_SECRET.search(name) for name in names):
        return None
    rule = "holds credentials, which would be saved with the run"
    remedy = "Put them where the store's own tools look for them: environment, ~/.aws, ~/.netrc"
    return Problem("data", shown(url), rule, remedy)


def file_name(url: str) -> str:
    """The last part of an address's path."""
    parts = urlsplit(url)
    path = unquote(parts.path) if parts.scheme.startswith("http") else url.partition("://")[2]
    return path.rstrip("/").rpartition("/")[2]
