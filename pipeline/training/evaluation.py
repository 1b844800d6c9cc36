"""The evaluation of a checkpoint, or of a folder's weights, on whole validation sets, on one rank.

The engine is that of training, in the job's layout and number format, built with the weights alone: no
optimizer state is read or kept. Its loss does not depend on the layout.

    {"step": 40, "sequence_length": 128, ..., "sets": [{"name": "books", "loss": 1.81, "perplexity": 6.11,
     "bits_per_byte": 2.61, "tokens": 99999, "bytes": 100000, "documents": 1}]}

    loss             mean over the predicted tokens, natural logarithm
    perplexity       e to the power of it
    bits_per_byte    loss * tokens / (ln 2 * bytes): bits for all predicted tokens, the ends of documents
                     included, over the bytes of the documents' text in UTF-8; null where these cannot be
                     known, with the reason as `bits_per_byte_reason`
    tokens           predicted ones: all of a set but its first, which nothing stands before. The last sample,
                     which is rarely full, is padded, and its padding does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.checkpoints.hosts import complete_hosts
from pipeline.checkpoints.manifest import Checkpoint, TrainState
from pipeline.checkpoints.resume import ONE_FOLDER, partial_problems, select_checkpoint
from pipeline.checkpoints.stored import StoredState, StoredWeights
from pipeline.cluster.agent.rank_link import RankLink
from pipeline.cluster.outcome import Outcome
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.data.loader import EvalBatches
from pipeline.data.remote_cache import RemoteCache
from pipeline.data.tokenizer import Tokenizer, from_facts, unlike_its_text
from pipeline.data.training_data import EvalData, load_evaluation
from pipeline.engine.agreement import agree_on_start, agree_on_weights, gather_objects, gather_rows
from pipeline.engine.build import build_engine
from pipeline.engine.distributed import stop_distributed
from pipeline.engine.engine import TrainEngine
from pipeline.engine.folder_weights import FolderWeights
from pipeline.job.data_sources import data_settings
from pipeline.job.job import Job, OptimizerConfig
from pipeline.parallel.context import Parallel
from pipeline.parallel.parameters import Source
from pipeline.training.loop import Abandoned, evaluate
from pipeline.training.preparing import agreed, local_sources, meet, remote_cache
from pipeline.training.quiet import captured_stdout
from pipeline.training.run_files import finite
from pipeline.training.signals import StopRequest
from pipeline.training.stopping import Stopping, reason_text

logger = logging.getLogger(__name__)
UNKNOWN_TOKENIZER = "the token files do not say which tokenizer made them"


class Stopped(Exception):
    """Some rank was asked to stop. Raised on every rank alike."""


def evaluate_job(
    job: Job, environment: RankEnvironment, stop: StopRequest, link: RankLink, only_named: bool
) -> Outcome:
    """The losses of the weights that `job` would begin or resume with, as JSON in the outcome's message.

    Args:
        only_named: Leave out what is held out of the training data, which is not read then.

    Raises:
        JobError: the data or the weights cannot be used, or there is nothing to evaluate.
        StoppedEarly: a signal arrived before ranks met.
    """
    found = select_checkpoint(job)
    state = found.checkpoint.state if found.checkpoint else TrainState()
    link.progress("preparing data", state.step)
    with contextlib.closing(remote_cache(job)) as remote:
        sets = _read_sets(job, state, remote, only_named)
        link.progress("joining", state.step)
        with stop.meeting():
            parallel = meet(job, environment)
        agree_on_start(parallel, _fingerprint(sets), state.step)
        link.progress("preparing data", state.step)  # all of a checkpoint is read, as long as that takes
        stopping = Stopping(stop)
        verified = agreed(job, environment, parallel, found, stopping).verified
        try:
            if not verified:
                raise Stopped("while its checkpoint was verified")
            engine = _build(job, environment, parallel, found.checkpoint)
            losses = [_losses(engine, each, stopping, link, state.step) for each in sets]
        except Stopped as reason:
            outcome = Outcome("stopped", state.step, message=str(reason))
        else:
            about = _about(job, found.checkpoint)
            outcome = Outcome("finished", state.step, message=json.dumps({**about, "sets": losses}))
    gather_rows(parallel, 0)  # a barrier: a launcher ends all ranks as soon as one has left
    link.ended(outcome)
    stop_distributed()
    return outcome


def _read_sets(job: Job, state: TrainState, remote: RemoteCache, only_named: bool) -> tuple[EvalData, ...]:
    """What is held out as the run has held it out, and the named sets.

    Raises:
        JobError: they cannot be used, or there are none.
    """
    spec = job.data
    sets = load_evaluation(
        () if only_named or not spec.held_out_fraction else local_sources(spec.training, remote),
        data_settings(job),
        validation=local_sources(spec.validation, remote),
        tokenizer=from_facts(spec.tokenizer),
        saved=state.data,
    )
    if not sets:
        rule = "there is nothing to evaluate: nothing is held out of the training data, and no set is named"
        raise job_error("validation", None, rule, "Give --validation NAME=PATH")
    return sets


def _fingerprint(sets: Sequence[EvalData]) -> str:
    """Equal on hosts that read the same tokens."""
    return hashlib.sha256(" ".join(each.token_file.fingerprint for each in sets).encode()).hexdigest()


def _build(
    job: Job, environment: RankEnvironment, parallel: Parallel, checkpoint: Checkpoint | None
) -> TrainEngine:
    """The engine with these weights. Collective.

    Raises:
        JobError: hosts hold parts of the checkpoint only.
        WeightsMismatch: ranks see different files.
    """
    weights: Source
    if checkpoint is not None:
        complete_hosts(parallel, environment.local_rank, checkpoint)
        if any(gather_objects(parallel, problems := partial_problems(checkpoint, "checkpoint"))):
            rule = "a host holds a part of it only"
            elsewhere = Problem("checkpoint", str(checkpoint.path), rule, ONE_FOLDER)
            raise JobError(problems or [elsewhere])
        weights = StoredWeights(StoredState(checkpoint.path, job.allow_pickle))
    else:
        assert job.initial_weights.folder is not None, "a folder without weights is refused"
        weights = folder = FolderWeights(job.initial_weights.folder, job.model)
        agree_on_weights(parallel, folder.fingerprint)
    # Of the optimizers the one that keeps no state beside the weights; it takes no step.
    plain = OptimizerConfig("SGD", lr=0.0, fused=job.optimizer.fused)
    with captured_stdout():
        return build_engine(replace(job, optimizer=plain), parallel, weights)


def _losses(
    engine: TrainEngine, data: EvalData, stopping: Stopping, link: RankLink, step: int
) -> dict[str, Any]:
    """What is found of one set. Collective.

    Raises:
        Stopped: some rank was asked to stop.
    """

    def stop_code() -> int:
        link.progress("evaluating", step)  # a set may take longer than a rank may be silent
        return stopping.code()

    job, here = engine.job, engine.parallel.coordinates
    share = EvalBatches(data.dataset, None, job.batch.micro_batch_size, here.data, job.mesh.data)
    found = evaluate(engine, engine.parallel, share, stop_code)
    if isinstance(found, Abandoned):
        raise Stopped(reason_text(found.reason))
    loss, tokens = found
    size, reason = _text_bytes(data, from_facts(job.data.tokenizer), engine.parallel)
    fields = {
        "name": data.name or "validation",
        "loss": loss,
        "perplexity": math.exp(loss) if loss < math.log(1e300) else math.inf,
        "bits_per_byte": loss * tokens / (math.log(2) * size) if size else None,
        **({"bits_per_byte_reason": reason} if reason else {}),
        "tokens": tokens,
        "bytes": size,
        "documents": data.dataset.num_documents,
    }
    return finite(fields)


def _text_bytes(data: EvalData, tokenizer: Tokenizer, parallel: Parallel) -> tuple[int | None, str]:
    """Bytes of the documents' text, None where they cannot be known, and why. Each rank decodes its share of
    the documents. Collective."""
    if data.token_file.tokenizer_hash is None:
        return None, UNKNOWN_TOKENIZER
    if reason := unlike_its_text(tokenizer):
        return None, reason
    documents = data.dataset.documents(parallel.rank, parallel.mesh.world_size)
    mine = sum(map(tokenizer.num_bytes, documents))
    size = int(gather_rows(parallel, mine).sum())
    return (size, "") if size else (None, "the documents have no text")


def _about(job: Job, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What was evaluated, and how."""
    return {
        "checkpoint": None if checkpoint is None else str(checkpoint.path),
        "folder": str(job.initial_weights.folder) if checkpoint is None else None,
        "step": None if checkpoint is None else checkpoint.state.step,
        "sequence_length": job.batch.sequence_length,
        "precision": job.precision.compute,
        "layout": {**asdict(job.mesh), "zero_stage": job.zero_stage},
    }
