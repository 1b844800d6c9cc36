"""The blocks of DeepSpeed's monitors in the JSON: TensorBoard, Weights & Biases, CSV files, Comet."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from pipeline.base.problems import Problem
from pipeline.base.user_input import exists, is_folder

# JSON key -> module that DeepSpeed's monitor imports; None: nothing beyond the standard library.
MONITORS: Mapping[str, str | None] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "csv_monitor": None,
    "comet": "comet_ml",
}
# Monitors that write files under `output_path`.
FILE_MONITORS = ("tensorboard", "csv_monitor")


def monitor_problems(config: Mapping[str, object]) -> list[Problem]:
    """What keeps the enabled monitors of a DeepSpeed JSON from working. Imports none of them.

    Blocks that are not objects are left to the strict reader of the JSON.
    """
    problems = []
    for key, block in enabled_monitors(config).items():
        module = MONITORS[key]
        if module is not None and not _is_installed(module):
            rule = f"the monitor needs the Python package {module}, which is not installed"
            remedy = f'pip install {module}, or set "{key}": {{"enabled": false}}'
            problems.append(Problem(f"{key}.enabled", True, rule, remedy))
        problems += _path_problems(key, block)
    return problems


def enabled_monitors(config: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """The blocks with ``"enabled": true``, by key."""
    blocks = {key: config.get(key) for key in MONITORS}
    return {k: b for k, b in blocks.items() if isinstance(b, Mapping) and b.get("enabled") is True}


def resolved_monitors(config: Mapping[str, object], output_dir: str) -> dict[str, dict[str, object]]:
    """The enabled blocks, with files under the run's folder unless ``output_path`` says where.

    DeepSpeed's own default is the current folder.
    """
    blocks = {key: dict(block) for key, block in enabled_monitors(config).items()}
    for key in FILE_MONITORS:
        if key in blocks and not blocks[key].get("output_path"):
            blocks[key]["output_path"] = str(Path(output_dir) / key)
    return blocks


def _is_installed(module: str) -> bool:
    """A folder ``wandb/`` that an earlier run left here looks like a package, but has no origin."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def _path_problems(key: str, block: Mapping[str, object]) -> list[Problem]:
    path = block.get("output_path")
    if key not in FILE_MONITORS or not isinstance(path, str):
        return []
    blocking = next((p for p in (Path(path), *Path(path).parents) if exists(p) and not is_folder(p)), None)
    if blocking is None:
        return []
    rule = f"must be a folder, and {blocking} is a file"
    return [Problem(f"{key}.output_path", path, rule, "name a folder that exists or can be made")]
