"""A checkpoint as a Hugging Face folder: config, tokenizer and weights, which appear together or not."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.base.files import make_folder, remove_empty, remove_tree, sync_files, sync_folder
from pipeline.base.problems import JobError, Problem
from pipeline.base.user_input import exists, unwritable
from pipeline.checkpoints.export.tensors import FORMATS, tensors, verified_state, write_weights
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.output import free_bytes, lack_of_space, only_one, output_problems
from pipeline.checkpoints.stored import StoredState
from pipeline.data.tokenizer import Tokenizer, vocabulary_problems
from pipeline.hugging_face.families import config_json, generation_config_json
from pipeline.hugging_face.folder_files import GENERATION_CONFIG
from pipeline.hugging_face.safetensors_files import SIZES
from pipeline.job.initial_weights import wanted_tensors
from pipeline.job.models import CONFIG_FILE
from pipeline.model.config import ModelConfig
from pipeline.model.counts import total_parameters

logger = logging.getLogger(__name__)

# Beside weights and tokenizer, room for the small files and the file system's own.
SPARE_BYTES = 16 * 2**20
# The files of a folder that may be replaced: those of a model, and what people and the hub put beside them.
_OF_A_MODEL = re.compile(
    r"(.*\.(safetensors|json|bin|jinja)|additional_chat_templates|merges\.txt|vocab\.txt|(tokenizer|spiece)\.model|README\.md|LICENSE|\.gitattributes)"
)


@dataclass(frozen=True)
class Export:
    """What is written where.

    Attributes:
        folder: Made by the export; an earlier one with a model in it is replaced if `overwrite` says so.
        dtype: Format of the weights.
        largest_file: Bytes of tensors in one file.
        allowed: Names that the checkpoint's files may ask for, from ``--allow_pickle``.
    """

    checkpoint: Checkpoint
    model: ModelConfig
    tokenizer: Tokenizer
    folder: Path
    dtype: torch.dtype
    largest_file: int
    overwrite: bool
    allowed: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return total_parameters(self.model) * SIZES[FORMATS[self.dtype]]


def export_problems(export: Export) -> list[Problem]:
    """Why the export cannot begin."""
    problems = list(vocabulary_problems(export.tokenizer, export.model.vocab_size))
    try:
        wanted_tensors(export.model)
    except JobError as error:
        problems += error.problems
    return problems + (_folder_problems(export) or _room_problems(export))


def _folder_problems(export: Export) -> list[Problem]:
    folder, key = export.folder, str(export.folder)
    if rule := unwritable(folder) or unwritable(folder.resolve().parent):
        return [Problem("folder", key, rule, "Name another folder")]
    if problems := output_problems("folder", key):
        return problems
    if not exists(folder) or not any(folder.iterdir()):
        return []
    if not export.overwrite:
        remedy = "Name another folder, or give --overwrite to replace it"
        return [Problem("folder", key, "is there already and not empty", remedy)]
    others = sorted(each.name for each in folder.iterdir() if not _OF_A_MODEL.fullmatch(each.name))
    if others or not (folder / CONFIG_FILE).exists():
        rule = f"is no model's folder: it has {', '.join(others[:3])}" if others else f"has no {CONFIG_FILE}"
        return [Problem("folder", key, rule, "Name another folder; --overwrite replaces whole folders")]
    return []


def _room_problems(export: Export) -> list[Problem]:
    nearest = next(path for path in export.folder.resolve().parents if exists(path))
    if rule := lack_of_space(nearest, export.num_bytes + SPARE_BYTES, free_bytes(nearest), "the export"):
        remedy = "Make room, choose another disk, or a smaller --dtype"
        return [Problem("folder", str(export.folder), rule, remedy)]
    return []


def write_export(export: Export) -> list[Path]:
    """Write the folder; it takes its name when all of it is on the disk.

    Returns:
        The files of weights.

    Raises:
        JobError: `export_problems`, the checkpoint is damaged, or another process is exporting to there.
        OSError: the disk is full, or cannot be written; nothing has its name then.
        RuntimeError: the checkpoint does not hold its model.
    """
    if problems := export_problems(export):
        raise JobError(problems)
    staging = StagingFolder(export.folder.resolve())
    with staging.held():
        # Once more: a folder may have come back that a crash had left without its name.
        if problems := export_problems(export):
            raise JobError(problems)
        state = verified_state(export.checkpoint, export.allowed)
        staging.content.mkdir()
        files = _fill(export, state, staging.content)
        staging.publish()
    return [export.folder / file.name for file in files]


def _fill(export: Export, state: StoredState, folder: Path) -> list[Path]:
    end, facts = export.tokenizer.end_of_document, export.tokenizer.facts
    name = str(export.dtype).removeprefix("torch.")
    descriptions = {
        CONFIG_FILE: config_json(export.model, name, end, facts.model_config),
        GENERATION_CONFIG: generation_config_json(end, facts.generation_config, facts.model_config),
    }
    export.tokenizer.save(folder)  # with the earlier two descriptions
    for file, content in descriptions.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    logger.info(f"writing {export.num_bytes / 1e6:,.1f} MB of {name} from {export.checkpoint.path}")
    values = tensors(export.model, state)
    files = write_weights(folder, wanted_tensors(export.model), values, export.dtype, export.largest_file)
    sync_files(folder)
    return files


@dataclass(frozen=True)
class StagingFolder:
    """Where `folder`, a resolved path, is made: by one process at a time, and a crash takes no folder away.

    .out.export-partial/lock    one export into `out` at a time
    .out.export-partial/model   takes the name `out` when all of it is on the disk
    .out.export-replaced        what had the name before; removed when the new folder has it
    """

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.export-partial")

    @property
    def content(self) -> Path:
        """The folder that is being written."""
        return self.path / "model"

    @property
    def replaced(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.export-replaced")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other process exports to there, and what crashes have left is put right. Afterwards
        nothing of it is left.

        Raises:
            JobError: another process is at it.
            OSError: it cannot be made.
        """
        made = make_folder(self.path)
        with only_one(self.path / "lock", "folder", self.folder, "exporting"):
            try:
                self._recover()
                yield
            finally:
                # Within the lock, so that the folder of the next process is not taken from it. What cannot be
                # removed must not hide why; the next export tries again.
                shutil.rmtree(self.path, ignore_errors=True)
                remove_empty(made[1:])

    def _recover(self) -> None:
        self._give_back()
        remove_tree(self.replaced)
        remove_tree(self.content)

    def _give_back(self) -> None:
        """Where a crash came between the two renames of `publish`, the earlier folder gets its name back."""
        if self.replaced.exists() and not _has_content(self.folder):
            self.replaced.rename(self.folder)
            sync_folder(self.folder.parent)

    def publish(self) -> None:
        """Give what was written its name, instead of an earlier folder."""
        try:
            if _has_content(self.folder):
                self.folder.rename(self.replaced)
            self.content.rename(self.folder)  # an empty folder of that name gives way
        except BaseException:
            self._give_back()
            raise
        sync_folder(self.folder.parent)
        try:
            remove_tree(self.replaced)
        except OSError as error:  # the export is done nevertheless
            logger.warning(f"{self.replaced}, which was replaced, cannot be removed: {error}")


def _has_content(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())
