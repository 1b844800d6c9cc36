"""DeepSpeed files as people have them: what is taken with a note, by an old name, as "auto", or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.json_reader import read_json
from pipeline.base.problems import EXIT_FINISHED
from pipeline.check import main as check
from pipeline.job.foreign_keys import FOREIGN, MEGATRON, MEGATRON_RULE, OLD_NAMES, of_megatron
from pipeline.job.options import Options
from pipeline.job.run_file import run_json
from pipeline.job.schema import KEYS
from tests.job.drafts import A100, CPU, V100, draft, world

ZERO = "zero_optimization"
OFFLOAD = {"device": "cpu", "pin_memory": True}


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def taken(folder: Path, config: dict[str, Any], **options: Any) -> tuple[Any, list[str]]:
    """The job of a file that is taken, on two A100s, and the keys of its notes."""
    made = draft(folder, config, world(2, device=A100), **options)
    assert made.job is not None, [str(problem) for problem in made.errors]
    return made.job, [each.key.split(" (")[0] for each in made.problems if each.severity == "note"]


# A value of each foreign key that changes nothing, where `false` is none.
INERT = {
    "checkpoint.tag_validation": "Warn",
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "optimizer.params.bias_correction": True,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.load_from_fp32_weights": True,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.offload_optimizer.ratio": 1.0,
}


@pytest.mark.parametrize("path", [path for path, key in FOREIGN.items() if key.note])
def test_what_asks_for_what_is_so_is_noted_and_goes_no_further(path: str, tmp_path: Path) -> None:
    job, notes = taken(tmp_path, nested(path, INERT.get(path, False)))
    assert notes == [path]
    block: Any = job.deepspeed
    for name in path.split("."):
        block = block.get(name) if isinstance(block, dict) else None
    own = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
           "pipeline.pipe_partitioned": False,
           "pipeline.grad_partitioned": False}  # fmt: skip
    assert block == own.get(path)


@pytest.mark.parametrize("path", [path for path, key in FOREIGN.items() if key.rule])
def test_what_would_train_otherwise_is_refused_with_a_remedy(path: str, tmp_path: Path) -> None:
    value = {"mics_shard_size": 8, "gradient_allreduce_op": "sum"}.get(path.rpartition(".")[2], True)
    if FOREIGN[path].inert(value):
        value = False
    (problem,) = draft(tmp_path, nested(path, value), world(2, device=A100)).problems
    assert problem.severity == "error" and problem.rule and problem.remedy
    assert problem.key.startswith(f"{path} (") and problem.value == value


# DeepSpeed's documented blocks, off.
OFF: list[dict[str, Any]] = [
    {"amp": {"enabled": False, "opt_level": "O1"}},
    {"amp": {"enabled": "auto", "opt_level": "auto"}},
    {"flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1}},
    {"autotuning": {"enabled": False, "fast": True}},
    {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
    {"curriculum_learning": {"enabled": False, "curriculum_type": "seqlen", "min_difficulty": 8}},
    {"progressive_layer_drop": {"enabled": False, "theta": 0.5}},
    {"eigenvalue": {"enabled": False, "verbose": False, "max_iter": 100}},
    {"data_efficiency": {"enabled": False, "seed": 1234}},
    {"elasticity": {"enabled": False, "max_train_batch_size": 2000}},
    {"checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": True,
                    "parallel_write": {"pipeline_stage": False}}},
    {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False,
                                  "contiguous_memory_optimization": False, "number_checkpoints": 4,
                                  "synchronize_checkpoint_boundary": True, "profile": True}},
]  # fmt: skip


@pytest.mark.parametrize("config", OFF, ids=lambda config: next(iter(config)))
def test_blocks_that_turn_nothing_on_are_taken(config: dict[str, Any], tmp_path: Path) -> None:
    _, notes = taken(tmp_path, config)
    assert notes and all(note.split(".")[0] in config for note in notes)


EVERY_STAGE = {
    "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True,
    "reduce_bucket_size": 2e8, "contiguous_gradients": True, "round_robin_gradients": True,
    "sub_group_size": 1e9, "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": 1e5,
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
    "offload_optimizer": {"device": "none", "buffer_count": 4, "pipeline_read": True, "fast_init": False},
    "offload_param": {"device": "none", "buffer_size": 1e8, "max_in_cpu": 1e9},
}  # fmt: skip
# Those that act, by stage.
ACTS = {
    0: set(),
    1: {"allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size",
        "contiguous_gradients", "round_robin_gradients"},
}  # fmt: skip
ACTS[2] = ACTS[1]
ACTS[3] = {"overlap_comm", "reduce_scatter", "reduce_bucket_size", "contiguous_gradients", "sub_group_size",
           "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
           "stage3_max_reuse_distance"}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_number_changes_the_stage_of_a_file(stage: int, tmp_path: Path) -> None:
    config = {ZERO: {"stage": stage, **EVERY_STAGE}, "aio": {"queue_depth": 8}}
    job, notes = taken(tmp_path, config)
    assert job.zero_stage == stage
    acting = job.deepspeed[ZERO].keys() & EVERY_STAGE.keys() - {"offload_optimizer", "offload_param"}
    assert acting == ACTS[stage]
    plain = {name for name in EVERY_STAGE if not name.startswith("offload")}
    assert {f"{ZERO}.{name}" for name in plain - ACTS[stage]} <= set(notes)
    assert not {f"{ZERO}.{name}" for name in ACTS[stage]} & set(notes)
    assert {"aio", f"{ZERO}.offload_optimizer.pipeline_read", f"{ZERO}.offload_param.buffer_size"} <= set(
        notes
    )


def test_an_offload_that_the_stage_lacks_is_refused(tmp_path: Path) -> None:
    made = draft(tmp_path, {ZERO: {"stage": 0, "offload_optimizer": OFFLOAD}})
    (problem,) = made.errors
    assert problem.key.startswith(f"{ZERO}.offload_optimizer.device")
    assert draft(tmp_path, {ZERO: {"stage": 0, "offload_optimizer": OFFLOAD | {"device": "none"}}}).job


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_the_stage_does_not_offload_are_counted_on_the_gpu(
    stage: int, tmp_path: Path
) -> None:
    given = {ZERO: {"stage": stage, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}
    made, plain = draft(tmp_path, given), draft(tmp_path, {ZERO: {"stage": stage}})
    (warning,) = (problem for problem in made.problems if problem.severity == "warning")
    assert "weights stay on the GPU" in warning.rule and made.memory == plain.memory
    assert made.job and made.job.deepspeed == plain.job.deepspeed


def test_overlap_is_off_under_pipelines(tmp_path: Path) -> None:
    job, notes = taken(tmp_path, {ZERO: {"stage": 1, "overlap_comm": True}, "pipeline": {"stages": 2}})
    assert job.deepspeed[ZERO]["overlap_comm"] is False
    assert f"{ZERO}.overlap_comm" in notes


OLD = [
    ({"bfloat16": {"enabled": True}, ZERO: {"stage": 1}}, "bfloat16", ("bf16", "enabled"), True),
    ({ZERO: {"stage": 2, "cpu_offload": True}}, f"{ZERO}.cpu_offload", (ZERO, "offload_optimizer", "device"),
     "cpu"),
    ({ZERO: {"stage": 2, "cpu_offload": False}}, f"{ZERO}.cpu_offload",
     (ZERO, "offload_optimizer", "device"), "none"),
    ({ZERO: {"stage": 3, "cpu_offload_params": True}}, f"{ZERO}.cpu_offload_params",
     (ZERO, "offload_param", "device"), "cpu"),
    ({ZERO: {"stage": 3, "prefetch_bucket_size": 7}}, f"{ZERO}.prefetch_bucket_size",
     (ZERO, "stage3_prefetch_bucket_size"), 7),
    ({"optimizer": {"params": {"max_grad_norm": 0.5}}}, "optimizer.params.max_grad_norm",
     ("gradient_clipping",), 0.5),
    ({ZERO: True}, ZERO, (ZERO, "stage"), 1),
    ({ZERO: False}, ZERO, (ZERO, "stage"), 0),
]  # fmt: skip


@pytest.mark.parametrize(("config", "noted", "became", "value"), OLD)
def test_old_names_are_taken_as_the_new_ones(
    config: dict, noted: str, became: tuple, value: Any, tmp_path: Path
) -> None:
    job, notes = taken(tmp_path, config)
    assert noted in notes
    found_value: Any = job.deepspeed
    for name in became:
        found_value = found_value[name]
    assert found_value == value


def test_an_old_name_beside_the_new_one_must_agree(tmp_path: Path) -> None:
    config = {ZERO: {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "none"}}}
    (problem,) = draft(tmp_path, config).errors
    assert "cpu_offload" in problem.key and "another value" in problem.rule
    config[ZERO]["offload_optimizer"]["device"] = "cpu"
    assert draft(tmp_path, config).job is not None
    config[ZERO]["offload_optimizer"] = "cpu"
    assert len(draft(tmp_path, config).errors) == 2


def test_a_problem_of_a_renamed_key_names_the_line_that_was_written(tmp_path: Path) -> None:
    text = '{"zero_optimization": {\n"stage": 3,\n"prefetch_bucket_size": -1}}'
    (problem,) = draft(tmp_path, text).errors
    assert problem.key.startswith(f"{ZERO}.prefetch_bucket_size (") and problem.key.endswith(":3)")
    (problem,) = draft(tmp_path, '{"bfloat16": {\n"enabld": true}}').errors
    assert problem.key.startswith("bfloat16.enabld (") and problem.key.endswith(":2)")


@pytest.mark.parametrize("old", OLD_NAMES)
def test_null_is_no_value_of_an_old_name(old: str, tmp_path: Path) -> None:
    assert draft(tmp_path, nested(old, None)).errors


# The keys for which transformers' documentation and accelerate's templates write "auto".
TRAINER: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
             "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                              "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                      "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    ZERO: {"stage": "auto", "offload_optimizer": {"device": "auto", "nvme_path": "auto", "pin_memory": True},
           "offload_param": {"device": "auto", "nvme_path": "auto"}, "overlap_comm": "auto",
           "reduce_bucket_size": "auto", "sub_group_size": "auto", "stage3_prefetch_bucket_size": "auto",
           "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": "auto",
           "stage3_gather_16bit_weights_on_model_save": "auto"},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": "auto",
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip


@pytest.mark.parametrize(("device", "compute"), [(A100, "bf16"), (V100, "fp16"), (CPU, "fp32")])
@pytest.mark.parametrize("stage", ["auto", 2, 3])
def test_auto_is_resolved_and_shown(device: tuple, compute: str, stage: Any, tmp_path: Path) -> None:
    config = {**TRAINER, ZERO: {**TRAINER[ZERO], "stage": stage}}
    made = draft(tmp_path, config, world(2, device=device))
    assert made.job is not None, [str(problem) for problem in made.errors]
    assert made.job.precision.compute == compute
    assert made.job.zero_stage == (1 if stage == "auto" else stage)
    shown = [note.key for note in made.job.resolved]
    assert len(shown) == len(set(shown))
    wanted = {"fp16.enabled", "bf16.enabled", "gradient_clipping", f"{ZERO}.offload_optimizer.device",
              f"{ZERO}.stage3_prefetch_bucket_size", "optimizer.params.weight_decay"}  # fmt: skip
    assert wanted <= set(shown)
    assert "auto" not in json.dumps(made.job.deepspeed)


def test_what_is_absent_and_means_something_else_to_deepspeed_is_shown(tmp_path: Path) -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}}
    config = {"optimizer": {"type": "AdamW"}, "scheduler": cycle, "bf16": {"enabled": True}}
    job, _ = taken(tmp_path, {**config, ZERO: {"stage": 1}})
    reasons = {note.key: note.reason for note in job.resolved}
    assert reasons["optimizer.params.weight_decay"].endswith("DeepSpeed's default is 0")
    assert reasons["data_types.grad_accum_dtype"].endswith("DeepSpeed's default is bf16")
    assert reasons["scheduler.params.cycle_momentum"].endswith("DeepSpeed's default is true")
    written = {"optimizer": {"type": "AdamW", "params": {"weight_decay": "auto"}}}
    reasons = {note.key: note.reason for note in taken(tmp_path, written)[0].resolved}
    assert "DeepSpeed" not in reasons["optimizer.params.weight_decay"]


def test_comments_that_are_keys_are_taken(tmp_path: Path) -> None:
    config = {"_comment": "for the small runs", "comment": 1, ZERO: {"//": "one number", "stage": 1}}
    assert taken(tmp_path, config)[1] == ["_comment", "comment", f"{ZERO}.//"]


def test_of_an_optimizer_that_is_refused_the_parameters_are_not_told_too(tmp_path: Path) -> None:
    params = {"lr": 1e-3, "freeze_step": 23, "cuda_aware": False, "comm_backend_name": "nccl"}
    made = draft(tmp_path, {"optimizer": {"type": "OneBitAdam", "params": params}})
    assert [each.key.split(" (")[0] for each in made.errors] == ["optimizer.type"]


def test_bf16_without_zero_sums_as_deepspeed_does(tmp_path: Path) -> None:
    made = draft(tmp_path, {"bf16": {"enabled": True}, ZERO: {"stage": 0}}, world(2, device=A100))
    assert made.job is not None and made.job.precision.accumulation == "bf16"
    assert [each.severity for each in made.problems] == ["warning"]


def test_strict_refuses_what_is_otherwise_noted(tmp_path: Path) -> None:
    config = {"prescale_gradients": False, ZERO: {"stage": 0, "reduce_bucket_size": 5}}
    job, notes = taken(tmp_path, config)
    assert len(run_json(job)["notes"]) == len(notes) == 2
    made = draft(tmp_path, config, strict=True)
    assert made.job is None and len(made.errors) == 2
    assert all(problem.remedy for problem in made.errors)


def test_the_check_prints_notes_and_says_that_the_job_can_start(tmp_path: Path, capsys) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"fp16": {"loss_scale": 0}, "dump_state": False, "dataloader_drop_last": True})
    )
    assert check(["--deepspeed_config", str(path), "--model", "tiny", "--world_size", "2"]) == EXIT_FINISHED
    printed = capsys.readouterr()
    assert "note: dataloader_drop_last" in printed.out + printed.err
    assert "This job can start." in printed.out
    assert re.search(r"weight_decay +0.1 \(usual for this model; DeepSpeed's default is 0\)", printed.out)


NEOX = """{
  # GPT-NeoX's own form: a flow mapping with comments
  "pipe-parallel-size": 2, "model-parallel-size": 2,
  "num-layers": 12, "hidden-size": 768, "seq-length": 2048, "bias-gelu-fusion": true,
  "train_micro_batch_size_per_gpu": 4, "gas": 1, "data-path": "data/enwik8",
  "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "zero_optimization": {"stage": 1, "allgather_partitions": true, "cpu_offload": false},
}"""


def test_a_file_of_gpt_neox_is_answered_with_the_names_here(tmp_path: Path) -> None:
    made = draft(tmp_path, NEOX, world(8, device=A100))
    answers = {each.key.split(" (")[0]: each.remedy for each in made.errors}
    assert answers == {
        "pipe-parallel-size": 'Here it is "pipeline": {"stages": 2}',
        "model-parallel-size": 'Here it is "tensor_parallel": {"autotp_size": 2}',
        "num-layers": 'Here it is in a config.json for --model: "num_hidden_layers": 12',
        "hidden-size": 'Here it is in a config.json for --model: "hidden_size": 768',
        "seq-length": "Here it is --seq_length 2048",
        "bias-gelu-fusion": "Remove it",
        "gas": 'Here it is "gradient_accumulation_steps": 1',
        "data-path": "Here it is --data PATH",
    }


# An argument, what stands beside it, and what it is here.
WORKED_OUT: list[tuple[str, Any, dict[str, Any], str]] = [
    ("warmup", 0.01, {"lr-decay-iters": 320000}, '"warmup_num_steps": 3200 in scheduler.params'),
    ("warmup", 0.05, {"train-iters": 1000}, '"warmup_num_steps": 50 in scheduler.params'),
    ("warmup", 0.05, {}, '"warmup_num_steps" in scheduler.params, a number of steps'),
    ("lr_warmup_fraction", 0.1, {"lr_decay_iters": 500}, '"warmup_num_steps": 50 in scheduler.params'),
    ("lr_decay_iters", 500, {"lr_warmup_fraction": 0.1},
     '"decay_num_steps": 450 in scheduler.params of CosineWithFloor'),
    ("lr_decay_iters", 500, {"lr_warmup_iters": 20},
     '"decay_num_steps": 480 in scheduler.params of CosineWithFloor'),
    ("lr-decay-iters", 500, {"warmup": 0.1},
     '"decay_num_steps" in scheduler.params, of CosineWithFloor counted from the peak'),
    ("split", "949,50,1", {}, "--eval_fraction 0.05"),
    ("split", "969, 30, 1", {}, "--eval_fraction 0.03"),
    ("split", "1", {}, "--eval_fraction, the share that is evaluated on"),
    ("eval-iters", 10, {"train_batch_size": 32}, "--eval_samples 320"),
    ("eval-iters", 10, {}, "--eval_samples, counted in samples"),
    ("train-data-paths", ["a", "b"], {"train-data-weights": [1, 2.5]}, "--data a=1 b=2.5"),
    ("adam_beta1", 0.9, {"adam_beta2": 0.95}, '"betas": [0.9, 0.95] in optimizer.params'),
    ("hidden-dropout", 0.1, {"attention-dropout": 0.1}, "--dropout 0.1, of all layers"),
    ("hidden-dropout", 0.1, {"attention-dropout": 0}, "--dropout, one share for attention and all else"),
    ("no-weight-tying", True, {}, 'in a config.json for --model: "tie_word_embeddings": false'),
    ("checkpoint-activations", False, {}, '"activation_checkpointing": {"mode": "none"}'),
    ("lr-decay-style", "linear", {}, '"scheduler": {"type": "WarmupDecayLR"}'),
    ("precision", "bfloat16", {}, '"bf16": {"enabled": true}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "beside", "here"), WORKED_OUT)
def test_numbers_of_megatron_are_worked_out(name: str, value: Any, beside: dict, here: str) -> None:
    assert of_megatron(name, value, {name: value, **beside}) == (MEGATRON_RULE, f"Here it is {here}")


def test_one_stage_is_no_pipeline() -> None:
    for size in (0, 1):
        assert of_megatron("pipe-parallel-size", size, {}) == (
            MEGATRON_RULE,
            "Remove it: one stage is no pipeline",
        )


def test_what_megatron_calls_a_setting_leads_to_something_that_exists() -> None:
    options = set(Options.__dataclass_fields__) | {"launcher", "hostfile"}
    for said in MEGATRON.values():
        assert all(name in options for name in re.findall(r"--(\w+)", said)), said
        for text in re.findall(r'^("\w+": .+?})(?:[,;]|$)', said.format('"x"')):
            (key,) = json.loads("{" + text + "}")
            assert key in KEYS, said


def test_a_yaml_file_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "125M.yml"
    path.write_text("pipe-parallel-size: 1\n", encoding="utf-8")
    (problem,) = read_json(path).problems
    assert problem.rule == "is YAML, and a JSON is read"
    path.write_text(NEOX, encoding="utf-8")
    assert read_json(path).values["gas"] == 1


def test_an_offload_that_is_null_is_absent(tmp_path: Path) -> None:
    job, notes = taken(tmp_path, {ZERO: {"stage": 3, "offload_optimizer": None, "offload_param": None}})
    assert job.deepspeed == taken(tmp_path, {ZERO: {"stage": 3}})[0].deepspeed
    assert {f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"} <= set(notes)


def test_a_comma_that_hjson_does_not_need_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8\n "steps_per_print": 1}', encoding="utf-8")
    (problem,) = read_json(path).problems
    assert problem.key.endswith(":2") and problem.remedy == "Put a comma at the end of the line before"


# What the remedy says, done.
FIXED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"bf16": {"bf16_optimizer_states": True}}, "Remove it", {"bf16": {}}),
    ({"pipeline": {"activation_checkpoint_interval": 1}}, "activation_checkpointing.mode",
     {"activation_checkpointing": {"mode": "full"}}),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "bf16",
     {"bf16": {"enabled": "auto"}, ZERO: {"stage": 1}}),
    ({"tensor_parallel": {"tp_size": 2}}, "autotp_size", {"tensor_parallel": {"autotp_size": 2}}),
    ({ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}}, '"device": "cpu"',
     {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
    ({ZERO: {"stage": 3, "mics_shard_size": 2}}, "zero_hpz_partition_size",
     {ZERO: {"stage": 3, "zero_hpz_partition_size": 2}}),
    ({"monitor_config": {"csv_monitor": {"enabled": True}}}, "csv_monitor and comet at the top",
     {"csv_monitor": {"enabled": True}}),
    ({"logging": {"steps_per_print": 5}}, "what is in it at the top", {"steps_per_print": 5}),
    ({"gradient_accumulation_dtype": "fp32"}, "data_types.grad_accum_dtype",
     {"data_types": {"grad_accum_dtype": "fp32"}}),
    ({"fp16": {"enabled": True, "fp16": True}}, "Remove it; fp16.enabled", {"fp16": {"enabled": True}}),
    ({"pipeline": {"pipeline_parallel_size": 2}}, "Use stages", {"pipeline": {"stages": 2}}),
    ({"pipeline": {"chunks": 2}}, "gradient_accumulation_steps", {"gradient_accumulation_steps": 2}),
    ({"checkpoint": {"save_latest": True, "load_universal": True}}, "Remove it",
     {"checkpoint": {"load_universal": True}}),
    ({"checkpoint": {"save_checkpoint_steps": 50}}, "--save_interval 50", {}),
    ({"autotuning": {"enabled": True}}, "autotuning.enabled to false", {"autotuning": {"enabled": False}}),
    ({"user_script": "train.py"}, "Remove it", {}),
    ({"my_own_key": 1}, "Remove it", {}),
    ({ZERO: {"stage": "2"}}, "Write 2 without the quotes", {ZERO: {"stage": 2}}),
    ({"optimizer": {"type": "DeepSpeed_Adam"}}, "Use Adam", {"optimizer": {"type": "Adam"}}),
    ({"lr": 0.1}, "optimizer.params.lr", {"optimizer": {"params": {"lr": 0.1}}}),
    ({"fp16": {"loss_scal": 0}}, "loss_scale", {"fp16": {"loss_scale": 0}}),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3,
                                                   "cycle_momentum": True}}}, '"cycle_momentum" to false',
     {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3,
                                                   "cycle_momentum": False}}}),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "remedy", "right"), FIXED, ids=lambda value: str(value)[:40])
def test_a_remedy_that_is_followed_helps(wrong: dict, remedy: str, right: dict, tmp_path: Path) -> None:
    (problem,) = draft(tmp_path, wrong, world(2, device=A100)).errors
    assert remedy in problem.remedy
    assert draft(tmp_path, right, world(2, device=A100)).job is not None
