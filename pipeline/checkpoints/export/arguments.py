"""What export and generate are given, and what is wrong with it. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pipeline.base.json_reader import parse_saved
from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.user_input import is_file, is_text, read_text
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.resume import is_checkpoint
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.tokenizer_folder import TOKENIZER
from pipeline.job.models import CONFIG_FILE
from pipeline.job.options import FileName, FolderName, PathName
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
# Options that do nothing beside a switch.
_IDLE = {"greedy": ("temperature", "top_k", "top_p", "samples"), "chat": ("samples",)}


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
    """Continue texts with a trained model, or talk with it, and print what it writes as it comes."""

    source: Annotated[PathName, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's --output_dir, its checkpoints folder, one checkpoint, or a Hugging Face folder."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A text to continue; given again, one more, each by itself. With --chat: what is said first."""
    prompt_file: FileName | None = None
    """A file that is one text to continue, or a .jsonl file with a string or {"prompt": ...} on each line."""
    samples: int = 1
    """Texts for each prompt."""
    chat: bool = False
    """Talk with the model by its chat template, a line at a time; Ctrl-D ends."""
    max_new_tokens: int = 100
    """Most tokens to add; the end of a document ends the text before."""
    temperature: float | None = None
    """Divides the logits: below 1 likely tokens become likelier. None: 0.7."""
    top_k: int | None = None
    """Draw among that many likeliest tokens. None: among all."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have this probability. None: among all."""
    repetition_penalty: float | None = None
    """Above 1, tokens that are in the text already become less likely (Keskar et al. 2019). None: 1."""
    greedy: bool = False
    """Always take the likeliest token."""
    seed: int = 0
    """Of the draws for each prompt: the same seed, options and machine give the same text."""
    dtype: Dtype = "float32"
    """Format to compute in."""
    tokenizer: FolderName | None = None
    """bytes, or a Hugging Face tokenizer folder. None: the one saved with the checkpoint or in the folder."""
    allow_pickle: tuple[Annotated[str, "MODULE.NAME"], ...] = ()
    """What a checkpoint's files may ask for when they are read, beyond the pipeline's own."""


def option_problems(options: GenerateOptions) -> Iterator[Problem]:
    """Options out of range, and a source that is none."""
    if not (options.prompt or options.prompt_file or options.chat):
        yield Problem("prompt", None, "is missing", "Give --prompt, --prompt_file or --chat")
    # The last is what every random generator that transformers seeds takes.
    ranges = (("max_new_tokens", 1, 63), ("top_k", 1, 63), ("samples", 1, 63), ("seed", 0, 32))
    for name, lowest, bits in ranges:
        value = getattr(options, name)
        if value is not None and not lowest <= value < 2**bits:
            rule = f"must be at least {lowest} and fit {bits} bits"
            yield Problem(name, value, rule, f"Correct --{name}")
    if options.temperature is not None and not LEAST_TEMPERATURE <= options.temperature < float("inf"):
        rule = f"must be a number of at least {LEAST_TEMPERATURE:g}: it divides the logits"
        yield Problem("temperature", options.temperature, rule, "Correct it, or give --greedy")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        yield Problem("top_p", options.top_p, "must be above 0 and at most 1", "Correct --top_p")
    if options.repetition_penalty is not None and not 0 < options.repetition_penalty < float("inf"):
        yield Problem("repetition_penalty", options.repetition_penalty, "must be above 0", "Correct it")
    for switch, names in _IDLE.items():
        for name in names if getattr(options, switch) else ():
            if (value := getattr(options, name)) != getattr(GenerateOptions, name):
                remedy = f"Leave out --{switch} or --{name}"
                yield Problem(name, value, f"does nothing beside --{switch}", remedy)
    yield from dtype_problems(options.dtype)
    source = Path(options.source)
    if not is_checkpoint(source) and not is_file(source / CONFIG_FILE):
        rule = "is neither a checkpoint, nor a folder of a run, nor a Hugging Face folder"
        yield Problem("source", options.source, rule, "Correct the path")


def read_prompts(options: GenerateOptions) -> list[str]:
    """The texts of --prompt, then those of --prompt_file.

    Raises:
        JobError: the file cannot be read, or a text is empty.
    """
    path, found = options.prompt_file, list(options.prompt)
    if path is not None:
        try:
            text = read_text(path)
            lines = path.endswith(".jsonl")
            found += _lines(text) if lines else [text.removesuffix("\n").removesuffix("\r")]
        except (OSError, ValueError) as error:
            rule = f"cannot be read ({getattr(error, 'strerror', None) or error})"
            raise job_error("prompt_file", path, rule, "Name a text file, or a .jsonl file") from error
    rule, remedy = "is a text of at least one character", "Give --prompt, or correct the file"
    if wrong := [Problem("prompt", text, rule, remedy) for text in found if not text or not is_text(text)]:
        raise JobError(wrong)
    return found


def _lines(text: str) -> Iterator[str]:
    """The prompts of a file of JSON lines. Raises ValueError: a line that has none."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                value = parse_saved(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            prompt = value.get("prompt") if isinstance(value, dict) else value
            if not isinstance(prompt, str):
                raise ValueError(f'line {number} is neither a string nor has a "prompt" that is one')
            yield prompt


def length_problems(options: GenerateOptions, loaded: Loaded, tokens: Any, prompt: str) -> Iterator[Problem]:
    """A text longer than the model's positions, or with ids that the model does not have."""
    config, length = loaded.model.config, tokens.shape[1]
    if length == 0:
        yield Problem("prompt", prompt, "the tokenizer makes no token of it", "Give another text")
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
    if options.repetition_penalty is not None:
        common["repetition_penalty"] = options.repetition_penalty
    if options.greedy:
        return {**common, "do_sample": False}
    return {
        **common,
        "do_sample": True,
        "temperature": TEMPERATURE if options.temperature is None else options.temperature,
        "top_k": options.top_k or 0,
        "top_p": 1.0 if options.top_p is None else options.top_p,
    }
