"""``python -m pipeline.generate CHECKPOINT|FOLDER --prompt TEXT``: text from a checkpoint or HF folder.

transformers computes it, on the GPU if there is one, with a cache of keys and values: each token costs one
forward pass of that token. Exit codes: 0 done, 2 with every problem if it cannot be done as asked, 1 anything
else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.base.command import run_command, show_messages
from pipeline.base.command_line import read_command_line
from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_WRONG_JOB, JobError
from pipeline.checkpoints.export.arguments import GenerateOptions, length_problems, option_problems, sampling
from pipeline.checkpoints.resume import checkpoint_at, is_checkpoint
from pipeline.job.report import console, print_problems
from pipeline.training.quiet import quiet_deepspeed

if TYPE_CHECKING:
    from pipeline.checkpoints.export.load_model import Loaded

PROGRAM = "python -m pipeline.generate"


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate; the exit code."""
    try:
        options = read_command_line(GenerateOptions, arguments, PROGRAM)
        if problems := list(option_problems(options)):
            raise JobError(problems)
        _generate(options)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    except (OSError, RuntimeError, ValueError) as error:  # the last also: a terminal without the letters
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(flush=True)
        return EXIT_FAILED
    return EXIT_FINISHED


def _generate(options: GenerateOptions) -> None:
    quiet_deepspeed(0)
    show_messages(lambda line: print(line, file=sys.stderr))
    import torch
    from transformers import GenerationConfig, TextStreamer, set_seed

    loaded = _load(options)
    model = loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    inputs = loaded.tokenizer(options.prompt, return_tensors="pt")
    if problems := list(length_problems(options, loaded, inputs["input_ids"])):
        raise JobError(problems)
    set_seed(options.seed)
    model.generate(
        input_ids=inputs["input_ids"].to(model.device),
        attention_mask=inputs["attention_mask"].to(model.device),
        streamer=TextStreamer(loaded.tokenizer, skip_special_tokens=True),
        generation_config=GenerationConfig(**sampling(options)),
    )


def _load(options: GenerateOptions) -> Loaded:
    import torch
    from transformers.utils import logging

    from pipeline.checkpoints.export.load_model import from_checkpoint, from_folder

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype, source = getattr(torch, options.dtype), Path(options.source)
    if is_checkpoint(source):
        return from_checkpoint(
            checkpoint_at(source).reported(), options.tokenizer, dtype, options.allow_pickle
        )
    return from_folder(source, options.tokenizer, dtype)


if __name__ == "__main__":
    run_command(main)
