"""What pyproject.toml declares is what the pipeline imports: nothing more, nothing less."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Declared though nothing imports them, with the reason.
NOT_IMPORTED = {
    "accelerate": "`accelerate launch pipeline/pretrain.py` is one of the ways to start a job",
}
# Imported where a user asked for what they do; extras declare them.
OPTIONAL = {
    "aiohttp": "data at http(s):// addresses",
    "comet_ml": "the Comet monitor",
    "tensorboard": "the TensorBoard monitor",
    "wandb": "the W&B monitor",
}


def names(requirements: list[str]) -> set[str]:
    """As modules are written: the packages that are imported are called like their module."""
    return {re.match(r"[\w.-]+", requirement)[0].replace("-", "_") for requirement in requirements}


def imported() -> dict[str, list[str]]:
    """Module outside the standard library and the project: the files that import it."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "pipeline").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module in _modules(node):
                if module not in {*sys.stdlib_module_names, "pipeline"}:
                    found.setdefault(module, []).append(str(path.relative_to(ROOT)))
    return found


def _modules(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {node.module.partition(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


def test_what_is_imported_is_declared() -> None:
    declared = names(PROJECT["dependencies"]) | set(OPTIONAL)
    assert {module: files for module, files in imported().items() if module not in declared} == {}


def test_what_is_declared_is_imported() -> None:
    assert names(PROJECT["dependencies"]) - set(imported()) == set(NOT_IMPORTED)


def test_what_is_optional_is_imported_and_in_an_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(OPTIONAL) <= set(imported())
    assert set(OPTIONAL) <= names([*extras["monitors"], *extras["remote"]])


def test_versions_that_the_tests_run_with_are_pinned() -> None:
    """But for packages that constraints.txt says are their users' own."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = names(re.findall(r"^[\w.-]+==", constraints, re.MULTILINE))
    assert names([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]) <= pinned
