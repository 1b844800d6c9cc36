"""How a start of a run ends, how its user goes on from there, and how a rank's process ends. No torch."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import threading
from typing import NoReturn

from pipeline.job.job import Job


class RunFailed(Exception):
    """Training ended with an error; says after which step.

    Attributes:
        error: What went wrong.
        step: Optimizer steps done by then.
    """

    def __init__(self, error: Exception, step: int) -> None:
        super().__init__(f"after step {step}: {error}")
        self.error, self.step = error, step


def resume_hint(job: Job, by_name: bool = False) -> str:
    """How a run that was stopped is resumed; `by_name`: the checkpoint that this start has named, if it has,
    must be named again."""
    named = ["--resume", job.resume] if by_name and job.resume != "auto" else []
    return f"to resume: {_again(job, *named)}"


def go_on_hint(job: Job, done: int) -> str:
    """How a run that has finished `done` steps is trained on."""
    return f"to train on: {_again(job)} --train_steps {2 * done}"


def _again(job: Job, *more: str) -> str:
    """The command that starts this run again, as a shell reads it."""
    folder = job.output_dir
    return shlex.join(["./launch.sh", "--config", f"{folder}/run.json", "--output_dir", folder, *more])


def end_process(code: int) -> NoReturn:
    """End this process as Python does, except that the interpreter is not torn down.

    A worker thread of gloo frees the tensors of the last collective when it gets to it. If it asks for the
    interpreter's lock while the interpreter is torn down, Python ends the thread inside a C++ destructor, and
    the process dies by SIGABRT ("terminate called without an active exception") with all its work done.

    Call it in the main thread; all other threads that are not daemons are waited for.
    """
    threading._shutdown()  # wakes the workers of executors, too, that nobody has shut down
    atexit._run_exitfuncs()  # what other libraries have asked for, such as monitors that send their last data
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
