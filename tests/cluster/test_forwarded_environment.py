"""The files from which the launcher sets variables: what breaks it is refused, and no value is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster.forwarded_environment import ENV_FILE, deepspeed_env

SECRET = "hunter2"


def read(tmp_path: Path, text: str, launcher: str | None = None):
    (tmp_path / ENV_FILE).write_text(text)
    return deepspeed_env(tmp_path, tmp_path, {}, launcher)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (f"# TOKEN={SECRET}", "start nothing, and call that success"),
        ("# a comment", "start nothing"),
        ("", "stops at an empty line"),
        ("   ", "stops at an empty line"),
        (SECRET.upper(), "a line is NAME=VALUE"),
        (f"export TOKEN={SECRET}", "'export TOKEN' is not a variable's name"),
        (f"1TOKEN={SECRET}", "is not a variable's name"),
        (f'TOKEN="{SECRET}"', "passes through a shell"),
        (f"TOKEN=${SECRET}", "passes through a shell"),
        (f"TOKEN=`{SECRET}`", "passes through a shell"),
        (f"TOKEN=\\{SECRET}", "passes through a shell"),
        (f"TOKEN={SECRET}\u2028B=1", "the character U+2028"),
        (f"TOKEN={SECRET}\x00", "the character U+0000"),
    ],
)
def test_lines_that_the_launcher_breaks_on(tmp_path: Path, line: str, rule: str) -> None:
    variables, (problem,) = read(tmp_path, f"GOOD=1\n{line}\nLAST=2\n")
    assert variables == {"GOOD": "1", "LAST": "2"}
    assert problem.key == f"{tmp_path / ENV_FILE} line 2"
    assert rule in problem.rule
    assert SECRET not in str(problem)


def test_good_lines(tmp_path: Path) -> None:
    variables, problems = read(tmp_path, "NCCL_SOCKET_IFNAME=eth0\nA=b=c d\nEMPTY=\n")
    assert (variables, problems) == ({"NCCL_SOCKET_IFNAME": "eth0", "A": "b=c d", "EMPTY": ""}, [])


def test_a_blank_in_a_value_needs_a_shell(tmp_path: Path) -> None:
    assert read(tmp_path, "A=b c\n", "pdsh")[1] == []
    assert "with openmpi no shell" in read(tmp_path, "A=b c\n", "openmpi")[1][0].rule


def test_the_current_folder_wins_over_home_and_the_name_can_be_another(tmp_path: Path) -> None:
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    for folder, value in ((home, "1"), (cwd, "2")):
        folder.mkdir()
        (folder / "vars").write_text(f"A={value}\n{folder.name.upper()}={value}\n")
    assert deepspeed_env(home, cwd, {"DS_ENV_FILE": "vars"})[0] == {"A": "2", "HOME": "1", "CWD": "2"}
    assert deepspeed_env(home, cwd, {}) == ({}, [])


def test_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / ENV_FILE).write_bytes(b"\xff\xfe")
    assert "cannot be read" in deepspeed_env(tmp_path, tmp_path, {})[1][0].rule
