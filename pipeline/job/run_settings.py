"""What may change from one start of a run to the next, as a checkpoint keeps it, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pipeline.job.job import Job
from pipeline.job.schema import DYNAMIC_LOSS_SCALE, KEYS

LOSS_SCALE = "fp16.loss_scale"


def settings_of(job: Job) -> dict[str, Any]:
    """Each setting by its dotted name, as plain JSON values. The layout (parallel sizes, ZeRO stage, number
    formats) is kept beside it."""
    optimizer = asdict(job.optimizer)
    optimizer.pop("type")  # of the layout
    nested = {
        "batch": {key: value for key, value in asdict(job.batch).items() if key != "sequence_length"},
        "train_steps": job.train_steps,
        "gradient_clipping": job.gradient_clipping,
        "optimizer": optimizer,
        "scheduler": job.schedule.to_json(),
        "data": {source.name: float(source.weight) for source in job.data.training},
        "activation_checkpointing": job.activation_checkpointing,
    }
    return {**dict(_flat(nested)), **_loss_scale(job)}


def common_facts(job: Job) -> dict[str, Any]:
    """What every rank must have resolved alike: what the job is, and what decides the order of collectives.

    Flat, as plain JSON values. Paths of data may differ from host to host: its tokens are compared when read.
    """
    settings = {key: value for key, value in settings_of(job).items() if not key.startswith("data.")}
    shape = {
        "layout": asdict(job.mesh),
        "stages": list(job.stages),
        "pipeline_schedule": job.pipeline_schedule,
        "precision": {"compute": job.precision.compute, "accumulation": job.precision.accumulation},
        "deepspeed": job.deepspeed,
        "eval_interval": job.eval_interval,
        "eval_samples": job.data.eval_samples,
        "validation": [each.name for each in job.data.validation],
        "save_interval": job.saves.interval,
        "keep_best": job.saves.keep_best,
        "async_save": job.saves.in_background,
        "sample_tokens": job.reporting.sample_tokens,
    }
    return {**job.identity, **settings, **dict(_flat(shape))}


def _loss_scale(job: Job) -> dict[str, Any]:
    """What acts on the loss scale of an fp16 job, with the defaults of what is left out."""
    if job.precision.compute != "fp16":
        return {}
    given = job.deepspeed["fp16"]
    values = {
        name: given.get(name.removeprefix("fp16."), KEYS[name].default)
        for name in (LOSS_SCALE, *DYNAMIC_LOSS_SCALE)
    }
    return {LOSS_SCALE: values[LOSS_SCALE]} if values[LOSS_SCALE] else values


def setting_changes(saved: Mapping[str, Any], job: Job) -> list[str]:
    """What is another value now, as ``optimizer.lr: 0.001 -> 0.0003``; a setting that only one side has is
    `none` on the other. Nothing for a checkpoint that kept no settings, and nothing of fp16 where one side is
    in another format: that is a change of the layout."""
    if not saved:
        return []
    here = settings_of(job)
    names = [*saved, *(name for name in here if name not in saved)]
    if LOSS_SCALE not in saved or LOSS_SCALE not in here:
        names = [name for name in names if not name.startswith("fp16.")]
    return [
        f"{name}: {_shown(saved.get(name))} -> {_shown(here.get(name))}{_remark(name, saved, here)}"
        for name in names
        if saved.get(name) != here.get(name)
    ]


def _remark(name: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    if name == "fp16.initial_scale_power" and name in saved and name in here:
        return " (a saved dynamic scale continues from where it was)"
    return ""


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
