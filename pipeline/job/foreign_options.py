"""Options that others have, by the names that they give them: what they are here.

transformers' Trainer, Megatron-LM and nanoGPT call options otherwise, or have options for what the
DeepSpeed JSON says.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.job.foreign_keys import of_megatron
from pipeline.job.schema import KEYS

# Names that transformers' Trainer, Megatron and nanoGPT have -> keys of the JSON, options.
_KEYS_OF_OTHERS = {
    "learning_rate": "optimizer.params.lr",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "batch_size": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "max_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "optim": "optimizer.type",
    "optimizer": "optimizer.type",
    "lr_scheduler_type": "scheduler.type",
    "scheduler": "scheduler.type",
    "warmup_steps": "scheduler.params.warmup_num_steps",
    "warmup_iters": "scheduler.params.warmup_num_steps",
    "lr_warmup_iters": "scheduler.params.warmup_num_steps",
    "fp16": "fp16.enabled",
    "bf16": "bf16.enabled",
    "zero_stage": "zero_optimization.stage",
    "pipeline_parallel_size": "pipeline.stages",
    "pipeline_model_parallel_size": "pipeline.stages",
    "tensor_parallel_size": "tensor_parallel.autotp_size",
    "tensor_model_parallel_size": "tensor_parallel.autotp_size",
    "context_parallel_size": "sequence_parallel_size",
    "gradient_checkpointing": "activation_checkpointing.mode",
    "recompute_granularity": "activation_checkpointing.mode",
}
_OPTIONS_OF_OTHERS = {
    "max_steps": "train_steps",
    "max_iters": "train_steps",
    "train_iters": "train_steps",
    "save_steps": "save_interval",
    "eval_steps": "eval_interval",
    "logging_steps": "log_interval",
    "save_total_limit": "keep_last",
    "model_name_or_path": "model",
    "model_name": "model",
    "dataset": "data",
    "data_path": "data",
    "train_file": "data",
    "validation_file": "validation",
    "block_size": "seq_length",
    "max_seq_length": "seq_length",
    "out_dir": "output_dir",
    "save": "output_dir",
    "resume_from_checkpoint": "resume",
    "load": "resume",
}


# What is here otherwise, or not at all: rule and remedy, with the value that was given.
_ANSWERS = {
    "compile": ("there is no such option: blocks are not compiled", "Leave it out"),
    "use_flash_attn": ("there is no such option: torch takes fused attention where it can", "Leave it out"),
    "expert_model_parallel_size": ("there is no such option: models here have no experts", "Leave it out"),
    "exit_duration_in_mins": ("has another name here", "Give --time_limit {}m"),
    "use_distributed_optimizer": ("is ZeRO stage 1 here", "Give --set zero_optimization.stage=1"),
    "overlap_grad_reduce": (
        "is zero_optimization.overlap_comm of the DeepSpeed JSON",
        "Give --set zero_optimization.overlap_comm=true",
    ),
    "sequence_parallel": (
        "slices activations beside tensor parallelism, and here Ulysses slices whole sequences",
        "Leave it out, or give --set sequence_parallel_size=2",
    ),
    "num_layers_per_virtual_pipeline_stage": (
        "interleaves the stages, which is not done here",
        "Leave it out; --set pipeline.schedule=dualpipev has two chunks on each stage",
    ),
}
# nanoGPT's words for what Megatron-LM has as arguments, too.
_SIZES_OF_OTHERS = {"n_layer": "num_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size"}
_OFF = ("false", "0", "no", "none")
# How values begin that others give a key, and how they are called here; "": anything else.
_VALUES_OF_OTHERS = {
    "optimizer.type": {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"},
    "scheduler.type": {
        "cosine": "WarmupCosineLR",
        "linear": "WarmupDecayLR",
        "constant_with": "WarmupLR",
        "constant": "null",
    },
    "activation_checkpointing.mode": {**dict.fromkeys(_OFF, "none"), "selective": "selective", "": "full"},
    **{
        f"{precision}.enabled": {**dict.fromkeys(_OFF, "false"), "": "true"} for precision in ("fp16", "bf16")
    },
}


def option_of_others(name: str, values: Sequence[str]) -> tuple[str, str] | None:
    """Rule and remedy for an option that is a key of the JSON, or an option under another name."""
    value = " ".join(values)
    if option := _OPTIONS_OF_OTHERS.get(name):
        value = "auto" if (option, value) == ("resume", "True") else value
        return "has another name here", f"Give --{option} {value or 'VALUE'}"
    keys = [path for path, key in KEYS.items() if not key.block and path.rpartition(".")[2] == name]
    if key := _KEYS_OF_OTHERS.get(name, keys[0] if len(keys) == 1 else None):
        known = _VALUES_OF_OTHERS.get(key, {"": value or "VALUE"})
        given = next((here for there, here in known.items() if value.lower().startswith(there)), "VALUE")
        key = "scheduler" if given == "null" else key
        choice = f", VALUE one of {', '.join(KEYS[key].choices)}" if key in _VALUES_OF_OTHERS else ""
        choice = choice if given == "VALUE" else ", or write it there"
        return f"is {key} of the DeepSpeed JSON", f"Give --set {key}={given}{choice}"
    if answer := _ANSWERS.get(name):
        rule, remedy = answer
        return rule, remedy.format(value or "VALUE")
    if size := _SIZES_OF_OTHERS.get(name):
        return "is an argument of nanoGPT", of_megatron(size, value, {})[1]
    return of_megatron(name, value, {})
