"""Reading DeepSpeed's files without running what somebody may have put into them.

A pickle may call anything when it is read. So every file of a checkpoint is read by torch's restricted
unpickler (``weights_only=True``), which knows tensors and plain values, and here the few types in `ALLOWED`
that DeepSpeed puts beside them. A file that asks for anything else is refused before it is read, and says
for what; ``--allow_pickle MODULE.NAME`` allows that one thing. torch itself never allows functions of `os`
and `sys`.
"""

from __future__ import annotations

import importlib
import pickle
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from pipeline.base.problems import JobError, Problem

# Types without behaviour on construction: numbers, their names, and where a parameter lies in a flat tensor.
ALLOWED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)

# The list of allowed names is one for the whole process, and threads read files at the same time.
_TORCH_LIST = threading.Lock()


def foreign_names(path: Path, allowed: Collection[str] = ()) -> list[str]:
    """What a file asks for beyond tensors, plain values, `ALLOWED` and `allowed`; nothing of it is run.

    Raises:
        ValueError: it is no file of torch's.
    """
    try:
        asked = get_unsafe_globals_in_checkpoint(path)
    except (RuntimeError, ValueError, EOFError, IndexError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is no file that torch wrote ({type(error).__name__}: {error})") from error
    return sorted(set(asked) - {*ALLOWED, *allowed})


def load_torch_file(
    path: str | Path, map_location: Any = "cpu", *, mmap: bool = False, allowed: Collection[str] = ()
) -> Any:
    """The content of a file that torch wrote.

    Args:
        map_location: As of `torch.load`.
        mmap: Map tensors instead of reading them.
        allowed: Names beyond `ALLOWED`, from ``--allow_pickle``.

    Raises:
        JobError: it asks for something foreign, or for something that torch never allows, or a name of
            `allowed` cannot be imported.
        ValueError: it is no file of torch's.
    """
    path = Path(path)
    if foreign := foreign_names(path, allowed):
        raise JobError([foreign_problem(path, foreign)])
    names = [_imported(name) for name in (*ALLOWED, *allowed)]
    try:
        with _TORCH_LIST, safe_globals(names):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        rule = f"cannot be read safely ({_reason(error)})"
        raise JobError([Problem("resume", str(path), rule, "Resume from another checkpoint")]) from error


def _reason(error: pickle.UnpicklingError) -> str:
    """What stands between torch's advice, which is to read the file unsafely, and where it is documented."""
    paragraphs = [line.strip() for line in str(error).splitlines() if line.strip()]
    return paragraphs[1] if len(paragraphs) > 2 else paragraphs[0]


def foreign_problem(path: Path, names: Sequence[str]) -> Problem:
    """A file that is refused because of what it asks for."""
    listed = ", ".join(names)
    rule = f"would call {listed} when it is read, which no checkpoint of this pipeline holds"
    remedy = f"If you know why it does, and trust it: --allow_pickle {' '.join(names)}"
    return Problem("resume", str(path), rule, remedy)


def _imported(name: str) -> tuple[Callable[..., Any], str]:
    """What a dotted name means, with the name under which files ask for it."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute), name
    except (ImportError, AttributeError, ValueError) as error:
        rule = f"there is no such thing ({type(error).__name__}: {error})"
        raise JobError([Problem("allow_pickle", name, rule, "Correct --allow_pickle")]) from error
