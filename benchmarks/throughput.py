"""Tokens per second of this pipeline beside other ways to do the same training, measured in turn.

    python benchmarks/throughput.py                      # on GPUs: bf16, NCCL, gpt2-124m
    python benchmarks/throughput.py --model tiny --seq_length 64 --batch 16 --steps 20 --json result.json

Contenders train the same sizes at the same batch, precision and threads on the same samples, each in
processes of its own, a few steps at a time in turn: A B C ... A B C ... A ratio is the median over rounds of
the ratio within a round.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the project is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import contenders
from benchmarks.contenders import Task
from benchmarks.report import Report, paired_ratio, spread
from benchmarks.setting import Dtype, Setting, choose_device, choose_model, require_positive, run_comparison
from benchmarks.trainer import counterpart
from benchmarks.workers import Round, WorkerGroup
from pipeline.base.problems import JobError, Problem
from pipeline.base.words import did_you_mean
from pipeline.cluster.devices import visible_gpus
from pipeline.model.counts import training_flops_per_token
from pipeline.training.throughput import mfu, peak_tflops

# Losses of the first steps agree to this, relatively; later ones drift apart with the rounding.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True)
class Contender:
    """A line of the table."""

    label: str
    work: Any
    world_size: int
    recipe: str = "zero0"


CONTENDERS = {
    "plain": Contender("(a) plain PyTorch loop", contenders.plain, 1),
    "one": Contender("(b) this pipeline, ZeRO 1", contenders.this_pipeline, 1, "zero1"),
    "one_zero0": Contender("(b) this pipeline, ZeRO 0", contenders.this_pipeline, 1, "zero0"),
    "ddp": Contender("(c) PyTorch DDP", contenders.ddp, 2),
    "zero0": Contender("(d) this pipeline, ZeRO 0", contenders.this_pipeline, 2, "zero0"),
    "zero1": Contender("(d) this pipeline, ZeRO 1", contenders.this_pipeline, 2, "zero1"),
    "zero2": Contender("(d) this pipeline, ZeRO 2", contenders.this_pipeline, 2, "zero2"),
    "zero3": Contender("(d) this pipeline, ZeRO 3", contenders.this_pipeline, 2, "zero3"),
    "trainer": Contender("(e) transformers' Trainer", contenders.hugging_face, 1),
}
# (contender, measured against, reach): ratios of tokens per second.
TARGETS = (
    ("one", "plain", 0.95),
    ("one_zero0", "plain", 0.95),
    ("zero0", "ddp", 1.0),
    ("zero1", "ddp", 1.0),
    ("zero2", "ddp", None),
    ("zero3", "ddp", None),
    ("one", "trainer", 1.0),
    ("one_zero0", "trainer", 1.0),
)


@dataclass(frozen=True)
class Arguments:
    """Compare training speeds."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if there are any."""
    model: str = "auto"
    """Preset or file. auto: benchmarks/gpt-6m.json on CPU, gpt2-124m on GPU."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: fp32 on CPU, bf16 on GPU."""
    batch: int = 8
    """Sequences per step of all ranks together."""
    accumulation: int = 1
    """Micro-batches per step."""
    seq_length: int = 256
    """Tokens per sequence."""
    threads: int = 1
    """Threads of each rank, on CPU."""
    rounds: int = 15
    """Times that every contender gets its turn."""
    steps: int = 1
    """Steps of one turn."""
    warmup: int = 2
    """Steps before the first round."""
    only: tuple[str, ...] = ()
    """Contenders: plain, one, one_zero0, ddp, zero0, zero1, zero2, zero3, trainer. None: all for which
    there are enough devices."""
    one_at_a_time: bool = False
    """End each contender before the next one starts, for models that do not fit into memory together. All
    rounds of a contender then come in a row, and ratios lose their pairing."""
    data: tuple[str, ...] = ()
    """Text files or folders. None: the source text of Python's standard library."""
    json: str | None = None
    """File for the results."""


def main(arguments: Sequence[str]) -> int:
    """0, or 2 for a setting that cannot run."""
    return run_comparison("throughput", Arguments, compare, arguments)


def resolve_setting(given: Arguments, folder: str) -> Setting:
    """What `auto` means on this machine.

    Raises:
        JobError: a count below 1, or no such device.
    """
    require_positive(rounds=given.rounds, steps=given.steps, warmup=given.warmup, threads=given.threads)
    device = choose_device(given.device)
    usual: Dtype = "fp32" if device == "cpu" else "bf16"
    return Setting(
        model=choose_model(given.model, device),
        device=device,
        precision=usual if given.precision == "auto" else given.precision,
        batch=given.batch,
        accumulation=given.accumulation,
        seq_length=given.seq_length,
        threads=given.threads,
        folder=folder,
        data=given.data,
    )


def compare(given: Arguments, folder: str) -> None:
    """Measure, print, write.

    Raises:
        JobError: a contender's job cannot run.
        WorkerFailed: a contender failed.
    """
    setting = resolve_setting(given, folder)
    names, has_counterpart = _chosen(given, setting), counterpart(setting.load_model()) is not None
    if not has_counterpart:
        names = [name for name in names if name != "trainer"]
    jobs = {name: _task(setting, name).job(CONTENDERS[name].world_size) for name in names}
    settings = {**asdict(setting), "rounds": given.rounds, "steps": given.steps, "warmup": given.warmup}
    del settings["folder"]
    report = Report("throughput", setting.device, settings)
    if not has_counterpart:
        report.say("transformers has no model of this kind: (e) is left out")
    setting.load_data(jobs[names[0]])  # tokenized once, before the clocks run
    rounds = _measure(given, setting, names)
    rows = {name: _row(setting, jobs[name], rounds[name], given.warmup) for name in names}
    _print_rows(report, rows)
    ratios = _ratios(rows)
    _print_ratios(report, ratios)
    differences = _loss_differences(rows, LOSS_TOLERANCE[setting.precision])
    for line in differences:
        report.say(f"WARNING: {line}")
    report.write(given.json, contenders=rows, ratios=ratios, loss_differences=differences)


def _chosen(given: Arguments, setting: Setting) -> list[str]:
    if given.only:
        problems = [
            Problem("only", name, "there is no such contender", did_you_mean(name, CONTENDERS))
            for name in given.only
            if name not in CONTENDERS
        ]
        if problems:
            raise JobError(problems)
        return list(given.only)
    devices = len(visible_gpus()[0]) if setting.device == "cuda" else 2
    return [name for name, contender in CONTENDERS.items() if contender.world_size <= devices]


def _task(setting: Setting, name: str) -> Task:
    return Task(setting, CONTENDERS[name].recipe)


def start(setting: Setting, name: str) -> WorkerGroup:
    """The contender's processes, being built."""
    contender = CONTENDERS[name]
    return WorkerGroup(
        name,
        contender.work,
        _task(setting, name),
        world_size=contender.world_size,
        device=setting.device,
        threads=setting.threads,
    )


def _measure(given: Arguments, setting: Setting, names: Sequence[str]) -> dict[str, list[Round]]:
    """Rounds by contender; the first one is the warm-up."""
    if given.one_at_a_time:
        return {name: _take_turns(given, setting, [name])[name] for name in names}
    return _take_turns(given, setting, names)


def _take_turns(given: Arguments, setting: Setting, names: Sequence[str]) -> dict[str, list[Round]]:
    groups: dict[str, WorkerGroup] = {}
    try:
        for name in names:
            groups[name] = start(setting, name)
        for group in groups.values():
            group.wait_until_ready()
        rounds = {name: [group.run(given.warmup)] for name, group in groups.items()}
        for _ in range(given.rounds):
            for name, group in groups.items():
                rounds[name].append(group.run(given.steps))
    finally:
        for group in groups.values():
            group.stop()
    return rounds


def _row(setting: Setting, job: Any, rounds: list[Round], warmup: int) -> dict[str, Any]:
    seconds = [each.seconds for each in rounds[1:]]
    tokens = job.batch.tokens_per_step
    flops = training_flops_per_token(job.model, setting.seq_length) * tokens / median(seconds)
    per_device = flops / job.mesh.world_size / 1e12
    peak = peak_tflops(job.world.device_name, setting.precision)
    return {
        "processes": job.mesh.world_size,
        "seconds_per_step": median(seconds),
        "spread": spread(seconds),
        "tokens_per_second": tokens / median(seconds),
        "tflops_per_device": per_device,
        "mfu": mfu(per_device, peak),
        "rounds": seconds,
        "losses": [loss for each in rounds for loss in each.losses],
    }


def _ratios(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "contender": name,
            "against": other,
            "ratio": paired_ratio(rows[other]["rounds"], rows[name]["rounds"]),
            "reach": reach,
        }
        for name, other, reach in TARGETS
        if name in rows and other in rows
    ]


def _loss_differences(rows: dict[str, dict[str, Any]], tolerance: float) -> list[str]:
    """Contenders whose first losses are not those of the first contender that reports any."""
    curves = {name: row["losses"][:3] for name, row in rows.items() if row["losses"][0] is not None}
    if not curves:
        return []
    base = next(iter(curves))
    return [
        f"{name} trains otherwise than {base}: first losses {curve}, {curves[base]}"
        for name, curve in curves.items()
        if any(not abs(a - b) <= tolerance * b for a, b in zip(curve, curves[base], strict=True))
    ]


def _print_rows(report: Report, rows: dict[str, dict[str, Any]]) -> None:
    report.table(
        ("", "processes", "s/step", "+-", "tokens/s", "TFLOP/s each", "MFU"),
        [
            (
                CONTENDERS[name].label,
                row["processes"],
                f"{row['seconds_per_step']:.3f}",
                f"{row['spread']:.1%}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tflops_per_device']:.4g}",
                "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}",
            )
            for name, row in rows.items()
        ],
    )


def _print_ratios(report: Report, ratios: list[dict[str, Any]]) -> None:
    for each in ratios:
        reach = each["reach"]
        verdict = "" if reach is None else f", to reach {reach}: {'yes' if each['ratio'] >= reach else 'NO'}"
        label, other = CONTENDERS[each["contender"]].label, CONTENDERS[each["against"]].label
        report.say(f"{label} / {other}: {each['ratio']:.3f}{verdict}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
