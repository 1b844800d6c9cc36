"""The same training on two devices or in two precisions: loss curves beside each other.

    python benchmarks/loss_curves.py                       # GPU in bf16 beside CPU in fp32; without one,
                                                           # CPU in bf16 beside CPU in fp32

Exit code 1 where the curves differ by more than the tolerance, on average over their second half.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the project is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.contenders import Task, this_pipeline
from benchmarks.report import Report
from benchmarks.setting import Setting, choose_device, require_positive, run_comparison
from benchmarks.workers import WorkerGroup

Curve = Literal["cpu-fp32", "cpu-bf16", "cuda-fp32", "cuda-bf16"]
# bf16 keeps 8 bits: a product is off by up to 2^-9 = 0.2 %, and training amplifies it before it averages out.
TOLERANCE = {"bf16": 0.01, "fp32": 0.002}


@dataclass(frozen=True)
class Arguments:
    """Compare two loss curves."""

    first: Curve = "cpu-fp32"
    """Device and precision of the one curve."""
    second: Literal["auto", "cpu-fp32", "cpu-bf16", "cuda-fp32", "cuda-bf16"] = "auto"
    """And of the other. auto: bf16, on a GPU if there is one."""
    model: str = "tiny"
    """Preset or file."""
    seq_length: int = 64
    """Tokens per sequence."""
    batch: int = 16
    """Sequences per step."""
    steps: int = 300
    """Steps of each curve."""
    recipe: str = "zero1"
    """File in ds_configs."""
    json: str | None = None
    """File for the results."""


def main(arguments: Sequence[str]) -> int:
    """0; 1 where the curves differ; 2 for a setting that cannot run."""
    return run_comparison("loss_curves", Arguments, compare, arguments)


def compare(given: Arguments, folder: str) -> int:
    """Train both, print, write; 1 where the curves differ, else 0."""
    require_positive(steps=given.steps)
    second = f"{choose_device('auto')}-bf16" if given.second == "auto" else given.second
    for name in (given.first, second):
        choose_device(name.split("-")[0])
    report = Report("loss curves", second.split("-")[0], asdict(given))
    curves = [_train(given, name, folder) for name in (given.first, second)]
    tolerance = TOLERANCE["bf16" if "bf16" in given.first + second else "fp32"]
    result = differences(*curves)
    every = max(1, given.steps // 10)
    report.table(
        ("step", given.first, second, "difference"),
        [
            (step + 1, f"{a:.4f}", f"{b:.4f}", f"{(b - a) / a:+.2%}")
            for step, (a, b) in enumerate(zip(*curves, strict=True))
            if step == 0 or (step + 1) % every == 0
        ],
    )
    shown = ", ".join(f"{name} {value:+.3%}" for name, value in result.items())
    report.say(f"{shown}; allowed on average over the second half: {tolerance:.1%}")
    report.write(given.json, curves={given.first: curves[0], second: curves[1]}, differences=result)
    return int(not abs(result["second half"]) <= tolerance)


def differences(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """The second curve against the first, relatively: at the first step, on average over the second half
    (signed: noise cancels, a bias stays), and at the step where they differ most."""
    relative = [(b - a) / a for a, b in zip(first, second, strict=True)]
    return {
        "first step": relative[0],
        "second half": mean(relative[len(relative) // 2 :]),
        "largest": max(relative, key=abs),
    }


def _train(given: Arguments, name: str, folder: str) -> list[float]:
    device, precision = name.split("-")
    setting = Setting(
        given.model,
        device,  # type: ignore[arg-type]
        precision,  # type: ignore[arg-type]
        given.batch,
        1,
        given.seq_length,
        1,
        folder,
    )
    group = WorkerGroup(
        name, this_pipeline, Task(setting, given.recipe), world_size=1, device=device, threads=1
    )
    try:
        group.wait_until_ready()
        losses: list[Any] = group.run(given.steps).losses
    finally:
        group.stop()
    return losses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
