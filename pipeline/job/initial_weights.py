"""Where a run's first weights come from, and whether a folder's weights are those of its model. No torch.

    --model FOLDER              the weights in the folder; drawn at random where it has none, which is said
    --model FOLDER/config.json  drawn at random: the file describes a model, and nothing else is looked at
    --model PRESET              drawn at random, also by a usual name such as gpt2, where that is said

A run that resumes has its checkpoint's weights, whatever became of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.base.problems import JobError, Problem
from pipeline.base.user_input import exists, is_folder
from pipeline.base.words import few
from pipeline.hugging_face.families import family_of
from pipeline.hugging_face.safetensors_files import INDEX, SIZES, WEIGHTS, Stored, stored_tensors
from pipeline.hugging_face.tensor_map import OUTPUT, TIED, tensor_map
from pipeline.job.models import PRESETS, preset_of
from pipeline.model.config import ModelConfig

# What transformers once saved beside weights: masks and frequencies, which follow from config.json.
_DERIVED = re.compile(r"(^|\.)(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)$")
# Weights that were trained apart differ everywhere, so that a few places of them tell.
SAMPLES, SAMPLE_BYTES = 64, 4096
NO_COPY = f"{OUTPUT} is not the embedding, and its config.json ties them"
NO_COPY_REMEDY = "Set tie_word_embeddings in config.json to false"
_PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt")


class InitialWeights(NamedTuple):
    """Where the weights of step 0 come from.

    Attributes:
        folder: A Hugging Face folder; None where they are drawn at random.
        reason: Of the choice, in words; empty where ``--model`` is neither a path nor a preset's usual name.
    """

    folder: Path | None
    reason: str


def initial_weights(model_option: str) -> InitialWeights:
    """Where the weights of step 0 come from, by what ``--model`` says."""
    folder, beside = model_folder(model_option), Path(model_option).parent
    if (preset := preset_of(model_option)) and preset != model_option:
        return InitialWeights(None, f"{model_option} is the preset {preset}; a folder brings trained weights")
    if preset or not exists(model_option):
        return InitialWeights(None, "")
    if folder is None:
        more = f"; --model {beside} loads the weights beside it" if _has_weights(beside) else ""
        return InitialWeights(None, f"{model_option} is a description{more}")
    if _has_weights(folder):
        return InitialWeights(folder, "the folder has weights")
    return InitialWeights(None, f"no weights in {folder}")


def model_folder(model_option: str) -> Path | None:
    """The folder that ``--model`` names; None for a preset or a file."""
    return Path(model_option) if model_option not in PRESETS and is_folder(model_option) else None


def no_weights(folder: str) -> Problem:
    """The warning that a folder is trained from random weights."""
    rule = f"the folder has no {WEIGHTS}: training begins with RANDOM weights, not with trained ones"
    remedy = f"Put the model's weights there, or give {Path(folder) / 'config.json'} if random ones are meant"
    return Problem("model", folder, rule, remedy, "warning")


def _has_weights(folder: Path) -> bool:
    return exists(folder / WEIGHTS) or exists(folder / INDEX)


def folder_weights_problems(model_option: str, model: ModelConfig) -> list[Problem]:
    """Why the weights in the folder that ``--model`` names cannot be those of step 0."""
    folder = model_folder(model_option)
    if folder is None:
        return []
    if not _has_weights(folder):
        return list(_pickled(folder))
    try:
        family_of(model)
        return list(_mismatches(folder, model, stored_tensors(folder)))
    except JobError as error:
        return list(error.problems)
    except (OSError, ValueError) as error:
        rule = f"its weights cannot be read: {error}"
        return [Problem("model", model_option, rule, "Download or save the folder again")]


def _pickled(folder: Path) -> Iterator[Problem]:
    """Weights that are there, but in files that may run code when they are opened."""
    names = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if names:
        rule = f"has weights as pickles only ({few(names)}), which may run code when they are opened"
        remedy = (
            "Open it with transformers' AutoModelForCausalLM and save_pretrained it, which writes "
            f"safetensors; or give --model {folder / 'config.json'} to start from random weights"
        )
        yield Problem("model", str(folder), rule, remedy)


def _mismatches(folder: Path, model: ModelConfig, stored: dict[str, Stored]) -> Iterator[Problem]:
    """In what the tensors of a folder are not those that the model has."""
    there, remedy = str(folder), "Correct config.json, or give the folder that belongs to it"
    wanted = wanted_tensors(model)
    found = {full_name(name, stored, model): tensor for name, tensor in stored.items()}
    missing = [name for name in wanted if name not in found]
    if missing:
        yield Problem("model", there, f"its weights lack {len(missing)} tensors: {few(missing)}", remedy)
    extra = [name for name in found if name not in wanted and not _superfluous(name, model)]
    if extra:
        rule = f"its weights have {len(extra)} tensors that its model does not: {few(extra)}"
        yield Problem("model", there, rule, remedy)
    for name, shape in wanted.items():
        if name in found and found[name].shape != shape:
            rule = f"{name} has the shape {list(found[name].shape)}, and config.json makes it {list(shape)}"
            yield Problem("model", there, rule, remedy)
    formats = sorted({found[name].dtype for name in wanted if name in found} - SIZES.keys())
    if formats:
        rule = f"its weights are stored as {', '.join(formats)}, and are read as {', '.join(SIZES)}"
        yield Problem("model", there, rule, "Save it unquantized, with save_pretrained")
    elif model.tied and OUTPUT in found and not missing:
        (embedding,) = next(entry.theirs for entry in tensor_map(model) if entry.name == TIED)
        if _differ(found[embedding], found[OUTPUT]):
            yield Problem("model", there, NO_COPY, NO_COPY_REMEDY)


def _differ(one: Stored, other: Stored) -> bool:
    """Whether two tensors are seen to be different, by their shapes and some of their bytes. Of values in two
    formats nothing is read here, without torch; whoever loads them compares all."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return one.shape != other.shape
    with one.file.open("rb") as first, other.file.open("rb") as second:
        for index in range(SAMPLES):
            skipped = (one.end - one.begin) * index // SAMPLES
            length = min(SAMPLE_BYTES, one.end - one.begin - skipped)
            first.seek(one.begin + skipped)
            second.seek(other.begin + skipped)
            if first.read(length) != second.read(length):
                return True
    return False


def wanted_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that transformers has for a model."""
    return {name: shape for entry in tensor_map(model) for name, shape in entry.theirs.items()}


def full_name(name: str, stored: dict[str, Stored], model: ModelConfig) -> str:
    """A tensor's name in the model with its output layer: files of the model without it leave out the first
    word."""
    base = family_of(model).base
    if name == OUTPUT or any(other.startswith(base) for other in stored):
        return name
    return base + name


def _superfluous(name: str, model: ModelConfig) -> bool:
    """Whether a tensor says nothing: derived ones, and a tied output layer's copy of the embedding."""
    return bool(_DERIVED.search(name)) or (model.tied and name == OUTPUT)
