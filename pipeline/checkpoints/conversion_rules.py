"""Which checkpoint is converted to which layout, and every reason why it cannot be. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from pipeline.base.problems import Problem
from pipeline.checkpoints.manifest import SHARDS, Checkpoint, layout_of
from pipeline.checkpoints.output import output_problems
from pipeline.checkpoints.resume import differences
from pipeline.job.job import Job
from pipeline.job.options import CheckOptions
from pipeline.job.run_file import CHECKPOINTS, RUN_FILE, TOKENIZER_FOLDER


@dataclass(frozen=True)
class ReshardOptions(CheckOptions):
    """Convert a checkpoint to another layout offline, on one machine. Takes the options of the launcher and
    those of pretrain.py: they describe the job that is to resume. Without --config, what is not given is as
    in the run.json of the checkpoint's run."""

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")] = ""
    """A checkpoint, or the folder of a run: its newest one."""
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = ""
    """The folder to make. It is a checkpoint of its own, for --resume FOLDER."""
    workers: int = 4
    """Parameters that are converted at the same time; each takes the memory of one of its tensors in fp32."""


def option_problems(options: ReshardOptions, program: str) -> list[Problem]:
    """What is wrong with the options of a conversion by themselves; `program` is how it is called."""
    problems = []
    for name in ("checkpoint", "folder"):
        if not getattr(options, name):
            remedy = f"{program} CHECKPOINT FOLDER [options]"
            problems.append(Problem(name.upper(), "", "is missing", remedy))
    if options.folder and Path(options.folder).name in ("", ".."):
        rule = "is not the name of a folder to make"
        problems.append(Problem("FOLDER", options.folder, rule, "Name a folder that does not exist"))
    elif options.folder:
        problems += output_problems("FOLDER", options.folder)
    if options.workers < 1:
        problems.append(Problem("workers", options.workers, "must be at least 1", "Raise --workers"))
    return problems


def run_file_of(checkpoint: Checkpoint) -> Path | None:
    """The run.json of the run that a checkpoint lies in; None where it lies alone."""
    path = checkpoint.folder.parent / RUN_FILE
    return path if checkpoint.folder.name == CHECKPOINTS and path.exists() else None


def options_for(options: ReshardOptions, checkpoint: Checkpoint) -> ReshardOptions:
    """The options of the job that is to resume, without what a conversion does not touch: data and length."""
    tokenizer, steps = checkpoint.path / TOKENIZER_FOLDER, options.train_steps
    if steps is None and options.train_tokens is None:
        steps = max(checkpoint.state.step, 1)
    return replace(
        options,
        data=(),
        data_blend=None,
        validation=(),
        eval_samples=0,
        tokenizer=str(tokenizer) if tokenizer.exists() else options.tokenizer,
        seq_length=options.seq_length or checkpoint.identity.get("seq_length"),
        train_steps=steps,
        output_dir=options.folder,
        resume="auto",
    )


def conversion_problems(checkpoint: Checkpoint, job: Job) -> list[Problem]:
    """Why this checkpoint cannot be converted to the layout of this job."""
    path = str(checkpoint.path)
    there, here = checkpoint.layout, layout_of(job)
    problems = []
    if not checkpoint.has_shard_index:
        rule = f"has no {SHARDS}, without which only its own layout can read it"
        remedy = "Resume it in its own layout: the next checkpoint will have one"
        problems.append(Problem("CHECKPOINT", path, rule, remedy))
    if missing := checkpoint.missing:
        rule = f"was saved on file systems of {checkpoint.hosts} hosts; not here are {', '.join(missing)}"
        remedy = "Copy the folders of all hosts into one"
        problems.append(Problem("CHECKPOINT", path, rule, remedy))
    if there["nvme"]:
        rule = "has state on NVMe drives, which is not converted"
        problems.append(Problem("CHECKPOINT", path, rule, "Resume it in its own layout"))
    if here["nvme"]:
        rule = "state on NVMe drives is read by the layout only that wrote it"
        problems.append(Problem("offload_optimizer.device", "nvme", rule, "Offload to cpu, or not at all"))
    if there["optimizer"] != here["optimizer"]:
        rule = f"the checkpoint's is {there['optimizer']}, and one optimizer's state is nothing to another"
        problems.append(Problem("optimizer.type", here["optimizer"], rule, "Keep the optimizer"))
    wanted = {k: v for k, v in job.identity.items() if k.startswith("model.") or k == "seq_length"}
    if differing := differences(checkpoint.identity, wanted):
        rule = f"is not the checkpoint's: {differing}"
        problems.append(Problem("model", job.model.name, rule, "Give the options of the checkpoint's run"))
    return problems
