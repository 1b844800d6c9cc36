"""Documentation made from data is current, and names everything."""

from __future__ import annotations

from pipeline.job.pages import KEYS_PAGE, RULES_PAGE, rules_page, with_keys
from pipeline.job.rules import RULES
from pipeline.job.schedules import SCHEDULES, parameters
from pipeline.job.schema import KEYS


def test_the_rules_page_is_current() -> None:
    assert RULES_PAGE.read_text(encoding="utf-8") == rules_page(), "run python -m pipeline.job.pages"
    for rule in RULES:
        assert rule.sentence in rules_page()


def test_the_keys_page_is_current() -> None:
    page = KEYS_PAGE.read_text(encoding="utf-8")
    assert page == with_keys(page), "run python -m pipeline.job.pages"
    for path in KEYS:
        assert f"| `{path}` |" in page
    for kind in SCHEDULES:
        assert f"`scheduler.params` of `{kind}`" in page
        assert all(f"| `{name}` |" in page for name in parameters(kind))
