"""transformers' Trainer doing the same work."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.setting import Setting
from benchmarks.workers import Clock
from pipeline.data.packing import PackedDataset
from pipeline.job.job import Job
from pipeline.model.config import ModelConfig


class Samples(torch.utils.data.Dataset):
    """The packed samples as the Trainer wants them: inputs, and the same as labels (the model shifts)."""

    def __init__(self, data: PackedDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.samples_per_epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.data.read([index]).tokens[0, :-1])
        return {"input_ids": tokens, "labels": tokens}


class Rounds(TrainerCallback):
    """Hands the Trainer's steps to the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self.clock.begin()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.clock.step_done()


def counterpart(model: ModelConfig) -> PretrainedConfig | None:
    """transformers' configuration of the same sizes and computation, vocabulary padding included; None where
    it has no such model."""
    if model.dropout or model.attention_dropout or model.qk_norm:
        return None
    kind = (model.position, model.norm, model.activation, model.bias)
    if kind == ("learned", "layernorm", "gelu_tanh", True) and model.num_kv_heads == model.num_heads:
        return _gpt2(model)
    if kind == ("rotary", "rmsnorm", "swiglu", False) and not model.qkv_bias:
        return _llama(model)
    return None


def _gpt2(model: ModelConfig) -> GPT2Config:
    return GPT2Config(
        vocab_size=model.padded_vocab_size,
        n_positions=model.max_position_embeddings,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_inner=model.ffn_hidden_size,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=model.norm_eps,
        tie_word_embeddings=model.tied,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )


def _llama(model: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=model.padded_vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )


def train(job: Job, data: PackedDataset, setting: Setting, folder: Path, clock: Clock) -> None:
    """Train until the clock ends it. The model must have a `counterpart`."""
    optimizer = job.optimizer
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=10**6,
        per_device_train_batch_size=job.batch.micro_batch_size,
        gradient_accumulation_steps=job.batch.accumulation_steps,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=job.gradient_clipping,
        bf16=setting.precision == "bf16",
        use_cpu=setting.device == "cpu",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=setting.seed,
    )
    model = AutoModelForCausalLM.from_config(counterpart(job.model))
    Trainer(model, arguments, train_dataset=Samples(data), callbacks=[Rounds(clock)]).train()
