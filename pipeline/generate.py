"""``python -m pipeline.generate CHECKPOINT|FOLDER --prompt TEXT``: text from a checkpoint or HF folder.

transformers computes it, on the GPU if there is one, with a cache of keys and values: each token costs one
forward pass of that token. Exit codes: 0 done, 2 with every problem if it cannot be done as asked, 1 anything
else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pipeline.base.command import run_command
from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_WRONG_JOB, JobError, Problem
from pipeline.base.user_input import is_file, is_text
from pipeline.checkpoints.export.checkpoint_at import is_checkpoint
from pipeline.export import DTYPES, chosen_checkpoint
from pipeline.job.model_files import CONFIG_FILE
from pipeline.job.report import console, print_problems
from pipeline.training.quiet import quiet_deepspeed

if TYPE_CHECKING:
    from pipeline.checkpoints.export.load_model import Loaded

PROGRAM = "python -m pipeline.generate"
TEMPERATURE = 0.7
# The likeliest token is as good as certain by then; far below, the logits overflow.
LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text with a trained model, and print it as it comes."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's --output_dir, its checkpoints folder, one checkpoint, or a Hugging Face folder."""
    prompt: str
    """The text to continue."""
    max_new_tokens: int = 100
    """Most tokens to add; the end of a document ends the text before."""
    temperature: float | None = None
    """Divides the logits: below 1 likely tokens become likelier. None: 0.7."""
    top_k: int | None = None
    """Draw among that many likeliest tokens. None: among all."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have this probability. None: among all."""
    greedy: bool = False
    """Always take the likeliest token."""
    seed: int = 0
    """Of the draws: the same seed, options and machine give the same text."""
    dtype: str = "float32"
    """Format to compute in: float32, bfloat16 or float16."""
    tokenizer: str | None = None
    """bytes, or a Hugging Face tokenizer folder. None: the one saved with the checkpoint or in the folder."""
    allow_pickle: tuple[str, ...] = ()
    """MODULE.NAME that a checkpoint's files may ask for when they are read, beyond the pipeline's own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate; the exit code."""
    options = tyro.cli(
        GenerateOptions,
        args=arguments,
        prog=PROGRAM,
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
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


def option_problems(options: GenerateOptions) -> Iterator[Problem]:
    """Options out of range, and a source that is none."""
    if not is_text(options.prompt) or not options.prompt:
        yield Problem("prompt", options.prompt, "is a text of at least one character", "Give --prompt")
    # The last is what every random generator that transformers seeds takes.
    for name, lowest, bits in (("max_new_tokens", 1, 63), ("top_k", 1, 63), ("seed", 0, 32)):
        value = getattr(options, name)
        if value is not None and not lowest <= value < 2**bits:
            rule = f"must be at least {lowest} and fit {bits} bits"
            yield Problem(name, value, rule, f"Correct --{name}")
    if options.temperature is not None and not LEAST_TEMPERATURE <= options.temperature < float("inf"):
        rule = f"must be a number of at least {LEAST_TEMPERATURE:g}: it divides the logits"
        yield Problem("temperature", options.temperature, rule, "Correct it, or give --greedy")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        yield Problem("top_p", options.top_p, "must be above 0 and at most 1", "Correct --top_p")
    for name in ("temperature", "top_k", "top_p") if options.greedy else ():
        if getattr(options, name) is not None:
            remedy = f"Leave out --greedy or --{name}"
            yield Problem(name, getattr(options, name), "does nothing beside --greedy", remedy)
    if options.dtype not in DTYPES:
        rule = f"is not one of {', '.join(DTYPES)}"
        yield Problem("dtype", options.dtype, rule, "Correct --dtype")
    source = Path(options.source)
    if not is_checkpoint(source) and not is_file(source / CONFIG_FILE):
        rule = "is neither a checkpoint, nor a folder of a run, nor a Hugging Face folder"
        yield Problem("source", options.source, rule, "Correct the path")


def _generate(options: GenerateOptions) -> None:
    quiet_deepspeed(0)
    import torch
    from transformers import GenerationConfig, TextStreamer, set_seed

    loaded = _load(options)
    model = loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    inputs = loaded.tokenizer(options.prompt, return_tensors="pt")
    if problems := list(_length_problems(options, loaded, inputs["input_ids"])):
        raise JobError(problems)
    set_seed(options.seed)
    model.generate(
        input_ids=inputs["input_ids"].to(model.device),
        attention_mask=inputs["attention_mask"].to(model.device),
        streamer=TextStreamer(loaded.tokenizer, skip_special_tokens=True),
        generation_config=GenerationConfig(**_sampling(options)),
    )


def _load(options: GenerateOptions) -> Loaded:
    import torch
    from transformers.utils import logging

    from pipeline.checkpoints.export.load_model import from_checkpoint, from_folder

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype, source = getattr(torch, options.dtype), Path(options.source)
    if is_checkpoint(source):
        return from_checkpoint(chosen_checkpoint(source), options.tokenizer, dtype, options.allow_pickle)
    return from_folder(source, options.tokenizer, dtype)


def _length_problems(options: GenerateOptions, loaded: Loaded, tokens: Any) -> Iterator[Problem]:
    """A text longer than the model's positions, or with ids that the model does not have."""
    config, length = loaded.model.config, tokens.shape[1]
    if length == 0:
        yield Problem("prompt", options.prompt, "the tokenizer makes no token of it", "Give another text")
        return
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length + options.max_new_tokens > limit:
        rule = f"with the {length} tokens of the prompt that is more than the model's {limit} positions"
        remedy = f"Use at most {max(0, limit - length)}, or a shorter prompt"
        yield Problem("max_new_tokens", options.max_new_tokens, rule, remedy)
    if (highest := int(tokens.max())) >= config.vocab_size:
        rule = f"has the id {highest}, and the model has {config.vocab_size} ids"
        yield Problem("tokenizer", options.tokenizer, rule, "Give the model's own tokenizer")


def _sampling(options: GenerateOptions) -> dict[str, Any]:
    """How tokens are chosen. What is not said here is left out: of the model comes no setting but its ids."""
    common = {"max_new_tokens": options.max_new_tokens, "use_cache": True}
    if options.greedy:
        return {**common, "do_sample": False}
    return {
        **common,
        "do_sample": True,
        "temperature": TEMPERATURE if options.temperature is None else options.temperature,
        "top_k": options.top_k or 0,
        "top_p": 1.0 if options.top_p is None else options.top_p,
    }


if __name__ == "__main__":
    run_command(main)
