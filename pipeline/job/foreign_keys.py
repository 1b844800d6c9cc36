"""Keys of DeepSpeed files on which nothing here acts, and the old names that DeepSpeed still reads.

People bring the files that they have. A value that asks for what is so anyway, or that cannot act, is taken
with a note; one that would train otherwise than asked is refused, with the reason and the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.base.fields import AUTO
from pipeline.base.problems import Problem

ZERO = "zero_optimization."
_REMOVE = "Remove it"


def is_comment(name: str) -> bool:
    """Whether a key is one by which people put comments into a JSON."""
    return name.startswith(("_", "#", "//")) or name.lower() in ("comment", "comments")


def anything(value: Any) -> bool:
    """Every value is inert."""
    return True


def never(value: Any) -> bool:
    """No value is inert."""
    return False


def off(value: Any) -> bool:
    """false, 0, null, or an object that turns nothing on."""
    if isinstance(value, dict):
        switch = value.get("enabled")
        return switch in (False, AUTO) or (switch is None and all(off(each) for each in value.values()))
    return value is None or value is False or value == 0 or value == [] or value == AUTO


def only(*values: Any) -> Callable[[Any], bool]:
    """These values, and "auto", are inert."""
    return lambda value: value in (*values, AUTO)


@dataclass(frozen=True)
class Foreign:
    """A key of DeepSpeed that does not act here.

    Attributes:
        note: Why a value changes nothing.
        inert: Which values the note is true of.
        rule, remedy: Of all other values.
    """

    note: str = ""
    inert: Callable[[Any], bool] = anything
    rule: str = ""
    remedy: str = ""

    def problem(self, where: str, value: object) -> Problem:
        """The note on a value that changes nothing, or why it is refused.

        Args:
            where: What the problem calls the key.
        """
        if self.inert(value):
            return Problem(where, value, self.note, "", "note")
        return Problem(where, value, self.rule, self.remedy)


def _refused(rule: str, remedy: str = _REMOVE) -> Foreign:
    return Foreign("", never, rule, remedy)


def _switch(rule: str, remedy: str = _REMOVE) -> Foreign:
    """Off is what is so; on is refused."""
    return Foreign("is off here, too", off, rule, remedy)


def _gone(remedy: str = _REMOVE) -> Foreign:
    """A key that DeepSpeed 0.19.8 raises for (runtime/config.py); off, it asks for nothing."""
    return Foreign("DeepSpeed 0.19 has removed this key, and it is off", off, REMOVED_RULE, remedy)


REMOVED_RULE = "DeepSpeed 0.19 has removed this key"
_MEAN = "gradients are averaged over the same ranks either way: the mean is the same"
_NO_EFFECT = "does nothing here"
_OWN_STEP = "torch's optimizers are used, also for offloaded state"
_CHECKPOINTS = "any checkpoint resumes on any layout here, and this key is not needed for it"
_WHOLE_WEIGHTS = "python -m pipeline.export writes whole weights of any checkpoint"
_CURRICULUM = "samples come from this pipeline's own order of the data"
_RECOMPUTED = "blocks are recomputed by this pipeline"
_RECOMPUTE = "Set activation_checkpointing.mode to full or selective instead"
_MASTERS = "master weights and optimizer state are fp32 here"
_SLICED = "layers are sliced by this pipeline, not by AutoTP"
_COMPRESSED = "gradients or weights would lose bits in a way that is not tested here"

_BLOCKS = {
    "amp": _gone("Remove it and use bf16 or fp16"),
    "compression_training": _gone("Remove it; compress the exported model afterwards"),
    "curriculum_learning": _gone(
        "Remove it; begin with a smaller --seq_length, and prepare data in that order"
    ),
    "eigenvalue": _gone(),
    "elasticity": _gone("Remove it and set the batch sizes; --allow_fewer_hosts restarts on fewer hosts"),
    "graph_harvesting": _gone(),
    "nebula": _gone("Remove it; --async_save saves in the background"),
    "progressive_layer_drop": _gone("Remove it; --dropout regularizes"),
    "quantize_training": _gone("Remove it; quantize the exported model afterwards"),
    "sparse_attention": _gone("Remove it; --document_mask keeps attention inside documents"),
    "sparse_gradients": _gone("Remove it; embeddings have dense gradients"),
    "autotuning": _switch(
        "it ends the run after a few profiled steps",
        "Set autotuning.enabled to false",
    ),
    "compile": _switch("DeepCompile is not tested together with this pipeline's parallelism"),
    "hybrid_engine": _switch("it serves generation during reinforcement learning"),
    "data_efficiency": _switch(
        _CURRICULUM, "Remove it; all tokens pass all layers; --data_blend weighs sources"
    ),
    "torch_autocast": _switch("it conflicts with bf16 and fp16 weights", "Use bf16 or fp16"),
    "weight_quantization": _switch("it serves inference"),
    "expert_parallel": _switch("the model has no experts"),
    "datastates_ckpt": _switch("checkpoints are written by this pipeline", "Remove it; see --async_save"),
    "flops_profiler": Foreign("metrics.jsonl and every printed line have TFLOP/s per device, and mfu"),
    "timers": Foreign("throughput is measured by this pipeline: tokens_per_second in metrics.jsonl"),
    "checkpoint.tag_validation": Foreign(
        "the tag of a checkpoint is agreed on by all ranks",
        lambda value: str(value).lower() in ("warn", "ignore", "fail", AUTO),
        "must be Warn, Ignore or Fail to DeepSpeed",
        _REMOVE,
    ),
    "checkpoint.load_universal": Foreign(_CHECKPOINTS),
    "checkpoint.use_node_local_storage": Foreign("hosts with disks of their own are recognized"),
    "checkpoint.parallel_write": Foreign("every rank writes its own files"),
    "checkpoint.writer": _refused("checkpoints are written by this pipeline", "Remove it; see --async_save"),
    "checkpoint.checkpoint_serialization": Foreign("files are those of torch.save"),
}

_TOP = {
    "prescale_gradients": Foreign(_MEAN),
    "gradient_predivide_factor": Foreign(_MEAN),
    "gradient_allreduce_op": Foreign(
        "is so here", only("mean", "avg"), "the loss is the mean over the tokens of a step", _REMOVE
    ),
    "managed_gradient_accumulation": Foreign(
        "is so here", only(True), "micro-batches are accumulated by the engine", _REMOVE
    ),
    "fp32_allreduce": Foreign(
        "DeepSpeed does not read it; communication_data_type is the format of the gradient reduction"
    ),
    "seq_parallel_communication_data_type": Foreign(
        "sequence ranks reduce together with data ranks, in the format of communication_data_type"
    ),
    "dataloader_drop_last": Foreign("every batch is whole, and what is left of an epoch is in the next"),
    "dataloader_num_workers": Foreign("data is loaded by this pipeline, ahead of the step"),
    "zero_allow_untested_optimizer": Foreign(_OWN_STEP),
    "zero_force_ds_cpu_optimizer": Foreign(_OWN_STEP),
    "disable_allgather": Foreign("DeepSpeed reads it and does nothing with it"),
    "vocabulary_size": Foreign("the model says it, padded to a multiple of 128"),
    "use_data_before_expert_parallelism": Foreign("the model has no experts"),
    "log_level": Foreign("rank 0 alone writes to the console"),
    "gather_16bit_weights_on_model_save": Foreign(_WHOLE_WEIGHTS),
    "aio.thread_count": Foreign("DeepSpeed reads intra_op_parallelism instead"),
    "aio.use_gds": _switch("GPUDirect Storage is not supported here"),
    "bf16.immediate_grad_update": _switch("it does not combine with every layout's gradient path"),
    "bf16.bf16_master_weights_and_grads": _switch(_MASTERS),
    "bf16.bf16_optimizer_states": _switch(_MASTERS),
    "fp16.fp16_master_weights_and_grads": _switch(_MASTERS),
    "fp16.auto_cast": Foreign("inputs are token ids, which have no format to cast"),
    "fp16.opt_level": Foreign("it is NVIDIA apex's; fp16 here has fp16 weights and fp32 masters"),
    "bf16.opt_level": Foreign("it is NVIDIA apex's; bf16 here has bf16 weights and fp32 masters"),
    **{
        f"bf16.{name}": Foreign("bf16 has the range of fp32, and no loss scale")
        for name in (
            "auto_cast",
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    },
    "data_types.param_dtype": _refused("bf16.enabled and fp16.enabled say it"),
    "data_types.buffer_dtype": _refused("buffers are fp32 where that matters"),
    "data_types.keep_in_fp32_modules": _refused("the loss and the rotary table are fp32 already"),
    "tensor_parallel.tp_size": _refused(
        "DeepSpeed's training key is autotp_size", "Rename it to autotp_size"
    ),
}

_OPTIMIZER = {
    "optimizer.legacy_fusion": Foreign("the fused kernel is torch's: optimizer.params.fused"),
    "optimizer.params.torch_adam": Foreign("torch's Adam is always the one used"),
    "optimizer.params.bias_correction": Foreign(
        "is so here", only(True), "torch's Adam always corrects the bias", _REMOVE
    ),
    "optimizer.params.amsgrad": _switch("it is not tested together with this pipeline's parallelism"),
}

_CHECKPOINTING = {
    f"activation_checkpointing.{name}": Foreign(
        "it says how DeepSpeed recomputes where a model asks it to; here activation_checkpointing.mode does"
    )
    for name in (
        "partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "number_checkpoints",
        "synchronize_checkpoint_boundary", "profile",
    )
}  # fmt: skip

_PIPELINE = {
    "pipeline.activation_checkpoint_interval": Foreign("is off here, too", off, _RECOMPUTED, _RECOMPUTE),
    "pipeline.use_reentrant": Foreign(_RECOMPUTED),
    "pipeline.pipe_partitioned": Foreign("activations between stages are whole, on every tensor rank"),
    "pipeline.grad_partitioned": Foreign("gradients between stages are whole, on every tensor rank"),
    "pipeline.seed_layers": Foreign("initial weights depend on the seed and the parameter's name only"),
}

_TENSOR = {
    f"tensor_parallel.{name}": _refused(_SLICED, "Keep autotp_size only")
    for name in (
        "tp", "tensor_parallel", "dtype", "injection_policy_tuple", "partition_config", "preset_model",
        "keep_module_on_host", "replace_with_kernel_inject", "kernel_inject", "tp_overlap_comm",
        "vocab_parallel_lm_head", "vocab_parallel_ce_backend",
    )
}  # fmt: skip

_ZERO_KEYS = {
    "allgather_partitions": Foreign("weights are gathered, with the same values either way"),
    "compute_grad_norm": Foreign("is so here", only(True), "every step reports its gradient norm", _REMOVE),
    "elastic_checkpoint": Foreign(_CHECKPOINTS),
    "load_from_fp32_weights": Foreign(
        "is so here", only(True), "a resume is exact, so master weights are always loaded", _REMOVE
    ),
    "pipeline_loading_checkpoint": Foreign(_NO_EFFECT),
    "memory_efficient_linear": Foreign("it replaces torch's linear, which this model does not use"),
    "override_module_apply": Foreign(_NO_EFFECT),
    "stage3_gather_16bit_weights_on_model_save": Foreign(_WHOLE_WEIGHTS),
    "stage3_gather_fp16_weights_on_model_save": Foreign(_WHOLE_WEIGHTS),
    "gather_16bit_weights_on_model_save": Foreign(_WHOLE_WEIGHTS),
    "gather_fp16_weights_on_model_save": Foreign(_WHOLE_WEIGHTS),
    "leaf_module": Foreign("it serves mixture-of-experts blocks, and the model has none"),
    "save_muon_momentum_buffer_in_memory": Foreign("it belongs to offload of Muon to NVMe"),
    "offload_optimizer.ratio": Foreign(
        "all of the optimizer's state is offloaded",
        only(1),
        "DeepSpeed splits the state for its own compiled Adam only, and torch's is used here",
        "Remove it, or set it to 1",
    ),
    "offload_optimizer.cpuadam_cores_perc": Foreign("it belongs to super_offload, which is off"),
    "offload_optimizer.super_offload": _switch(
        "it needs a Grace-Hopper host and DeepSpeed's CPU Adam", 'Use "device": "cpu" alone'
    ),
    "zenflow": _switch("it delays a part of the updates", "Use offload_optimizer"),
    "zero_quantized_weights": _switch(_COMPRESSED),
    "zero_quantized_nontrainable_weights": _switch(_COMPRESSED),
    "zero_quantized_gradients": _switch(_COMPRESSED),
    "legacy_stage1": _gone("Remove it; stage 1 has one implementation"),
    "mics_hierarchical_params_gather": _gone(),
    "mics_shard_size": Foreign(
        "DeepSpeed 0.19 has removed this key, and it is off",
        only(-1, 0),
        REMOVED_RULE,
        "Remove it; zero_hpz_partition_size keeps a second shard inside hosts",
    ),
    "zeropp_loco_param": _gone(),
}

# By dotted name.
FOREIGN: dict[str, Foreign] = {
    **_BLOCKS,
    **_TOP,
    **_OPTIMIZER,
    **_CHECKPOINTING,
    **_PIPELINE,
    **_TENSOR,
    **{ZERO + name: key for name, key in _ZERO_KEYS.items()},
}


def _device(value: Any) -> Any:
    """DeepSpeed's old switch of an offload, as the device."""
    return {True: "cpu", False: "none"}.get(value, value) if isinstance(value, bool) else value


# Old name -> the name that DeepSpeed has now, and what its value became.
OLD_NAMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bfloat16": ("bf16", lambda value: value),
    "optimizer.params.max_grad_norm": ("gradient_clipping", lambda value: value),
    ZERO + "cpu_offload": (ZERO + "offload_optimizer.device", _device),
    ZERO + "cpu_offload_param": (ZERO + "offload_param.device", _device),
    ZERO + "cpu_offload_params": (ZERO + "offload_param.device", _device),
    ZERO + "cpu_offload_use_pin_memory": (ZERO + "offload_optimizer.pin_memory", lambda value: value),
    **{
        ZERO + name: (f"{ZERO}stage3_{name}", lambda value: value)
        for name in (
            "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
            "max_live_parameters", "max_reuse_distance", "module_granularity_threshold",
            "use_all_reduce_for_fetch_params", "allgather_sequential",
        )
    },
}  # fmt: skip

# Arguments of Megatron-LM and GPT-NeoX, with hyphens or underscores -> what says it here; {} is the value.
_CONFIG_JSON = "in a config.json for --model: "
MEGATRON: dict[str, str] = {
    "pipe_parallel_size": '"pipeline": {{"stages": {}}}',
    "pipeline_model_parallel_size": '"pipeline": {{"stages": {}}}',
    "model_parallel_size": '"tensor_parallel": {{"autotp_size": {}}}',
    "tensor_model_parallel_size": '"tensor_parallel": {{"autotp_size": {}}}',
    "ds_sequence_parallel_size": '"sequence_parallel_size": {}',
    "context_parallel_size": '"sequence_parallel_size": {}',
    "zero_stage": '"zero_optimization": {{"stage": {}}}',
    "micro_batch_size": '"train_micro_batch_size_per_gpu": {}',
    "batch_size": '"train_micro_batch_size_per_gpu": {}',
    "global_batch_size": '"train_batch_size": {}',
    "gas": '"gradient_accumulation_steps": {}',
    "clip_grad": '"gradient_clipping": {}',
    "weight_decay": '"weight_decay": {} in optimizer.params',
    "adam_beta1": '"betas" in optimizer.params, the first',
    "adam_beta2": '"betas" in optimizer.params, the second',
    "adam_eps": '"eps": {} in optimizer.params',
    "lr_decay_style": '"scheduler": {{"type": "CosineWithFloor"}}, or another of its types',
    "lr_decay_iters": '"decay_num_steps" in scheduler.params, of CosineWithFloor counted from the peak',
    "min_lr": '"min_lr": {} in scheduler.params of CosineWithFloor',
    "warmup": '"warmup_num_steps" in scheduler.params, a number of steps',
    "lr_warmup_fraction": '"warmup_num_steps" in scheduler.params, a number of steps',
    "lr_warmup_iters": '"warmup_num_steps": {} in scheduler.params',
    "checkpoint_activations": '"activation_checkpointing": {{"mode": "full"}}, or none for false',
    "recompute_activations": '"activation_checkpointing": {{"mode": "selective"}}',
    "train_iters": "--train_steps {}",
    "seq_length": "--seq_length {}",
    "seed": "--seed {}",
    "data_path": "--data PATH",
    "train_data_paths": "--data PATH ..., or PATH=WEIGHT for each",
    "train_data_weights": "--data PATH=WEIGHT for each",
    "valid_data_paths": "--validation NAME=PATH ...",
    "valid_data_weights": "--validation NAME=PATH, one for each set",
    "split": "--eval_fraction, the share that is evaluated on",
    "tokenizer_type": "--tokenizer FOLDER, or bytes",
    "vocab_file": "--tokenizer FOLDER that holds a tokenizer.json",
    "merge_file": "--tokenizer FOLDER that holds a tokenizer.json",
    "save": "--output_dir {}",
    "load": "--resume {}, or the run's --output_dir",
    "save_interval": "--save_interval {}",
    "checkpoint_factor": "--save_interval {}",
    "keep_last_n_checkpoints": "--keep_last {}",
    "eval_interval": "--eval_interval {}",
    "eval_iters": "--eval_samples, counted in samples",
    "log_interval": "--log_interval {}",
    "attention_dropout": "--dropout {}, of all layers",
    "hidden_dropout": "--dropout {}, of all layers",
    "reset_attention_mask": "--document_mask",
    "reset_position_ids": "--document_mask",
    "eod_mask_loss": "--mask_document_end",
    "num_layers": f'{_CONFIG_JSON}"num_hidden_layers": {{}}',
    "hidden_size": f'{_CONFIG_JSON}"hidden_size": {{}}',
    "num_attention_heads": f'{_CONFIG_JSON}"num_attention_heads": {{}}',
    "num_kv_heads": f'{_CONFIG_JSON}"num_key_value_heads": {{}}',
    "num_query_groups": f'{_CONFIG_JSON}"num_key_value_heads": {{}}',
    "ffn_hidden_size": f'{_CONFIG_JSON}"intermediate_size": {{}}',
    "intermediate_size": f'{_CONFIG_JSON}"intermediate_size": {{}}',
    "max_position_embeddings": f'{_CONFIG_JSON}"max_position_embeddings": {{}}',
    "norm": f'{_CONFIG_JSON}"model_type" llama for RMSNorm, gpt2 or starcoder2 for LayerNorm',
    "pos_emb": f'{_CONFIG_JSON}"model_type" llama or starcoder2 for rotary positions, gpt2 for learned ones',
    "no_weight_tying": f'{_CONFIG_JSON}"tie_word_embeddings", the other way round',
    "precision": '"bf16": {{"enabled": true}}, "fp16": {{"enabled": true}}, or neither for fp32',
    "optimizer_type": '"optimizer": {{"type": {}}}',
    "zero_reduce_scatter": '"reduce_scatter": {} in zero_optimization',
    "zero_contiguous_gradients": '"contiguous_gradients": {} in zero_optimization',
    "zero_reduce_bucket_size": '"reduce_bucket_size": {} in zero_optimization',
    "zero_allgather_bucket_size": '"allgather_bucket_size": {} in zero_optimization',
    "dynamic_loss_scale": '"loss_scale": 0 in fp16',
    "wandb_project": '"project": {} in wandb',
    "test_data_weights": "--validation NAME=PATH, one for each set",
    "output_layer_parallelism": "nothing: the output layer is divided as the embedding",
    "attention_config": "nothing: attention is global",
    "save_iters": "--save_interval, every so many steps",
    "log_dir": "nothing: logs are in --output_dir",
    "make_vocab_size_divisible_by": "nothing: the vocabulary is padded to a multiple of 128",
    "scaled_upper_triang_masked_softmax_fusion": "nothing: torch's fused attention is used",
    "data_impl": "nothing: token files are mapped into memory",
    "deepspeed_slurm": "nothing: srun starts pipeline/pretrain.py",
    "test_data_paths": "--validation NAME=PATH ...",
    "init_method": "nothing: weights are drawn from the seed and each parameter's name",
    "output_layer_init_method": "nothing: weights are drawn from the seed and each parameter's name",
    "partition_activations": "nothing",
    "checkpoint_num_layers": "nothing: each block is recomputed by itself",
    "distributed_backend": "nothing: NCCL on GPUs, gloo on CPUs",
    "launcher": "--launcher {} of launch.sh",
    "hostfile": "--hostfile {} of launch.sh",
    **dict.fromkeys(("rope_fusion", "layernorm_fusion", "bias_gelu_fusion"), "nothing"),
    **dict.fromkeys(("identifier_string", "config_files", "synchronize_each_layer"), "nothing"),
    **dict.fromkeys(("train_dataset_name", "val_dataset_name", "sparsity_config"), "nothing"),
    **dict.fromkeys(("deepspeed_jsrun", "is_pipe_parallel", "global_num_gpus", "world_size"), "nothing"),
    **dict.fromkeys(("rank", "local_rank", "user_script", "text_gen_type"), "nothing"),
    "gpt_j_residual": "nothing: a block's feed-forward layer comes after its attention",
    "rotary_pct": "nothing: the whole of a head is rotated",
    "num_workers": "nothing: batches are read ahead",
    "use_wandb": '"wandb": {{"enabled": true}}',
    "tensorboard_dir": '"tensorboard": {{"enabled": true, "output_path": {}}}',
}
# Names that people write and that are no keys of DeepSpeed: what to do instead; {} is the value.
_MONITORS_AT_TOP = "Put tensorboard, wandb, csv_monitor and comet at the top of the file"
MISNAMED: dict[str, str] = {
    "monitor_config": _MONITORS_AT_TOP,
    "monitoring": _MONITORS_AT_TOP,
    "logging": "Put what is in it at the top of the file",
    "gradient_accumulation_dtype": "It belongs at data_types.grad_accum_dtype",
    "cuda_visible_devices": "Remove it; --include of launch.sh chooses devices",
    "pipeline.pipeline_parallel_size": "Use stages",
    "fp16.fp16": "Remove it; fp16.enabled says it",
    "pipeline.chunks": "Remove it; gradient_accumulation_steps says how many micro-batches there are",
    "checkpoint.save_checkpoint_steps": "Remove it, and use --save_interval {}",
    "checkpoint.checkpoint_dir": "Remove it; checkpoints are in --output_dir",
}
MEGATRON_RULE = "is an argument of Megatron-LM or GPT-NeoX"


def of_megatron(name: str, value: Any, file: Mapping[str, Any]) -> tuple[str, str] | None:
    """Rule and remedy for an argument of Megatron-LM or GPT-NeoX in place of a key. `file`: all of it."""
    arguments = {key.replace("-", "_"): each for key, each in file.items()}
    name = name.replace("-", "_")
    template = MEGATRON.get(name)
    if template is None:
        return None
    said = _worked_out(name, value, arguments)
    said = said or template.format(value if isinstance(value, str) else json.dumps(value))
    return MEGATRON_RULE, f"Remove it{said.removeprefix('nothing')}" if said.startswith(
        "nothing"
    ) else f"Here it is {said}"


def _worked_out(name: str, value: Any, file: Mapping[str, Any]) -> str | None:
    """What says an argument here, with its numbers; None where these do not follow from the file."""
    if name in _BY_VALUE:
        return _BY_VALUE[name].get(str(value).lower())
    if name in ("attention_dropout", "hidden_dropout"):
        alike = file.get("attention_dropout", value) == file.get("hidden_dropout", value)
        return None if alike else "--dropout, one share for attention and all else"
    if name in ("adam_beta1", "adam_beta2") and {"adam_beta1", "adam_beta2"} <= file.keys():
        return f'"betas": [{file["adam_beta1"]}, {file["adam_beta2"]}] in optimizer.params'
    if name == "split":
        shares = [_number(part) for part in str(value).split(",")]
        return f"--eval_fraction {shares[1] / sum(shares):.6g}" if len(shares) > 1 and any(shares) else None
    if name in ("train_data_paths", "train_data_weights"):
        paths, weights = file.get("train_data_paths"), file.get("train_data_weights")
        paired = isinstance(paths, list) and isinstance(weights, list) and len(paths) == len(weights)
        return f"--data {' '.join(map('{}={}'.format, paths, weights))}" if paired else None
    steps = _number(file.get("lr_decay_iters")) or _number(file.get("train_iters"))
    share = _number(file.get("warmup" if name == "warmup" else "lr_warmup_fraction"))
    batch = _number(file.get("train_batch_size")) or _number(file.get("global_batch_size"))
    if name in ("warmup", "lr_warmup_fraction") and share * steps:
        return f'"warmup_num_steps": {round(share * steps)} in scheduler.params'
    if name == "lr_decay_iters" and "warmup" not in file:  # GPT-NeoX's curve ends elsewhere
        warmup = _number(file.get("lr_warmup_iters")) or share * steps
        return f'"decay_num_steps": {round(steps - warmup)} in scheduler.params of CosineWithFloor'
    return f"--eval_samples {round(_number(value) * batch)}" if name == "eval_iters" and batch else None


def _number(value: Any) -> float:
    """A number as written, in quotes too; 0 for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


# Arguments of which each value says something else: the value in small letters -> what says it here.
_NO_STAGES = dict.fromkeys(("0", "1"), "nothing: one stage is no pipeline")
_BY_VALUE: dict[str, dict[str, str]] = {
    "pipe_parallel_size": _NO_STAGES,
    "pipeline_model_parallel_size": _NO_STAGES,
    "no_weight_tying": {
        "true": f'{_CONFIG_JSON}"tie_word_embeddings": false',
        "false": f'{_CONFIG_JSON}"tie_word_embeddings": true',
    },
    "checkpoint_activations": {
        "true": '"activation_checkpointing": {"mode": "full"}',
        "false": '"activation_checkpointing": {"mode": "none"}',
    },
    "lr_decay_style": {
        "cosine": '"scheduler": {"type": "CosineWithFloor"}',
        "linear": '"scheduler": {"type": "WarmupDecayLR"}',
        "constant": '"scheduler": null, or {"type": "WarmupLR"} for a warm-up before it',
    },
    "precision": {
        "fp16": '"fp16": {"enabled": true}',
        "bfloat16": '"bf16": {"enabled": true}',
        "fp32": "nothing: weights are fp32 without bf16 and fp16",
    },
}
