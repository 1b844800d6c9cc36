"""A model from its name, or from the configuration file that describes it. No torch, no transformers.

Hugging Face files of the kinds gpt2, llama and qwen2 are translated field by field. A field that would
change the computation in a way that is not built here is refused by name, and so is a field nobody knows:
training something else than the file says is worse than stopping.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.job.hugging_face_config import KINDS, model_from_hugging_face
from pipeline.job.model_config import ModelConfig, model_from_json
from pipeline.job.model_presets import PRESETS
from pipeline.job.problems import JobError, Problem
from pipeline.job.suggest import did_you_mean

AUTO = "auto"
CONFIG_FILE = "config.json"


def load_model(name: str, device: str) -> ModelConfig:
    """The model called `name`.

    Args:
        name: A preset; ``auto`` (``tiny`` on CPU, else ``gpt2-124m``); a JSON file, either a Hugging Face
            config.json or the fields of `ModelConfig`; or a folder that holds a config.json.
        device: ``cpu`` or ``cuda``.

    Raises:
        JobError: no such preset, file or kind, or a file that describes a model that cannot be built; all
            reasons.
    """
    if name == AUTO:
        name = "tiny" if device == "cpu" else "gpt2-124m"
    if name in PRESETS:
        return PRESETS[name].model
    path = Path(name)
    if path.is_dir():
        path = path / CONFIG_FILE
    if not path.is_file():
        raise JobError([_unknown(name, path)])
    return _from_description(_read(path), str(path))


def _unknown(name: str, path: Path) -> Problem:
    if path.parent.is_dir() and path.name == CONFIG_FILE:
        return Problem("model", name, f"the folder has no {CONFIG_FILE}", "Give a model's folder or file")
    if path.suffix == ".json" or len(path.parts) > 1:
        return Problem("model", name, "there is no such file or folder", "Correct the path")
    return Problem("model", name, "no preset, file or folder has this name", did_you_mean(name, PRESETS))


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    remedy = f"Give a Hugging Face {CONFIG_FILE}"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        rule = f"cannot be read as JSON ({type(error).__name__}: {error})"
        raise JobError([Problem("model", str(path), rule, remedy)]) from error
    if not isinstance(values, dict):
        raise JobError([Problem("model", str(path), "must hold one JSON object", remedy)])
    return values


def _from_description(values: dict[str, Any], source: str) -> ModelConfig:
    if "model_type" in values:
        return model_from_hugging_face(values, source)
    if "num_kv_heads" in values:
        return model_from_json({**values, "name": source}, source)
    rule = f"has neither model_type (Hugging Face: {', '.join(KINDS)}) nor this project's own fields"
    raise JobError([Problem(f"{source}: model_type", None, rule, "Give the model_type")])
