"""What export and generate are given: a checkpoint, a tokenizer, a format, a size. No torch."""

from __future__ import annotations

import re

from pipeline.base.problems import JobError, Problem
from pipeline.base.user_input import is_file
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.data.tokenizer import TOKENIZER, Tokenizer, load_tokenizer
from pipeline.job.run_file import TOKENIZER_FOLDER
from pipeline.model.config import ModelConfig, model_from_json

DTYPES = ("float32", "bfloat16", "float16")
_OF_MODEL = "model."
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


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
