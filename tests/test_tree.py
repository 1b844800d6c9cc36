"""The folders of `tests/` are those of what they test."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
# Folders that test no single one, with what they do.
OWN = {
    "crash": "kills a run again and again",
    "end_to_end": "runs whole jobs",
    "fuzz": "gives the commands anything",
    "harness": "forks ranks",
    "hosts": "makes hosts",
    "parity": "compares layouts with one process",
}
# Outside `pipeline/`.
BESIDE = {"benchmarks", "docs"}


def folders(root: Path) -> set[str]:
    """Folders with Python files, by their paths below `root`."""
    found = {path.parent.relative_to(root).as_posix() for path in root.rglob("*.py")}
    return found - {"."}


def test_the_folders_of_the_tests_are_those_of_the_pipeline() -> None:
    mirrored = folders(ROOT / "tests") - set(OWN) - BESIDE
    assert mirrored == folders(ROOT / "pipeline")


def test_the_other_folders_are_there() -> None:
    assert set(OWN) <= folders(ROOT / "tests")
    assert all((ROOT / name).is_dir() for name in BESIDE)
