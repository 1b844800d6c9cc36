"""A model from its name, or from the configuration file that describes it. No torch, no transformers.

Hugging Face files of the kinds gpt2, llama and qwen2 are translated field by field. A field that would
change the computation in a way that is not built here is refused by name, and so is a field nobody knows:
training something else than the file says is worse than stopping.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.base.json_reader import read_json
from pipeline.base.problems import JobError, Problem
from pipeline.base.user_input import is_file, is_folder
from pipeline.base.words import did_you_mean
from pipeline.hugging_face.config import KINDS, model_from_hugging_face
from pipeline.job.model_presets import PRESETS
from pipeline.model.config import ModelConfig, model_from_json

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
    if is_folder(path):
        path = path / CONFIG_FILE
    if not is_file(path):
        raise JobError([_unknown(name, path)])
    return _from_description(_read(path), str(path))


def _unknown(name: str, path: Path) -> Problem:
    if is_folder(path.parent) and path.name == CONFIG_FILE:
        return Problem("model", name, f"the folder has no {CONFIG_FILE}", "Give a model's folder or file")
    if path.suffix == ".json" or len(path.parts) > 1:
        return Problem("model", name, "there is no such file or folder", "Correct the path")
    return Problem("model", name, "no preset, file or folder has this name", did_you_mean(name, PRESETS))


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    document = read_json(path, "model", f"a Hugging Face {CONFIG_FILE}")
    if document.problems:
        raise JobError(document.problems)
    return document.values


def _from_description(values: dict[str, Any], source: str) -> ModelConfig:
    if "model_type" in values:
        return model_from_hugging_face(values, source)
    if "num_kv_heads" in values:
        return model_from_json({**values, "name": source}, source)
    rule = f"has neither model_type (Hugging Face: {', '.join(KINDS)}) nor this project's own fields"
    raise JobError([Problem(f"{source}: model_type", None, rule, "Give the model_type")])
