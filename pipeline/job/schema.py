"""Every key that a DeepSpeed JSON may hold here, as data: type, default, range, and what it does.

Names are DeepSpeed's own. A key is in `KEYS` (it acts), in `REMOVED` (DeepSpeed 0.19 dropped it) or in
`REFUSED` (DeepSpeed knows it, but it would do nothing here or break an invariant; the reason is given).
Keys of `scheduler.params` depend on the schedule and are described by pipeline/job/schedules.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.job.schedules import SCHEDULES

Kind = Literal["int", "float", "bool", "str", "object", "numbers", "strings", "partition"]


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        path: Dotted name from the top of the JSON.
        kind: Type of the value. ``int`` takes whole floats such as 5e8 as well.
        default: What holds when it is absent, as the documentation says it.
        meaning: What it does.
        low, high: Bounds, inclusive; with `above` the lower one is exclusive.
        choices: The only values allowed.
        auto: The string "auto" leaves the value to the run.
        zero_stages: ZeRO stages in which the key acts; None: not a matter of the stage.
        passed: DeepSpeed receives it as written. Otherwise this pipeline acts on it.
    """

    path: str
    kind: Kind
    default: str
    meaning: str
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[Any, ...] = ()
    auto: bool = False
    zero_stages: tuple[int, ...] | None = None
    passed: bool = False


def _block(path: str, meaning: str) -> Key:
    return Key(path, "object", "absent", meaning)


def _flag(path: str, default: str, meaning: str, **kwargs: Any) -> Key:
    return Key(path, "bool", default, meaning, **kwargs)


def _size(path: str, default: str, meaning: str, low: int = 1, **kwargs: Any) -> Key:
    return Key(path, "int", default, meaning, low=low, **kwargs)


_DTYPES = ("fp32", "bf16", "fp16")

_BATCH = (
    _size("train_batch_size", "model's default", "Sequences of the whole job per step.", auto=True),
    _size("train_micro_batch_size_per_gpu", "derived", "Sequences per forward pass of a replica.", auto=True),
    _size("gradient_accumulation_steps", "derived", "Micro-batches per step.", auto=True),
    Key("gradient_clipping", "float", "1.0", "Largest norm of the full gradient; 0 turns it off.", low=0),
)

# They act with a dynamic loss scale only.
DYNAMIC_LOSS_SCALE = (
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
)

_PRECISION = (
    _block("bf16", "bfloat16 weights and activations with fp32 master weights."),
    _flag("bf16.enabled", "false", "On. auto: where the device computes bf16 natively.", auto=True),
    _flag("bf16.check_grad_overflow", "true", "Skip a step whose gradient is not finite.", passed=True),
    _block("fp16", "float16 with loss scaling (CUDA only)."),
    _flag("fp16.enabled", "false", "On.", passed=True),
    Key("fp16.loss_scale", "float", "0", "Fixed loss scale; 0: dynamic.", low=0, passed=True),
    _size("fp16.initial_scale_power", "16", "The dynamic scale starts at 2 ** this.", low=0, passed=True),
    _size("fp16.loss_scale_window", "1000", "Steps without overflow before the scale doubles.", passed=True),
    _size("fp16.hysteresis", "2", "Overflows before the scale halves.", passed=True),
    _flag("fp16.consecutive_hysteresis", "false", "Refill hysteresis after a good step.", passed=True),
    _size("fp16.min_loss_scale", "1", "Smallest dynamic scale.", passed=True),
    _block("data_types", "Number formats beside the weights'."),
    Key("data_types.grad_accum_dtype", "str", "fp32 (fp16 for fp16)", "Format in which gradients of "
        "micro-batches are summed.", choices=_DTYPES),
    Key("communication_data_type", "str", "as grad_accum_dtype", "Format of the gradient reduction.",
        choices=_DTYPES, passed=True),
)  # fmt: skip

_OPTIMIZER = (
    _block("optimizer", "torch's optimizer. Absent: AdamW with the model's defaults."),
    Key("optimizer.type", "str", "AdamW", "Optimizer.", choices=("AdamW", "Adam", "SGD")),
    _block("optimizer.params", "Its arguments."),
    Key("optimizer.params.lr", "float", "model's default", "Peak learning rate.", low=0, above=True,
        auto=True),
    Key("optimizer.params.betas", "numbers", "model's default", "Adam's two decay rates, each in [0, 1).",
        low=0, high=1, auto=True),
    Key("optimizer.params.eps", "float", "1e-8", "Adam's epsilon.", low=0, above=True, auto=True),
    Key("optimizer.params.weight_decay", "float", "model's default", "Weight decay of matrices; norms "
        "and biases have none.", low=0, auto=True),
    _flag("optimizer.params.adam_w_mode", "true", "false makes Adam add weight decay to the gradient (L2)."),
    Key("optimizer.params.momentum", "float", "0", "SGD's momentum.", low=0, high=1),
    _flag("optimizer.params.nesterov", "false", "SGD with Nesterov momentum."),
    _flag("optimizer.params.fused", "true", "torch's fused kernel; false: its for-each kernels."),
    _flag("optimizer.params.torch_adam", "true", "Only true: torch's Adam is always the one used."),
    _block("scheduler", "Learning rate as a function of the step. Absent: constant."),
    Key("scheduler.type", "str", "required", "Name of the schedule.", choices=tuple(SCHEDULES)),
    _block("scheduler.params", "Its parameters, listed per schedule below."),
    _block("lr_scaling", "Scale the learning rate with the batch."),
    Key("lr_scaling.rule", "str", "none", "lr times (train batch / base batch), to the power 1 or 1/2.",
        choices=("none", "linear", "sqrt")),
    _size("lr_scaling.base_batch_size", "required", "Sequences per step for which lr is meant."),
)  # fmt: skip

_LAYOUT = (
    _block("pipeline", "Pipeline parallelism."),
    _size("pipeline.stages", "1", "Stages."),
    Key("pipeline.partition", "partition", "parameters", "How layers are dealt to stages: parameters, "
        "uniform, or a list with the number of layers of each stage (of each half stage for dualpipev). "
        "Layers are embedding, positions, blocks, norm, output."),
    Key("pipeline.schedule", "str", "1f1b", "1f1b, or dualpipev (two chunks of layers per stage).",
        choices=("1f1b", "dualpipev")),
    _block("tensor_parallel", "Tensor slicing inside layers."),
    _size("tensor_parallel.autotp_size", "1", "Ranks that share each weight matrix."),
    _size("sequence_parallel_size", "1", "Ranks that share each sequence (Ulysses)."),
    _block("activation_checkpointing", "Recompute activations in the backward pass."),
    Key("activation_checkpointing.mode", "str", "none", "none, full (each block) or selective (attention).",
        choices=("none", "full", "selective")),
)  # fmt: skip


def _zero(name: str, kind: Kind, default: str, meaning: str, stages: tuple[int, ...], **kwargs: Any) -> Key:
    return Key(f"zero_optimization.{name}", kind, default, meaning, zero_stages=stages, passed=True, **kwargs)


_SHARDED, _FLAT, _THREE = (1, 2, 3), (1, 2), (3,)

_ZERO = (
    _block("zero_optimization", "ZeRO: what is sharded over the data and sequence ranks."),
    Key("zero_optimization.stage", "int", "0", "0 nothing, 1 optimizer state, 2 and gradients, 3 and "
        "parameters.", low=0, high=3),
    _zero("contiguous_gradients", "bool", "true", "Copy gradients to one buffer.", _SHARDED),
    _zero("reduce_scatter", "bool", "true", "Reduce-scatter instead of all-reduce.", _SHARDED),
    _zero("reduce_bucket_size", "int", "a rank's parameters, at most 5e8, on CPUs 1e6",
          "Elements reduced at a time.", _SHARDED, low=1),
    _zero("use_multi_rank_bucket_allreduce", "bool", "true", "One reduction for several ranks' buckets.",
          _FLAT),
    _zero("allgather_bucket_size", "int", "5e8", "Elements gathered at a time.", _FLAT, low=1),
    _zero("overlap_comm", "bool", "true at stage 3", "Reduce while the backward pass goes on.", _SHARDED),
    _zero("ignore_unused_parameters", "bool", "true", "Accept parameters without gradient.", (2,)),
    _zero("round_robin_gradients", "bool", "false", "Spread offloaded gradient copies over ranks.", _FLAT),
    _zero("parameter_alignment", "bool", "false", "Align parameters to 16 bytes in flat buffers.", _FLAT),
    _zero("sub_group_size", "int", "1e9", "Elements updated at a time.", _THREE, low=1),
    _zero("stage3_prefetch_bucket_size", "int", "5e7", "Elements fetched ahead.", _THREE, low=0),
    _zero("stage3_param_persistence_threshold", "int", "1e5", "Smaller ones stay whole.", _THREE, low=0),
    _zero("stage3_model_persistence_threshold", "int", "unlimited", "Elements that may stay whole in all.",
          _THREE, low=0),
    _zero("stage3_max_live_parameters", "int", "1e9", "Elements resident before release.", _THREE, low=0),
    _zero("stage3_max_reuse_distance", "int", "1e9", "Keep a parameter used again within this.", _THREE,
          low=0),
    _zero("stage3_module_granularity_threshold", "int", "0", "Fetch modules finer than this as one.", _THREE,
          low=0),
    _zero("stage3_use_all_reduce_for_fetch_params", "bool", "false", "Fetch with all-reduce.", _THREE),
    _zero("stage3_allgather_sequential", "bool", "false", "Fetch parameters one by one: less memory.",
          _THREE),
    _zero("zero_hpz_partition_size", "int", "1", "Ranks of the second, in-host shard of weights (ZeRO++).",
          _THREE, low=1),
    _zero("log_trace_cache_warnings", "bool", "false", "Log when the fetch trace is invalid.", _THREE),
    _zero("enable_sanity_checks", "bool", "false", "DeepSpeed's internal checks.", _THREE),
    _zero("offload_optimizer", "object", "absent", "Optimizer state off the GPU.", _SHARDED),
    _zero("offload_optimizer.device", "str", "none", "Where to.", _SHARDED, choices=("none", "cpu", "nvme")),
    _zero("offload_optimizer.nvme_path", "str", "absent", "Folder on the NVMe drive.", _THREE),
    _zero("offload_optimizer.buffer_count", "int", "4", "NVMe buffers; at least 4 for Adam.", _THREE, low=1),
    _zero("offload_optimizer.pin_memory", "bool", "true", "Page-locked host memory.", _SHARDED),
    _zero("offload_optimizer.pipeline_read", "bool", "false", "Read the next NVMe tile early.", _THREE),
    _zero("offload_optimizer.pipeline_write", "bool", "false", "Write the last NVMe tile late.", _THREE),
    _zero("offload_optimizer.fast_init", "bool", "false", "Quicker NVMe start.", _THREE),
    _zero("offload_optimizer.ratio", "float", "1.0", "Share of optimizer state offloaded.", _THREE, low=0,
          high=1),
    _zero("offload_param", "object", "absent", "Parameters off the GPU.", _THREE),
    _zero("offload_param.device", "str", "none", "Where to.", _THREE, choices=("none", "cpu", "nvme")),
    _zero("offload_param.nvme_path", "str", "absent", "Folder on the NVMe drive.", _THREE),
    _zero("offload_param.buffer_count", "int", "5", "NVMe buffers.", _THREE, low=1),
    _zero("offload_param.buffer_size", "int", "1e8", "Elements per NVMe buffer.", _THREE, low=1),
    _zero("offload_param.max_in_cpu", "int", "1e9", "Elements kept in host memory with NVMe.", _THREE, low=0),
    _zero("offload_param.pin_memory", "bool", "true", "Page-locked host memory.", _THREE),
    Key("aio", "object", "absent", "Asynchronous I/O of NVMe offload.", passed=True),
    _size("aio.block_size", "1048576", "Bytes per request.", passed=True),
    _size("aio.queue_depth", "8", "Requests in flight.", passed=True),
    _size("aio.intra_op_parallelism", "1", "Threads.", passed=True),
    _flag("aio.single_submit", "false", "Submit requests one by one.", passed=True),
    _flag("aio.overlap_events", "true", "Submit and wait at once.", passed=True),
)  # fmt: skip


def _monitor(name: str, what: str, *texts: tuple[str, str, str]) -> tuple[Key, ...]:
    return (
        _block(name, what),
        _flag(f"{name}.enabled", "false", "On."),
        *(Key(f"{name}.{text}", "str", default, meaning) for text, default, meaning in texts),
    )


_REPORTS = (
    *_monitor("tensorboard", "TensorBoard files.",
              ("output_path", "<output_dir>/tensorboard", "Folder."),
              ("job_name", "DeepSpeedJobName", "Folder inside it.")),
    *_monitor("wandb", "Weights & Biases.", ("group", "absent", "Group of runs."),
              ("team", "absent", "Team."), ("project", "deepspeed", "Project.")),
    *_monitor("csv_monitor", "CSV files.", ("output_path", "<output_dir>/csv_monitor", "Folder."),
              ("job_name", "DeepSpeedJobName", "Folder inside it.")),
    *_monitor("comet", "Comet.", ("project", "absent", "Project."), ("workspace", "absent", "Workspace."),
              ("api_key", "Comet's own configuration", "Key; better left to Comet's configuration file."),
              ("experiment_name", "absent", "Name."), ("experiment_key", "absent", "Existing experiment.")),
    Key("comet.mode", "str", "get_or_create", "Continue an experiment, or begin one.",
        choices=("get", "create", "get_or_create")),
    _size("comet.samples_log_interval", "100", "Samples between records."),
    _flag("comet.online", "true", "false keeps an offline record."),
    _size("steps_per_print", "never", "Steps between DeepSpeed's own lines (ours: --log_interval).",
          passed=True),
    _flag("wall_clock_breakdown", "false", "DeepSpeed's timers per phase, every steps_per_print (else "
          "--log_interval) steps.", passed=True),
    _flag("memory_breakdown", "false", "DeepSpeed's memory lines at start-up.", passed=True),
    _flag("dump_state", "false", "DeepSpeed prints its configuration at start-up.", passed=True),
    Key("comms_logger", "object", "absent", "DeepSpeed's log of collectives.", passed=True),
    _flag("comms_logger.enabled", "false", "On.", passed=True),
    _flag("comms_logger.verbose", "false", "A line for each collective.", passed=True),
    _flag("comms_logger.prof_all", "true", "All collectives.", passed=True),
    Key("comms_logger.prof_ops", "strings", "[]", "Names of collectives, with prof_all off.", passed=True),
    _flag("comms_logger.debug", "false", "Name the caller.", passed=True),
    _flag("disable_python_gc", "false", "No garbage collection while training.", passed=True),
)  # fmt: skip

KEYS: dict[str, Key] = {
    key.path: key for key in (*_BATCH, *_PRECISION, *_OPTIMIZER, *_LAYOUT, *_ZERO, *_REPORTS)
}


def children(block: str) -> tuple[str, ...]:
    """Names directly inside a block; "" is the top of the file."""
    prefix = f"{block}." if block else ""
    return tuple(
        path[len(prefix) :]
        for path in KEYS
        if path.startswith(prefix) and path != block and "." not in path[len(prefix) :]
    )
