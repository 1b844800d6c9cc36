"""How large the parts of the house may grow: so that a folder, a file and a call fit into a reader's head."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "pipeline"
FILES_IN_A_FOLDER, LINES_IN_A_FILE, PARAMETERS = 25, 500, 7
# A module with one public name is a file of its own only if it has something to say.
LINES_OF_ONE_NAME = 40
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.stat().st_size)


def functions(source: str) -> Iterator[Function]:
    yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))


def parameters(function: Function) -> int:
    """Those that a caller gives; `self` and `cls` are none."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([each for each in given if each.arg not in ("self", "cls")])


def public_names(source: str) -> list[str]:
    nodes = ast.parse(source).body
    return [
        node.name
        for node in nodes
        if isinstance(node, (Function, ast.ClassDef)) and not node.name.startswith("_")
    ]


def test_a_folder_is_taken_in_at_a_glance() -> None:
    counts = Counter(str(path.parent.relative_to(PACKAGE)) for path in sources())
    assert {folder: count for folder, count in counts.items() if count > FILES_IN_A_FOLDER} == {}


def test_a_file_fits_in_a_readers_head() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: length for name, length in lengths.items() if length > LINES_IN_A_FILE} == {}


def test_a_call_is_understood_without_counting() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {function.name} takes {parameters(function)}"
        for path in sources()
        for function in functions(path.read_text(encoding="utf-8"))
        if parameters(function) > PARAMETERS
    ]
    assert found == []


def test_no_small_module_stands_alone() -> None:
    found = [
        str(path.relative_to(PACKAGE))
        for path in sources()
        if path.parent != PACKAGE and path.name != "__init__.py"
        for source in [path.read_text(encoding="utf-8")]
        if len(public_names(source)) == 1 and len(source.splitlines()) < LINES_OF_ONE_NAME
    ]
    assert found == []


def test_what_is_too_much_is_seen() -> None:
    source = "class A:\n    def f(self, a, b, *, c): ...\ndef _g(): ...\n"
    assert [parameters(function) for function in functions(source)] in ([3, 0], [0, 3])
    assert public_names(source) == ["A"]


def test_a_single_problem_is_raised_in_one_way() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sources()
        if path.name != "problems.py"  # which defines `job_error`
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("JobError([Problem(")
        if isinstance(node.args[0], ast.List) and [len(each.args) for each in node.args[0].elts] == [4]
    ]
    assert found == [], "use job_error"
