"""What export and generate are given: a checkpoint, a tokenizer, a format, a size. No torch."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

from pipeline.base.problems import JobError, Problem
from pipeline.base.user_input import is_file, is_folder
from pipeline.checkpoints.folder import steps_in
from pipeline.checkpoints.manifest import MANIFEST, Checkpoint, read_checkpoint
from pipeline.checkpoints.resume import Candidates, Selection
from pipeline.data.tokenizer import TOKENIZER, Tokenizer, load_tokenizer
from pipeline.job.model_source import CHECKPOINTS, TOKENIZER_FOLDER
from pipeline.model.config import ModelConfig, model_from_json

DTYPES = ("float32", "bfloat16", "float16")
_OF_MODEL = "model."
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is one of the places that `checkpoint_at` takes, by what lies there."""
    return is_file(path / MANIFEST) or is_folder(path / CHECKPOINTS) or bool(steps_in(path))


def checkpoint_at(path: Path) -> Selection:
    """The checkpoint at `path`: one by itself, or the newest of a run's folder or its folder of checkpoints.

    Raises:
        JobError: there is none, or none that is complete.
    """
    if is_file(path / MANIFEST):
        return Selection(read_checkpoint(path))
    if not is_checkpoint(path):
        rule = "is no checkpoint, and no folder of a run" if is_folder(path) else "there is no such folder"
        raise JobError([Problem("checkpoint", str(path), rule, "Name a run's --output_dir, or a checkpoint")])
    candidates = Candidates(path / CHECKPOINTS if is_folder(path / CHECKPOINTS) else path)
    _, checkpoint = candidates.newest()
    if checkpoint is not None:
        return Selection(checkpoint, candidates.notes(checkpoint))
    if candidates.exist:
        raise candidates.refusal()
    raise JobError([Problem("checkpoint", str(path), "the run has not saved yet", "Let it save first")])


def model_of_checkpoint(checkpoint: Checkpoint) -> ModelConfig:
    """The model that a checkpoint holds.

    Raises:
        JobError: its manifest describes none that can be built here.
    """
    fields = {
        key.removeprefix(_OF_MODEL): value
        for key, value in checkpoint.identity.items()
        if key.startswith(_OF_MODEL)
    }
    return model_from_json({**fields, "name": str(checkpoint.path)}, str(checkpoint.path))


def tokenizer_of_checkpoint(checkpoint: Checkpoint, name: str | None) -> Tokenizer:
    """The tokenizer called `name`, or else the one saved with a checkpoint or its run.

    Raises:
        JobError: there is none, or it cannot be used.
    """
    if name is not None:
        return load_tokenizer(name)
    for folder in (checkpoint.path, checkpoint.folder.parent):
        if is_file(folder / TOKENIZER_FOLDER / TOKENIZER):
            return load_tokenizer(str(folder / TOKENIZER_FOLDER))
    rule = f"neither {checkpoint.path} nor its run has a folder {TOKENIZER_FOLDER}"
    raise JobError([Problem("tokenizer", None, rule, "Give --tokenizer")])


def chosen_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`; says which newer ones were skipped."""
    return checkpoint_at(path).told(partial(print, file=sys.stderr))


def dtype_problems(dtype: str) -> list[Problem]:
    """What is wrong with a value of ``--dtype``."""
    if dtype in DTYPES:
        return []
    return [Problem("dtype", dtype, f"is not one of {', '.join(DTYPES)}", "Correct --dtype")]


def bytes_of(size: str) -> int | None:
    """5GB -> 5,000,000,000, as transformers counts; None for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", size.strip(), re.IGNORECASE)
    if not match:
        return None
    return int(float(match[1]) * _UNITS.get((match[2] or "").upper(), 1))
