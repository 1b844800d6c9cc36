"""``python docs/picture.py CONSOLE.log docs/run.svg``: a run's console as the README's picture.

    ./launch.sh --output_dir runs/picture | tee console.log
    python docs/picture.py console.log docs/run.svg

The job's tables and long stretches of steps are left out, which a line of dots says; nothing else is changed.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COMMAND = "$ ./launch.sh"
WIDTH = 132
# The check's last line: the tables stand before it.
CHECKED = "This job can start."
# Lines of steps and evaluations shown at the beginning and at the end of each stretch.
FIRST, LAST = 3, 2
_STEP = re.compile(r"step +\d+/\d+ \| ")
# rich's own template loads its fonts from the network; whoever looks at the picture has a monospaced one.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 16px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def shortened(lines: Sequence[str]) -> Iterator[str]:
    """The lines, with dots for the job's tables and for the middle of each stretch of steps."""
    if CHECKED in lines:
        lines = ["...", *lines[lines.index(CHECKED) :]]
    for is_step, stretch in itertools.groupby(lines, lambda line: _STEP.match(line) is not None):
        found = list(stretch)
        if is_step and len(found) > FIRST + LAST:
            found[FIRST:-LAST] = ["..."]
        yield from found


def picture(text: str) -> str:
    """An SVG of a terminal that shows `text` below the command."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(COMMAND, style="bold green"))
    for line in shortened([line.rstrip() for line in text.splitlines()]):
        console.print(Text(line))
    return console.export_svg(
        title="gpt-pretraining-pipeline", theme=MONOKAI, code_format=SVG, unique_id="run"
    )


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(Path, arguments)
    target.write_text(picture(source.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
