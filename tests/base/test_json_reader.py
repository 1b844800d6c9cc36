"""The JSON reader: what it allows, and what it refuses at which line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.base.json_reader import parse_json, read_json

TEXT = """{
  // a comment, "with": quotes
  "train_batch_size": 16, # another
  /* over
     lines */
  "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8,},
  "url": "http://not/a/comment", "list": [1, -2.5, "x", true, null,],
}
"""


def test_reads_comments_and_trailing_commas() -> None:
    document = parse_json(TEXT, "f.json")
    assert document.problems == ()
    assert document.values == {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
        "url": "http://not/a/comment",
        "list": [1, -2.5, "x", True, None],
    }


def test_knows_the_line_of_each_key() -> None:
    document = parse_json(TEXT, "f.json")
    assert document.lines["train_batch_size"] == 3
    assert document.where("zero_optimization.stage") == "zero_optimization.stage (f.json:6)"
    assert document.where("absent") == "absent (f.json)"


def test_agrees_with_the_standard_reader_on_plain_json() -> None:
    values = {"a": [1, 2.5e-3, {"b": '\u00e9\n"\\/'}], "c": {"d": {}}, "e": [], "f": -0.0, "g": 2**63 - 1}
    assert parse_json(json.dumps(values), "f").values == values
    assert parse_json(json.dumps(values, indent=3, ensure_ascii=False), "f").values == values


def test_refuses_duplicate_keys_and_names_both_lines() -> None:
    document = parse_json('{\n"a": {"b": 1,\n"b": 2},\n"a": 3}', "f.json")
    assert [problem.key for problem in document.problems] == ["a.b (f.json:3)", "a (f.json:4)"]
    assert "line 2" in document.problems[0].rule


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        ("", 1, "starts with '{'"),
        ("[1]", 1, "starts with '{'"),
        ('{\n"a": NaN}', 2, "NaN is not a JSON number"),
        ('{"a": -Infinity}', 1, "-Infinity is not"),
        ('{"a": 1e999}', 1, "too large"),
        ('{"a": 9223372036854775808}', 1, "too large"),
        ('{"a": -%s}' % ("9" * 5000), 1, "too large"),
        ('{"a": "\\ud800"}', 1, "half of a surrogate pair"),
        ('{"\\udfff": 1}', 1, "half of a surrogate pair"),
        ('{"a": 01}', 1, "expected a value"),
        ('{"a": 1.}', 1, "expected a value"),
        ('{"a": tru}', 1, "expected a value"),
        ('{"a": }', 1, "expected a value"),
        ('{"a": 1\n"b": 2}', 2, "expected ','"),
        ('{"a" 1}', 1, "expected ':'"),
        ("{'a': 1}", 1, "double quotes"),
        ("{a: 1}", 1, "double quotes"),
        ('{"a": "x\n"}', 1, "does not end"),
        ('{"a": "\\x"}', 1, "invalid string"),
        ('{"a": 1', 1, "expected ','"),
        ('{"a": 1,', 1, "missing"),
        ('{"a": [1', 1, "expected ','"),
        ('{/* "a": 1}', 1, "double quotes"),
        ("{}\n}", 2, "nothing may follow"),
        ('{"a": ' * 3000, 1, "nested"),
        ('{"a": ' + "[" * 3000, 1, "nested"),
    ],
)
def test_refuses_what_is_not_json(text: str, line: int, rule: str) -> None:
    document = parse_json(text, "f.json")
    assert document.values == {}
    assert document.problems[-1].key == f"f.json:{line}"
    assert rule in document.problems[-1].rule


def test_a_long_line_is_shown_in_part() -> None:
    assert parse_json('{"a": ' * 3000, "f.json").problems[-1].value == ('{"a": ' * 17)[:100].strip()


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    (problem,) = read_json(tmp_path / "eyJhIjogMX0=").problems
    assert (problem.key, problem.rule) == ("deepspeed_config", "there is no such file")


def test_a_folder_and_binary_data_are_problems(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "binary", Path("/dev/zero")):
        (problem,) = read_json(path).problems
        assert "cannot be read" in problem.rule


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "f").values == {"a": 1}
