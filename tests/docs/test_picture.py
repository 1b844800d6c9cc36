"""The picture of a run: drawn from its console, whole but for the middle of its steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
CONSOLE = "\n".join(
    [
        "starting at step 0",
        *(f"step {step:4}/100 | loss {5 - step / 100:.4f}" for step in range(1, 101)),
        "finished",
    ]
)


def words(svg: str) -> str:
    return " ".join("".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ").split())


def test_a_console_becomes_a_picture(tmp_path: Path) -> None:
    log, target = tmp_path / "console.log", tmp_path / "run.svg"
    log.write_text(CONSOLE)
    command = [sys.executable, str(ROOT / "docs" / "picture.py"), str(log), str(target)]
    subprocess.run(command, check=True)
    shown = words(target.read_text(encoding="utf-8"))
    for line in ("$ ./launch.sh", "starting at step 0", "step 1/100 | loss 4.9900", "...", "finished"):
        assert line in shown, line
    assert "step 100/100 | loss 4.0000" in shown
    assert "step 50/100" not in shown


def test_the_picture_of_the_readme_needs_no_network() -> None:
    svg = (ROOT / "docs" / "run.svg").read_text(encoding="utf-8")
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert "validation loss" in words(svg)
