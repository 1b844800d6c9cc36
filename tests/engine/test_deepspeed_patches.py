"""Patches of DeepSpeed: each is listed, applied, and needed; another DeepSpeed is refused in words."""

from __future__ import annotations

import ast
import importlib
import inspect
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.base.problems import JobError
from pipeline.engine import deepspeed_patches
from pipeline.engine.deepspeed_patches import PATCHES, TESTED_VERSION, Patch, replaced, require_tested_version
from tests.harness import run_ranks
from tests.parity.layouts import FAST, SLOW

ROOT = Path(__file__).parents[2]
FILE = Path(deepspeed_patches.__file__).relative_to(ROOT)
# Public names of the file that change nothing by themselves.
HELPERS = {"replaced", "require_tested_version", "Patch"}


def sources() -> dict[Path, str]:
    """The other files of the package."""
    files = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "pipeline").rglob("*.py")}
    del files[FILE]
    return files


def each_patch() -> Any:
    return pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.apply.__name__)


def test_every_patch_of_the_file_is_listed():
    public = {
        name
        for name, value in vars(deepspeed_patches).items()
        if not name.startswith("_") and inspect.getmodule(value) is deepspeed_patches and callable(value)
    }
    assert {patch.apply.__name__ for patch in PATCHES} == public - HELPERS


@each_patch()
def test_a_patch_is_applied(patch: Patch):
    used = [path for path, text in sources().items() if f"{patch.apply.__name__}" in _called(text)]
    assert used != []


def _called(text: str) -> set[str]:
    """Names that a file uses other than in imports."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


@each_patch()
def test_what_a_patch_replaces_is_there(patch: Patch):
    for name in patch.replaces:
        if name.startswith("deepspeed."):
            assert _found(name) is not None


def _found(dotted: str) -> Any:
    """The module, class or function of a dotted name."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            value = getattr(value, name)
        return value
    return None


@each_patch()
def test_the_test_of_a_patch_is_there(patch: Patch):
    assert len(patch.reason) > 20
    file, _, name = patch.test.partition("::")
    function, _, case = name.partition("[")
    text = (ROOT / file).read_text()
    assert function in {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    if file.endswith("test_layouts.py"):
        assert case[:-1] in {each.id for each in (FAST if function.startswith("test_layout") else SLOW)}


def test_no_other_file_changes_private_parts_of_other_objects():
    """Nor sets attributes by name, nor puts a function in the place of a method."""
    found = [
        f"{path}:{node.lineno}"
        for path, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if _is_foreign_change(node)
    ]
    assert found == []


def _is_foreign_change(node: ast.AST) -> bool:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("setattr", "delattr")
    ):
        return True
    if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return False
    given = node.targets if isinstance(node, ast.Assign) else [node.target]
    targets = [t for t in given if isinstance(t, ast.Attribute) and not _is_own(t)]
    return any(target.attr.startswith("_") or isinstance(node.value, ast.Lambda) for target in targets)


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


@pytest.mark.parametrize("version", ["0.20.0", "0.18.9", "1.19.8", "0.19.7", "unknown"])
def test_another_deepspeed_is_refused_in_words(version: str):
    with pytest.raises(JobError) as refusal:
        require_tested_version(version)
    (problem,) = refusal.value.problems
    assert (problem.key, problem.value) == ("deepspeed", version)
    assert TESTED_VERSION in problem.rule
    assert f"deepspeed=={TESTED_VERSION}" in problem.remedy


def test_a_later_patch_release_is_a_warning():
    assert require_tested_version("0.19.10") == (
        f"DeepSpeed 0.19.10 is later than the tested release {TESTED_VERSION}"
    )
    assert require_tested_version("0.19.9+cuda") is not None


def test_the_tested_version_is_the_one_that_is_installed_here():
    assert f"deepspeed=={TESTED_VERSION}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert require_tested_version() is None


def test_no_rank_prepares_anything_with_another_deepspeed(monkeypatch: pytest.MonkeyPatch):
    from pipeline.training import run

    def refuse() -> None:
        require_tested_version("0.20.0")

    monkeypatch.setattr(run, "require_tested_version", refuse)
    monkeypatch.setattr(run, "prepare", lambda *_: pytest.fail("prepared"))
    with pytest.raises(JobError):
        run.run(None, None, None, None, None)


def test_replaced_puts_back_what_was_there():
    class Kind:
        value = 1

    one = Kind()
    with replaced(one, "value", 2):
        assert one.value == 2
    assert "value" not in vars(one)
    own = SimpleNamespace(value=1)
    with pytest.raises(KeyError), replaced(own, "value", 2):
        raise KeyError
    assert own.value == 1


def start_without_compiler() -> None:
    from deepspeed.accelerator import get_accelerator

    from pipeline.engine.distributed import start_distributed

    def compile_it(*_: Any) -> None:
        raise AssertionError("an operator would be compiled")

    get_accelerator().create_op_builder = compile_it
    start_distributed("cpu", 0, timedelta(seconds=60))


def test_no_operator_is_compiled_on_cpus():
    run_ranks(start_without_compiler, 1)


def test_no_script_is_put_beside_checkpoints(tmp_path: Path):
    class Engine:
        def _copy_recovery_script(self, save_path: str) -> None:
            (Path(save_path) / "zero_to_fp32.py").touch()

    engine = Engine()
    deepspeed_patches.skip_recovery_script(engine)
    engine._copy_recovery_script(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
