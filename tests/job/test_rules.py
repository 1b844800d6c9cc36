"""Each rule is provoked once, by a job that breaks it; and a job that keeps all of them has no problem."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.job.resolve import Draft
from pipeline.job.rules import RULES
from tests.job.drafts import A100, CPU, V100, draft, found, world

ADAM = {"type": "AdamW", "params": {}}

# rule, JSON, world (slots and device), options, key, part of the text
CASES: list[tuple[str, dict[str, Any], tuple, dict[str, Any], str, str]] = [
    ("model", {}, ((2,), CPU), {"model": "gpt5"}, "model", "gpt5"),
    ("world", {"pipeline": {"stages": 2}}, ((3,), CPU), {}, "world size",
     "2 (pipeline) * 1 (sequence) * 1 (tensor) = 2; 3 / 2 is not whole"),
    ("tensor in host", {"tensor_parallel": {"autotp_size": 2}}, ((3, 3), CPU), {},
     "tensor_parallel.autotp_size", "spans hosts (a host ends after rank 2)"),
    ("tensor divides", {"tensor_parallel": {"autotp_size": 3}}, ((3,), CPU), {},
     "tensor_parallel.autotp_size", "must divide attention heads 4, kv heads 4 of tiny. Use 1"),
    ("sequence divides", {"sequence_parallel_size": 2}, ((2,), CPU), {"seq_length": 33},
     "sequence_parallel_size", "must divide the sequence length 33. Use 1, or --seq_length 32"),
    ("sequence and heads", {"sequence_parallel_size": 8}, ((8,), CPU), {},
     "sequence_parallel_size", "must divide the 4 attention heads of a rank (4 / 1 tensor)"),
    ("sequence and kv heads", {"sequence_parallel_size": 7}, ((7,), A100),
     {"model": "qwen2-7b", "seq_length": 7}, "sequence_parallel_size", "the 4 kv heads of a rank"),
    ("positions", {}, ((2,), CPU), {"seq_length": 1025}, "seq_length", "longer than the 1024 positions"),
    ("dualpipev", {"pipeline": {"schedule": "dualpipev"}}, ((2,), CPU), {},
     "pipeline.schedule", "at least 2 pipeline stages"),
    ("partition", {"pipeline": {"stages": 2, "partition": [4, 4]}}, ((2,), CPU), {},
     "pipeline.partition", "adds up to 8, and the model has 7 layers"),
    ("partition", {"pipeline": {"stages": 8}}, ((8,), CPU), {}, "pipeline.stages", "6 layers with weights"),
    ("partition method", {"pipeline": {"partition": "uniform"}}, ((2,), CPU), {},
     "pipeline.partition", "at least 2 pipeline stages"),
    ("batch", {"train_batch_size": 7}, ((2,), CPU), {}, "train_batch_size", "7 / 2 leaves 1"),
    ("memory", {}, ((8,), A100), {"model": "llama3-70b"}, "zero_optimization.stage",
     "take 1.03 TiB, and NVIDIA A100-SXM4-80GB has 80 GiB. Set zero_optimization.stage to 3 and, in it, "
     "offload_optimizer.device to cpu: 32.9 GiB, 164 GiB of host memory for each rank"),
    ("memory", {}, ((8,), ("cuda", None, True)), {"model": "llama3-70b"}, "zero_optimization.stage",
     "and the largest GPU has 288 GiB"),
    ("memory", {}, ((8,), ("cuda", None, True)), {"model": "gpt3-6.7b"}, "zero_optimization.stage",
     "more than the 80 GiB of an A100 or H100, and no GPU was asked"),
    ("memory", {"train_micro_batch_size_per_gpu": 512}, ((1,), A100), {"model": "gpt2-124m"},
     "train_micro_batch_size_per_gpu", "with activations and buffers"),
    ("micro-batches", {"pipeline": {"stages": 2, "schedule": "dualpipev"},
                       "gradient_accumulation_steps": 3}, ((2,), CPU), {},
     "gradient_accumulation_steps", "2 * 2 stages = 4, and there are 3"),
    ("micro-batches", {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 1}, ((2,), CPU), {},
     "gradient_accumulation_steps", "leave stages idle"),
    ("ZeRO and pipeline", {"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}}, ((2,), CPU), {},
     "zero_optimization.stage", "must be 0 or 1 with 2 pipeline stages"),
    ("ZeRO keys", {"zero_optimization": {"stage": 1, "stage3_max_live_parameters": 1}}, ((2,), CPU), {},
     "zero_optimization.stage3_max_live_parameters", "acts at ZeRO stage 3, and the stage is 1"),
    ("ZeRO keys", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ((2,), CPU), {},
     "zero_optimization.offload_optimizer.device", "acts at ZeRO stage 1, 2 or 3, and the stage is 0"),
    ("ZeRO keys", {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, ((2,), CPU), {},
     "zero_optimization.offload_param.device", "acts at ZeRO stage 3"),
    ("NVMe", {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, ((2,), CPU), {},
     "zero_optimization.offload_param.device", "needs nvme_path"),
    ("NVMe", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "buffer_count": 4}}},
     ((2,), CPU), {}, "zero_optimization.offload_param.buffer_count", "acts with device nvme, not cpu"),
    ("NVMe", {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/"}}},
     ((2,), CPU), {}, "zero_optimization.offload_optimizer.device", "nvme needs ZeRO stage 3"),
    ("aio", {"aio": {"queue_depth": 4}}, ((2,), CPU), {}, "aio", "offload to nvme only"),
    ("ZeRO keys", {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
     ((2,), CPU), {}, "zero_optimization.offload_param.device", "acts at ZeRO stage 3"),
    ("overlap and pipeline", {"zero_optimization": {"stage": 1, "overlap_comm": True},
                              "pipeline": {"stages": 2}}, ((2,), CPU), {},
     "zero_optimization.overlap_comm", "is off with 2 pipeline stages"),
    ("second shard", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, ((4,), CPU), {},
     "zero_optimization.zero_hpz_partition_size", "must divide the 4 ranks"),
    ("second shard", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
                      "tensor_parallel": {"autotp_size": 2}}, ((4,), CPU), {},
     "zero_optimization.zero_hpz_partition_size", "excludes tensor parallelism, and the tensor size is 2"),
    ("overflow check", {"bf16": {"enabled": True, "check_grad_overflow": False},
                        "zero_optimization": {"stage": 3}}, ((2,), A100), {},
     "bf16.check_grad_overflow", "does not act at ZeRO stage 3 with sums in fp32"),
    ("overflow check", {"bf16": {"enabled": True, "check_grad_overflow": False},
                        "zero_optimization": {"stage": 1}}, ((2,), A100), {},
     "bf16.check_grad_overflow", "does not act at ZeRO stage 1 with sums in fp32"),
    ("bf16 at stage 1", {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100},
                         "bf16": {"enabled": True}}, ((2,), A100), {"model": "tiny"},
     "zero_optimization.reduce_bucket_size", "does not act at stage 1"),
    ("one precision", {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ((2,), A100), {},
     "fp16.enabled", "excludes bf16.enabled"),
    ("fp16 and CUDA", {"fp16": {"enabled": True}}, ((2,), CPU), {}, "fp16.enabled", "needs CUDA"),
    ("native bf16", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, ((2,), V100), {},
     "bf16.enabled", "Tesla V100 emulates bf16"),
    ("sums at stage 0", {"bf16": {"enabled": True}}, ((2,), A100), {},
     "data_types.grad_accum_dtype", "is bf16 here, as in DeepSpeed"),
    ("sums at stage 0", {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
     ((2,), A100), {}, "data_types.grad_accum_dtype", "must be fp16 at ZeRO stage 0"),
    ("tied gradients", {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
                        "zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}, ((2,), A100), {},
     "data_types.grad_accum_dtype", "must be fp16 for fp16 weights with 2 pipeline stages"),
    ("tied gradients", {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
                        "pipeline": {"stages": 2}}, ((2,), A100), {},
     "data_types.grad_accum_dtype", "must be fp16 for fp16 weights with 2 pipeline stages"),
    ("tied gradients", {"bf16": {"enabled": True}, "pipeline": {"stages": 2},
                        "data_types": {"grad_accum_dtype": "fp32"},
                        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
     ((2,), A100), {}, "data_types.grad_accum_dtype", "must be bf16 for offloaded optimizer state"),
    ("accumulation", {"data_types": {"grad_accum_dtype": "bf16"}}, ((2,), CPU), {},
     "data_types.grad_accum_dtype", "must be fp32 or the weights' fp32"),
    ("loss scale", {"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 2}}, ((2,), A100), {},
     "fp16.hysteresis", "acts with a dynamic loss scale"),
    ("switches", {"fp16": {"loss_scale": 128}}, ((2,), A100), {}, "fp16", "does nothing without enabled"),
    ("switches", {"zero_optimization": {"stage": 3, "offload_optimizer": {"pin_memory": True}}}, ((2,), CPU),
     {}, "zero_optimization.offload_optimizer", "does nothing without device"),
    ("switches", {"csv_monitor": {"job_name": "x"}}, ((2,), CPU), {},
     "csv_monitor", "does nothing without enabled, in DeepSpeed"),
    ("monitors", {"csv_monitor": {"enabled": True, "output_path": f"{__file__}/csv"}}, ((2,), CPU), {},
     "csv_monitor.output_path", "test_rules.py is a file"),
    ("logged collectives", {"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}}, ((2,), CPU), {},
     "comms_logger.prof_ops", "chooses nothing while prof_all is true"),
    ("betas", {"optimizer": {"params": {"betas": [0.9]}}}, ((2,), CPU), {},
     "optimizer.params.betas", "two numbers below 1"),
    ("betas", {"optimizer": {"params": {"betas": []}}}, ((2,), CPU), {},
     "optimizer.params.betas", "two numbers below 1"),
    ("ZeRO keys", {"zero_optimization": {"stage": 1, "reduce_bucket_size": "x",
                                         "stage3_max_live_parameters": 1}}, ((2,), CPU), {},
     "zero_optimization.stage3_max_live_parameters", "acts at ZeRO stage 3, and the stage is 1"),
    ("optimizer parameters", {"optimizer": {"params": {"momentum": 0.9}}}, ((2,), CPU), {},
     "optimizer.params.momentum", "is not a parameter of AdamW. Remove it, or use SGD"),
    ("betas", {"optimizer": {"params": {"betas": [0.9, 1.0]}}}, ((2,), CPU), {},
     "optimizer.params.betas", "two numbers below 1"),
    ("nesterov", {"optimizer": {"type": "SGD", "params": {"lr": 1, "nesterov": True}}}, ((2,), CPU), {},
     "optimizer.params.nesterov", "needs momentum above 0"),
    ("lr scaling", {"lr_scaling": {"rule": "linear"}}, ((2,), CPU), {},
     "lr_scaling.base_batch_size", "is needed by rule linear"),
    ("lr scaling", {"lr_scaling": {"base_batch_size": 4}}, ((2,), CPU), {},
     "lr_scaling.base_batch_size", "does nothing with rule none"),
    ("schedule", {"scheduler": {"type": "WarmupDecayLR", "params": {
        "total_num_steps": 5, "warmup_num_steps": 9}}}, ((2,), CPU), {},
     "scheduler.params.total_num_steps", "too short"),
    ("SGD's rate", {"optimizer": {"type": "SGD"}}, ((2,), CPU), {}, "optimizer.params.lr", "meant for AdamW"),
    ("one run length", {}, ((2,), CPU), {"train_steps": 3, "train_tokens": 9}, "train_tokens", "second time"),
    ("evaluation", {}, ((2,), CPU), {"eval_fraction": 0.0}, "eval_fraction", "nothing to evaluate"),
    ("async save",
     {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/"}}},
     ((2,), CPU), {"async_save": True}, "async_save", "would change while it is written"),
    ("retention", {}, ((2,), CPU), {"keep_every": 5}, "keep_every", "not how many of these"),
    ("retention", {}, ((2,), CPU), {"keep_best": 5}, "keep_best", "not how many of these"),
    ("retention", {}, ((2,), CPU), {"keep_best": 5, "keep_last": 1, "eval_samples": 0},
     "keep_best", "there are none with eval_samples 0"),
    ("sample", {}, ((2,), CPU), {"sample_prompt": ""}, "sample_prompt", "at least one character"),
    ("data", {}, ((2,), CPU), {"data": ("/no/such/file",)}, "data", "does not exist"),
    ("data", {}, ((2,), CPU), {"data": (str(Path(__file__).parents[2] / "ds_configs" / "zero1.json"),)},
     "data", "does not have one JSON object on each line"),
    ("evaluation", {}, ((2,), CPU), {"validation": ("a=b",), "eval_samples": 0},
     "validation", "does nothing"),
    ("data", {}, ((2,), CPU), {"data": ("a=0.5", "b=0.4")}, "data", "add up to 0.9, not 1"),
    ("data", {}, ((2,), CPU), {"data_blend": "/no/such.json"}, "data_blend", "there is no such file"),
    ("data", {}, ((2,), CPU), {"validation": ("exam",)}, "validation", "is not NAME=PATH"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{index}" for index, case in enumerate(CASES)])
def test_a_broken_rule_is_reported(case: tuple, tmp_path: Path) -> None:
    _, config, (slots, device), options, key, text = case
    made = draft(tmp_path, config, world(*slots, device=device), **options)
    problems = found(made.problems, key)
    assert any(text in str(problem) for problem in problems), [str(p) for p in made.problems]
    assert all(bool(problem.remedy) == (problem.severity != "note") for problem in problems)
    assert (made.job is None) == bool(made.errors)


SIZES = (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize("model", ["gpt2-124m", "llama3-8b", "tiny"])
def test_a_size_that_is_offered_breaks_no_other_rule(model: str, tmp_path: Path) -> None:
    """Every error of a parallel size is answered with sizes; with each of them the check accepts the job."""
    keys = {"tensor_parallel.autotp_size": "tensor", "sequence_parallel_size": "sequence"}
    followed = 0
    for tensor, sequence in itertools.product(SIZES, SIZES):
        for problem in layout(tmp_path, model, tensor, sequence).errors:
            if (axis := keys.get(problem.key.split(" (")[0])) is None:
                continue
            offered = re.match(r"Use ([\d, or]+?)(?:, or --|$)", problem.remedy)
            for size in map(int, re.findall(r"\d+", offered[1] if offered else "")):
                right = {"tensor": tensor, "sequence": sequence, axis: size}
                assert layout(tmp_path, model, **right).job is not None, (problem, size)
                followed += 1
    assert followed > 10


def layout(folder: Path, model: str, tensor: int, sequence: int) -> Draft:
    config = {
        "tensor_parallel": {"autotp_size": tensor},
        "sequence_parallel_size": sequence,
        "zero_optimization": {"stage": 3},
    }
    return draft(folder, config, world(8, 8, device=A100), model=model)


def test_every_rule_has_a_case() -> None:
    # These need files beside the JSON and have tests of their own.
    elsewhere = {"run length", "vocabulary", "output folder", "initial weights"}
    assert {rule.name for rule in RULES} - {case[0] for case in CASES} == elsewhere
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_a_pipeline_may_offload_where_sums_have_the_weights_format(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "pipeline": {"stages": 2},
    }
    assert draft(tmp_path, config).job is not None


def test_warnings_do_not_refuse_the_job(tmp_path: Path) -> None:
    made = draft(tmp_path, {"tensor_parallel": {"autotp_size": 2}}, world(3, 3))
    assert [problem.severity for problem in made.problems] == ["warning"]
    assert made.job is not None and made.job.problems == tuple(made.problems)


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64}


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "vocab_size": 256}), encoding="utf-8")
    config = {"optimizer": {"params": {"lr": 0.1}}, "train_batch_size": 4}
    made = draft(tmp_path, config, model=str(tmp_path), train_steps=5)
    (problem,) = made.errors
    assert "256 token ids, and the byte tokenizer needs 257" in problem.rule


def test_a_model_from_a_file_needs_a_length_and_a_batch(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 64,
        "vocab_size": 300,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made = draft(tmp_path, {"optimizer": {"params": {"lr": 0.1}}}, model=str(tmp_path / "config.json"))
    assert {problem.key.split(" (")[0] for problem in made.problems} == {"train_batch_size", "train_steps"}
    config = {"optimizer": {"params": {"lr": 0.1}}, "train_batch_size": 4}
    made = draft(tmp_path, config, model=str(tmp_path), train_steps=5)
    assert made.job is not None and made.job.batch.sequence_length == 64
