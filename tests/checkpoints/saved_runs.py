"""Checkpoint folders on paper: manifests of real jobs over a few bytes of shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.checkpoints.folder import point_latest, tag_of
from pipeline.checkpoints.manifest import Checkpoint, TrainState, files_below, read_checkpoint, write_manifest
from pipeline.checkpoints.resume import Candidates
from pipeline.job.job import Job
from tests.job.drafts import draft, world

STATE = TrainState(step=3, consumed_samples=48, tokens=3072, data={"start": 0})


def job_in(folder: Path, config: dict[str, Any] | None = None, ranks: int = 2, **options: Any) -> Job:
    """A job whose output folder is ``folder / "run"``."""
    found = draft(folder, config or {}, world(ranks), **options)
    assert found.job is not None, found.problems
    return found.job


def saved(
    folder: Path, state: TrainState = STATE, config: dict[str, Any] | None = None, **options: Any
) -> Path:
    """A checkpoint of a job in `folder`, pointed to by `latest`."""
    job = job_in(folder, config, **options)
    path = Path(job.output_dir) / "checkpoints" / tag_of(state.step)
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "shard.pt").write_bytes(b"12345")
    (path / "shards.json").write_bytes(b"{}\n")
    write_manifest(job, state, path, files_below(path))
    point_latest(path.parent, path.name)
    return path


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object], format_2: bool = True) -> None:
    """Change a manifest by hand; with `format_2` False, into one that has no format and no digests."""
    file = path / "manifest.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if not format_2:
        kept = ("state", "layout", "identity", "files")
        content = {key: content[key] for key in kept}
        content["files"] = {name: entry["bytes"] for name, entry in content["files"].items()}
        for name in ("best_eval_loss", "evaluation_due"):
            del content["state"][name]
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def find_checkpoint(output_dir: str, resume: str) -> Checkpoint | None:
    """The checkpoint that ``--resume RESUME`` takes, of whatever run lies in `output_dir`."""
    if resume == "never":
        return None
    if resume != "auto":
        return read_checkpoint(Path(resume))
    candidates = Candidates(Path(output_dir) / "checkpoints")
    _, checkpoint = candidates.newest()
    if checkpoint is None and candidates.exist:
        raise candidates.refusal()
    return checkpoint
