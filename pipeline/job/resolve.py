"""Options + DeepSpeed JSON + world -> Job, or every reason why not."""

from __future__ import annotations

from pipeline.cluster.world import World
from pipeline.job.job import Batch, Job, OptimizerConfig, Precision, Resolved
from pipeline.job.options import Options

__all__ = ["Batch", "Job", "OptimizerConfig", "Precision", "Resolved", "resolve"]


def resolve(options: Options, world: World) -> Job:
    """Raises JobError with all problems."""
    raise NotImplementedError
