"""The weights of step 0 where they come from a folder, and what is said of them."""

from __future__ import annotations

from pipeline.engine.agreement import agree_on_weights
from pipeline.engine.folder_weights import FolderWeights
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel


def first_weights(job: Job, parallel: Parallel) -> FolderWeights | None:
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


def weights_lines(job: Job) -> list[str]:
    """Where the weights of step 0 come from, for the console."""
    weights = job.initial_weights
    if weights.folder is None:
        return [f"starting at step 0{f' from random weights: {weights.reason}' if weights.reason else ''}"]
    lines = [f"starting at step 0 with the weights in {weights.folder}"]
    if job.data.model_has_tokenizer:
        lines.append("tokens are those of the tokenizer there")
    return lines
