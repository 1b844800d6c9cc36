"""Pretrain a GPT: ``deepspeed pipeline/pretrain.py [options]``, or by torchrun, or alone.

A launcher starts this script once per rank. That process becomes the rank's agent, and starts the script
again as the rank (`pipeline.cluster.agent.agent`).

Every rank reads the job for itself and comes to the same result. A wrong job is refused here, before torch is
imported. Exit codes: 0 finished, 2 wrong job, 3 stopped with a checkpoint saved, 1 anything else.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the package is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from pipeline.cluster.agent.agent import own_rank

    own_rank(sys.argv)  # a launcher's process is the agent and never gets further; the rank does
    # Until it listens, an interrupt ends it as any other signal does: its agent tells, not a traceback.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its agent asks it to save

from pipeline.base.problems import EXIT_FAILED, EXIT_STOPPED, EXIT_WRONG_JOB, JobError
from pipeline.cluster.agent.rank_link import Inherited, RankLink, connect, split_inherited
from pipeline.cluster.rank_environment import read_rank_environment
from pipeline.job.report import console, print_problems
from pipeline.training.rank import run_rank
from pipeline.training.signals import StoppedEarly, StopRequest, end_process


def main(arguments: Sequence[str], link: RankLink | None = None, inherited: Inherited | None = None) -> int:
    """One rank's whole life; its exit code.

    Args:
        link: Leads to this rank's agent, if it has one.
        inherited: What the launch decided; None without one.
    """
    link = link or RankLink()
    try:
        environment = read_rank_environment()
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    with StopRequest(announce=environment.rank == 0, early=True) as stop:
        try:
            return run_rank(arguments, environment, stop, link, inherited)
        except StoppedEarly as request:
            stop.leave(str(request))
            return EXIT_STOPPED


if __name__ == "__main__":
    inherited, arguments = split_inherited(sys.argv[1:])
    code = main(arguments, connect(inherited) if inherited else None, inherited)
    if code == EXIT_FAILED:
        sys.stdout.flush()
        sys.stderr.flush()
        # What waits for a thread or a library may wait for ranks that are gone.
        os._exit(code)
    end_process(code)
