"""Files that pages and docstrings name are there, so that a walk through the code can be followed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("[!.]*/*.md")) if path.name != "CHANGELOG.md")
# `job/options.py`, `tests/run.sh`, `pipeline/job/` in backquotes; bare names are not looked for.
_NAMED = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_0-9]+\.(?:py|md|json|sh))?)`")
# Below these, a path is a user's: of a run, of data.
_USERS = ("runs/", "tokens/", "exported/", "checkpoints/latest", "data/", "logs/", "tokenizer/", "ds_config/",
          "tensorboard/", "csv_monitor/", "wandb/", "comet/")  # fmt: skip


def named(text: str) -> Iterator[str]:
    for match in _NAMED.finditer(text):
        if match[1] not in _USERS and not match[1].startswith("runs/"):
            yield match[1]


def there(path: str) -> bool:
    places = (ROOT, ROOT / "pipeline", ROOT / "tests")
    return any((place / path).exists() for place in places)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_of_a_page_exist(page: Path) -> None:
    missing = [path for path in named(page.read_text(encoding="utf-8")) if not there(path)]
    assert missing == []


def test_paths_of_docstrings_and_comments_exist() -> None:
    missing = [
        f"{source.relative_to(ROOT)}: {path}"
        for source in sorted((ROOT / "pipeline").rglob("*.py"))
        for path in named(source.read_text(encoding="utf-8"))
        if path.endswith(".py") and not there(path)
    ]
    assert missing == []


def test_a_path_that_is_gone_is_seen() -> None:
    assert list(named("see `job/options.py`, `pipeline/job/` and `gone/file.py`")) == [
        "job/options.py", "pipeline/job/", "gone/file.py",
    ]  # fmt: skip
    assert there("job/options.py")
    assert not there("gone/file.py")
