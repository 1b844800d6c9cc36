"""``python -m pipeline.export CHECKPOINT FOLDER``: a checkpoint of any layout as a Hugging Face folder.

On one machine, without a process group, with one parameter in memory at a time. Exit codes: 0 done, 2 with
every problem if it cannot be done as asked, 1 anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pipeline.base.command import end_interrupts, run_command, show_messages
from pipeline.base.command_line import read_command_line
from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_WRONG_JOB, JobError, Problem
from pipeline.checkpoints.export.arguments import (
    Dtype,
    bytes_of,
    dtype_problems,
    model_of_checkpoint,
    tokenizer_of_checkpoint,
)
from pipeline.checkpoints.resume import checkpoint_at
from pipeline.hugging_face.families import family_of
from pipeline.job.options import FolderName, PathName
from pipeline.job.report import console, print_problems
from pipeline.training.quiet import quiet_deepspeed

if TYPE_CHECKING:
    from pipeline.checkpoints.export.export_folder import Export

PROGRAM = "python -m pipeline.export"


@dataclass(frozen=True)
class ExportOptions:
    """Write a checkpoint as a folder that transformers' AutoModelForCausalLM and AutoTokenizer open."""

    checkpoint: Annotated[PathName, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A run's --output_dir, its checkpoints folder (the newest complete one is taken), or one checkpoint."""
    folder: Annotated[PathName, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder to make."""
    dtype: Dtype = "float32"
    """Format of the weights; they are trained in float32."""
    max_shard_size: Annotated[str, "SIZE"] = "5GB"
    """Largest file of weights, as 500MB or 5GB; more weights go into several files and an index."""
    tokenizer: FolderName | None = None
    """bytes, or a Hugging Face tokenizer folder. None: the one saved with the checkpoint."""
    overwrite: bool = False
    """Replace a folder that holds a model."""
    allow_pickle: tuple[Annotated[str, "MODULE.NAME"], ...] = ()
    """What the checkpoint's files may ask for when they are read, beyond the pipeline's own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Export; the exit code."""
    try:
        options = read_command_line(ExportOptions, arguments, PROGRAM)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    try:
        with end_interrupts():
            quiet_deepspeed(0)
            show_messages(_say)
            export = _export(options)
            from pipeline.checkpoints.export.export_folder import write_export

            files = write_export(export)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}; {options.folder} was not written", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"\ninterrupted; {options.folder} was not written", file=sys.stderr)
        return EXIT_FAILED
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    _say(f"wrote {options.folder}: {family_of(export.model).architecture}, weights in {count}")
    return EXIT_FINISHED


def _export(options: ExportOptions) -> Export:
    """The export that the options describe.

    Raises:
        JobError: with every problem that can be seen in the options and the checkpoint.
    """
    problems, largest = dtype_problems(options.dtype), bytes_of(options.max_shard_size)
    if not largest:
        rule = "is no size above 0, such as 500MB or 5GB"
        problems.append(Problem("max_shard_size", options.max_shard_size, rule, "Correct --max_shard_size"))
    try:
        checkpoint = checkpoint_at(Path(options.checkpoint)).reported()
        model = model_of_checkpoint(checkpoint)
        tokenizer = tokenizer_of_checkpoint(checkpoint, options.tokenizer)
    except JobError as error:
        raise JobError([*problems, *error.problems]) from error
    if problems or not largest:
        raise JobError(problems)
    import torch

    from pipeline.checkpoints.export.export_folder import Export

    dtype = getattr(torch, options.dtype)
    return Export(
        checkpoint,
        model,
        tokenizer,
        Path(options.folder),
        dtype,
        largest,
        options.overwrite,
        options.allow_pickle,
    )


def _say(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    run_command(main)
