"""The order in which the folders of `pipeline/` can be read: each imports only from those above it.

base             problems, files, the JSON reader: what everything uses
parallel         the rank grid, collectives, sliced layers
model            the transformer and its sizes
hugging_face     names and files of Hugging Face models
data             from text to batches
job              what a run is: options, JSON, rules, the resolved job
cluster          where it runs: hosts, devices, a rank's environment, who may use a folder
cluster/agent    what owns a rank, and where ranks' owners meet
engine           one face over DeepSpeed's two engines
checkpoints      saving, choosing, loading in any layout
checkpoints/export   a checkpoint as a Hugging Face folder, and as a generator of text
training         one rank's run: set-up, loop, metrics, stops
launch/...       checks of hosts and links, then the start and the restarts
deployment       what schedulers are given
(entries)        the commands
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline"
ENTRIES = "(entries)"
ORDER = (
    "base",
    "parallel",
    "model",
    "hugging_face",
    "data",
    "job",
    "cluster",
    "cluster/agent",
    "engine",
    "checkpoints",
    "checkpoints/export",
    "training",
    "launch/host_check",
    "launch/network_test",
    "launch",
    "deployment",
    ENTRIES,
)
# Imports against the order, with the reason. At most five.
EXCEPTIONS: dict[tuple[str, str], str] = {}
# Importing every module of these folders brings in no torch: they run in the check, in the launch and in the
# process that owns a rank, all of which must start at once and in little memory.
WITHOUT_TORCH = ("base", "hugging_face", "job", "cluster", "cluster/agent", "deployment", "launch/host_check")
# Of the others, what the check and the launch need.
MODULES_WITHOUT_TORCH = (
    "parallel/mesh",
    "model/config",
    "launch/launch",
    "launch/preflight",
    "check",
    "evaluate",
    "deploy",
    "prepare",
    "pretrain",
    "training/rank",
)


def folder_of(module: str) -> str:
    """The folder of ``job/options``; entries stand directly in `pipeline/`."""
    return module.rpartition("/")[0] or ENTRIES


def modules() -> list[str]:
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(path.as_posix() for path in paths if path.name != "__init__")


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of this project that a module names in any import, those inside functions included."""
    return frozenset(_named_in(module, set(modules())))


def _named_in(module: str, known: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        paths = (name.removeprefix("pipeline.").replace(".", "/") for name in names)
        yield from (path for path in paths if path in known)


def against_the_order(module: str, imported: str) -> bool:
    return ORDER.index(folder_of(imported)) > ORDER.index(folder_of(module))


def test_every_folder_has_its_place() -> None:
    assert {folder_of(module) for module in modules()} == set(ORDER)


def test_folders_import_only_from_those_above_them() -> None:
    found = {
        (module, imported)
        for module in modules()
        for imported in imports(module)
        if against_the_order(module, imported)
    }
    assert found == set(EXCEPTIONS)
    assert len(EXCEPTIONS) <= 5


def test_an_import_against_the_order_is_seen() -> None:
    assert against_the_order("base/problems", "job/job")
    assert against_the_order("launch/preflight", "check")
    assert not against_the_order("training/loop", "engine/engine")
    assert "job/options" in set(imports("job/resolve"))


def without_torch() -> list[str]:
    return [
        module
        for module in modules()
        if folder_of(module) in WITHOUT_TORCH or module in MODULES_WITHOUT_TORCH
    ]


def test_some_folders_import_no_torch() -> None:
    names = [f"pipeline.{module.replace('/', '.')}" for module in without_torch()]
    assert {*MODULES_WITHOUT_TORCH} <= {*without_torch()}
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = sorted({'torch', 'deepspeed', 'transformers', 'datasets'} & set(sys.modules))\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [each for each in modules() if folder_of(each) == ENTRIES])
def test_nothing_imports_an_entry(module: str) -> None:
    importers = {other for other in modules() if module in set(imports(other))}
    assert importers <= {importer for importer, imported in EXCEPTIONS if imported == module}
