"""A job is resolved once: what runs it reads neither the command line nor a file that describes a job."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_import_order import PACKAGE, folder_of, modules

# What trains a resolved job. Exports are commands of their own, and read what they are given.
BELOW = ("parallel", "model", "hugging_face", "data", "cluster/agent", "engine", "checkpoints", "training")
# The command line, and whatever reads a file that describes a job.
READERS = frozenset(
    {
        *("Options", "CheckOptions", "parse_options", "from_run_file", "config_path", "read_json"),
        *("resolve", "examine", "identity", "load_model", "model_of", "model_folder", "initial_weights"),
        *("training_sources", "validation_sets"),
        *(
            "choose_tokenizer",
            "chosen_tokenizer",
            "tokenizer_facts",
            "load_tokenizer",
        ),
    }
)
# Those that have a reason, by module and name.
EXCEPTIONS = {
    **dict.fromkeys(
        [("training/rank", name) for name in ("Options", "parse_options", "resolve")],
        "a rank's process reads its command line, and resolves the job that all below it is given",
    ),
    (
        "data/tokenizer",
        "tokenizer_facts",
    ): "of the byte tokenizer, and in `load_tokenizer`, which no run calls",
    ("data/tokenizer_training", "load_tokenizer"): "opens the tokenizer that it has just trained",
}


def reads(source: str) -> Iterator[str]:
    """The readers that a module imports, inside functions too; ``.options`` where it looks at raw options."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipeline."):
            yield from (alias.name for alias in node.names if alias.name in READERS)
        elif isinstance(node, ast.Attribute) and node.attr == "options":
            yield ".options"


def test_what_runs_a_job_reads_no_file_that_describes_it() -> None:
    found = {
        (module, name)
        for module in modules()
        if folder_of(module) in BELOW
        for name in reads((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    }
    assert found == set(EXCEPTIONS)


def test_a_reader_is_seen_and_exists() -> None:
    hidden = "def save():\n    from pipeline.job.data_sources import training_sources\n"
    assert list(reads(f"{hidden}    return training_sources(self.job.options)\n")) == [
        "training_sources",
        ".options",
    ]
    assert defined_names() >= READERS


def defined_names() -> set[str]:
    """Every function and class at the top of a module."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(PACKAGE).rglob("*.py")]
    return {node.name for tree in trees for node in tree.body if hasattr(node, "name")}
