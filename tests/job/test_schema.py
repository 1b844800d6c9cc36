"""Names, types, ranges and "auto" of single keys, and that every key of DeepSpeed was decided on."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from pipeline.base.fields import AUTO, MISSING, fields_of, value_problem
from pipeline.base.json_reader import Document
from pipeline.job.data_sources import Blend, BlendSource
from pipeline.job.facts import Settings
from pipeline.job.foreign_keys import FOREIGN, OLD_NAMES
from pipeline.job.pages import PROJECT
from pipeline.job.schedules import SCHEDULES, parameters
from pipeline.job.schema import KEYS


def check(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    settings = Settings(Document("f.json", values))
    return settings.values, [str(problem) for problem in settings.problems]


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("gradient_clipp1ng", 1, "The nearest name is gradient_clipping"),
        ("zero_optimization.overlapcomm", True, "The nearest name is overlap_comm"),
        ("zero_optimization.comm_overlap", True, "The nearest name is overlap_comm"),
        ("data_types.grad_acum_dtype", "fp32", "The nearest name is grad_accum_dtype"),
        ("lr", 0.1, "It belongs at optimizer.params.lr"),
        ("pipeline.stage", 2, "The nearest name is stages"),
        ("pipeline.nonsense", 1, "Choose from partition, schedule, stages"),
        ("train_batch_size", 0, "must be at least 1"),
        ("train_batch_size", -4, "must be at least 1"),
        ("train_batch_size", 1.5, "must be a whole number, not a number"),
        ("train_batch_size", "16", "must be a whole number, not a string"),
        ("train_batch_size", True, "must be a whole number, not true or false"),
        ("gradient_clipping", -1, "must be at least 0"),
        ("scheduler.type", "auto", "is required, and nothing decides it"),
        ("zero_optimization", 3, "must be an object"),
        ("zero_optimization.stage", 4, "at most 3"),
        ("zero_optimization.offload_optimizer.device", "gpu", "must be one of none, cpu, nvme"),
        ("bf16.enabled", 1, "must be true or false"),
        ("bf16", None, "must be an object {...}, not null"),
        ("optimizer.type", "Lamb", "Use AdamW, and lr_scaling for a larger batch"),
        ("optimizer.type", "OneBitAdam", "Use AdamW with ZeRO 1"),
        ("optimizer.type", "Muon", "orthogonalizes whole matrices"),
        ("optimizer.type", "Adamx", "must be one of AdamW, Adam, SGD"),
        ("optimizer.params.lr", -0.1, "must be above 0"),
        ("optimizer.params.lr", 0, "must be above 0"),
        ("zero_optimization.reduce_bucket_size", 1e300, "must be a whole number"),
        ("comet.mode", "resume", "must be one of get, create, get_or_create"),
        ("checkpoint.writer", {"type": "fast"}, "checkpoints are written by this pipeline"),
        ("optimizer.params.eps", 0, "must be above 0"),
        ("optimizer.params.betas", [0.9, "x"], "must be a list of numbers"),
        ("scheduler.type", "WarmupLr", "must be one of WarmupLR"),
        ("scheduler", 3, "must be an object {...} or null, not a number"),
        ("pipeline.partition", "best", "one of parameters, uniform or a list of whole numbers"),
        ("pipeline.stages", 0, "must be at least 1"),
        ("gradient_allreduce_op", "sum", "the loss is the mean over the tokens"),
        ("elasticity", {"enabled": True}, "DeepSpeed 0.19 has removed this key"),
        ("zero_optimization.mics_shard_size", 2, "DeepSpeed 0.19 has removed this key"),
    ],
)
def test_refuses(path: str, value: Any, text: str) -> None:
    kept, problems = check(nested(path, value))
    assert len(problems) == 1
    assert text in problems[0]
    assert problems[0].startswith(f"error: {path} (f.json) = {value!r}")
    block: Any = kept
    for name in path.split(".")[:-1]:
        block = block.get(name, {})
    assert path.split(".")[-1] not in block


def test_a_key_with_a_dot_is_not_the_key_of_a_block() -> None:
    kept, problems = check({"zero_optimization.stage": 2, "aio": {"x.y": 1}})
    assert kept == {"aio": {}}
    assert 'Write "stage" inside the block zero_optimization' in problems[0]
    assert "there is no such key in aio" in problems[1]


def test_names_all_problems_at_once() -> None:
    _, problems = check({"a": 1, "bf16": {"enabled": 2, "b": 3}, "train_batch_size": 0})
    assert len(problems) == 4


def test_a_scheduler_has_a_type_and_a_problem_beside_it_hides_nothing() -> None:
    _, (params, kind) = check({"scheduler": {"params": 3}})
    assert "scheduler.params (f.json) = 3: must be an object" in params
    assert "scheduler.type (f.json) = None: is required and was not given. Give one of WarmupLR" in kind


def test_takes_whole_floats_as_integers() -> None:
    kept, problems = check({"zero_optimization": {"reduce_bucket_size": 5e8}})
    assert problems == []
    assert type(kept["zero_optimization"]["reduce_bucket_size"]) is int


def test_takes_auto_where_it_is_resolved() -> None:
    paths = [path for path, key in KEYS.items() if key.auto]
    assert "train_batch_size" in paths and "bf16.enabled" in paths and "optimizer.params.lr" in paths
    for path in paths:
        assert check(nested(path, "auto"))[1] == []


def test_every_field_has_a_meaning_and_a_default_or_is_required() -> None:
    schedules = [(f"{kind}.{name}", field) for kind in SCHEDULES for name, field in parameters(kind).items()]
    blend = [*fields_of(Blend).items(), *fields_of(BlendSource).items()]
    for path, field in [*KEYS.items(), *schedules, *blend]:
        assert field.meaning.endswith("."), path
        assert field.forms, path
        assert field.default_text, path
        # None stands for what the run decides, which is said in words; of a block or text it is "absent".
        if field.default is None and not field.block and field.default_text == "absent":
            assert [form.kind for form in field.forms] == [str], path
        if field.default is MISSING:
            assert field.default_text in ("required", "optimizer's rate"), path
        elif field.default is not None and not (field.default == AUTO and field.auto) and not field.block:
            assert value_problem(field, field.default, path) is None, path


def test_no_call_site_states_the_default_of_a_key_again() -> None:
    """``values.get("stage", 0)``: the default is the schema's."""
    names = {path.rpartition(".")[2] for path in KEYS} | {n for kind in SCHEDULES for n in parameters(kind)}
    found = []
    for path in (PROJECT / "pipeline").rglob("*.py"):
        if "hugging_face" in path.parts:  # whose files have keys of their own
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            key = node.args[0] if node.args else None
            if node.func.attr in ("get", "setdefault", "pop") and len(node.args) == 2:
                text = key.value if isinstance(key, ast.Constant) else None
                if ast.unparse(node.args[1]) in ("{}", "None"):  # nothing, said in another way
                    continue
                if isinstance(text, str) and (text in KEYS or text.rpartition(".")[2] in names):
                    found.append(f"{path.relative_to(PROJECT / 'pipeline')}: {ast.unparse(node)}")
    assert found == []


def test_every_key_has_its_block() -> None:
    for path in [*KEYS, *FOREIGN, *OLD_NAMES]:
        block = path.rpartition(".")[0]
        assert block in ("", "checkpoint") or KEYS[block].block, path
    for new, _ in OLD_NAMES.values():
        assert new in KEYS
    assert not KEYS.keys() & FOREIGN.keys() and not OLD_NAMES.keys() & (KEYS.keys() | FOREIGN.keys())


def test_every_key_of_deepspeed_is_taken_refused_or_removed() -> None:
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    blocks = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensor_parallel": TPTrainingConfig,
    }
    decided = KEYS.keys() | FOREIGN.keys() | OLD_NAMES.keys()
    names = {
        f"{block}.{field.alias or name}"
        for block, model in blocks.items()
        for name, field in model.model_fields.items()
    }
    assert names - decided == set()
    zero = "zero_optimization."
    removed = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS, *(zero + k for k in config._REMOVED_ZERO_CONFIG_KEYS)}
    assert removed <= FOREIGN.keys()
    passed = {
        path for path, key in KEYS.items() if key.details.get("passed") and path.rpartition(".")[0] in blocks
    }
    assert passed - names == set()
