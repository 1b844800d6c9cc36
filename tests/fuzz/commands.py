"""The commands as functions of their arguments; what would go to other machines or train is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

# Imported here, so that no case is charged with it.
import pipeline.checkpoints.conversion
import pipeline.checkpoints.export.export_folder
import pipeline.checkpoints.export.load_model  # noqa: F401
from pipeline import check, deploy, export, generate, prepare, reshard
from pipeline.base.problems import EXIT_FINISHED, EXIT_WRONG_JOB, JobError
from pipeline.checkpoints.resume import select_checkpoint
from pipeline.cluster.folder_lock import running_problems
from pipeline.cluster.outcome import Outcome
from pipeline.cluster.rank_environment import read_rank_environment
from pipeline.job.options import parse_options
from pipeline.job.report import console, print_problems
from pipeline.launch import launch, preflight, restart_loop
from pipeline.training import preparing
from pipeline.training.rank import read_job


def rank(arguments: Sequence[str]) -> int:
    """What rank 0 does before it meets the others; but it does not hold the folder."""
    try:
        environment = read_rank_environment()
        job = read_job(parse_options(arguments), environment, None)
        if problems := running_problems(job.output_dir):
            raise JobError(problems)
        state = preparing._state(job, select_checkpoint(job))
        preparing._require_usable_numbers(job, state)
        with preparing.remote_cache(job) as remote:
            preparing._read_data(job, state, remote)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    return EXIT_FINISHED


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "check": check.main,
    "launch": launch.main,
    "rank": rank,
    "prepare": prepare.main,
    "export": export.main,
    "generate": generate.main,
    "reshard": reshard.main,
    "deploy": deploy.main,
}


@contextmanager
def nothing_is_started() -> Iterator[None]:
    """No host is asked, no rank started."""
    with (
        mock.patch.object(preflight, "can_ask_hosts", return_value=False),
        mock.patch.object(restart_loop, "start_once", return_value=Outcome("finished", 1)),
    ):
        yield
