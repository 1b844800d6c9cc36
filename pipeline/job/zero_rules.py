"""Checks of ZeRO, offload and number formats. Listed in `pipeline.job.rules`."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.base.problems import Problem
from pipeline.base.words import listed
from pipeline.job.facts import Facts
from pipeline.job.schema import DYNAMIC_LOSS_SCALE, KEYS

STAGE = "zero_optimization.stage"
ACCUMULATION = "data_types.grad_accum_dtype"


def zero_pipeline(f: Facts) -> Iterable[Problem]:
    if f.zero_stage >= 2 and f.stages > 1:
        rule = f"must be 0 or 1 with {f.stages} pipeline stages"
        yield f.settings.problem(STAGE, rule, "Use stage 0 or 1, or one pipeline stage", f.zero_stage)


def zero_keys(f: Facts) -> Iterable[Problem]:
    for path, key in KEYS.items():
        acts = key.details.get("zero_stages")
        if acts is None or key.block or not f.settings.given(path) or f.zero_stage in acts:
            continue
        if key.name == "device" and f.settings.value(path) == "none":
            continue
        rule = f"acts at ZeRO stage {listed(acts)}, and the stage is {f.zero_stage}"
        if key.name == "device":
            # Optimizer state is most of a rank's memory, and missed. Weights are counted where they stay.
            what, severity = (
                ("weights stay", "warning") if "param" in path else ("optimizer state stays", "error")
            )
            remedy = f"Set it to none, or {STAGE} to {listed(acts)}"
            yield f.settings.problem(path, f"{rule}: {what} on the GPU", remedy, severity=severity)
        else:
            yield f.settings.note(path, rule)


def nvme(f: Facts) -> Iterable[Problem]:
    for block in ("offload_optimizer", "offload_param"):
        path = f"zero_optimization.{block}"
        device = f.offload_device(block)
        if device == "nvme" and f.settings.absent(f"{path}.nvme_path"):
            yield f.settings.problem(f"{path}.device", "needs nvme_path beside it", f"Set {path}.nvme_path")
        if device == "nvme" and f.zero_stage in (1, 2):
            yield f.settings.problem(f"{path}.device", "nvme needs ZeRO stage 3", "Use cpu, or stage 3")
        for name in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read",
                     "pipeline_write", "fast_init"):  # fmt: skip
            if device != "nvme" and f.settings.given(f"{path}.{name}"):
                yield f.settings.note(f"{path}.{name}", f"acts with device nvme, not {device}")


def async_save(f: Facts) -> Iterable[Problem]:
    if f.options.async_save and f.offload_device("offload_optimizer") == "nvme":
        rule = "copies state in memory, and that on NVMe drives would change while it is written"
        yield Problem("async_save", True, rule, "Leave --async_save out, or offload to cpu")


def aio(f: Facts) -> Iterable[Problem]:
    used = "nvme" in (f.offload_device("offload_optimizer"), f.offload_device("offload_param"))
    if f.settings.value("aio") is not None and not used:
        yield f.settings.note("aio", "acts with offload to nvme only")


def overlap_pipeline(f: Facts) -> Iterable[Problem]:
    key = "zero_optimization.overlap_comm"
    if f.stages > 1 and f.config.zero_optimization.overlap_comm:
        yield f.settings.note(key, f"is off with {f.stages} pipeline stages, by DeepSpeed itself")


def second_shard(f: Facts) -> Iterable[Problem]:
    """DeepSpeed takes consecutive ranks of the world as a group; with tensor ranks these are neighbours that
    hold slices of different weights, and gathering them would mix the slices."""
    key = "zero_optimization.zero_hpz_partition_size"
    size = f.config.zero_optimization.zero_hpz_partition_size
    if size > 1 and f.tensor > 1:
        rule = f"excludes tensor parallelism, and the tensor size is {f.tensor}"
        yield f.settings.problem(key, rule, "Remove it, or set tensor_parallel.autotp_size to 1")
    elif f.data * f.sequence % size:
        shared = f.data * f.sequence
        rule = f"must divide the {shared} ranks that ZeRO shards over"
        sizes = [number for number in range(1, shared + 1) if shared % number == 0]
        yield f.settings.problem(key, rule, f"Use {listed(sizes)}, at most the slots of a host")


def bf16_optimizer_keys(f: Facts) -> Iterable[Problem]:
    if not f.uses_bf16_optimizer:
        return
    for name in ("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_comm",
                 "use_multi_rank_bucket_allreduce", "round_robin_gradients",
                 "parameter_alignment"):  # fmt: skip
        key = f"zero_optimization.{name}"
        if f.settings.given(key):
            yield f.settings.note(key, "does not act at stage 1 with bf16 weights and fp32 accumulation")


def overflow_check(f: Facts) -> Iterable[Problem]:
    key = "bf16.check_grad_overflow"
    if not f.settings.given(key) or f.compute != "bf16":
        return
    if f.zero_stage not in (1, 2) or f.uses_bf16_optimizer:
        yield f.settings.note(key, f"does not act at ZeRO stage {f.zero_stage} with sums in {f.accumulation}")


def one_precision(f: Facts) -> Iterable[Problem]:
    if f.fp16 and f.bf16:
        yield f.settings.problem("fp16.enabled", "excludes bf16.enabled", "Turn one of them off")


def fp16_cuda(f: Facts) -> Iterable[Problem]:
    if f.fp16 and f.world.device != "cuda":
        yield f.settings.problem("fp16.enabled", "needs CUDA devices", "Use bf16, or neither for fp32")


def bf16_native(f: Facts) -> Iterable[Problem]:
    if f.config.bf16.enabled is True and not f.world.bf16_native:
        name = f.world.device_name or f.world.device
        rule = f"{name} emulates bf16, which is slow"
        yield f.settings.problem(
            "bf16.enabled", rule, 'Use "auto" for bf16 where it is native', severity="warning"
        )


def loss_scale(f: Facts) -> Iterable[Problem]:
    if f.config.fp16.loss_scale == 0:
        return
    for key in DYNAMIC_LOSS_SCALE:
        if f.settings.given(key):
            yield f.settings.note(key, "acts with a dynamic loss scale, and fp16.loss_scale is fixed")


def sums_at_zero0(f: Facts) -> Iterable[Problem]:
    own = f.compute
    if own == "fp16" and f.stages > 1:  # whatever the ZeRO stage: tied_gradients says so
        return
    if own != "fp32" and f.zero_stage == 0 and f.accumulation != own:
        rule = f"must be {own} at ZeRO stage 0 with {own} weights: DeepSpeed cannot sum in fp32 there"
        remedy = f"Use ZeRO stage 1, or accept the loss of bits with {ACCUMULATION} = {own}"
        yield f.settings.problem(ACCUMULATION, rule, remedy, f.accumulation)
    elif own == "bf16" and f.sums_in_own_format and not f.settings.given(ACCUMULATION):
        rule = "is bf16 here, as in DeepSpeed: small gradients of many micro-batches lose bits"
        remedy = "Use ZeRO stage 1 without offload to sum in fp32, or say bf16"
        yield f.settings.problem(ACCUMULATION, rule, remedy, f.accumulation, "warning")


def tied_gradients(f: Facts) -> Iterable[Problem]:
    """DeepSpeed's pipeline engine reduces a tied weight's `grad`. Where sums have a format of their own they
    are elsewhere, `grad` is None, and the reduction is silently left out; only its bf16 optimizer
    (ZeRO 1 without offload) is provided for."""
    offloaded = f.offload_device("offload_optimizer") != "none"
    if f.stages > 1 and f.accumulation != f.compute and (offloaded or f.compute == "fp16"):
        cause = "offloaded optimizer state" if offloaded else "fp16 weights"
        rule = f"must be {f.compute} for {cause} with {f.stages} pipeline stages"
        remedy = f"Set it to {f.compute}, or use one stage{', or no offload' if offloaded else ''}"
        yield f.settings.problem(ACCUMULATION, rule, remedy, f.accumulation)


def accumulation(f: Facts) -> Iterable[Problem]:
    if f.accumulation not in ("fp32", f.compute):
        rule = f"must be fp32 or the weights' {f.compute}"
        yield f.settings.problem(ACCUMULATION, rule, f"Use fp32, or {f.accumulation} weights")
