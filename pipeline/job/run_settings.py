"""What may change from one start of a run to the next, as a checkpoint keeps it, and how a change is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pipeline.data.sources import training_sources
from pipeline.job.job import Job


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
        "data": {source.name: float(source.weight) for source in training_sources(job.options)},
        "activation_checkpointing": job.activation_checkpointing,
    }
    return dict(_flat(nested))


def setting_changes(saved: Mapping[str, Any], job: Job) -> list[str]:
    """What is another value now, as ``optimizer.lr: 0.001 -> 0.0003``; a setting that only one side has is
    `none` on the other. Nothing for a checkpoint that kept no settings."""
    if not saved:
        return []
    here = settings_of(job)
    names = [*saved, *(name for name in here if name not in saved)]
    return [
        f"{name}: {_shown(saved.get(name))} -> {_shown(here.get(name))}"
        for name in names
        if saved.get(name) != here.get(name)
    ]


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
