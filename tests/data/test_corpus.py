import gzip
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pipeline.base.problems import JobError
from pipeline.data.corpus import data_problems, find_corpus
from pipeline.data.records import ReadPosition, read_tasks


def write(folder: Path, **files: str) -> Path:
    """Make files; in their names a double underscore stands for a slash, a single one for a dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def read(path: Path) -> list[object]:
    files = find_corpus([str(path)]).files
    return [
        record
        for task in read_tasks(files, "text", ReadPosition(), cut_long_texts=True)
        for record in task.records
    ]


def listed(folder: Path, *paths: str) -> list[str]:
    return [os.path.relpath(file.path, folder) for file in find_corpus(paths or (str(folder),)).files]


def test_folders_are_searched_recursively_in_a_fixed_order(tmp_path: Path) -> None:
    write(tmp_path, b_txt="b", a__z_md="z", a__a_PY="a", c_json="{}", a__deep__x_rst="x")
    write(tmp_path / ".git", config_txt="hidden")
    (tmp_path / ".hidden.txt").write_text("hidden")
    assert listed(tmp_path) == ["b.txt", "a/a.PY", "a/z.md", "a/deep/x.rst"]
    assert find_corpus([str(tmp_path)]).left_out == {"hidden": 2, ".json without an object on each line": 1}


def test_order_is_not_that_of_the_disk(tmp_path: Path) -> None:
    names = [f"{letter}/{number}.txt" for letter in "dbeacfg" for number in (3, 1, 2)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert listed(tmp_path) == sorted(names)


def test_order_follows_the_arguments(tmp_path: Path) -> None:
    write(tmp_path, one__b_txt="b", one__a_txt="a", two_txt="2", plain="no suffix")
    paths = [str(tmp_path / name) for name in ("two.txt", "one", "plain")]
    assert listed(tmp_path, *paths) == ["two.txt", "one/a.txt", "one/b.txt", "plain"]


def test_a_file_counts_once_and_empty_ones_are_named(tmp_path: Path) -> None:
    write(tmp_path, a_txt="a", b_txt="")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    corpus = find_corpus([str(tmp_path), str(tmp_path / "a.txt")])
    assert [Path(file.path).name for file in corpus.files] == ["a.txt"]
    assert [(Path(s.path).name, s.reason.split(" /")[0]) for s in corpus.skipped] == [
        ("b.txt", "empty"),
        ("link.txt", "the same file as"),
        ("a.txt", "the same file as"),
    ]


def test_what_this_program_writes_is_never_its_input(tmp_path: Path) -> None:
    write(tmp_path, a_txt="a", own__metrics_jsonl="{}\n{}\n", own__data__x_txt="x", old__run_json="{}")
    write(tmp_path, old__metrics_jsonl="{}\n{}\n", tok_bin="", tok_idx="", tok_json="{}\n{}\n", tok_txt="t")
    write(tmp_path, tok_tokenizer__vocab_txt="v", model__config_json="{}", model__model_safetensors="")
    write(tmp_path, model__README_md="generated")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    corpus = find_corpus([str(tmp_path)], [str(tmp_path / "own")])
    assert [Path(file.path).name for file in corpus.files] == ["a.txt", "tok.txt"]
    assert corpus.left_out == {
        "folder that this run writes to": 1,
        "folder of a run": 1,
        "folder of a model": 1,
        "of token files, which are named by their PREFIX": 4,
    }
    for wrong, written in (("old", ()), ("own", (str(tmp_path / "own"),))):
        (problem,) = data_problems([str(tmp_path / wrong)], written)
        assert re.search(r"holds no file .*\(left out: 1 folder (of a|that this) run", problem.rule)


def test_links_are_followed_once_and_come_last(tmp_path: Path) -> None:
    write(tmp_path, data__b__x_txt="x", data__z_txt="z", other__deep__o_txt="o")
    links = {
        "data/a": "data/b",
        "data/c": "other",
        "other/up": ".",
        "data/gone.txt": "gone",
        "data/d": "data/d",
    }
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    os.mkfifo(tmp_path / "data/pipe.txt")
    corpus = find_corpus([str(tmp_path / "data")])
    found = [os.path.relpath(file.path, tmp_path / "data") for file in corpus.files]
    assert found == ["z.txt", "b/x.txt", "c/deep/o.txt"]
    assert corpus.left_out == {"without a file behind the name": 3}


@pytest.mark.parametrize(
    ("content", "in_folder", "by_name"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', True, True),
        ('\n{"text": "a"}\n', False, True),
        ('{"text": "a"}', False, True),
        ('{\n  "text": "a"\n}\n', False, False),
        ('[{"text": "a"},\n{"text": "b"}]', False, False),
        ('{"text": "a"}\n[]\n', False, False),
    ],
)
def test_json_is_read_where_each_line_has_an_object(
    tmp_path: Path, content: str, in_folder: bool, by_name: bool
) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.json").write_text(content)
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(content.encode()))
    assert listed(tmp_path) == (["a.txt", "b.json", "c.json.gz"] if in_folder else ["a.txt"])
    problems = data_problems([str(tmp_path / "b.json"), str(tmp_path / "c.json.gz")])
    assert ["one JSON object on each line" in problem.rule for problem in problems] == [True, True] * (
        not by_name
    )


def test_the_check_notes_what_a_folder_holds_beside_data(tmp_path: Path) -> None:
    write(tmp_path, a_txt="a", b_csv="b", c_csv="c", README="d", e_tar_gz="e")
    (note,) = data_problems([str(tmp_path)])
    assert (note.severity, note.rule) == ("note", "left out: 2 .csv, 1 .tar.gz, 1 without a known ending")


def test_a_path_names_one_thing_and_token_files_are_two(tmp_path: Path) -> None:
    write(tmp_path, words__a_txt="a", words_bin="", words_idx="", half_bin="")
    (two,) = data_problems([str(tmp_path / "words")])
    assert "names two things: this folder" in two.rule and f"{tmp_path}/words/ for the folder" in two.remedy
    assert data_problems([f"{tmp_path}/words/", f"{tmp_path}/words.idx"]) == ()
    (half,) = data_problems([str(tmp_path / "half.bin")])
    assert "half.idx is missing" in half.rule


def test_every_wrong_path_is_reported_at_once(tmp_path: Path) -> None:
    write(tmp_path, data_csv="a,b", only__x_bin="x", good_txt="text")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "binary.txt").write_bytes(b"ab\xff")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    names = ["missing", "data.csv", "only", "good.txt", "pipe.txt", "binary.txt", "loop", "x" * 5000]
    paths = [str(tmp_path / name) for name in names]
    with pytest.raises(JobError) as caught:
        find_corpus(paths)
    found = {Path(str(problem.value)).name: problem.rule for problem in caught.value.problems}
    assert found.keys() == set(names) - {"good.txt"}
    assert "does not exist" in found["missing"]
    assert ".csv is not one of those that are read" in found["data.csv"]
    assert "holds no file with one of the suffixes" in found["only"]
    assert "is no file or folder" in found["pipe.txt"]
    assert "is not UTF-8 text: byte 0xff at position 2" in found["binary.txt"]
    assert "does not exist" in found["loop"] and "does not exist" in found["x" * 5000]
    assert data_problems(paths) == caught.value.problems
    assert all(problem.key == "data" and problem.remedy for problem in caught.value.problems)


def test_only_empty_files_are_no_corpus(tmp_path: Path) -> None:
    write(tmp_path, a_txt="")
    with pytest.raises(JobError, match=r"there is no text in it .*a\.txt: empty"):
        find_corpus([str(tmp_path)])
    (problem,) = data_problems([str(tmp_path / "a.txt")])
    assert "there is no text in it" in problem.rule


def test_a_character_cut_by_the_look_at_the_beginning_is_text(tmp_path: Path) -> None:
    write(tmp_path, a_txt="x" + "\u00e9" * 40_000)
    assert data_problems([str(tmp_path / "a.txt")]) == ()


def test_byte_order_mark_is_no_text_and_line_ends_stay(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert read(tmp_path / "a.txt") == ["one\r\ntwo\n"]


@pytest.mark.parametrize("change", ["longer", "touched", "gone"])
def test_a_file_that_changes_under_the_run_is_an_error(tmp_path: Path, change: str) -> None:
    path = write(tmp_path, a_txt="before") / "a.txt"
    (file,) = find_corpus([str(path)]).files
    if change == "longer":
        path.write_text("and after")
    elif change == "touched":
        os.utime(path, ns=(0, 0))
    else:
        path.unlink()
    with pytest.raises(JobError, match=r"a\.txt.*(changed while|cannot be read \(No such file)"):
        list(read_tasks([file], "text", ReadPosition(), cut_long_texts=True))


def test_default_is_the_standard_library_without_tests_and_packages() -> None:
    corpus = find_corpus(())
    root = sysconfig.get_path("stdlib")
    names = {os.path.relpath(file.path, root) for file in corpus.files}
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    assert not {Path(name).parts[0] for name in names} & {"site-packages", "test", "idlelib", "encodings"}
    assert all(name.endswith(".py") for name in names)
    assert 3_000_000 < sum(file.size for file in corpus.files) < 30_000_000
    assert corpus == find_corpus(())
    assert not corpus.skipped


def test_nothing_here_imports_torch() -> None:
    code = "import sys, pipeline.data.training_data; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode
        == 0
    )
