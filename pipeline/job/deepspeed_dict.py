"""The dict that `deepspeed.initialize(config=...)` receives: built here, printed by --print_config."""

from __future__ import annotations

from typing import Any

from pipeline.job.job import Batch, Precision
from pipeline.job.schema import KEYS
from pipeline.job.settings import Settings

# DeepSpeed tests steps % steps_per_print, so "never" is a number that no run reaches.
NEVER = 2**31 - 1


def deepspeed_dict(
    config: Settings,
    batch: Batch,
    precision: Precision,
    gradient_clipping: float,
    reduce_bucket: int | None,
    log_interval: int,
) -> dict[str, Any]:
    """What DeepSpeed needs and nothing that it would interpret in its own way.

    - No train_batch_size: sequence ranks are part of DeepSpeed's data axis, so that its product would be
      sequence_parallel_size times the real one. Micro-batch and accumulation steps say it all.
    - gradient_clipping always, because its absence means 1.0.
    - communication_data_type always: its absence means the weights' format, in which DeepSpeed would round
      the fp32 sums of bf16 weights before it adds those of other ranks.
    - comms_logger only where it is on: DeepSpeed takes the block itself for "enabled".
    - No optimizer and no scheduler: both are built here.
    - No monitors: the engines would write what they know, a loss scaled for their own averaging, the rate of
      the next step, samples counted once per sequence rank. The job feeds the monitors its own numbers.
    - Whole activations between pipeline stages: partitioned ones need tensors that divide by the tensor
      size, and tensor peers hold equal ones anyway.
    - No tensor_parallel and no sequence_parallel_size: these would start DeepSpeed's own slicing.
    """
    values = _passed("", config.values)
    values.update(
        train_micro_batch_size_per_gpu=batch.micro_batch_size,
        gradient_accumulation_steps=batch.accumulation_steps,
        gradient_clipping=gradient_clipping,
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
        data_types={"grad_accum_dtype": precision.accumulation},
        pipeline={"pipe_partitioned": False, "grad_partitioned": False},
    )
    values.setdefault("communication_data_type", precision.accumulation)
    if not config.get("comms_logger.enabled", False):
        values.pop("comms_logger", None)
    values["bf16"] = {**values.get("bf16", {}), "enabled": precision.compute == "bf16"}
    values["fp16"] = {**values.get("fp16", {}), "enabled": precision.compute == "fp16"}
    stage = config.get("zero_optimization.stage", 0)
    values["zero_optimization"] = {"stage": stage, **values.get("zero_optimization", {})}
    if reduce_bucket is not None:
        values["zero_optimization"]["reduce_bucket_size"] = reduce_bucket
    if "steps_per_print" not in values:
        values["steps_per_print"] = log_interval if values.get("wall_clock_breakdown") else NEVER
    return dict(sorted(values.items()))


def _passed(block: str, values: dict[str, Any]) -> dict[str, Any]:
    """The part of the JSON that DeepSpeed reads itself."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{block}.{name}" if block else name
        if path not in KEYS:  # scheduler.params: never DeepSpeed's
            continue
        if isinstance(value, dict):
            inside = _passed(path, value)
            if inside or KEYS[path].passed:
                kept[name] = inside
        elif KEYS[path].passed:
            kept[name] = value
    return kept
