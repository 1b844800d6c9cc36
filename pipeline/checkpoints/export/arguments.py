"""What export and generate are given, and what is wrong with it. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pipeline.base.problems import Problem, job_error
from pipeline.base.user_input import is_file, is_text
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.resume import is_checkpoint
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.tokenizer_folder import TOKENIZER
from pipeline.job.models import CONFIG_FILE
from pipeline.job.options import FolderName, PathName
from pipeline.job.run_file import TOKENIZER_FOLDER
from pipeline.model.config import ModelConfig, model_from_json

if TYPE_CHECKING:
    from pipeline.checkpoints.export.load_model import Loaded

DTYPES = ("float32", "bfloat16", "float16")
Dtype = Annotated[str, f"{{{','.join(DTYPES)}}}"]
_OF_MODEL = "model."
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
TEMPERATURE = 0.7
# The likeliest token is as good as certain by then; far below, the logits overflow.
LEAST_TEMPERATURE = 1e-6


def model_of_checkpoint(checkpoint: Checkpoint) -> ModelConfig:
    """The model that a checkpoint holds.

    Raises:
        JobError: its manifest describes none that can be built here.
    """
    fields = {
        key.removeprefix(_OF_MODEL): value
        for key, value in checkpoint.identity.items()
        if key.startswith(_OF_MODEL)
    }
    return model_from_json({**fields, "name": str(checkpoint.path)}, str(checkpoint.path))


def tokenizer_of_checkpoint(checkpoint: Checkpoint, name: str | None) -> Tokenizer:
    """The tokenizer called `name`, or else the one saved with a checkpoint or its run.

    Raises:
        JobError: there is none, or it cannot be used.
    """
    if name is not None:
        return load_tokenizer(name)
    for folder in (checkpoint.path, checkpoint.folder.parent):
        if is_file(folder / TOKENIZER_FOLDER / TOKENIZER):
            return load_tokenizer(str(folder / TOKENIZER_FOLDER))
    rule = f"neither {checkpoint.path} nor its run has a folder {TOKENIZER_FOLDER}"
    raise job_error("tokenizer", None, rule, "Give --tokenizer")


def dtype_problems(dtype: str) -> list[Problem]:
    """What is wrong with a value of ``--dtype``."""
    if dtype in DTYPES:
        return []
    return [Problem("dtype", dtype, f"is not one of {', '.join(DTYPES)}", "Correct --dtype")]


def bytes_of(size: str) -> int | None:
    """5GB -> 5,000,000,000, as transformers counts; None for what is no size."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?B)?", size.strip(), re.IGNORECASE)
    if not match:
        return None
    return int(float(match[1]) * _UNITS.get((match[2] or "").upper(), 1))


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text with a trained model, and print it as it comes."""

    source: Annotated[PathName, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
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
    dtype: Dtype = "float32"
    """Format to compute in."""
    tokenizer: FolderName | None = None
    """bytes, or a Hugging Face tokenizer folder. None: the one saved with the checkpoint or in the folder."""
    allow_pickle: tuple[Annotated[str, "MODULE.NAME"], ...] = ()
    """What a checkpoint's files may ask for when they are read, beyond the pipeline's own."""


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
    yield from dtype_problems(options.dtype)
    source = Path(options.source)
    if not is_checkpoint(source) and not is_file(source / CONFIG_FILE):
        rule = "is neither a checkpoint, nor a folder of a run, nor a Hugging Face folder"
        yield Problem("source", options.source, rule, "Correct the path")


def length_problems(options: GenerateOptions, loaded: Loaded, tokens: Any) -> Iterator[Problem]:
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


def sampling(options: GenerateOptions) -> dict[str, Any]:
    """How tokens are chosen. Of the model's own settings only the ids are used."""
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
