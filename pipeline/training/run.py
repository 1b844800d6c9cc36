"""One rank's run, from a resolved job to its end, in this order:

1. the data, read by each rank alone: whatever is wrong with it ends the run before ranks wait for others
2. the process groups, which most of what follows needs
3. the checkpoint that all ranks resume from, verified; then the data again, should it be another one
4. the start in the run's history; the engine: model, optimizer, DeepSpeed (`pipeline.engine.build`)
5. the checkpoint's weights and optimizer state, which need the engine's parameters
6. the run's file and tokenizer in its folder: only now it is known that the job can be built
7. the loop, with what it reads, writes and saves (`pipeline.training.train`)
8. the outcome, written before any rank leaves
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.base.problems import JobError
from pipeline.base.words import after_step
from pipeline.checkpoints.load import load_checkpoint, resume_from
from pipeline.cluster.agent.rank_link import RankLink
from pipeline.cluster.history import record_start
from pipeline.cluster.outcome import Outcome
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.engine.agreement import agree_on_weights, first_reason, gather_rows
from pipeline.engine.build import build_engine
from pipeline.engine.deepspeed_patches import require_tested_version
from pipeline.engine.distributed import stop_distributed
from pipeline.engine.engine import TrainEngine
from pipeline.engine.folder_weights import FolderWeights
from pipeline.job.job import Job
from pipeline.job.run_file import TOKENIZER_FOLDER, write_run_file
from pipeline.parallel.context import Parallel
from pipeline.training.preparing import Prepared, prepare
from pipeline.training.quiet import captured_stdout
from pipeline.training.signals import StopRequest
from pipeline.training.stopping import reason_text
from pipeline.training.summary import resume_hint, start_lines
from pipeline.training.train import train

logger = logging.getLogger(__name__)


class RunFailed(Exception):
    """Training ended with an error; says after which step.

    Attributes:
        error: What went wrong.
        step: Optimizer steps done by then.
    """

    def __init__(self, error: Exception, step: int) -> None:
        super().__init__(f"{after_step(step)}: {error}")
        self.error, self.step = error, step


def run(
    job: Job,
    environment: RankEnvironment,
    stop: StopRequest,
    record: Callable[[Outcome], None],
    link: RankLink,
) -> Outcome:
    """Train `job` as the rank that `environment` describes.

    Rank 0 calls `record` with the outcome before any rank leaves: a launcher ends all ranks as soon as
    one has left with an exit code other than 0, which a stopped run's is. `link` hears how far the rank is.

    Raises:
        JobError: DeepSpeed, the data (both found before ranks meet, on every rank alike) or the checkpoint
            cannot be used.
        StoppedEarly: a signal arrived before ranks met.
        RunFailed: anything else that goes wrong once it is known what the run resumes from.
    """
    if (warning := require_tested_version()) and environment.rank == 0:
        logger.warning(warning)
    prepared = prepare(job, environment, stop, link)
    state = prepared.state
    with _fails_after(state.step):
        if environment.rank == 0:
            checkpoint = prepared.selection.checkpoint
            record_start(job, state.step, state.tokens, checkpoint.path if checkpoint else None)
        link.progress("building", state.step)
        engine = _build(prepared)
        outcome = _load(engine, prepared)
        if environment.rank == 0:
            write_run_file(job)  # only now: the folder belongs to a job that could be built
            prepared.data.tokenizer.save(Path(job.output_dir) / TOKENIZER_FOLDER)
    if outcome is None:
        outcome = _train(engine, prepared)
    with _fails_after(outcome.step):
        _leave(prepared, outcome, record)
    return outcome


@contextlib.contextmanager
def _fails_after(step: int) -> Iterator[None]:
    """Inside, an error is one after so many steps. Raises RunFailed."""
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        raise RunFailed(error, step) from error


def _build(prepared: Prepared) -> TrainEngine:
    job, parallel = prepared.job, prepared.parallel
    weights = None if prepared.selection.checkpoint else _first_weights(job, parallel)
    with captured_stdout():
        return build_engine(job, parallel, weights)


def _first_weights(job: Job, parallel: Parallel) -> FolderWeights | None:
    """The weights in the folder that the job names; None where they are drawn. Collective.

    Raises:
        WeightsMismatch: ranks see different files.
    """
    folder = job.initial_weights.folder
    if folder is None:
        return None
    weights = FolderWeights(folder, job.model)
    agree_on_weights(parallel, weights.fingerprint)
    return weights


def _load(engine: TrainEngine, prepared: Prepared) -> Outcome | None:
    """Resume from the checkpoint, if there is one; the outcome, where the run is to stop before that."""
    checkpoint = prepared.selection.checkpoint
    if checkpoint is None:
        return None
    reason = first_reason(gather_rows(prepared.parallel, prepared.stopping.code())[:, 0])
    verified = prepared.selection.verified
    if reason is None:
        assert verified, "a reason to stop that ended the verification stays one"
        load_checkpoint(engine, checkpoint)
        return None
    if verified:
        resume_from(engine, checkpoint)  # for the next start, which may not name it again
    outcome = Outcome("stopped", checkpoint.state.step, message=reason_text(reason))
    before = "was read" if verified else "was verified"
    what = f"stopped at step {outcome.step} before its checkpoint {before} ({outcome.message})"
    logger.info(f"{what}; {resume_hint(prepared.job, by_name=not verified)}")
    return outcome


def _train(engine: TrainEngine, prepared: Prepared) -> Outcome:
    """Raises RunFailed."""
    prepared.console.start(start_lines(prepared.job, prepared.data, prepared.selection))
    try:
        return train(engine, prepared)
    except Exception as error:
        raise RunFailed(error, engine.step) from error
    finally:
        prepared.console.finish()


def _leave(prepared: Prepared, outcome: Outcome, record: Callable[[Outcome], None]) -> None:
    if outcome.status == "stopped":
        prepared.stopping.obeyed()
    if prepared.parallel.rank == 0:
        record(outcome)
    gather_rows(prepared.parallel, 0)  # a barrier: no rank leaves before that
    prepared.link.ended(outcome)
    stop_distributed()
    prepared.remote.close()
