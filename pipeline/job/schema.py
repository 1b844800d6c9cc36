"""Every key that a DeepSpeed JSON may hold here: type, range, default and meaning, in one typed definition.

Names are DeepSpeed's own. Each block of the JSON is a record, and `DeepSpeedConfig` is the whole:
`config.zero_optimization.stage`. A default is stated here and nowhere else. Other keys of DeepSpeed are in
pipeline/job/foreign_keys.py, those of ``scheduler.params``, which depend on the schedule, in
pipeline/job/schedules.py.

    passed          DeepSpeed receives the key as written. Otherwise this pipeline acts on it.
    module          what a monitor of DeepSpeed imports; None: nothing beyond the standard library
    zero_stages     ZeRO stages in which the key acts; without: not a matter of the stage.
    default_text    the default in words, where the run decides (the value is then None or "auto")
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pipeline.base.fields import AUTO, Auto, Field, Limits, Record, described, fields_of
from pipeline.job.job import Dtype
from pipeline.job.schedules import SCHEDULES

Size = Annotated[int, Limits(1)]
Amount = Annotated[int, Limits(0)]
Positive = Annotated[float, Limits(0, above=True)]
NotNegative = Annotated[float, Limits(0)]
Share = Annotated[float, Limits(0, 1)]
Path = Annotated[str, Limits(path=True)]
USUAL = "model's default"


def _passed(default: Any, meaning: str, **details: Any) -> Any:
    """A key that DeepSpeed receives."""
    return described(default, meaning, passed=True, **details)


def _sharded(default: Any, meaning: str, **details: Any) -> Any:
    """A key of ZeRO that acts where anything is sharded."""
    return _passed(default, meaning, zero_stages=(1, 2, 3), **details)


def _flat(default: Any, meaning: str, **details: Any) -> Any:
    """A key of ZeRO that acts where parameters are whole."""
    return _passed(default, meaning, zero_stages=(1, 2), **details)


def _three(default: Any, meaning: str, **details: Any) -> Any:
    """A key of ZeRO that acts where parameters are sharded."""
    return _passed(default, meaning, zero_stages=(3,), **details)


@dataclass(frozen=True, slots=True)
class Bf16(Record):
    enabled: bool | Auto = described(False, "On. auto: where the device computes bf16 natively.")
    check_grad_overflow: bool = _passed(True, "Skip a step whose gradient is not finite.")


@dataclass(frozen=True, slots=True)
class Fp16(Record):
    enabled: bool | Auto = _passed(False, "On. auto: on CUDA devices where bf16 is off.")
    loss_scale: NotNegative = _passed(0, "Fixed loss scale; 0: dynamic.")
    initial_scale_power: Amount = _passed(16, "The dynamic scale starts at 2 ** this.")
    loss_scale_window: Size = _passed(1000, "Steps without overflow before the scale doubles.")
    hysteresis: Size = _passed(2, "Overflows before the scale halves.")
    consecutive_hysteresis: bool = _passed(False, "Refill hysteresis after a good step.")
    min_loss_scale: Size = _passed(1, "Smallest dynamic scale.")


# Keys of fp16 that act with a dynamic loss scale only.
DYNAMIC_LOSS_SCALE = (
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
)


@dataclass(frozen=True, slots=True)
class DataTypes(Record):
    grad_accum_dtype: Dtype | None = described(
        None,
        "Format in which gradients of micro-batches are summed.",
        default_text="fp32 (fp16 for fp16, bf16 without ZeRO)",
    )


@dataclass(frozen=True, slots=True)
class OptimizerParams(Record):
    lr: Positive | Auto = described(AUTO, "Peak learning rate.", default_text=USUAL)
    betas: Annotated[list[float], Limits(0, 1)] | Auto = described(
        AUTO, "Adam's two decay rates, each in [0, 1).", default_text=USUAL
    )
    eps: Positive | Auto = described(1e-8, "Adam's epsilon.")
    weight_decay: NotNegative | Auto = described(
        AUTO, "Weight decay of matrices; norms and biases have none.", default_text=USUAL
    )
    adam_w_mode: bool = described(True, "false makes Adam add weight decay to the gradient (L2).")
    momentum: Share = described(0, "SGD's momentum.")
    nesterov: bool = described(False, "SGD with Nesterov momentum.")
    fused: bool = described(True, "torch's fused kernel; false: its for-each kernels.")


@dataclass(frozen=True, slots=True)
class Optimizer(Record):
    type: Literal["AdamW", "Adam", "SGD"] = described("AdamW", "Optimizer.")
    params: OptimizerParams = described(OptimizerParams, "Its arguments.")


@dataclass(frozen=True, slots=True)
class Scheduler(Record):
    type: Annotated[str, Limits(choices=tuple(SCHEDULES))] = described(meaning="Name of the schedule.")
    params: dict[str, Any] = described(
        {}, "Its parameters, listed per schedule below.", default_text="absent"
    )


@dataclass(frozen=True, slots=True)
class LrScaling(Record):
    rule: Literal["none", "linear", "sqrt"] = described(
        "none", "lr times (train batch / base batch), to the power 1 or 1/2."
    )
    base_batch_size: Size | None = described(
        None, "Sequences per step for which lr is meant.", default_text="required"
    )


@dataclass(frozen=True, slots=True)
class Pipeline(Record):
    stages: Size = described(1, "Stages.")
    partition: Literal["parameters", "uniform"] | list[int] = described(
        "parameters",
        "How layers are divided among stages: parameters, uniform, or a list with the number of layers of "
        "each stage (of each half stage for dualpipev). Layers are embedding, positions, blocks, norm, "
        "output.",
    )
    schedule: Literal["1f1b", "dualpipev"] = described(
        "1f1b", "1f1b, or dualpipev (two chunks of layers per stage)."
    )


@dataclass(frozen=True, slots=True)
class TensorParallel(Record):
    autotp_size: Size = described(1, "Ranks that share each weight matrix.")


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing(Record):
    mode: Literal["none", "full", "selective"] = described(
        "none", "none, full (each block) or selective (attention)."
    )


@dataclass(frozen=True, slots=True)
class OffloadOptimizer(Record):
    device: Literal["none", "cpu", "nvme"] = _sharded("none", "Where to.")
    nvme_path: Path | None = _three(None, "Folder on the NVMe drive.")
    buffer_count: Size = _three(4, "NVMe buffers; at least 4 for Adam.")
    pin_memory: bool = _sharded(True, "Page-locked host memory.")
    pipeline_read: bool = _three(False, "Read the next NVMe tile early.")
    pipeline_write: bool = _three(False, "Write the last NVMe tile late.")
    fast_init: bool = _three(False, "Quicker NVMe start.")


@dataclass(frozen=True, slots=True)
class OffloadParam(Record):
    device: Literal["none", "cpu", "nvme"] = _three("none", "Where to.")
    nvme_path: Path | None = _three(None, "Folder on the NVMe drive.")
    buffer_count: Size = _three(5, "NVMe buffers.")
    buffer_size: Size = _three(100_000_000, "Elements per NVMe buffer.")
    max_in_cpu: Amount = _three(1_000_000_000, "Elements kept in host memory with NVMe.")
    pin_memory: bool = _three(True, "Page-locked host memory.")


@dataclass(frozen=True, slots=True)
class ZeroOptimization(Record):
    stage: Annotated[int, Limits(0, 3)] | Auto = described(
        0, "0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters. auto: 1."
    )
    contiguous_gradients: bool = _sharded(True, "Copy gradients to one buffer.")
    reduce_scatter: bool = _sharded(True, "Reduce-scatter instead of all-reduce.")
    reduce_bucket_size: Size | None = _sharded(
        None,
        "Elements reduced at a time.",
        default_text="a rank's parameters, at most 5e8, on CPUs 1e6",
    )
    use_multi_rank_bucket_allreduce: bool = _flat(True, "One reduction for several ranks' buckets.")
    allgather_bucket_size: Size = _flat(500_000_000, "Elements gathered at a time.")
    overlap_comm: bool | None = _sharded(
        None, "Reduce during the backward pass.", default_text="true at stage 3"
    )
    ignore_unused_parameters: bool = _passed(True, "Accept parameters without gradient.", zero_stages=(2,))
    round_robin_gradients: bool = _flat(False, "Spread offloaded gradient copies over ranks.")
    parameter_alignment: bool = _flat(False, "Align parameters to 16 bytes in flat buffers.")
    sub_group_size: Amount = _three(1_000_000_000, "Elements updated at a time.")
    stage3_prefetch_bucket_size: Amount = _three(50_000_000, "Elements fetched ahead.")
    stage3_param_persistence_threshold: Amount = _three(100_000, "Smaller ones stay whole.")
    stage3_model_persistence_threshold: Amount | None = _three(
        None, "Elements that may stay whole in total.", default_text="unlimited"
    )
    stage3_max_live_parameters: Amount = _three(1_000_000_000, "Elements resident before release.")
    stage3_max_reuse_distance: Amount = _three(1_000_000_000, "Keep a parameter used again within this.")
    stage3_module_granularity_threshold: Amount = _three(0, "Fetch modules finer than this as one.")
    stage3_use_all_reduce_for_fetch_params: bool = _three(False, "Fetch with all-reduce.")
    stage3_allgather_sequential: bool = _three(False, "Fetch parameters one by one: less memory.")
    zero_hpz_partition_size: Size = _three(1, "Ranks of the second, in-host shard of weights (ZeRO++).")
    log_trace_cache_warnings: bool = _three(False, "Log when the fetch trace is invalid.")
    enable_sanity_checks: bool = _three(False, "DeepSpeed's internal checks.")
    offload_optimizer: OffloadOptimizer = _sharded(OffloadOptimizer, "Optimizer state off the GPU.")
    offload_param: OffloadParam = _three(OffloadParam, "Parameters off the GPU.")


@dataclass(frozen=True, slots=True)
class Aio(Record):
    block_size: Size = _passed(1_048_576, "Bytes per request.")
    queue_depth: Size = _passed(8, "Requests in flight.")
    intra_op_parallelism: Size = _passed(1, "Threads.")
    single_submit: bool = _passed(False, "Submit requests one by one.")
    overlap_events: bool = _passed(True, "Submit and wait at once.")


@dataclass(frozen=True, slots=True)
class TensorBoard(Record):
    enabled: bool = described(False, "On.")
    output_path: Path | None = described(None, "Folder.", default_text="<output_dir>/tensorboard")
    job_name: str = described("DeepSpeedJobName", "Folder inside it.")


@dataclass(frozen=True, slots=True)
class CsvMonitor(Record):
    enabled: bool = described(False, "On.")
    output_path: Path | None = described(None, "Folder.", default_text="<output_dir>/csv_monitor")
    job_name: str = described("DeepSpeedJobName", "Folder inside it.")


@dataclass(frozen=True, slots=True)
class Wandb(Record):
    enabled: bool = described(False, "On.")
    group: str | None = described(None, "Group of runs.")
    team: str | None = described(None, "Team.")
    project: str = described("deepspeed", "Project.")


@dataclass(frozen=True, slots=True)
class Comet(Record):
    enabled: bool = described(False, "On.")
    project: str | None = described(None, "Project.")
    workspace: str | None = described(None, "Workspace.")
    api_key: str | None = described(
        None,
        "Key; better left to Comet's configuration file.",
        default_text="Comet's own configuration",
    )
    experiment_name: str | None = described(None, "Name.")
    experiment_key: str | None = described(None, "Existing experiment.")
    mode: Literal["get", "create", "get_or_create"] = described(
        "get_or_create", "Continue an experiment, or begin one."
    )
    samples_log_interval: Size = described(100, "Samples between records.")
    online: bool = described(True, "false keeps an offline record.")


@dataclass(frozen=True, slots=True)
class CommsLogger(Record):
    enabled: bool = _passed(False, "On.")
    verbose: bool = _passed(False, "A line for each collective.")
    prof_all: bool = _passed(True, "All collectives.")
    prof_ops: list[str] = _passed([], "Names of collectives, with prof_all off.")
    debug: bool = _passed(False, "Name the caller.")


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig(Record):
    train_batch_size: Size | Auto | None = described(
        None, "Sequences of the whole job per step.", default_text=USUAL
    )
    train_micro_batch_size_per_gpu: Size | Auto | None = described(
        None, "Sequences per forward pass of a replica.", default_text="derived"
    )
    gradient_accumulation_steps: Size | Auto | None = described(
        None, "Micro-batches per step.", default_text="derived"
    )
    gradient_clipping: NotNegative = described(1.0, "Largest norm of the full gradient; 0 turns it off.")
    bf16: Bf16 = described(Bf16, "bfloat16 weights and activations with fp32 master weights.")
    fp16: Fp16 = described(Fp16, "float16 with loss scaling (CUDA only).")
    data_types: DataTypes = described(DataTypes, "Number formats beside the weights'.")
    communication_data_type: Dtype | None = _passed(
        None, "Format of the gradient reduction.", default_text="as grad_accum_dtype"
    )
    optimizer: Optimizer = described(Optimizer, "torch's optimizer. Absent: AdamW with the model's defaults.")
    scheduler: Scheduler | None = described(
        None,
        "Learning rate by the step. Absent: linear warm-up, half a cosine to a tenth of the peak; "
        "null: constant.",
        null="constant",
    )
    lr_scaling: LrScaling = described(LrScaling, "Scale the learning rate with the batch.")
    pipeline: Pipeline = described(Pipeline, "Pipeline parallelism.")
    tensor_parallel: TensorParallel = described(TensorParallel, "Tensor slicing inside layers.")
    sequence_parallel_size: Size = described(1, "Ranks that share each sequence (Ulysses).")
    activation_checkpointing: ActivationCheckpointing = described(
        ActivationCheckpointing, "Recompute activations in the backward pass."
    )
    zero_optimization: ZeroOptimization = described(
        ZeroOptimization, "ZeRO: what is sharded over the data and sequence ranks."
    )
    aio: Aio = _passed(Aio, "Asynchronous I/O of NVMe offload.")
    tensorboard: TensorBoard = described(
        TensorBoard, "TensorBoard files. Absent: written, if the package is installed.", module="tensorboard"
    )
    wandb: Wandb = described(Wandb, "Weights & Biases.", module="wandb")
    csv_monitor: CsvMonitor = described(CsvMonitor, "CSV files.", module=None)
    comet: Comet = described(Comet, "Comet.", module="comet_ml")
    steps_per_print: Size | None = _passed(
        None, "Steps between DeepSpeed's own lines (ours: --log_interval).", default_text="never"
    )
    wall_clock_breakdown: bool = _passed(
        False, "DeepSpeed's timers per phase, every steps_per_print (else --log_interval) steps."
    )
    memory_breakdown: bool = _passed(False, "DeepSpeed's memory lines at start-up.")
    dump_state: bool = _passed(False, "DeepSpeed prints its configuration at start-up.")
    comms_logger: CommsLogger = _passed(CommsLogger, "DeepSpeed's log of collectives.")
    disable_python_gc: bool = _passed(False, "No garbage collection while training.")


def _flattened(record: type, block: str = "") -> Iterator[tuple[str, Field]]:
    for name, field in fields_of(record).items():
        path = f"{block}.{name}" if block else name
        yield path, field
        if field.block is not None:
            yield from _flattened(field.block, path)


# Every key by its dotted name.
KEYS: dict[str, Field] = dict(_flattened(DeepSpeedConfig))
# DeepSpeed's monitors, and the modules that they import.
MONITORS: dict[str, str | None] = {
    path: key.details["module"] for path, key in KEYS.items() if "module" in key.details
}


def children(block: str) -> tuple[str, ...]:
    """Names directly inside a block; "" is the top of the file."""
    inside = KEYS[block].block if block else DeepSpeedConfig
    return tuple(fields_of(inside)) if inside else ()


# What an absent key means to DeepSpeed 0.19.8, where it means something else here.
DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "data_types.grad_accum_dtype": "bf16",
    "optimizer.params.lr": 1e-3,
    "optimizer.params.betas": (0.9, 0.999),
    "optimizer.params.weight_decay": 0,
    "scheduler": "a constant rate",
    "scheduler.params.cycle_momentum": True,
}

_ONE_BIT = (
    "it compresses gradients by operators that are compiled, and keeps errors for each layout apart",
    "Use AdamW with ZeRO 1 and bf16; pipeline stages send least between hosts",
)
_MUP = ("it needs a model whose widths the package mup has set", "Use AdamW with a rate for this width")
# Optimizers that DeepSpeed knows and that are not here, in lower case: rule and remedy.
OPTIMIZERS: dict[str, tuple[str, str]] = {
    "lamb": ("torch has no Lamb", "Use AdamW, and lr_scaling for a larger batch"),
    "onebitadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "lion": ("torch has no Lion", "Use AdamW, with a rate 3 to 10 times as large as Lion's"),
    "adagrad": (
        "torch's Adagrad makes its state for the parameters it is given, which ZeRO replaces afterwards",
        "Use AdamW, or SGD with momentum",
    ),
    "muon": (
        "it orthogonalizes whole matrices, and ranks hold parts of them: rows or columns of tensor slices, "
        "flat shards of ZeRO",
        "Use AdamW",
    ),
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
    "fusedadam": ("it is the name of a class", "Use Adam; optimizer.params.fused is true already"),
    "deepspeed_adam": ("it is no optimizer of DeepSpeed 0.19", "Use Adam"),
    "deepspeedcpuadam": ("it is the name of a class", "Use AdamW with offload_optimizer"),
}
