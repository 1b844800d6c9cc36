"""Small Hugging Face folders, jobs that start from them in any layout, and what transformers computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from pipeline.data.loader import MicroBatch
from pipeline.data.tokenizer import ByteTokenizer
from pipeline.engine.engine import TrainEngine
from pipeline.job.job import Job
from pipeline.job.options import Options
from pipeline.job.resolve import resolve
from pipeline.job.world import Host, World
from tests.checkpoints.layouts import find
from tests.model.hugging_face import build

ROWS, SEQUENCE = 8, 16
TOKENS = torch.randint(300, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(8))
# A part of the weights goes into each of several files.
SEVERAL_FILES = "60KB"
# A rate that changes no weight by more than rounding is none: what is asked is the loss before the update.
CONFIG: dict[str, Any] = {"train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 1e-9}}}


def write_folder(folder: Path, kind: str, max_shard_size: str = SEVERAL_FILES) -> Path:
    """The model of `tests.model.hugging_face.build`, as transformers saves it, with the byte tokenizer."""
    build(kind).save_pretrained(folder, max_shard_size=max_shard_size)
    ByteTokenizer().save(folder)
    return folder


def only_config(folder: Path, other: Path) -> Path:
    """A folder with another one's config.json alone."""
    other.mkdir()
    shutil.copy(folder / "config.json", other)
    return other


def options(folder: Path, model: Path | str, layout: str = "one", **more: Any) -> Options:
    """Of a run in ``folder / "run"``."""
    path = folder / f"{layout}.json"
    path.write_text(json.dumps({**CONFIG, **find(layout).config}), encoding="utf-8")
    values: dict[str, Any] = {
        "deepspeed_config": str(path),
        "model": str(model),
        "seq_length": SEQUENCE,
        "train_steps": 1,
        "dropout": 0.0,
        "output_dir": str(folder / "run"),
    }
    return Options(**{**values, **more})


def job(folder: Path, model: Path | str, layout: str = "one", **more: Any) -> Job:
    """The job of these options."""
    world = World((Host("localhost", find(layout).ranks),), "cpu")
    return resolve(options(folder, model, layout, **more), world)


def loss_of_transformers(folder: Path) -> float:
    """Of all of `TOKENS`, in the model of a folder."""
    with torch.no_grad():
        logits = logits_of_transformers(folder, TOKENS[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).item()


@torch.no_grad()
def logits_of_transformers(folder: Path, tokens: Tensor) -> Tensor:
    """[rows, sequence, vocabulary] fp32; every tensor must be in the folder, and no other."""
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, local_files_only=True
    )
    assert not any(found.values()), found
    return model.eval()(tokens).logits


def first_loss(engine: TrainEngine) -> float:
    """Of all of `TOKENS`, by a step of training."""
    batch, data = engine.job.batch, engine.parallel.mesh.data
    batches = []
    for index in range(batch.accumulation_steps):
        first = (index * data + engine.parallel.coordinates.data) * batch.micro_batch_size
        rows = TOKENS[first : first + batch.micro_batch_size]
        mask = torch.ones(len(rows), SEQUENCE, dtype=torch.bool)
        batches.append(MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), mask, (0,)))
    return engine.train_step(batches, ROWS * SEQUENCE).loss
