"""What the options and a blend file say about data, and every way to say it wrong."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.problems import JobError
from pipeline.job.data_sources import training_sources, validation_sets
from pipeline.job.options import Options
from tests.job.drafts import draft


def refusal(**options: Any) -> str:
    with pytest.raises(JobError) as caught:
        training_sources(Options(**options))
    return str(caught.value)


def blend_file(folder: Path, content: object) -> str:
    path = folder / "blend.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_paths_without_weights_are_one_source() -> None:
    (source,) = training_sources(Options(data=("a", "b")))
    assert (source.name, source.paths, source.weight) == ("a, b", ("a", "b"), 1)
    assert training_sources(Options())[0].paths == ()


def test_weights_are_decimal_fractions() -> None:
    sources = training_sources(Options(data=("a=0.7", "b=.2", "c=1e-1")))
    assert [source.weight for source in sources] == [Fraction(7, 10), Fraction(1, 5), Fraction(1, 10)]
    assert [source.paths for source in sources] == [("a",), ("b",), ("c",)]


def test_thirds_with_six_digits_are_meant_well_and_made_exact() -> None:
    sources = training_sources(Options(data=("a=0.333333", "b=0.333333", "c=0.333333")))
    assert [source.weight for source in sources] == [Fraction(1, 3)] * 3


def test_a_file_whose_name_ends_in_a_number_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "year=2020"
    path.mkdir()
    assert training_sources(Options(data=(str(path),)))[0].paths == (str(path),)
    assert training_sources(Options(data=("lang=en/part",)))[0].paths == ("lang=en/part",)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (("a=0.7", "b=0.2"), r"0.7 \+ 0.2.*add up to 0.9, not 1.*a 0.777778, b 0.222222"),
        (("a=70", "b=30"), "add up to 100, not 1"),
        (("a=1.5", "b=-0.5"), "b=-0.5.*a weight is above 0"),
        (("a=1", "b=0"), "b=0.*a weight is above 0"),
        (("a=0.5", "b"), "'b': has no weight, and other paths have one"),
        (("a=0.5", "a=0.5"), "'a': is named twice"),
    ],
)
def test_wrong_weights(data: tuple[str, ...], said: str) -> None:
    assert re.search(said, refusal(data=data))


def test_a_blend_file_names_sources_of_several_paths(tmp_path: Path) -> None:
    path = blend_file(
        tmp_path,
        """{"sources": [ // shares of the samples
            {"name": "books", "data": ["one", "two"], "weight": 0.75},
            {"data": "code", "weight": 0.25},
        ]}""",
    )
    books, code = training_sources(Options(data_blend=path))
    assert (books.name, books.paths, books.weight) == ("books", ("one", "two"), Fraction(3, 4))
    assert (code.name, code.paths, code.weight) == ("code", ("code",), Fraction(1, 4))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "blend.json:1"),
        ({}, "sources .*is required"),
        ({"sources": []}, "sources .*must not be empty"),
        ({"source": [{"data": "a", "weight": 1}]}, "no such key. The nearest name is sources"),
        ({"sources": ["a"]}, r"sources\[0\].*must be an object"),
        ({"sources": [{"data": "a"}]}, r"sources\[0\].weight .*= None: is required"),
        ({"sources": [{"data": "a", "weight": "1"}]}, "must be a number"),
        ({"sources": [{"data": "a", "weight": True}]}, "must be a number"),
        (
            {"sources": [{"data": [], "weight": 1}]},
            r"sources\[0\].data \(.*blend.json:1\).*must not be empty",
        ),
        ({"sources": [{"data": "a", "weight": 1, "wieght": 2}]}, "no such key. The nearest name is weight"),
        ({"sources": [{"data": "a", "weight": 1, "name": ""}]}, "must not be empty"),
        ({"sources": [{"data": "a", "weight": 2}, {"data": "b", "weight": -1}]}, "a weight is above 0"),
        (
            {
                "sources": [
                    {"name": "n", "data": "a", "weight": 0.5},
                    {"name": "n", "data": "b", "weight": 0.5},
                ]
            },
            "is named twice",
        ),
    ],
)
def test_wrong_blend_files(content: object, said: str, tmp_path: Path) -> None:
    assert re.search(said, refusal(data_blend=blend_file(tmp_path, content)))


def test_several_mistakes_of_a_blend_file_are_all_said(tmp_path: Path) -> None:
    path = blend_file(tmp_path, {"sources": [{"data": 3, "weight": "x"}, 4], "other": 1})
    with pytest.raises(JobError) as caught:
        training_sources(Options(data_blend=path, data=("a",)))
    assert len(caught.value.problems) == 5


def test_a_missing_blend_file_is_named(tmp_path: Path) -> None:
    said = refusal(data_blend=str(tmp_path / "none.json"))
    assert "none.json" in said
    assert "there is no such file" in said
    assert "a JSON of sources and weights" in said


def test_validation_sets_by_name() -> None:
    sets = validation_sets(Options(validation=("books=a=b.txt", "code=c", "books=d")))
    assert [(each.name, each.paths) for each in sets] == [("books", ("a=b.txt", "d")), ("code", ("c",))]


@pytest.mark.parametrize("entry", ["books", "=a", "books=", "a/b=c", "-x=c"])
def test_wrong_validation_sets(entry: str) -> None:
    with pytest.raises(JobError, match="is not NAME=PATH"):
        validation_sets(Options(validation=(entry,)))


def test_paths_of_every_source_and_set_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    here, gone = str(tmp_path / "a.txt"), str(tmp_path / "gone.txt")
    sets = {"data": (f"{here}=0.5", f"{gone}=0.5"), "validation": (f"v={gone}x",)}
    problems = [(problem.key, problem.value) for problem in draft(tmp_path, {}, **sets).errors]
    assert problems == [("data", gone), ("validation", f"{gone}x")]


def test_a_wrong_blend_hides_no_problem_of_a_validation_set(tmp_path: Path) -> None:
    sets = {"data": ("a=0.5", "b"), "validation": (f"v={tmp_path}/gone",)}
    assert [problem.key for problem in draft(tmp_path, {}, **sets).errors] == ["data", "validation"]


def test_what_is_held_out_by_default() -> None:
    assert Options().held_out_fraction == 0.05
    assert Options(validation=("a=b",)).held_out_fraction == 0
    assert Options(validation=("a=b",), eval_fraction=0.1).held_out_fraction == 0.1
    assert Options(eval_samples=0).held_out_fraction == 0
