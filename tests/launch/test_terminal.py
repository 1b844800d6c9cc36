"""What one sees of a run: in a real terminal of 80 or 60 columns, and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pytest

from pipeline.cluster.rank_environment import free_port

RANK = Path(__file__).with_name("terminal_rank.py")
PLACE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}
BAR = re.compile(r"[━╸╺]+ \d+/10000  loss .*")
_PIECE = re.compile(r"\x1b\[(\d*)([AK])|\x1b\[\?25[lh]|\x1b\[[\d;]*m|([\r\n])|([^\x1b\r\n]+)")


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return inherited | PLACE | {"MASTER_PORT": str(free_port())}


def in_terminal(columns: int, command: list[str]) -> str:
    """What it writes to a terminal of that width."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment() | {"TERM": "xterm"}
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # nobody has the other end any more
            break
        seen += piece
    os.close(leader)
    assert process.wait(20) == 1
    return seen.decode()


def lines_of(seen: str) -> tuple[list[str], list[str]]:
    """The lines that stay on the screen, as they were sent, and all that ever stood in one."""
    lines, row, column, ever = [""], 0, 0, []
    for number, command, move, text in (match.groups() for match in _PIECE.finditer(seen)):
        if text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
            ever.append(lines[row])
        elif move == "\r":
            column = 0
        elif move == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif command == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif command == "A":
            row -= int(number or 1)
    return [line for line in lines if line], ever


@pytest.mark.parametrize("columns", [80, pytest.param(60, marks=pytest.mark.slow)])
def test_nothing_is_glued_and_all_of_it_fits(columns: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a path is not broken
        seen = in_terminal(columns, [sys.executable, str(RANK), folder])
    lines, ever = lines_of(seen)
    assert max(map(len, ever)) <= columns, [line for line in ever if len(line) > columns]
    # The clock moves, and leaves one line.
    assert len({line for line in ever if re.fullmatch(r"reading data: \d+ s", line)}) > 1
    assert sum(line.startswith("reading data: ") for line in lines) == 1
    for whole in ("tokenizing 473 files", "a line of a library's native code"):
        assert whole in lines, lines
    assert any(BAR.fullmatch(line) for line in ever)
    assert not any(BAR.search(line) for line in lines[:-1])
    assert [line.split(" | ")[0] for line in lines if line.startswith("step ")] == [
        f"step {step:5}/10000" for step in (1, 5, 10)
    ]
    at = next(number for number, line in enumerate(lines) if line.startswith("to resume:"))
    command = " ".join(line.strip().removesuffix(" \\") for line in lines[at + 1 :])
    assert command.startswith("./launch.sh --num_gpus 2 --config runs/tiny/run.json --output_dir runs/tiny ")
    assert any(line.startswith("rank 0 on ") for line in lines[at:])
    assert "Traceback" not in seen


def test_a_pipe_gets_lines_and_nothing_to_draw_with(tmp_path: Path) -> None:
    command = [sys.executable, str(RANK), str(tmp_path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=60
    )
    assert not re.search(r"[\r\x1b]| $", done.stdout, re.MULTILINE)
    lines = done.stdout.splitlines()
    at = lines.index("reading data ...")
    assert lines[at + 1] == "tokenizing 473 files"
    assert len([line for line in lines if re.fullmatch(r"reading data: \d+ s", line)]) == 1
    assert "to resume: ./launch.sh --num_gpus 2 --config runs/tiny/run.json --output_dir runs/tiny" in lines
    assert lines[-1].endswith("/rank_00000.log")
    assert lines[-2].endswith("OSError: no space left on a device that has a long name, and more of it than "
                              "fits a line of 80")  # fmt: skip
