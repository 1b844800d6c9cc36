"""What DeepSpeed receives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.job.schema import MONITORS
from tests.job.drafts import A100, draft, world

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": "auto", "check_grad_overflow": True},
    "zero_optimization": {"stage": 1, "allgather_bucket_size": 5e8},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "pipeline": {"stages": 2, "partition": "uniform"},
    "tensor_parallel": {"autotp_size": 2},
    "sequence_parallel_size": 2,
    "activation_checkpointing": {"mode": "full"},
    "csv_monitor": {"enabled": True},
    "wall_clock_breakdown": True,
    "comms_logger": {"enabled": False},
}


def test_holds_what_deepspeed_needs_and_nothing_else(tmp_path: Path) -> None:
    job = draft(tmp_path, CONFIG, world(8, 8, device=A100), log_interval=7).job
    assert job is not None
    assert job.deepspeed == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1, "allgather_bucket_size": 500_000_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "wall_clock_breakdown": True,
        "steps_per_print": 7,
        "communication_data_type": "fp32",
    }
    assert json.loads(json.dumps(job.deepspeed)) == job.deepspeed
    assert job.json == CONFIG
    assert job.monitors["csv_monitor"]["output_path"] == str(tmp_path / "run" / "csv_monitor")


def test_gradients_are_reduced_in_the_format_of_their_sums_unless_the_json_says_more(tmp_path: Path) -> None:
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    for config, expected in (
        ({}, "fp32"),
        (bf16, "fp32"),
        ({**bf16, "data_types": {"grad_accum_dtype": "bf16"}}, "bf16"),
        ({**bf16, "communication_data_type": "bf16"}, "bf16"),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}, "fp16"),
    ):
        job = draft(tmp_path, config, world(2, device=A100)).job
        assert job is not None and job.deepspeed["communication_data_type"] == expected


def test_the_comms_logger_is_there_only_where_it_is_on(tmp_path: Path) -> None:
    """DeepSpeed takes the block itself for "on"."""
    for enabled in (False, True):
        block = {"enabled": enabled, "verbose": True}
        job = draft(tmp_path, {"comms_logger": block}).job
        assert job is not None and job.deepspeed.get("comms_logger") == (block if enabled else None)


def test_the_engines_get_no_monitor(tmp_path: Path) -> None:
    job = draft(tmp_path, {"csv_monitor": {"enabled": True}, "wandb": {"enabled": False}}).job
    assert job is not None and not job.deepspeed.keys() & MONITORS.keys()


def test_fp16_keeps_its_loss_scale(tmp_path: Path) -> None:
    config = {"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 3}, "zero_optimization": {"stage": 1}}
    job = draft(tmp_path, config, world(2, device=A100)).job
    assert job is not None
    assert job.deepspeed["fp16"] == {"enabled": True, "loss_scale": 0, "hysteresis": 3}
    assert job.deepspeed["data_types"] == {"grad_accum_dtype": "fp16"}


def test_deepspeed_accepts_every_key_of_it(tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    job = draft(tmp_path, CONFIG, world(8, 8, device=A100)).job
    assert job is not None
    config = DeepSpeedConfig(job.deepspeed)
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (2, 8)
    assert config.gradient_clipping == 1.0 and config.bfloat16_config.enabled
    assert config.optimizer_name is None and config.scheduler_name is None


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({}, False),
        ({"wall_clock_breakdown": False, "comms_logger": {"enabled": False}}, False),
        ({"wall_clock_breakdown": True}, True),
        ({"steps_per_print": 5}, True),
        ({"memory_breakdown": True}, True),
        ({"dump_state": True}, True),
        ({"comms_logger": {"enabled": True}}, True),
    ],
)
def test_reports_of_deepspeeds_own_are_known(config: dict, asked: bool, tmp_path: Path) -> None:
    job = draft(tmp_path, config).job
    assert job is not None and job.deepspeed_reports == asked
