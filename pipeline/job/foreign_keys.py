"""Keys of DeepSpeed files that this pipeline does not take, each with the reason and the remedy."""

from __future__ import annotations

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
    "autotuning": ("the launcher's autotuner edits the JSON behind the job's back", _REMOVE),
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
    "log_level": ("the console speaks once, from rank 0", _REMOVE),
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
    _ZERO + "leaf_module": ("it serves mixture-of-experts blocks, which the model has not", _REMOVE),
    _ZERO + "save_muon_momentum_buffer_in_memory": ("Muon is not among the optimizers here", _REMOVE),
    _ZERO + "zero_quantized_weights": _COMPILED,
    _ZERO + "zero_quantized_nontrainable_weights": _COMPILED,
    _ZERO + "zero_quantized_gradients": _COMPILED,
    _ZERO + "offload_optimizer.super_offload": ("it needs a Grace-Hopper host and DeepSpeed's CPU Adam",
        _REMOVE),
    _ZERO + "offload_optimizer.cpuadam_cores_perc": ("it belongs to super_offload", _REMOVE),
}  # fmt: skip
