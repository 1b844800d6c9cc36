"""launch.sh: which Python it takes, and its set-up."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def launch_sh(tmp_path: Path, pythons: dict[str, str]) -> subprocess.Popen:
    """launch.sh --setup_only by a link, with nothing on the PATH but a shell and the given pythons."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "readlink"):
        (tools / tool).symlink_to(shutil.which(tool))
    for name, script in pythons.items():
        (tools / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
        (tools / name).chmod(0o755)
    shutil.copy(ROOT / "launch.sh", tmp_path)
    (tools / "train").symlink_to("../launch.sh")
    line = [str(tools / "bash"), str(tools / "train"), "--setup_only"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, env={"PATH": str(tools)}, text=True, **pipes)


def run_launch_sh(tmp_path: Path, pythons: dict[str, str]) -> tuple[int, str]:
    """Its exit code and what it says."""
    process = launch_sh(tmp_path, pythons)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_another_projects_pipeline_in_the_current_folder_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").write_text("raise SystemExit(77)")
    last_line = (ROOT / "launch.sh").read_text(encoding="utf-8").splitlines()[-1]
    script = f"root={ROOT}\n{last_line.replace('$root/.venv/bin/python', sys.executable)}"
    line = ["bash", "-c", script, "launch.sh", "--train_steps", "0"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "train_steps = 0" in done.stderr


def test_only_the_pinned_packages_are_used(tmp_path: Path) -> None:
    """Whatever the shell says of Python, and whatever the current folder has that is named as a module is."""
    for folder in ("cwd", "modules"):
        (tmp_path / folder).mkdir()
        for name in ("random", "queue", "json", "numpy"):
            (tmp_path / folder / f"{name}.py").write_text("raise SystemExit(77)")
    script = (ROOT / "launch.sh").read_text(encoding="utf-8")
    script = f"root={ROOT}\nfor name in PYTHONPATH{script.partition('for name in PYTHONPATH')[2]}"
    started = '"$root/.venv/bin/python" "$root/pipeline/launch/launch.py"'
    assert started in script
    # As the launcher is started: with -m, or -c, the current folder would come first.
    look = "import json, queue, random, site; print(site.ENABLE_USER_SITE)"
    script = script.replace(started, f"{sys.executable} -c '{look}'")
    given = {"PYTHONPATH": str(tmp_path / "modules"), "PYTHONHOME": "/nowhere", "PYTHONSTARTUP": "x"}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path / "cwd",
        env={"PATH": "/usr/bin:/bin", **given},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "False\n"
    for name, value in given.items():
        assert f"note: {name}={value} is not used" in done.stderr


OLD_PYTHON = 'if [ "$1" = -V ]; then echo Python 3.9.1; else exit 1; fi'
NO_VENV_PYTHON = 'case "$*" in *ensurepip*) exit 1;; esac'


@pytest.mark.parametrize(
    ("pythons", "message"),
    [
        ({}, "there is no python3 on the PATH"),
        ({"python3": OLD_PYTHON}, "python3 is Python 3.9.1"),
        ({"python3": NO_VENV_PYTHON}, "apt-get install python3-venv"),
        ({"python3": OLD_PYTHON, "python3.12": NO_VENV_PYTHON}, "python3.12 cannot make virtual env"),
    ],
)
def test_a_machine_without_a_fitting_python_is_told_what_to_do(
    tmp_path: Path, pythons: dict[str, str], message: str
) -> None:
    code, said = run_launch_sh(tmp_path, pythons)
    assert code == 1
    assert message in said


@pytest.mark.parametrize("start", [["-m", "pipeline.check"], ["pipeline/pretrain.py"]], ids=" ".join)
def test_a_python_that_cannot_run_it_is_told_so_by_every_command(start: list[str], tmp_path: Path) -> None:
    """An old one as by launch.sh, and one without the packages."""
    version = "import sys; sys.version_info = (3, 9, 1); sys.version = '3.9.1 x'"
    (tmp_path / "sitecustomize.py").write_text(version)
    for isolated, rule in (
        ([], "Python 3.10 or newer is needed; "),
        (["-S"], "the packages of this project"),
    ):
        done = subprocess.run(
            [sys.executable, *isolated, *start], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 1 and done.stderr.startswith(f"error: {rule}"), done.stderr
        assert sys.executable in done.stderr


@pytest.mark.parametrize("path", ["pipeline/__init__.py", "pipeline/pretrain.py"])
def test_an_old_python_can_read_as_far_as_that_sentence(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 7))
    assert "from __future__" not in source, "Python 3.6 has no postponed annotations"


def test_a_newer_python_beside_an_old_one_is_found(tmp_path: Path) -> None:
    good = f'case "$*" in *install.py*) echo "install $*" > {tmp_path}/called;; esac'
    assert run_launch_sh(tmp_path, {"python3": OLD_PYTHON, "python3.11": good})[0] == 0
    assert (tmp_path / "called").read_text().strip().endswith(f"install.py {tmp_path}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_the_set_up_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    called = tmp_path / "called"
    slow = f'case "$*" in *install.py*) echo $$ > {called}; exec {shutil.which("sleep")} 60;; esac'
    process = launch_sh(tmp_path, {"python3": slow})
    while not (called.exists() and called.read_text()):
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (3, "Stopped before anything was started.\n")
    assert not psutil.pid_exists(int(called.read_text()))


def test_a_set_up_that_fails_starts_nothing(tmp_path: Path) -> None:
    failing = 'case "$*" in *install.py*) exit 7;; esac'
    assert run_launch_sh(tmp_path, {"python3": failing}) == (7, "")
