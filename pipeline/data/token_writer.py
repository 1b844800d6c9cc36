"""Writing token files: a killed writer loses seconds of work, and no program ever sees an unfinished file.

    PREFIX.bin.partial     tokens so far
    PREFIX.sizes.partial   length of each document so far, int64; locked by the writer
    PREFIX.progress.json   how much of both is on the disk, and the position in the input that belongs to it

When all is written the files are renamed: .bin, .json, and last .idx, without which no program opens the
other two.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from pipeline.base.files import file_lock, make_folder, remove_empty, replaced_atomically, sync_folder
from pipeline.base.json_reader import saved_json
from pipeline.base.problems import job_error
from pipeline.data.corpus import Skipped
from pipeline.data.losses import Losses
from pipeline.data.records import ReadPosition
from pipeline.data.token_file import write_index

# Seconds between commits: a killed writer loses at most this much work.
_COMMIT_SECONDS = 5.0
# Skipped records that are listed; the rest are only counted.
_SKIPS_KEPT = 1000


@dataclass
class Counts:
    """What a preparation did so far.

    Attributes:
        documents: Written.
        tokens: Written, ends of documents included.
        characters: Of the texts.
        lost_characters, unknown_tokens, lost_examples: What the tokens do not keep of them, see `Losses`.
        end_markers: How often the texts hold, as letters, what ends a document.
        longest: Tokens of the longest document.
        max_token: Highest id.
        num_skipped: Records and files without a document.
        skipped: The first of those.
        seconds: Spent, over all starts.
    """

    documents: int = 0
    tokens: int = 0
    characters: int = 0
    lost_characters: int = 0
    unknown_tokens: int = 0
    lost_examples: str = ""
    end_markers: int = 0
    longest: int = 0
    max_token: int = 0
    num_skipped: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def losses(self) -> Losses:
        """What the tokens do not keep of the texts."""
        return Losses(self.lost_characters, self.unknown_tokens, self.lost_examples)

    def lose(self, losses: Losses) -> None:
        """Count what was lost of more texts."""
        known = self.losses + losses
        self.lost_characters, self.unknown_tokens = known.characters, known.unknown
        self.lost_examples = known.examples

    def skip(self, name: str, reason: str) -> None:
        """Count a record or file without a document."""
        self.num_skipped += 1
        if len(self.skipped) < _SKIPS_KEPT:
            self.skipped.append(Skipped(name, reason))


@dataclass(frozen=True)
class Paths:
    """The files of one token file, finished and in the making."""

    prefix: str

    def __getitem__(self, suffix: str) -> Path:
        return Path(f"{self.prefix}.{suffix}")

    @property
    def finished(self) -> tuple[Path, ...]:
        """In the order in which they appear."""
        return self["bin"], self["json"], self["idx"]


class TokenWriter:
    """Writes the tokens of documents to ``PREFIX``; a context manager.

    Args:
        prefix: Path without suffix; its folder is made.
        dtype: Of the ids.
        identity: Hash of all that decides the content. An unfinished file with the same identity is
            continued, any other is removed.

    Attributes:
        place: Where in the input to read on.
        counts: So far.
        resumed: An unfinished file is continued.

    Raises:
        JobError: another process is writing the same file.
        OSError: the folder or its files cannot be written.
    """

    def __init__(self, prefix: str, dtype: np.dtype, identity: str) -> None:
        self.paths = Paths(prefix)
        self.dtype, self.identity = dtype, identity
        self.place, self.counts, self.resumed = ReadPosition(), Counts(), False
        self._open_tokens = 0
        self._begin = time.monotonic()
        self._last_commit = self._begin
        self._made = make_folder(self.paths["bin"].parent)
        with ExitStack() as stack:
            # Before the files, so that it is held until their last bytes are written.
            try:
                stack.enter_context(file_lock(self.paths["sizes.partial"]))
            except TimeoutError as error:
                rule, remedy = "another process is writing these token files", "Wait, or use another PREFIX"
                raise job_error("output", prefix, rule, remedy) from error
            self._bin = stack.enter_context(self.paths["bin.partial"].open("ab"))
            self._sizes = stack.enter_context(self.paths["sizes.partial"].open("ab"))
            self._continue()
            self._files = stack.pop_all()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.paths["progress.json"].exists():
            self.discard()  # without a commit there is nothing to continue
        self._files.close()

    def write(self, tokens: np.ndarray, lengths: Sequence[int], closed: bool) -> None:
        """Append documents.

        Args:
            tokens: Of all of them, [tokens].
            lengths: Of each; the first continues a document that the last call left open.
            closed: The last document ends here.
        """
        if not len(lengths):
            return
        self._bin.write(tokens.astype(self.dtype, copy=False).data)
        documents = np.array(lengths, dtype="<i8")
        documents[0] += self._open_tokens
        self._open_tokens = 0 if closed else int(documents[-1])
        if not closed:
            documents = documents[:-1]
        self._sizes.write(documents.data)
        counts = self.counts
        counts.documents += len(documents)
        counts.tokens += int(documents.sum())
        counts.longest = max(counts.longest, int(documents.max(initial=0)))
        counts.max_token = max(counts.max_token, int(tokens.max(initial=0)))

    def abandon(self) -> None:
        """Remove the open document."""
        self._bin.flush()
        self._bin.truncate(self.counts.tokens * self.dtype.itemsize)
        self._open_tokens = 0

    def commit_sometimes(self, place: ReadPosition) -> None:
        """Commit if the last commit is some seconds old; no document is open."""
        self.place = place
        if time.monotonic() - self._last_commit >= _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Flush all to the disk, and record it."""
        for stream in (self._bin, self._sizes):
            stream.flush()
            os.fsync(stream.fileno())
        now = time.monotonic()
        self.counts.seconds += now - self._begin
        self._begin = self._last_commit = now
        self._record(finished=False)

    def finish(self, description: dict[str, Any]) -> None:
        """Write index and description, and rename the files."""
        self.commit()
        sizes = self.paths["sizes.partial"]
        lengths = np.memmap(sizes, "<i8", "r") if self.counts.documents else np.empty(0, "<i8")
        with self.paths["idx.partial"].open("wb") as stream:
            write_index(stream, self.dtype, lengths)
            _to_disk(stream)
        with self.paths["json.partial"].open("w", encoding="utf-8") as stream:
            json.dump(description, stream, indent=2)
            stream.write("\n")
            _to_disk(stream)
        self._record(finished=True)
        _publish(self.paths)

    def discard(self) -> None:
        """Remove the unfinished files, and the folders that were made for them."""
        for suffix in ("bin.partial", "sizes.partial", "idx.partial", "json.partial", "progress.json"):
            self.paths[suffix].unlink(missing_ok=True)
        remove_empty(self._made)

    def _record(self, finished: bool) -> None:
        note = {"identity": self.identity, "finished": finished, "place": asdict(self.place)}
        with replaced_atomically(self.paths["progress.json"]) as file:
            file.write(json.dumps({**note, "counts": asdict(self.counts)}).encode())

    def _continue(self) -> None:
        """Continue an unfinished file, as far as it is recorded to be on the disk; otherwise begin."""
        recorded = _recorded(self.paths["progress.json"], self.identity)
        if recorded is not None:
            place, counts = recorded
            enough = self._bin.tell() >= counts.tokens * self.dtype.itemsize
            if enough and self._sizes.tell() >= 8 * counts.documents:
                self.place, self.counts, self.resumed = place, counts, True
        self._bin.truncate(self.counts.tokens * self.dtype.itemsize)
        self._sizes.truncate(8 * self.counts.documents)


def finish_interrupted(prefix: str, identity: str) -> None:
    """Rename the rest of the files of a writer that was killed while it renamed them."""
    paths = Paths(prefix)
    try:
        note = saved_json(paths["progress.json"])
        if note["finished"] and note["identity"] == identity:
            _publish(paths)
    except (OSError, ValueError, KeyError, TypeError):
        return  # no record, or none that can be read: nothing to rename


def _publish(paths: Paths) -> None:
    for path in paths.finished:
        partial = path.with_name(f"{path.name}.partial")
        if partial.exists():
            partial.replace(path)
            sync_folder(path.parent)
    paths["progress.json"].unlink(missing_ok=True)
    paths["sizes.partial"].unlink(missing_ok=True)


def _recorded(path: Path, identity: str) -> tuple[ReadPosition, Counts] | None:
    try:
        note = saved_json(path)
        if note["identity"] != identity or note["finished"]:
            return None
        counts = Counts(**note["counts"])
        counts.skipped = [Skipped(**entry) for entry in note["counts"]["skipped"]]
        return ReadPosition(**note["place"]), counts
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no record, or none that can be read: everything is written again


def _to_disk(stream: IO[Any]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
