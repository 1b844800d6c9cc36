"""Commands whose reader leaves, and what their help says of them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.base.command import show_messages

ROOT = Path(__file__).parents[2]


def first_line(*arguments: str) -> tuple[str, str, int]:
    """What a reader that leaves after one line gets, what is on standard error, and the exit code."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, **pipes) as process:
        line = process.stdout.readline()
        process.stdout.close()
        return line, process.stderr.read(), process.wait(60)


@pytest.mark.parametrize("command", ["check", "reshard"])
def test_help_names_the_command_and_a_reader_may_leave(command: str) -> None:
    line, errors, _ = first_line("-m", f"pipeline.{command}", "--help")
    assert line.startswith(f"usage: python -m pipeline.{command} ") and line.endswith("[options]\n")
    assert errors == ""


@pytest.mark.parametrize("flush", ["", ", flush=True"])
def test_a_command_whose_reader_has_left_ends_with_1(flush: str) -> None:
    write = f"[print('line'{flush}) for _ in range(100_000)]"
    script = f"from pipeline.base.command import run_command\nrun_command(lambda: {write} and 0)"
    assert first_line("-c", script) == ("line\n", "", 1)


@pytest.mark.parametrize("code", [0, 2])
def test_a_commands_code_is_the_process_code(code: int) -> None:
    script = f"from pipeline.base.command import run_command\nrun_command(lambda: print('line') or {code})"
    assert first_line("-c", script) == ("line\n", "", code)


@pytest.mark.parametrize(
    ("shell", "code", "says"),
    [
        ("{} >&-", 0, ""),
        ("{} <&- >&- 2>&-", 0, ""),
        ("{} --nope 2>&-", 2, ""),
        ("{} >/dev/full", 1, "error: No space left on device\n"),
        ("{} --data nothing >/dev/full", 1, "error: No space left on device\n"),
        (
            "mkdir gone && cd gone && rmdir ../gone && {}",
            2,
            "error: the current folder cannot be used (No such file or directory): change to one that "
            "exists.\n",
        ),
    ],
)
def test_what_a_shell_may_take_from_a_command(shell: str, code: int, says: str, tmp_path: Path) -> None:
    check = f"{sys.executable} -m pipeline.check --world_size 2 --model tiny --output_dir {tmp_path}/run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        shell.format(check),
        shell=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, says)


def test_what_modules_log_is_shown_by_the_last_who_asked() -> None:
    first, second, narrow = [], [], []
    try:
        show_messages(first.append, "pipeline.tried")
        show_messages(second.append, "pipeline.tried")
        show_messages(narrow.append, "pipeline.tried.inner")
        logging.getLogger("pipeline.tried").info("outer")
        logging.getLogger("pipeline.tried.inner").info("inner")
        logging.getLogger("pipeline.tried.inner").debug("detail")
    finally:
        for name in ("pipeline.tried", "pipeline.tried.inner"):
            logging.getLogger(name).handlers.clear()
    assert (first, second, narrow) == ([], ["outer", "inner"], ["inner"])
