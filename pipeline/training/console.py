"""What rank 0 says while it trains. The other ranks have a `NullConsole` and say nothing.

In a terminal the last line is live from the first step on: it is redrawn with each one, other lines scroll
past above it, and all keep to the terminal's width. Everywhere else (a pipe, a file, a CI log) the same
facts come as plain lines, without control characters, whatever the environment says about colour.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import IO, Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from pipeline.base.command import show_messages
from pipeline.base.words import wrapped
from pipeline.training.metrics import EvalMetrics, StepMetrics

# Redrawing costs about a millisecond; a step of a tiny model takes ten.
REDRAWS_PER_SECOND = 10
# Columns of a terminal that nobody has made narrower.
USUAL_WIDTH = 80
# Steps that the remaining time is estimated from: few enough to follow a change of pace.
PACE_STEPS = 50
# Modules that act for a host, or for all: the rank that does the work says what comes of it.
WORK_OF_A_HOST = ("pipeline.data.preparation", "pipeline.checkpoints.folder", "pipeline.checkpoints.saver")


class Console(Protocol):
    """What the job says things to; on every rank, so that no caller asks for its rank."""

    def start(self, lines: Iterable[str]) -> None:
        """Describe the job, one line per fact, then begin to show progress."""

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluation(self, metrics: EvalMetrics) -> None: ...

    def message(self, text: str) -> None:
        """Say something once, above the progress line."""

    def finish(self, lines: Iterable[str] = ()) -> None:
        """End the progress line and say the last lines. May be called twice, and after a failure."""


def make_console(
    rank: int, *, total_steps: int, log_interval: int, resume_step: int = 0, file: IO[str] | None = None
) -> Console:
    """The console of `rank`: live in a terminal, plain lines elsewhere, silent on other ranks.

    Args:
        rank: Global rank; 0 speaks.
        total_steps: The step at which the job is finished.
        log_interval: A log line every so many steps.
        resume_step: Steps taken before this start.
        file: Where to write; standard output if None.
    """
    if rank != 0:
        return NullConsole()
    stream = sys.stdout if file is None else file
    # Not rich's idea of a terminal, which FORCE_COLOR in a CI's environment turns on for a pipe.
    live = stream.isatty() and not RichConsole(file=stream).is_dumb_terminal
    kind = LiveConsole if live else PlainConsole
    return kind(stream, total_steps=total_steps, log_interval=log_interval, resume_step=resume_step)


def show_job(console: Console, rank: int) -> None:
    """Give what the pipeline's modules log to `console`, on rank 0. The others are quiet until they fail, but
    for modules that do the work of a host on whichever of its ranks comes first."""
    if rank == 0:
        show_messages(console.message)
        return
    for module in WORK_OF_A_HOST:
        show_messages(partial(print, flush=True), module)


class NullConsole:
    """Says nothing."""

    def start(self, lines: Iterable[str]) -> None:
        pass

    def step(self, metrics: StepMetrics) -> None:
        pass

    def evaluation(self, metrics: EvalMetrics) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def finish(self, lines: Iterable[str] = ()) -> None:
        pass


class PlainConsole:
    """One line per `log_interval` steps, evaluation and message; each is flushed at once."""

    def __init__(self, stream: IO[str], *, total_steps: int, log_interval: int, resume_step: int = 0) -> None:
        self._stream = stream
        self._total = total_steps
        self._interval = log_interval
        self._first = resume_step + 1
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._lost = False

    def start(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.message(line)

    def step(self, metrics: StepMetrics) -> None:
        self._pace.append(metrics.step_time)
        if self._is_logged(metrics):
            self.message(step_line(metrics, self._total, self._remaining(metrics.step), self._width))

    def evaluation(self, metrics: EvalMetrics) -> None:
        self.message(evaluation_line(metrics, self._total))

    def message(self, text: str) -> None:
        self._show(lambda: self._write(text))

    def _show(self, write: Callable[[], None]) -> None:
        """Write, unless the terminal or pipe is gone: a run outlives its display, the files have it all."""
        if self._lost:
            return
        try:
            write()
        except OSError:
            self._lost = True

    def _write(self, text: str) -> None:
        print(printable(text, self._stream), file=self._stream, flush=True)

    def finish(self, lines: Iterable[str] = ()) -> None:
        for line in lines:
            self.message(line)

    @property
    def _width(self) -> int | None:
        """Columns of a line; None: as many as it takes."""
        return None

    def _is_logged(self, metrics: StepMetrics) -> bool:
        """Also the first and the last step, and what a reader must not miss: a skipped one."""
        return (
            metrics.step % self._interval == 0
            or metrics.step in (self._first, self._total)
            or metrics.skipped
        )

    def _remaining(self, step: int) -> float:
        """Seconds to the last step, at the mean pace of the last steps. The first of a start is slow
        (kernels are chosen, memory is allocated), so it counts only until there is another."""
        paces = list(self._pace)
        if step - self._first < PACE_STEPS and len(paces) > 1:
            paces = paces[1:]
        return (self._total - step) * sum(paces) / len(paces)


class LiveConsole(PlainConsole):
    """The plain lines, above one line that is redrawn in place."""

    def __init__(self, stream: IO[str], *, total_steps: int, log_interval: int, resume_step: int = 0) -> None:
        super().__init__(stream, total_steps=total_steps, log_interval=log_interval, resume_step=resume_step)
        self._rich = RichConsole(file=stream, force_terminal=True, highlight=False)
        # No refresh thread: threads and forked data workers do not go together.
        bar = 20 if self._rich.width >= USUAL_WIDTH else 8
        self._progress = Progress(
            BarColumn(bar_width=bar),
            TextColumn("{task.description}", markup=False),
            console=self._rich,
            auto_refresh=False,
            transient=True,
        )
        self._text_width = self._rich.width - bar - 1
        self._task = self._progress.add_task("", total=total_steps)
        self._drawn = 0.0

    @property
    def _width(self) -> int:
        return self._rich.width

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        text = progress_text(metrics, self._total, self._remaining(metrics.step), self._text_width)
        self._progress.update(self._task, completed=metrics.step, description=text)
        if not self._progress.live.is_started:  # before, the launch shows how long the start takes
            self._show(self._begin)
        now = time.monotonic()
        if now - self._drawn >= 1 / REDRAWS_PER_SECOND or metrics.step == self._total:
            self._show(self._progress.refresh)
            self._drawn = now

    def _begin(self) -> None:
        self._progress.start()
        self._rich.show_cursor(True)  # a killed job must not leave the terminal without one
        self._progress.refresh()

    def _write(self, text: str) -> None:
        self._rich.print(Text(wrapped(printable(text, self._stream), self._width)), soft_wrap=True)

    def finish(self, lines: Iterable[str] = ()) -> None:
        self._show(self._progress.stop)
        super().finish(lines)


def step_line(metrics: StepMetrics, total_steps: int, remaining: float, columns: int | None = None) -> str:
    """The log line of a step; `remaining` in seconds. In few `columns` it leaves out what counts least:
    all of it is in metrics.jsonl."""
    width = len(str(total_steps))
    parts = {
        "step": f"step {metrics.step:>{width}}/{total_steps}",
        "loss": f"loss {metrics.loss:.4f}",
        "norm": f"{'grad ' if columns is None or columns > 100 else ''}norm {metrics.grad_norm:.3f}",
        "lr": f"lr {metrics.lr:.2e}",
        "tokens": f"{metrics.tokens_per_second:,.0f} tokens/s",
        "flops": f"{metrics.tflops_per_device:.3g} TFLOP/s per device",
        "mfu": "" if metrics.mfu is None else f"MFU {metrics.mfu:.1%}",
        "skipped": "skipped: overflow" if metrics.skipped else "",
        "remaining": "" if metrics.skipped else f"remaining {duration(remaining)}",
    }
    return _fitting(parts, ("flops", "remaining", "mfu", "tokens", "lr", "norm"), " | ", columns)


def progress_text(
    metrics: StepMetrics, total_steps: int, remaining: float, columns: int | None = None
) -> str:
    """The live line: what one wants to see at a glance."""
    parts = {
        "step": f"{metrics.step}/{total_steps}",
        "loss": f"loss {metrics.loss:.3f}",
        "lr": f"lr {metrics.lr:.1e}",
        "tokens": f"{metrics.tokens_per_second:,.0f} tok/s",
        "mfu": "" if metrics.mfu is None else f"MFU {metrics.mfu:.0%}",
        "remaining": duration(remaining),
    }
    return _fitting(parts, ("lr", "mfu", "tokens", "loss"), "  ", columns)


def _fitting(parts: dict[str, str], dispensable: Sequence[str], between: str, columns: int | None) -> str:
    """The parts that say something, without the first of the dispensable ones where they are too many."""
    for count in range(len(dispensable) + 1):
        left = [text for name, text in parts.items() if text and name not in dispensable[:count]]
        if columns is None or len(between.join(left)) <= columns:
            break
    return between.join(left)


def evaluation_line(metrics: EvalMetrics, total_steps: int) -> str:
    width = len(str(total_steps))
    name = f" on {metrics.name}" if metrics.name is not None else ""
    best = ""
    if metrics.best is not None:
        lowest = metrics.best.step == metrics.step
        best = " | lowest so far" if lowest else f" | lowest {metrics.best.loss:.4f} at {metrics.best.step}"
    return f"step {metrics.step:>{width}}/{total_steps} | validation loss{name} {metrics.eval_loss:.4f}{best}"


def printable(text: str, stream: IO[str]) -> str:
    """`text` with control characters, and what the stream's encoding lacks, as backslash escapes.

    A sample of an untrained byte model holds all of them, the terminal's own commands included.
    """
    encoding = stream.encoding or "utf-8"
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown).encode(encoding, "backslashreplace").decode(encoding)


def duration(seconds: float) -> str:
    """``75`` is ``0:01:15``; from a day on ``2 d 03:04:05``."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{hours // 24} d {hours % 24:02}:{minute:02}:{second:02}"
