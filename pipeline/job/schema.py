"""Every key that a DeepSpeed JSON may hold here: type, range, default and meaning, in one typed definition.

Names are DeepSpeed's own. Each block of the JSON is a record, and `DeepSpeedConfig` is the whole:
`config.zero_optimization.stage`. A default is stated here and nowhere else. Other keys of DeepSpeed are in
`REMOVED` or `REFUSED`, with the reason. Those of ``scheduler.params`` depend on the schedule and are in
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
    enabled: bool = _passed(False, "On.")
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
        None, "Format in which gradients of micro-batches are summed.", default_text="fp32 (fp16 for fp16)"
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
    torch_adam: bool = described(True, "Only true: torch's Adam is always the one used.")


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
    nvme_path: str | None = _three(None, "Folder on the NVMe drive.")
    buffer_count: Size = _three(4, "NVMe buffers; at least 4 for Adam.")
    pin_memory: bool = _sharded(True, "Page-locked host memory.")
    pipeline_read: bool = _three(False, "Read the next NVMe tile early.")
    pipeline_write: bool = _three(False, "Write the last NVMe tile late.")
    fast_init: bool = _three(False, "Quicker NVMe start.")
    ratio: Share = _three(1.0, "Share of optimizer state offloaded.")


@dataclass(frozen=True, slots=True)
class OffloadParam(Record):
    device: Literal["none", "cpu", "nvme"] = _three("none", "Where to.")
    nvme_path: str | None = _three(None, "Folder on the NVMe drive.")
    buffer_count: Size = _three(5, "NVMe buffers.")
    buffer_size: Size = _three(100_000_000, "Elements per NVMe buffer.")
    max_in_cpu: Amount = _three(1_000_000_000, "Elements kept in host memory with NVMe.")
    pin_memory: bool = _three(True, "Page-locked host memory.")


@dataclass(frozen=True, slots=True)
class ZeroOptimization(Record):
    stage: Annotated[int, Limits(0, 3)] = described(
        0, "0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."
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
    sub_group_size: Size = _three(1_000_000_000, "Elements updated at a time.")
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
    output_path: str | None = described(None, "Folder.", default_text="<output_dir>/tensorboard")
    job_name: str = described("DeepSpeedJobName", "Folder inside it.")


@dataclass(frozen=True, slots=True)
class CsvMonitor(Record):
    enabled: bool = described(False, "On.")
    output_path: str | None = described(None, "Folder.", default_text="<output_dir>/csv_monitor")
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
        None, "Learning rate as a function of the step. Absent: constant."
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
    tensorboard: TensorBoard = described(TensorBoard, "TensorBoard files.", module="tensorboard")
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


# Keys of DeepSpeed files that are not taken here, each with the reason and the remedy.

_SET_BATCH = "Remove it and set the three batch sizes directly"
_REMOVE = "Remove it"
_ZERO = "zero_optimization."

# DeepSpeed 0.19.8 raises for these (runtime/config.py).
REMOVED: dict[str, str] = {
    "amp": "Remove it and use bf16 or fp16",
    "compression_training": _REMOVE,
    "curriculum_learning": _REMOVE,
    "eigenvalue": _REMOVE,
    "elasticity": _SET_BATCH,
    "graph_harvesting": _REMOVE,
    "nebula": _REMOVE,
    "progressive_layer_drop": _REMOVE,
    "quantize_training": _REMOVE,
    "sparse_attention": _REMOVE,
    "sparse_gradients": _REMOVE,
    _ZERO + "legacy_stage1": "Remove it; stage 1 has one implementation",
    _ZERO + "mics_hierarchical_params_gather": _REMOVE,
    _ZERO + "mics_shard_size": "Remove it; zero_hpz_partition_size keeps a second shard inside hosts",
    _ZERO + "zeropp_loco_param": _REMOVE,
}

_OWN_CHECKPOINTING = (
    "blocks are recomputed by this pipeline, in both engines",
    "Remove it and set activation_checkpointing.mode to none, full or selective",
)
_OWN_SCALE = (
    "it changes the scale of gradients, which this pipeline fixes: loss per token of the global batch",
    _REMOVE,
)
_OWN_MASTER = ("master weights and optimizer state are fp32 here", _REMOVE)
_OWN_TENSOR = ("layers are sliced by this pipeline, not by AutoTP", "Keep autotp_size only")
_OWN_DATA = ("data is loaded by this pipeline, in its own order", "Remove it and use --data")
_OWN_CHECKPOINTS = (
    "checkpoints are written by this pipeline",
    "Remove it; see --save_interval, --async_save",
)
_RENAMED_OFFLOAD = "the name is DeepSpeed's deprecated one"
_COMPILED = ("it needs compiled CUDA operators, and weights or gradients lose bits", _REMOVE)
_UNTESTED = ("it is not tested together with this pipeline's parallelism", _REMOVE)
_NO_EFFECT = ("it would do nothing here", _REMOVE)

# DeepSpeed knows these. (rule, remedy)
REFUSED: dict[str, tuple[str, str]] = {
    "prescale_gradients": _OWN_SCALE,
    "gradient_predivide_factor": _OWN_SCALE,
    "gradient_allreduce_op": _OWN_SCALE,
    "managed_gradient_accumulation": _OWN_SCALE,
    "seq_parallel_communication_data_type": ("sequence ranks reduce together with data ranks", "Use "
        "communication_data_type"),
    "bfloat16": ("the name is DeepSpeed's old one", "Rename it to bf16"),
    "torch_autocast": ("it conflicts with bf16 and fp16 weights", "Use bf16 or fp16"),
    "flops_profiler": ("it never reports under pipelines; FLOPs are counted analytically here",
        "Remove it; metrics.jsonl has tflops_per_device and mfu"),
    "autotuning": ("the launcher's autotuner edits the JSON without the job's knowledge", _REMOVE),
    "compile": ("DeepCompile is not tested together with this pipeline's parallelism", _REMOVE),
    "hybrid_engine": ("it serves generation during reinforcement learning", _REMOVE),
    "data_efficiency": _OWN_DATA,
    "dataloader_drop_last": _OWN_DATA,
    "checkpoint": _OWN_CHECKPOINTS,
    "datastates_ckpt": _OWN_CHECKPOINTS,
    "zero_allow_untested_optimizer": ("it is always true here: torch's optimizers are used", _REMOVE),
    "zero_force_ds_cpu_optimizer": ("it is always false here: torch's optimizers are used", _REMOVE),
    "disable_allgather": _NO_EFFECT,
    "vocabulary_size": ("the model says it, padded to a multiple of 128", _REMOVE),
    "use_data_before_expert_parallelism": _NO_EFFECT,
    "expert_parallel": ("the model has no experts", _REMOVE),
    "weight_quantization": ("it serves inference", _REMOVE),
    "log_level": ("only rank 0 writes to the console", _REMOVE),
    "timers": ("throughput is measured by this pipeline", "Remove it; metrics.jsonl has tokens_per_second"),
    "aio.use_gds": ("GPUDirect Storage is not supported here", _REMOVE),
    "bf16.immediate_grad_update": ("it does not combine with every layout's gradient path", _REMOVE),
    "bf16.bf16_master_weights_and_grads": _OWN_MASTER,
    "bf16.bf16_optimizer_states": _OWN_MASTER,
    "fp16.fp16_master_weights_and_grads": _OWN_MASTER,
    "fp16.auto_cast": _NO_EFFECT,
    "data_types.param_dtype": ("bf16.enabled and fp16.enabled say it", _REMOVE),
    "data_types.buffer_dtype": ("buffers are fp32 where that matters", _REMOVE),
    "data_types.keep_in_fp32_modules": ("the loss and the rotary table are fp32 already", _REMOVE),
    "optimizer.legacy_fusion": ("the fused kernel is torch's", "Use optimizer.params.fused"),
    "optimizer.params.max_grad_norm": ("DeepSpeed does not take it there", "Use gradient_clipping"),
    "optimizer.params.bias_correction": ("torch's Adam always corrects the bias", _REMOVE),
    "optimizer.params.amsgrad": _UNTESTED,
    "activation_checkpointing.partition_activations": _OWN_CHECKPOINTING,
    "activation_checkpointing.cpu_checkpointing": _OWN_CHECKPOINTING,
    "activation_checkpointing.contiguous_memory_optimization": _OWN_CHECKPOINTING,
    "activation_checkpointing.number_checkpoints": _OWN_CHECKPOINTING,
    "activation_checkpointing.synchronize_checkpoint_boundary": _OWN_CHECKPOINTING,
    "activation_checkpointing.profile": _OWN_CHECKPOINTING,
    "pipeline.activation_checkpoint_interval": _OWN_CHECKPOINTING,
    "pipeline.use_reentrant": _OWN_CHECKPOINTING,
    "pipeline.pipe_partitioned": ("activations between stages are equal on tensor ranks, and stay whole",
        _REMOVE),
    "pipeline.grad_partitioned": ("gradients between stages are equal on tensor ranks, and stay whole",
        _REMOVE),
    "pipeline.seed_layers": ("initial weights depend on the seed and the parameter's name only", _REMOVE),
    "tensor_parallel.tp_overlap_comm": _OWN_TENSOR,
    "tensor_parallel.tensor_parallel": _OWN_TENSOR,
    "tensor_parallel.tp": _OWN_TENSOR,
    "tensor_parallel.tp_size": ("DeepSpeed's training key is autotp_size", "Rename it to autotp_size"),
    "tensor_parallel.dtype": _OWN_TENSOR,
    "tensor_parallel.injection_policy_tuple": _OWN_TENSOR,
    "tensor_parallel.partition_config": _OWN_TENSOR,
    "tensor_parallel.preset_model": _OWN_TENSOR,
    "tensor_parallel.keep_module_on_host": _OWN_TENSOR,
    "tensor_parallel.replace_with_kernel_inject": _OWN_TENSOR,
    "tensor_parallel.kernel_inject": _OWN_TENSOR,
    "tensor_parallel.vocab_parallel_lm_head": _OWN_TENSOR,
    "tensor_parallel.vocab_parallel_ce_backend": _OWN_TENSOR,
    _ZERO + "cpu_offload": (_RENAMED_OFFLOAD, 'Write "offload_optimizer": {"device": "cpu"}'),
    _ZERO + "cpu_offload_param": (_RENAMED_OFFLOAD, 'Write "offload_param": {"device": "cpu"}'),
    _ZERO + "cpu_offload_use_pin_memory": (_RENAMED_OFFLOAD, "Use pin_memory inside offload_optimizer"),
    _ZERO + "allgather_partitions": _NO_EFFECT,
    _ZERO + "compute_grad_norm": ("every step reports its gradient norm, so it is always on", _REMOVE),
    _ZERO + "elastic_checkpoint": _OWN_CHECKPOINTS,
    _ZERO + "load_from_fp32_weights": ("a resume is exact, so master weights are always loaded", _REMOVE),
    _ZERO + "pipeline_loading_checkpoint": _NO_EFFECT,
    _ZERO + "memory_efficient_linear": ("it replaces torch's linear, which this model does not use", _REMOVE),
    _ZERO + "override_module_apply": _NO_EFFECT,
    _ZERO + "stage3_gather_16bit_weights_on_model_save": ("it serves save_16bit_model, which is not used "
        "here", _REMOVE),
    _ZERO + "stage3_gather_fp16_weights_on_model_save": ("it serves save_16bit_model, which is not used "
        "here", _REMOVE),
    _ZERO + "zenflow": _UNTESTED,
    _ZERO + "leaf_module": ("it serves mixture-of-experts blocks, and the model has none", _REMOVE),
    _ZERO + "save_muon_momentum_buffer_in_memory": ("Muon is not among the optimizers here", _REMOVE),
    _ZERO + "zero_quantized_weights": _COMPILED,
    _ZERO + "zero_quantized_nontrainable_weights": _COMPILED,
    _ZERO + "zero_quantized_gradients": _COMPILED,
    _ZERO + "offload_optimizer.super_offload": ("it needs a Grace-Hopper host and DeepSpeed's CPU Adam",
        _REMOVE),
    _ZERO + "offload_optimizer.cpuadam_cores_perc": ("it belongs to super_offload", _REMOVE),
}  # fmt: skip
