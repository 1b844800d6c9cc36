"""What rank 0 prints: whole snapshots where the output is plain, the essentials where it is live."""

from __future__ import annotations

import errno
import io
import logging
import re
import shlex
import subprocess
import sys
import textwrap
import traceback
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster.launcher_options import split_arguments
from pipeline.job.options import parse_options
from pipeline.job.run_file import write_run_file
from pipeline.training.console import (
    WORK_OF_A_HOST,
    LiveConsole,
    NullConsole,
    PlainConsole,
    duration,
    evaluation_line,
    make_console,
    printable,
    progress_text,
    show_job,
    step_line,
)
from pipeline.training.metrics import Best, EvalMetrics, StepMetrics
from pipeline.training.quiet import captured_stdout
from pipeline.training.summary import continue_hint
from tests.job.drafts import draft

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def metrics(
    step: int, mfu: float | None = None, step_time: float = 2.0, skipped: bool = False
) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=5.5 / step,
        grad_norm=1.25,
        lr=3e-4,
        tokens=8192 * step,
        step_time=step_time,
        tokens_per_second=8192 / step_time,
        tflops_per_device=12.34,
        mfu=mfu,
        data_time=0.01,
        skipped=skipped,
    )


def test_a_named_set_is_named():
    assert (
        evaluation_line(EvalMetrics(3, 1.75, "books"), 20) == "step  3/20 | validation loss on books 1.7500"
    )


def test_the_lowest_loss_stands_beside():
    line = "step  3/20 | validation loss 1.7500 | lowest"
    assert evaluation_line(EvalMetrics(3, 1.75, best=Best(1.75, 3)), 20) == f"{line} so far"
    assert evaluation_line(EvalMetrics(3, 1.75, best=Best(1.5, 2)), 20) == f"{line} 1.5000 at 2"


def run(console, steps: range, **fields: object) -> None:
    console.start(["model      tiny, 1,234,567 parameters", "pipeline   2 stages"])
    for step in steps:
        console.step(metrics(step, **fields))
    console.evaluation(EvalMetrics(steps[-1], 1.75))
    console.message("checkpoint saved")
    console.finish(["finished"])


def test_plain_output_is_exactly_this(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as some CI services set it
    monkeypatch.setenv("COLUMNS", "20")
    out = io.StringIO()
    run(make_console(0, total_steps=20, log_interval=5, file=out), range(1, 12), mfu=0.0396)
    rest = "grad norm 1.250 | lr 3.00e-04 | 4,096 tokens/s | 12.3 TFLOP/s per device | MFU 4.0% | remaining"
    assert out.getvalue().splitlines() == [
        "model      tiny, 1,234,567 parameters",
        "pipeline   2 stages",
        f"step  1/20 | loss 5.5000 | {rest} 0:00:38",
        f"step  5/20 | loss 1.1000 | {rest} 0:00:30",
        f"step 10/20 | loss 0.5500 | {rest} 0:00:20",
        "step 11/20 | validation loss 1.7500",
        "checkpoint saved",
        "finished",
    ]


def test_no_mfu_is_said_where_the_peak_is_unknown():
    out = io.StringIO()
    run(make_console(0, total_steps=2, log_interval=1, file=out), range(1, 3))
    assert "MFU" not in out.getvalue()


@pytest.mark.parametrize(
    ("columns", "line", "bar"),
    [
        (
            80,
            "step   5000/100000 | loss 0.0011 | norm 1.250 | lr 3.00e-04 | 4,096 tokens/s",
            "5000/100000  loss 0.001  4,096 tok/s  MFU 41%  2 d 04:46:40",
        ),
        (
            60,
            "step   5000/100000 | loss 0.0011 | norm 1.250 | lr 3.00e-04",
            "5000/100000  loss 0.001  4,096 tok/s  2 d 04:46:40",
        ),
        (30, "step   5000/100000 | loss 0.0011", "5000/100000  2 d 04:46:40"),
    ],
)
def test_lines_leave_out_what_counts_least_where_columns_are_few(columns: int, line: str, bar: str):
    measured, left = metrics(5000, mfu=0.41), 2 * 95_000.0
    assert step_line(measured, 100_000, left, columns) == line
    assert progress_text(measured, 100_000, left, columns - (21 if columns >= 80 else 9)) == bar
    assert len(line) <= max(columns, 32)


def test_first_last_and_skipped_steps_are_always_logged():
    out = io.StringIO()
    console = make_console(0, total_steps=107, log_interval=50, resume_step=102, file=out)
    for step in range(103, 108):
        console.step(metrics(step, skipped=step == 105))
    assert re.findall(r"step (\d+)/107", out.getvalue()) == ["103", "105", "107"]
    assert out.getvalue().splitlines()[1].endswith("skipped: overflow")


def test_remaining_time_forgets_the_slow_first_step():
    out = io.StringIO()
    console = make_console(0, total_steps=102, log_interval=2, file=out)
    console.step(metrics(1, step_time=60.0))
    console.step(metrics(2, step_time=1.0))
    first, second = out.getvalue().splitlines()
    assert first.endswith("remaining 1:41:00")
    assert second.endswith("remaining 0:01:40")


def test_other_ranks_are_silent(capsys):
    console = make_console(1, total_steps=20, log_interval=1)
    run(console, range(1, 12))
    assert isinstance(console, NullConsole)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("term", "stream", "kind"),
    [
        ("xterm", Terminal(), LiveConsole),
        ("dumb", Terminal(), PlainConsole),
        ("xterm", io.StringIO(), PlainConsole),
    ],
)
def test_live_only_in_a_terminal_that_can(monkeypatch, term, stream, kind):
    monkeypatch.setenv("TERM", term)
    assert type(make_console(0, total_steps=2, log_interval=1, file=stream)) is kind


def test_live_output_redraws_one_line_and_keeps_the_log_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("pipeline.training.console.REDRAWS_PER_SECOND", 1e9)
    out, stdout = Terminal(), sys.stdout
    run(make_console(0, total_steps=12, log_interval=6, file=out), range(1, 13), mfu=0.41)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    for step in (2, 7, 12):  # drawn, and not logged but for the last
        assert f"{step}/12  loss {5.5 / step:.3f}  lr 3.0e-04  4,096 tok/s  MFU 41%" in text
    logged = [line for line in text.replace("\r", "\n").splitlines() if line.startswith("step")]
    assert [line[:10] for line in logged] == ["step  1/12", "step  6/12", "step 12/12", "step 12/12"]
    assert text.rstrip().endswith("finished")
    assert sys.stdout is stdout, "the redirection by the live display was not undone"


def test_the_cursor_stays_visible_for_the_time_after_a_kill(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    console = make_console(0, total_steps=12, log_interval=6, file=out)
    console.start([])
    console.step(metrics(1))
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")
    console.finish()
    console.finish()  # once from the job, once from whoever cleans up


def test_terminal_commands_in_generated_text_are_shown_not_obeyed():
    assert printable("a\x1b[2Jb\tc\nd\x00", io.StringIO()) == "a\\x1b[2Jb\tc\nd\\x00"


def test_text_that_the_stream_cannot_encode_is_escaped():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    make_console(0, total_steps=1, log_interval=1, file=stream).message("naïve \udcff")
    assert stream.buffer.getvalue() == b"na\\xefve \\udcff\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (-1, "0:00:00"), (75.4, "0:01:15"), (86399, "23:59:59"), (183845, "2 d 03:04:05")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_captured_output_vanishes_unless_the_block_fails_and_stands_below_its_traceback(capsys):
    with captured_stdout() as held:
        print("stage=0 layers=3")
    assert capsys.readouterr() == ("", "")
    assert held.getvalue() == "stage=0 layers=3\n"
    with pytest.raises(RuntimeError) as raised, captured_stdout():
        print("stage=1 layers=0")
        raise RuntimeError("no layers")
    assert capsys.readouterr() == ("", "")
    assert traceback.format_exception(raised.value)[-1] == "stage=1 layers=0\n"


@pytest.mark.parametrize(("rank", "passes"), [(0, ["warning", "error"]), (1, ["error"])])
def test_libraries_log_warnings_on_rank_0_and_errors_elsewhere(rank, passes):
    """In a process of its own: the setting is process-wide and outlives what libraries do on import."""
    code = f"""
        import logging, sys
        from pipeline.training.quiet import EXPECTED_WARNINGS, quiet_deepspeed
        quiet_deepspeed({rank})
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        logger = logging.getLogger("DeepSpeed")
        logger.setLevel(logging.DEBUG)
        for level in ("info", "warning", "error"):
            getattr(logger, level)(level)
        for text in EXPECTED_WARNINGS:
            logger.warning(text + " and so on")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == passes


class Unplugged(io.StringIO):
    """A stream whose other end is gone."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


class UnpluggedTerminal(Unplugged):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Unplugged(), UnpluggedTerminal()], ids=["pipe", "terminal"])
def test_a_run_outlives_its_display(stream: io.StringIO) -> None:
    console = make_console(0, total_steps=2, log_interval=1, file=stream)
    console.start(["a line"])
    console.message("another")
    console.finish(["the last"])


@pytest.mark.parametrize(("rank", "shown"), [(0, ["main", "folder"]), (1, ["folder"])])
def test_what_modules_log_is_shown_by_rank_0_or_by_who_works_for_its_host(
    rank: int, shown: list[str], capsys: pytest.CaptureFixture[str]
):
    loggers = [logging.getLogger(name) for name in ("pipeline", *WORK_OF_A_HOST)]
    before = [(each.handlers[:], each.level) for each in loggers]
    for each in loggers:
        each.handlers.clear()
    root = logging.getLogger()
    level = root.level
    try:
        root.setLevel(logging.ERROR if rank else logging.WARNING)  # as `quiet_deepspeed` has it
        loggers[0].setLevel(logging.NOTSET)
        show_job(make_console(rank, total_steps=1, log_interval=1), rank)
        logging.getLogger("pipeline.training.train").info("main")
        logging.getLogger("pipeline.checkpoints.folder").warning("folder")
    finally:
        root.setLevel(level)
        for each, (handlers, own) in zip(loggers, before, strict=True):
            each.handlers[:] = handlers
            each.setLevel(own)
    said = capsys.readouterr()
    assert (said.out.splitlines(), said.err) == (shown, "")


@pytest.mark.parametrize("folder", ["run", "my run", "-run"])
def test_the_command_that_goes_on_is_read_as_it_is_meant(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    job = draft(tmp_path, {}, output_dir=folder, train_tokens=4096).job
    write_run_file(job)
    hint = continue_hint(replace(job, command=("./launch.sh", "--num_gpus", "2")), 3)
    words = shlex.split(hint.removeprefix("to continue training: "))
    launcher, rest = split_arguments(words[1:])
    options = parse_options(rest)
    assert (words[0], launcher.num_gpus) == ("./launch.sh", 2)
    assert (options.train_steps, options.train_tokens) == (6, None)
    assert Path(options.output_dir) == Path(folder)
