"""Bytes of weights, gradients and optimizer state on each rank, measured and by the ZeRO paper's formulas.

    python benchmarks/memory.py                        # ZeRO 0-3 and offload on 2 ranks
    python benchmarks/memory.py --ranks 4 --model gpt2-124m --seq_length 16 --json result.json

Exit code 1 where a measured size is off by more than 2 %.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the project is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.contenders import Task, start_engine
from benchmarks.memory_formulas import states
from benchmarks.memory_probe import Held, measure
from benchmarks.report import Report
from benchmarks.setting import Setting, choose_device, choose_model, require_positive, run_comparison
from benchmarks.workers import Clock, WorkerGroup
from pipeline.cluster.devices import visible_gpus
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.data.loader import read_step
from pipeline.engine.engine import TrainEngine
from pipeline.model.counts import total_parameters

TOLERANCE = 0.02
PARTS = ("parameters", "gradients", "optimizer")
MIB = 2**20

_OPTIMIZER = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
_PARAMETERS = {"offload_param": {"device": "cpu", "pin_memory": False}}
# Stage 3 keeps parameters below this size whole; the formula has none such.
_ALL_SHARDED = {"stage3_param_persistence_threshold": 0}


@dataclass(frozen=True)
class Case:
    """One line: a ZeRO stage and number formats."""

    label: str
    recipe: str
    compute: Literal["fp32", "bf16"]
    accumulation: Literal["fp32", "bf16"]
    zero: tuple[tuple[str, Any], ...] = ()

    @property
    def stage(self) -> int:
        return int(self.recipe[4])

    def changes(self) -> tuple[tuple[str, Any], ...]:
        small = {"reduce_bucket_size": 1_000_000} if self.stage else {}
        zero = {**small, **(_ALL_SHARDED if self.stage == 3 else {}), **dict(self.zero)}
        return (
            ("zero_optimization", zero),
            ("bf16", {"enabled": self.compute == "bf16"}),
            ("data_types", {"grad_accum_dtype": self.accumulation}),
        )


CASES = (
    *(Case(f"fp32, ZeRO {stage}", f"zero{stage}", "fp32", "fp32") for stage in range(4)),
    *(Case(f"bf16, bf16 sums, ZeRO {stage}", f"zero{stage}", "bf16", "bf16") for stage in range(4)),
    *(Case(f"bf16, fp32 sums, ZeRO {stage}", f"zero{stage}", "bf16", "fp32") for stage in (1, 2, 3)),
    *(
        Case(f"fp32, ZeRO {stage}, offload", f"zero{stage}", "fp32", "fp32", tuple(_OPTIMIZER.items()))
        for stage in (1, 2, 3)
    ),
    Case("fp32, ZeRO 3, offload all", "zero3", "fp32", "fp32", tuple({**_OPTIMIZER, **_PARAMETERS}.items())),
)


@dataclass(frozen=True)
class Arguments:
    """Compare memory with the formulas of the ZeRO paper."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if there are any."""
    model: str = "auto"
    """Preset or file. auto: benchmarks/gpt-6m.json on CPU, gpt2-124m on GPU."""
    ranks: int | None = None
    """Data-parallel ranks. None: 2 on CPU, all GPUs."""
    seq_length: int = 16
    """Tokens per sequence: the states do not depend on it."""
    json: str | None = None
    """File for the results."""


def main(arguments: Sequence[str]) -> int:
    """0; 1 where a size is off; 2 for a setting that cannot run."""
    return run_comparison("memory", Arguments, compare, arguments)


def compare(given: Arguments, folder: str, cases: Sequence[Case] = CASES) -> int:
    """Measure each case in turn, print and write; 1 where one is off, else 0."""
    device = choose_device(given.device)
    ranks = given.ranks if given.ranks is not None else len(visible_gpus()[0]) if device == "cuda" else 2
    require_positive(ranks=ranks)
    model = choose_model(given.model, device)
    setting = Setting(model, device, "fp32", ranks, 1, given.seq_length, 1, folder)
    count = total_parameters(setting.load_model(), padded=True)
    settings = {"model": model, "parameters": count, "ranks": ranks, "optimizer": "AdamW"}
    report = Report("memory", device, settings)
    setting.load_data(setting.job("zero0", ranks))
    rows = [_row(case, _measure(case, setting, ranks), count, ranks) for case in cases]
    _print(report, rows)
    worst = max(abs(row[f"{part}_ratio"] - 1) for row in rows for part in PARTS)
    report.say(f"largest deviation {worst:.2%}, allowed {TOLERANCE:.0%}")
    report.write(given.json, rows=rows, largest_deviation=worst)
    return int(worst > TOLERANCE)


def hold(task: Task, environment: RankEnvironment, clock: Clock) -> Held:
    """What this rank holds in its second step, when Adam's moments exist.

    Weights and optimizer state are read just before the update. So are gradients at stages 2 and 3, which
    reduce and drop them during the backward pass: what is on its way then, a bucket, comes on top. At stages
    0 and 1 the backward pass leaves the whole gradient, read where its reduction begins.
    """
    job = task.job(environment.world_size)
    data = task.setting.load_data(job).train
    parallel, engine = start_engine(job, environment)
    after_backward = _measure_before(engine, "allreduce_gradients")
    before_update = _measure_before(engine, "_take_model_step")
    for step in range(2):
        first = step * job.batch.train_batch_size
        share = read_step(data, job.batch, parallel.coordinates.data, parallel.mesh.data, first)
        engine.train_step(share.micro_batches, job.batch.tokens_per_step)
    held = before_update[-1]
    if job.zero_stage <= 1:
        held = replace(held, gradients=max(held.gradients, after_backward[-1].gradients))
    return held


def _measure_before(engine: TrainEngine, method: str) -> list[Held]:
    """The list that gets a measurement before each call of a method of DeepSpeed's engine."""
    found: list[Held] = []
    original = getattr(engine.deepspeed, method)

    def measured(*args: Any, **kwargs: Any) -> Any:
        found.append(measure(engine))
        return original(*args, **kwargs)

    setattr(engine.deepspeed, method, measured)
    return found


def _measure(case: Case, setting: Setting, ranks: int) -> list[Held]:
    group = WorkerGroup(
        case.label,
        hold,
        Task(setting, case.recipe, case.changes()),
        world_size=ranks,
        device=setting.device,
        threads=setting.threads,
    )
    return group.result()


def _row(case: Case, held: list[Held], count: int, ranks: int) -> dict[str, Any]:
    """The rank that is furthest from the formula speaks for all, part by part."""
    offloaded = "offload_optimizer" in dict(case.zero)
    expected = states(count, ranks, case.stage, case.compute, case.accumulation, offloaded)
    row: dict[str, Any] = {"case": case.label, "ranks": [asdict(each) for each in held]}
    for part in PARTS:
        formula = getattr(expected, part)
        row[part] = max((getattr(each, part) for each in held), key=lambda size: abs(size / formula - 1))
        row[f"{part}_formula"] = formula
        row[f"{part}_ratio"] = row[part] / formula
    return row


def _print(report: Report, rows: list[dict[str, Any]]) -> None:
    report.say("MiB on one rank, just before an update: measured/by the formula=ratio")
    columns = ("", *PARTS, "on CPU", "other")
    report.table(
        columns,
        [
            (
                row["case"],
                *(
                    f"{row[part] / MIB:.2f}/{row[f'{part}_formula'] / MIB:.2f}={row[f'{part}_ratio']:.3f}"
                    for part in PARTS
                ),
                f"{row['ranks'][0]['by_device'].get('cpu', 0) / MIB:.2f}",
                f"{row['ranks'][0]['other'] / MIB:.2f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
