"""What of the settings is told as changed between two starts of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.job.run_file import setting_changes, settings_of
from tests.job.drafts import A100, draft, world

GOES_ON = " (a saved dynamic scale continues from where it was)"
OF_A_DYNAMIC_SCALE = [
    "fp16.initial_scale_power: 16 -> none",
    "fp16.loss_scale_window: 500 -> none",
    "fp16.hysteresis: 2 -> none",
    "fp16.consecutive_hysteresis: False -> none",
    "fp16.min_loss_scale: 1 -> none",
]


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({}, {"loss_scale": 0, "hysteresis": 2, "loss_scale_window": 1e3}, []),
        (
            {"loss_scale_window": 500},
            {"hysteresis": 4, "consecutive_hysteresis": True, "min_loss_scale": 16},
            [
                "fp16.loss_scale_window: 500 -> 1000",
                "fp16.hysteresis: 2 -> 4",
                "fp16.consecutive_hysteresis: False -> True",
                "fp16.min_loss_scale: 1 -> 16",
            ],
        ),
        ({}, {"initial_scale_power": 8}, [f"fp16.initial_scale_power: 16 -> 8{GOES_ON}"]),
        ({"loss_scale": 128}, {"loss_scale": 64.0}, ["fp16.loss_scale: 128 -> 64"]),
        ({"loss_scale_window": 500}, {"loss_scale": 64}, ["fp16.loss_scale: 0 -> 64", *OF_A_DYNAMIC_SCALE]),
        ({"enabled": False}, {}, []),
        ({}, {"enabled": False}, []),
    ],
)
def test_settings_of_the_loss_scale(before: dict, after: dict, changes: list[str], tmp_path: Path):
    saved = json.loads(json.dumps(settings_of(fp16_job(tmp_path, before))))
    assert setting_changes(saved, fp16_job(tmp_path, after)) == changes


def test_a_checkpoint_from_before_they_were_kept_tells_nothing(tmp_path: Path):
    job = fp16_job(tmp_path, {"loss_scale": 64})
    saved = {key: value for key, value in settings_of(job).items() if not key.startswith("fp16.")}
    assert setting_changes(saved, job) == []


def fp16_job(folder: Path, fp16: dict[str, Any]) -> Any:
    config = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, **fp16}}
    job = draft(folder, config, world(1, device=A100)).job
    assert job is not None
    return job
