"""``python -m pipeline.generate CHECKPOINT|FOLDER --prompt TEXT``: text from a checkpoint or HF folder.

transformers computes it, on the GPU if there is one, with a cache of keys and values: each token costs one
forward pass of that token. Exit codes: 0 done, 2 with every problem if it cannot be done as asked, 1 anything
else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.base.command import run_command, say, show_messages
from pipeline.base.command_line import read_command_line
from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_WRONG_JOB, JobError, job_error
from pipeline.checkpoints.export.arguments import (
    GenerateOptions,
    length_problems,
    option_problems,
    read_prompts,
    sampling,
)
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
        _generate(options, read_prompts(options))
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


def _generate(options: GenerateOptions, prompts: list[str]) -> None:
    quiet_deepspeed(0)
    show_messages(lambda line: print(line, file=sys.stderr))
    import torch

    loaded = _load(options)
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    (_chat if options.chat else _continue)(options, loaded, prompts)


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


def _continue(options: GenerateOptions, loaded: Loaded, prompts: list[str]) -> None:
    """The texts of all prompts, one after the other; those of one do not depend on the others."""
    from transformers import set_seed

    encoded = [loaded.tokenizer(prompt, return_tensors="pt") for prompt in prompts]
    pairs = list(zip(prompts, encoded, strict=True))
    if problems := [
        each for text, inputs in pairs for each in length_problems(options, loaded, inputs["input_ids"], text)
    ]:
        raise JobError(problems)
    for number, inputs in enumerate(encoded, 1):
        set_seed(options.seed)
        for sample in range(1, options.samples + 1):
            if len(prompts) > 1 or options.samples > 1:
                print(f"--- prompt {number} of {len(prompts)}, sample {sample} of {options.samples}")
            _write(options, loaded, inputs)


def _write(options: GenerateOptions, loaded: Loaded, inputs: Any, skip_prompt: bool = False) -> Any:
    """Print what the model makes of a text, as it comes; all its tokens [1, tokens]."""
    from transformers import GenerationConfig, TextStreamer

    return loaded.model.generate(
        input_ids=inputs["input_ids"].to(loaded.model.device),
        attention_mask=inputs["attention_mask"].to(loaded.model.device),
        streamer=TextStreamer(loaded.tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True),
        generation_config=GenerationConfig(**sampling(options)),
    )


def _chat(options: GenerateOptions, loaded: Loaded, prompts: list[str]) -> None:
    """Answer the prompts, then each line of standard input.

    Raises:
        JobError: the model has no chat template, or none that takes a conversation.
    """
    from transformers import set_seed

    if not loaded.tokenizer.chat_template:
        rule = f"{options.source} has no chat template, by which questions and answers become one text"
        remedy = (
            "Continue a text with --prompt, or give --tokenizer FOLDER that has the template of this model"
        )
        raise job_error("chat", True, rule, remedy)
    set_seed(options.seed)
    messages: list[dict[str, str]] = []
    for text in chain(prompts, _typed_lines()):
        messages.append({"role": "user", "content": text})
        inputs = _encoded(options, loaded, messages)
        while len(messages) > 1 and list(length_problems(options, loaded, inputs["input_ids"], text)):
            say("The conversation fills the model's positions: its first question and answer are left out.")
            del messages[:2]
            inputs = _encoded(options, loaded, messages)
        if problems := list(length_problems(options, loaded, inputs["input_ids"], text)):
            print_problems(console(stderr=True), problems)
            messages.clear()
            continue
        written = _write(options, loaded, inputs, skip_prompt=True)[0, inputs["input_ids"].shape[1] :]
        answer = loaded.tokenizer.decode(written, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})


def _encoded(options: GenerateOptions, loaded: Loaded, messages: list[dict[str, str]]) -> Any:
    """A conversation as tokens, to which the answer is to be added."""
    from jinja2 import TemplateError

    try:
        return loaded.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as error:
        rule = f"the chat template of {options.source} cannot be used ({type(error).__name__}: {error})"
        raise job_error("chat", True, rule, "Correct the template") from error


def _typed_lines() -> Iterator[str]:
    """Lines of standard input to its end, asked for on a terminal."""
    asked = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(asked)
        except EOFError:
            return
        if line.strip():
            yield line


if __name__ == "__main__":
    run_command(main)
