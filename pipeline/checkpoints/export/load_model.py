"""A model and a tokenizer of transformers, ready to generate: from a Hugging Face folder or a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline.base.problems import JobError, job_error
from pipeline.checkpoints.export.arguments import model_of_checkpoint, tokenizer_of_checkpoint
from pipeline.checkpoints.export.tensors import rounded, tensors, verified_state
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.data.tokenizer import Tokenizer, load_tokenizer, vocabulary_problems
from pipeline.hugging_face.families import TOKEN_IDS, config_json, generation_config_json
from pipeline.hugging_face.safetensors_files import stored_tensors

# Nothing is fetched, and no code from a folder is run, nor is the user asked whether it may.
_OFFLINE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class Loaded(NamedTuple):
    """What generates text. Of the model's generation config there are the ids that begin, end and pad a text,
    and nothing else: how tokens are chosen is the caller's choice."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def from_folder(folder: Path, tokenizer_name: str | None, dtype: torch.dtype) -> Loaded:
    """A Hugging Face folder; its own tokenizer where none is named.

    Raises:
        JobError: transformers cannot open it, or its weights are not those of its model, or not finite
            in this format.
    """
    own = None if tokenizer_name is None else load_tokenizer(tokenizer_name)
    try:
        stored_tensors(folder)  # transformers would ignore an index that is wrong
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **_OFFLINE
        )
        tokenizer = _of_transformers(own) if own else AutoTokenizer.from_pretrained(folder, **_OFFLINE)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        rule = f"cannot be opened ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        raise job_error("source", str(folder), rule, "Name a model's folder") from error
    if wrong := sorted(found["missing_keys"]):
        rule = f"its weights lack {len(wrong)} tensors, {wrong[0]} among them"
        raise job_error("source", str(folder), rule, "Download or save the folder again")
    if spoiled := [name for name, value in model.named_parameters() if not value.isfinite().all()]:
        rule = f"{len(spoiled)} tensors hold values that it cannot, {spoiled[0]} among them"
        name = str(dtype).removeprefix("torch.")
        raise job_error("dtype", name, rule, "Use another --dtype, or other weights")
    model.generation_config = GenerationConfig(
        **{name: getattr(model.generation_config, name) for name in TOKEN_IDS}
    )
    return Loaded(model.eval(), tokenizer)


def from_checkpoint(
    checkpoint: Checkpoint, tokenizer_name: str | None, dtype: torch.dtype, allowed: Collection[str] = ()
) -> Loaded:
    """A checkpoint of any layout, filled into a model of transformers tensor by tensor.

    Raises:
        JobError: no class of transformers computes what the model does, there is no tokenizer, a file of the
            checkpoint is damaged, or the format does not reach as far as its values.
        RuntimeError: the checkpoint does not hold its model.
    """
    config = model_of_checkpoint(checkpoint)
    ours = tokenizer_of_checkpoint(checkpoint, tokenizer_name)
    if problems := vocabulary_problems(ours, config.vocab_size):
        raise JobError(problems)
    state = verified_state(checkpoint, allowed)
    end, facts = ours.end_of_document, ours.facts
    described = config_json(config, str(dtype).removeprefix("torch."), end, facts.model_config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described), dtype=dtype)
    generation = generation_config_json(end, facts.generation_config, facts.model_config)
    model.generation_config = GenerationConfig(**{name: generation[name] for name in TOKEN_IDS})
    waiting = dict(model.named_parameters())  # a tied output layer is not among them
    with torch.no_grad():
        for name, values in tensors(config, state):
            waiting.pop(name).copy_(rounded(name, values, dtype))
    if waiting:
        raise RuntimeError(f"{checkpoint.path} does not give {sorted(waiting)} of {type(model).__name__}")
    return Loaded(model.eval(), _of_transformers(ours))


def _of_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return AutoTokenizer.from_pretrained(folder, **_OFFLINE)
