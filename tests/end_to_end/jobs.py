"""Small whole jobs: a text to train on, a DeepSpeed JSON, run folders, and what a run leaves in them."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import JobResult
from tests.harness.client import execute
from tests.harness.job import GRACE, job_result

PROJECT = Path(__file__).resolve().parents[2]
SEQUENCE = 32
# Times and rates: the only fields in which two runs of the same steps may differ.
TIMES = frozenset(
    {
        "step_time",
        "tokens_per_second",
        "tflops_per_device",
        "data_time",
        "mfu",
        "time",
        "eval_time",
        "save_time",
    }
)

# Rates and length are numbers, so that a run stopped early and continued is the same run.
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 10}},
    "zero_optimization": {"stage": 0},
    "tensorboard": {"enabled": False},  # a moment of each start
}

Fault = Callable[..., None]


def write_text(folder: Path, seed: int = 0, documents: int = 6) -> Path:
    """A corpus of a few files of random words; equal for equal arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(seed)
    words = "a layer adds what the layers before it did not say".split()
    for number in range(documents):
        text = " ".join(dice.choice(words) for _ in range(400))
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Workshop:
    """A folder of jobs over one corpus.

    Attributes:
        folder: Holds text, configs and the runs' folders.
    """

    folder: Path

    def config(self, name: str = "config", **changes: Any) -> str:
        """Write `CONFIG` with `changes` (None removes a key) as a DeepSpeed JSON; its path."""
        path = self.folder / f"{name}.json"
        values = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
        path.write_text(json.dumps(values), encoding="utf-8")
        return str(path)

    def text(self) -> str:
        """The corpus; written by the first call."""
        folder = self.folder / "text"
        return str(folder if folder.exists() else write_text(folder))

    def arguments(self, run: str, config: str, *more: str, steps: int = 2) -> list[str]:
        """A command line for the tiny model on the corpus."""
        return [
            *("--deepspeed_config", config, "--model", "tiny", "--data", self.text()),
            *("--seq_length", str(SEQUENCE), "--train_steps", str(steps), "--sample_tokens", "0"),
            *("--output_dir", str(self.folder / run), "--eval_samples", "6", *more),
        ]

    def lines(self, run: str) -> list[dict[str, Any]]:
        """metrics.jsonl as it is."""
        text = (self.folder / run / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def steps(self, run: str) -> list[dict[str, Any]]:
        """The step objects without their times."""
        lines = (line for line in self.lines(run) if "loss" in line)
        return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]

    def evaluations(self, run: str) -> dict[int, float]:
        """Held-out loss by step."""
        return {line["step"]: line["eval_loss"] for line in self.lines(run) if "eval_loss" in line}

    def latest(self, run: str) -> Path:
        """The folder of the checkpoint that a run resumes from."""
        folder = self.folder / run / "checkpoints"
        return folder / (folder / "latest").read_text(encoding="utf-8").strip()

    def outcome(self, run: str) -> dict[str, Any]:
        """outcome.json."""
        return json.loads((self.folder / run / "outcome.json").read_text(encoding="utf-8"))

    def history(self, run: str) -> list[dict[str, Any]]:
        """history.jsonl: starts and ends."""
        text = (self.folder / run / "history.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def logs(self, run: str) -> str:
        """The end of every rank's log: a launcher does not show all of them."""
        files = sorted((self.folder / run / "logs").glob("*/rank_*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(encoding='utf-8')[-3000:]}" for file in files)


def run_faulty_job(
    args: Sequence[str],
    world_size: int,
    fault: Fault,
    *fault_args: Any,
    timeout: float = 60,
    grace: float = GRACE,
) -> JobResult:
    """`run_job` with something wrong: each rank calls ``fault(arguments, rank, *fault_args)`` first.

    Args:
        fault: Top-level function; may patch modules and change the list of arguments.
        grace: Seconds that the other ranks get to end by themselves when one has failed.
    """
    __tracebackhide__ = True
    name = f"pretrain.py with {fault.__name__}{fault_args}"
    outcomes = execute(
        name,
        _faulty_pretrain,
        world_size,
        (list(args), fault, fault_args),
        timeout=timeout,
        group_timeout=timeout,
        grace=grace,
        hold=False,
        env=None,
    )
    return job_result(name, outcomes, timeout)


def _faulty_pretrain(args: list[str], fault: Fault, fault_args: tuple[Any, ...]) -> None:
    from pipeline import pretrain

    fault(args, int(os.environ["RANK"]), *fault_args)
    if code := pretrain.main(args):
        sys.exit(code)


def signal_after_step(_: list[str], rank: int, step: int, victim: int, number: signal.Signals) -> None:
    """Rank `victim` gets a signal when it has taken `step` steps."""
    from pipeline.engine.engine import TrainEngine

    train_step = TrainEngine.train_step

    def signalled(engine: TrainEngine, *args: Any) -> Any:
        result = train_step(engine, *args)
        if engine.step == step and rank == victim:
            os.kill(os.getpid(), number)
        return result

    TrainEngine.train_step = signalled


def signal_on_call(_: list[str], rank: int, target: str, victim: int, number: signal.Signals) -> None:
    """Rank `victim` gets a signal while it calls `target`, ``module:function`` or ``module:Class.method``."""
    before_call(target, lambda: os.kill(os.getpid(), number) if rank == victim else None)


def raise_on_call(_: list[str], rank: int, target: str, victim: int) -> None:
    """Rank `victim` raises where it would call `target`, ``module:function``."""

    def fail() -> None:
        if rank == victim:
            raise OSError(f"rank {rank} has no space left")

    before_call(target, fail)


def run_out_of_memory(_: list[str], rank: int, victim: int) -> None:
    """Rank `victim` has no memory for its first step."""
    import torch

    def fail() -> None:
        if rank == victim:
            text = (
                "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 80.00 GiB of "
            )
            raise torch.OutOfMemoryError(text + "which 4.00 KiB is free.")

    before_call("pipeline.engine.engine:TrainEngine.train_step", fail)


def poison_weight(_: list[str], rank: int, step: int, victim: int) -> None:
    """Rank `victim` has a NaN in its last parameter from `step` on."""
    from pipeline.engine.engine import TrainEngine

    train_step = TrainEngine.train_step

    def poisoned(engine: TrainEngine, *args: Any) -> Any:
        if engine.step + 1 == step and rank == victim:
            list(engine.module.parameters())[-1].data.flatten()[0] = float("nan")
        return train_step(engine, *args)

    TrainEngine.train_step = poisoned


def change_copy(_: list[str], rank: int, step: int, victim: int, name: str, by: float) -> None:
    """Rank `victim` has another value of a weight when it has taken `step` steps."""
    from pipeline.engine.engine import TrainEngine

    train_step = TrainEngine.train_step

    def changed(engine: TrainEngine, *args: Any) -> Any:
        result = train_step(engine, *args)
        if engine.step == step and rank == victim:
            engine.module.get_parameter(name).data += by
        return result

    TrainEngine.train_step = changed


def read_elsewhere(_: list[str], rank: int, victim: int) -> None:
    """Rank `victim` reads the samples one further on than it should."""
    from pipeline.data import loader

    read_step = loader.read_step
    if rank == victim:
        loader.read_step = lambda data, batch, index, size, first: read_step(
            data, batch, index, size, first + 1
        )


def replace_argument(args: list[str], rank: int, victim: int, old: str, new: str) -> None:
    """Rank `victim` was started with another argument."""
    if rank == victim:
        args[args.index(old)] = new


def before_call(target: str, action: Callable[[], None]) -> None:
    """Do something whenever `target` is called, ``module:function`` or ``module:Class.method``."""
    module_name, _, name = target.partition(":")
    module = __import__(module_name, fromlist=[name])
    *owners, name = name.split(".")
    for owner in owners:
        module = getattr(module, owner)
    function = getattr(module, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        action()
        return function(*args, **kwargs)

    setattr(module, name, called)
