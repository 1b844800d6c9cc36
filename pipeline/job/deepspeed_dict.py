"""The dict that `deepspeed.initialize(config=...)` receives (--print_config prints it), and the monitors.

It holds what DeepSpeed needs and nothing that it would interpret in its own way:

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

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.job.facts import Facts, Settings
from pipeline.job.job import Batch, Precision, Resolved
from pipeline.job.schema import KEYS, MONITORS
from pipeline.model.counts import layer_parameters, stage_parameters
from pipeline.model.memory import Training
from pipeline.parallel.mesh import Mesh

# DeepSpeed tests steps % steps_per_print, so "never" is a number that no run reaches.
NEVER = 2**31 - 1
BUCKET = "zero_optimization.reduce_bucket_size"
LARGEST_BUCKET = 500_000_000  # DeepSpeed's default
# On CPUs nothing overlaps a reduction, and a bucket that stays in the cache is copied faster: 4 to 6 % of a
# step in benchmarks/README.md.
BUCKET_ON_CPU = 1_000_000


def deepspeed_dict(
    facts: Facts,
    batch: Batch,
    precision: Precision,
    gradient_clipping: float,
    reduce_bucket: int | None,
) -> dict[str, Any]:
    """The dict of a job.

    Args:
        reduce_bucket: Elements to reduce at a time; None where the JSON says it or nothing reads it.
    """
    config = facts.config
    values = _passed("", facts.settings.values, facts.zero_stage)
    values.update(
        train_micro_batch_size_per_gpu=batch.micro_batch_size,
        gradient_accumulation_steps=batch.accumulation_steps,
        gradient_clipping=gradient_clipping,
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
        data_types={"grad_accum_dtype": precision.accumulation},
        pipeline={"pipe_partitioned": False, "grad_partitioned": False},
    )
    values["communication_data_type"] = config.communication_data_type or precision.accumulation
    if not config.comms_logger.enabled:
        values.pop("comms_logger", None)
    for name in ("bf16", "fp16"):
        values[name] = {**values.get(name, {}), "enabled": precision.compute == name}
    bucket = {} if reduce_bucket is None else {"reduce_bucket_size": reduce_bucket}
    overlap = {"overlap_comm": False} if facts.stages > 1 and config.zero_optimization.overlap_comm else {}
    zero = {"stage": facts.zero_stage, **values.get("zero_optimization", {})}
    values["zero_optimization"] = zero | bucket | overlap
    if "steps_per_print" not in values:
        values["steps_per_print"] = (
            facts.options.log_interval if values.get("wall_clock_breakdown") else NEVER
        )
    return dict(sorted(values.items()))


def _passed(block: str, values: dict[str, Any], zero_stage: int) -> dict[str, Any]:
    """The part of the JSON that DeepSpeed reads itself, and that acts at this stage of ZeRO."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{block}.{name}" if block else name
        if path not in KEYS:  # scheduler.params: never DeepSpeed's
            continue
        details = KEYS[path].details
        passed = details.get("passed", False) and zero_stage in details.get("zero_stages", (zero_stage,))
        if isinstance(value, dict):
            inside = _passed(path, value, zero_stage)
            if inside or passed:
                kept[name] = inside
        elif passed:
            kept[name] = value
    return kept


def reduce_bucket(facts: Facts, stages: tuple[int, ...]) -> Resolved | None:
    """Elements to reduce at a time; None where the JSON says it or nothing reads it.

    DeepSpeed allocates the bucket whatever the model's size: 2 GB of fp32 for its default of 5e8 elements. No
    bucket needs to hold more than a rank's parameters.
    """
    if facts.settings.given(BUCKET) or facts.zero_stage == 0 or facts.uses_bf16_optimizer:
        return None
    layers = layer_parameters(facts.model)
    chunks = [layers[start:end] for start, end in pairwise(stages)]
    if facts.schedule == "dualpipev":  # rank r holds chunk r and its mirror
        chunks = [chunk + mirror for chunk, mirror in zip(chunks, reversed(chunks), strict=True)]
    largest = -(-max(stage_parameters(chunk) for chunk in chunks) // facts.tensor)
    usual, why = (BUCKET_ON_CPU, "CPU ranks") if facts.world.device == "cpu" else (LARGEST_BUCKET, "usual")
    if largest < usual:
        return Resolved(BUCKET, largest, "a rank's parameters")
    return Resolved(BUCKET, usual, why)


def training_of(
    facts: Facts, batch: Batch, mesh: Mesh, boundaries: tuple[int, ...], moments: int
) -> Training:
    """What decides the memory of a rank, which DeepSpeed's buffers do, too. `moments`: of the optimizer."""
    zero = facts.config.zero_optimization
    bucket = zero.reduce_bucket_size
    if bucket is None:
        resolved = reduce_bucket(facts, boundaries)
        bucket = resolved.value if resolved else 0
    sharded = facts.zero_stage > 0 and not facts.uses_bf16_optimizer
    return Training(
        mesh=mesh,
        boundaries=boundaries,
        zero_stage=facts.zero_stage,
        compute=facts.compute,
        accumulation=facts.accumulation,
        moments=moments,
        offload_optimizer=facts.offload_device("offload_optimizer"),
        offload_parameters=facts.offload_device("offload_param"),
        second_shard=zero.zero_hpz_partition_size if facts.zero_stage == 3 else 1,
        bucket=bucket if sharded else 0,
        buckets=2 if zero.overlap_comm and facts.zero_stage < 3 and facts.stages == 1 else 1,
        live=zero.stage3_max_live_parameters if facts.zero_stage == 3 else 0,
        micro_batch=batch.micro_batch_size,
        micro_batches=batch.accumulation_steps,
        sequence_length=batch.sequence_length,
        recompute=facts.config.activation_checkpointing.mode,
    )


def resolved_monitors(settings: Settings, output_dir: str) -> dict[str, dict[str, object]]:
    """The enabled monitors with what was written for them, their files under the run's folder unless
    ``output_path`` says where: DeepSpeed's own default is the current folder. The services, which DeepSpeed
    does not begin, with their defaults."""
    blocks = {key: dict(settings.values[key]) for key in MONITORS if getattr(settings.config, key).enabled}
    for key, block in blocks.items():
        if f"{key}.output_path" not in KEYS:
            blocks[key] = asdict(getattr(settings.config, key))
        elif not block.get("output_path"):
            block["output_path"] = str(Path(output_dir) / key)
    return blocks
