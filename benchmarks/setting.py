"""What every contender of a comparison trains: model, batch, precision, data, optimizer. No torch."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro

from pipeline.base.json_reader import read_json
from pipeline.base.problems import EXIT_WRONG_JOB, JobError, Problem
from pipeline.cluster.devices import BF16_CAPABILITY, visible_gpus
from pipeline.data.training_data import DataSettings, TrainingData, load_data
from pipeline.job.data_sources import one_source
from pipeline.job.job import Job
from pipeline.job.models import load_model
from pipeline.job.options import Options
from pipeline.job.report import console, print_problems
from pipeline.job.resolve import config_path, resolve
from pipeline.job.world import Host, World
from pipeline.model.config import ModelConfig

Device = Literal["cpu", "cuda"]
Dtype = Literal["fp32", "bf16"]
Arguments = TypeVar("Arguments")

BENCHMARKS = Path(__file__).parent
CPU_MODEL, GPU_MODEL = str(BENCHMARKS / "gpt-6m.json"), "gpt2-124m"
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
CLIPPING = 1.0


@dataclass(frozen=True)
class Setting:
    """One training task.

    Attributes:
        model: Preset name or model file.
        device: What ranks compute on.
        precision: Of weights and activations in products.
        batch: Sequences per step of the whole job.
        accumulation: Micro-batches per step.
        seq_length: Tokens per sequence.
        threads: Of each rank, on CPU.
        folder: For files made on the way; the token cache is kept there.
        data: Text files or folders; none: the source text of Python's standard library.
        seed: Of weights and sample order.
    """

    model: str
    device: Device
    precision: Dtype
    batch: int
    accumulation: int
    seq_length: int
    threads: int
    folder: str
    data: tuple[str, ...] = ()
    seed: int = 1234

    def job(self, recipe: str, world_size: int, changes: dict[str, Any] | None = None) -> Job:
        """The job of one of the shipped recipes at this task's sizes.

        Args:
            recipe: File in ds_configs, without its ending. Batch, precision and optimizer are replaced.
            world_size: Ranks.
            changes: Further keys of the JSON; a block is merged into the recipe's.

        Raises:
            JobError: the recipe cannot run like this, say at a batch that does not divide.
        """
        document = read_json(config_path(f"ds_configs/{recipe}.json"))
        if document.problems:
            raise JobError(document.problems)
        values = merged(document.values, self._json(), changes or {})
        values["scheduler"] = None  # a constant rate
        if self.precision == "bf16" and values["zero_optimization"]["stage"] == 0:
            values["data_types"] = {"grad_accum_dtype": "bf16"}  # all that DeepSpeed does at stage 0
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        # A file for each process: every rank resolves the job for itself, at the same time.
        path = Path(self.folder) / f"{recipe}-{os.getpid()}.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        options = Options(
            deepspeed_config=str(path),
            model=self.model,
            data=self.data,
            seq_length=self.seq_length,
            train_steps=1,
            output_dir=str(Path(self.folder) / "run"),
            seed=self.seed,
        )
        return resolve(options, self.world(world_size))

    def _json(self) -> dict[str, Any]:
        return {
            "train_batch_size": self.batch,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": CLIPPING,
            "bf16": {"enabled": self.precision == "bf16"},
            "optimizer": {"type": "AdamW", "params": OPTIMIZER},
        }

    def load_model(self) -> ModelConfig:
        """The model's sizes.

        Raises:
            JobError: there is no such model.
        """
        return load_model(self.model, self.device)

    def world(self, size: int) -> World:
        """`size` ranks on this machine."""
        hosts = (Host("localhost", size),)
        if self.device == "cpu":
            return World(hosts, "cpu")
        gpus, problems = visible_gpus()
        if problems:
            raise JobError(problems)
        return World(hosts, "cuda", gpus[0].name, gpus[0].capability >= BF16_CAPABILITY)

    def load_data(self, job: Job) -> TrainingData:
        """The samples; tokenized by the first caller, read from the cache by later ones."""
        settings = DataSettings(
            self.seq_length, self.seed, 0.0, job.model.vocab_size, cache_folder=Path(self.folder) / "data"
        )
        return load_data(one_source(self.data), settings)


def choose_device(wanted: str) -> Device:
    """``auto`` is a GPU if there is one.

    Raises:
        JobError: a GPU is wanted, and there is none, or its driver does not work.
    """
    if wanted == "cpu":
        return "cpu"
    gpus, problems = visible_gpus()
    if wanted == "cuda" and not gpus and not problems:
        problems = (Problem("device", wanted, "this machine has no GPU", "Use --device cpu"),)
    if problems:
        raise JobError(problems)
    return "cuda" if gpus else "cpu"


def choose_model(wanted: str, device: Device) -> str:
    """``auto`` is a model that takes about a second per step on the device."""
    return {"cpu": CPU_MODEL, "cuda": GPU_MODEL}[device] if wanted == "auto" else wanted


def require_positive(**counts: int) -> None:
    """Check options that count something.

    Raises:
        JobError: all that are below 1.
    """
    problems = [
        Problem(name, count, "must be at least 1", "Give a positive whole number")
        for name, count in counts.items()
        if count < 1
    ]
    if problems:
        raise JobError(problems)


def run_comparison(
    name: str,
    kind: type[Arguments],
    compare: Callable[[Arguments, str], int | None],
    arguments: Sequence[str],
) -> int:
    """Read a benchmark's options, and measure; its exit code: that of `compare`, or 2 for a setting that
    cannot run.

    Args:
        kind: Its options. One called `folder` says where the temporary folder is made.
        compare: Measures with these options in that folder. None counts as 0.
    """
    given = tyro.cli(kind, args=list(arguments), use_underscores=True, prog=f"{name}.py")
    try:
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=vars(given).get("folder")) as folder:
            return compare(given, folder) or 0
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts put over one another; later layers win, key by key."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result
