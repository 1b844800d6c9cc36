"""Whole jobs without a launcher: the main function of `pipeline/pretrain.py` on forked ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.client import RankFailure, execute
from tests.harness.protocol import Outcome
from tests.harness.report import describe

# Seconds that the other ranks get to end by themselves when one has left with an error, so that a
# refusal on all ranks shows as that. They lose their peer's sockets at once.
GRACE = 10.0


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        exit_codes: By rank, in `subprocess` convention: negative for a signal. Ranks that outlived a failing
            peer by more than ten seconds were killed and have -9.
        stdout: By rank.
        stderr: By rank.
    """

    exit_codes: tuple[int, ...]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]

    def check(self) -> JobResult:
        """Return self if every rank ended with 0.

        Raises:
            AssertionError: one did not; the message has all output.
        """
        if any(self.exit_codes):
            streams = zip(self.stdout, self.stderr, strict=True)
            output = "\n".join(f"--- rank {rank}\n{out}{err}" for rank, (out, err) in enumerate(streams))
            raise AssertionError(f"exit codes {self.exit_codes}\n{output}")
        return self


def run_job(
    args: Sequence[str],
    world_size: int,
    *,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> JobResult:
    """Run `pretrain.py` with `args` on `world_size` ranks.

    Args:
        args: Command line, without the program and without --local_rank, which is added as the launcher does.
        world_size: Number of ranks, on one host.
        timeout: Seconds until the job counts as hung.
        env: Additional environment variables.
        cwd: Working directory; default: the caller's.

    Raises:
        RankFailure: the job hung; the message has every rank's stacks.
    """
    __tracebackhide__ = True
    name = " ".join(["pretrain.py", *args])
    outcomes = execute(
        name,
        _pretrain,
        world_size,
        (list(args),),
        timeout=timeout,
        group_timeout=timeout,
        grace=GRACE,
        hold=False,
        env=env,
        cwd=cwd,
    )
    return job_result(name, outcomes, timeout)


def job_result(name: str, outcomes: Sequence[Outcome], timeout: float) -> JobResult:
    """The ranks' outcomes as a job's.

    Raises:
        RankFailure: the job hung.
    """
    __tracebackhide__ = True
    if any(outcome.state == "hung" for outcome in outcomes):
        raise RankFailure(describe(name, outcomes, timeout), outcomes)
    return JobResult(
        exit_codes=tuple(outcome.exit_code for outcome in outcomes),
        stdout=tuple(outcome.stdout for outcome in outcomes),
        stderr=tuple(outcome.stderr + _last_words(outcome) for outcome in outcomes),
    )


def _last_words(outcome: Outcome) -> str:
    """The traceback that the interpreter would have printed: none for ``sys.exit``."""
    *_, last = outcome.traceback.splitlines() or [""]
    return "" if last.startswith("SystemExit") else outcome.traceback


def _pretrain(args: list[str]) -> None:
    from pipeline import pretrain

    argv = [f"--local_rank={os.environ['LOCAL_RANK']}", *args]
    sys.argv = [pretrain.__file__, *argv]
    code = pretrain.main(argv)
    if code:
        sys.exit(code)
