"""From options, JSON and world to a job: what each part becomes, and that no problem hides another."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.problems import JobError
from pipeline.job.options import Options
from pipeline.job.resolve import config_path, examine, resolve
from pipeline.job.schedules import ConstantLR, WarmupCosineLR
from pipeline.parallel.mesh import Mesh
from tests.job.drafts import A100, V100, draft, found, world


def test_the_default_job_on_two_cpu_ranks(tmp_path: Path) -> None:
    job = resolve(Options(output_dir=str(tmp_path / "run")), world(2))
    assert job.model.name == "tiny"
    assert job.mesh == Mesh(data=2)
    assert (job.batch.train_batch_size, job.batch.sequence_length) == (16, 64)
    assert (job.precision.compute, job.precision.accumulation) == ("fp32", "fp32")
    assert (job.zero_stage, job.stages, job.train_steps) == (1, (0, 7), 1500)
    assert job.problems == ()
    assert max(job.schedule(step) for step in range(1, 1501)) == job.optimizer.lr == 5e-3


def test_the_same_files_on_gpus(tmp_path: Path) -> None:
    job = resolve(Options(output_dir=str(tmp_path)), world(8, 8, device=A100))
    assert job.model.name == "gpt2-124m"
    assert (job.precision.compute, job.precision.accumulation) == ("bf16", "fp32")
    assert job.deepspeed["bf16"] == {"enabled": True}
    job = resolve(Options(output_dir=str(tmp_path)), world(8, device=V100))
    assert job.precision.compute == "fp32"
    assert any(note.key == "bf16.enabled" and note.value is False for note in job.resolved)


def test_degrees_come_from_the_json(tmp_path: Path) -> None:
    config = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}
    job = draft(tmp_path, config, world(8, 8)).job
    assert job is not None and job.mesh == Mesh(2, 2, 2, 2)
    # Sequence, tensor and pipeline peers do not multiply the batch.
    assert job.batch.train_batch_size == job.batch.micro_batch_size * job.batch.accumulation_steps * 2
    assert len(job.stages) == 3


def test_dualpipev_has_two_chunks_per_stage(tmp_path: Path) -> None:
    job = draft(tmp_path, {"pipeline": {"stages": 2, "schedule": "dualpipev"}}).job
    assert job is not None and len(job.stages) == 5 and job.batch.accumulation_steps >= 4


def test_independent_problems_do_not_hide_each_other(tmp_path: Path) -> None:
    text = '{"train_batch_size": 7, "zero_optimization": {"stage": 9}, "nonsense": 1, "nonsense": 2,}'
    made = draft(tmp_path, text, model="gpt5", seed=-1, data=("/no/such",), train_steps=0)
    keys = {problem.key.split(" (")[0] for problem in made.problems}
    assert keys == {"zero_optimization.stage", "nonsense", "model", "seed", "data", "train_steps"}
    made = draft(tmp_path, text, seed=-1)  # with a model, the batch can be judged, too
    assert found(made.problems, "train_batch_size")


def test_the_error_carries_all_of_them(tmp_path: Path) -> None:
    with pytest.raises(JobError) as error:
        resolve(Options(deepspeed_config="/no/such.json", seed=-1, output_dir=str(tmp_path)), world(2))
    assert [problem.key for problem in error.value.problems] == ["seed", "deepspeed_config"]


def test_a_refused_value_causes_no_further_problem(tmp_path: Path) -> None:
    # With stage 4 refused, nothing may be said about stage 0, its default.
    made = draft(
        tmp_path, {"zero_optimization": {"stage": 4, "overlap_comm": True}, "bf16": {"enabled": True}}
    )
    assert [problem.key.split(" (")[0] for problem in made.errors] == ["zero_optimization.stage"]


def test_an_unknown_world_leaves_the_rest(tmp_path: Path) -> None:
    made = examine(Options(model="tiny", seq_length=2000, output_dir=str(tmp_path)), None)
    assert [problem.key for problem in made.problems] == ["seq_length"]
    assert made.job is None and made.model is not None and made.schedule is not None


def test_clipping_that_is_absent_is_printed(tmp_path: Path) -> None:
    job = draft(tmp_path, {}).job
    assert job is not None and job.gradient_clipping == 1.0 == job.deepspeed["gradient_clipping"]
    assert any(note.key == "gradient_clipping" for note in job.resolved)
    job = draft(tmp_path, {"gradient_clipping": 0}).job
    assert job is not None and job.gradient_clipping == 0.0 == job.deepspeed["gradient_clipping"]
    assert not any(note.key == "gradient_clipping" for note in job.resolved)


def test_every_auto_is_printed(tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 1},
        "optimizer": {"params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"},
        },
    }
    job = draft(tmp_path, config).job
    assert job is not None
    noted = [note.key for note in job.resolved]
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                "bf16.enabled", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
                "optimizer.params.weight_decay", "scheduler.params.total_num_steps",
                "scheduler.params.warmup_num_steps", "scheduler.params.warmup_max_lr"):  # fmt: skip
        assert noted.count(key) == 1, key
    assert "auto" not in str(job.deepspeed)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_lr_scaling(rule: str, factor: float, tmp_path: Path) -> None:
    scaling = {"rule": rule, "base_batch_size": 4} if rule != "none" else {"rule": rule}
    rate = {"optimizer": {"params": {"lr": 0.001}}, "scheduler": None}
    config = {"train_batch_size": 16, **rate, "lr_scaling": scaling}
    job = draft(tmp_path, config).job
    assert job is not None
    assert math.isclose(job.optimizer.lr, 0.001 * factor) and math.isclose(job.schedule(7), 0.001 * factor)


RATE = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.parametrize("config", [{}, {"optimizer": {"params": {"lr": "auto"}}}, RATE])
@pytest.mark.parametrize(("steps", "warmup"), [(1500, 100), (300, 30), (10, 1), (1, 0)])
def test_without_a_scheduler_there_is_the_usual_one(
    config: dict[str, Any], steps: int, warmup: int, tmp_path: Path
) -> None:
    job = draft(tmp_path, config, train_steps=steps).job
    assert job is not None
    peak = 0.1 if config is RATE else 5e-3
    assert job.schedule == WarmupCosineLR(peak, steps, warmup, 0.0, 0.1, "linear")
    (note,) = [note for note in job.resolved if note.key.startswith("scheduler")]
    assert f"{warmup} step" in note.reason and '"scheduler": null is a constant rate' in note.reason
    assert job.schedule(1) > 0 and math.isclose(job.schedule(steps), peak / 10)


def test_a_scheduler_that_is_null_is_the_constant_rate(tmp_path: Path) -> None:
    for job in (draft(tmp_path, {"scheduler": None}).job, draft(tmp_path, {}, set=("scheduler=null",)).job):
        assert job is not None and job.schedule == ConstantLR(5e-3)
        assert not any(note.key.startswith("scheduler") for note in job.resolved)


@pytest.mark.parametrize(
    ("saved", "config", "options", "is_constant"),
    [
        ({2: None}, {}, {}, True),
        ({2: "WarmupLR", 10: None}, {}, {}, True),
        ({2: None, 10: "WarmupCosineLR"}, {}, {}, False),
        ({2: None, 10: "unreadable"}, {}, {}, True),
        ({2: "WarmupLR", 10: None}, {}, {"resume": "global_step2"}, False),
        ({2: None}, {"scheduler": {"type": "WarmupLR"}}, {}, False),
    ],
)
def test_a_run_without_a_schedule_continues_without_one(
    saved: dict[int, str | None],
    config: dict[str, Any],
    options: dict[str, str],
    is_constant: bool,
    tmp_path: Path,
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    for step, kind in saved.items():
        (folder := checkpoints / f"global_step{step}").mkdir(parents=True)
        text = json.dumps({"settings": {"scheduler.type": kind}}) if kind != "unreadable" else "{"
        (folder / "manifest.json").write_text(text)
    options = {key: str(checkpoints / value) for key, value in options.items()}
    job = draft(tmp_path, config, **options).job
    assert job is not None
    assert (job.schedule == ConstantLR(5e-3)) is is_constant
    notes = [note.reason for note in job.resolved if note.key == "scheduler"]
    assert any("as in the checkpoint" in reason for reason in notes) is is_constant


def test_train_tokens_round_up_to_steps(tmp_path: Path) -> None:
    job = draft(tmp_path, {"train_batch_size": 16}, train_tokens=16 * 64 * 3 + 1).job
    assert job is not None and job.train_steps == 4


def test_adam_without_decoupling_is_l2(tmp_path: Path) -> None:
    job = draft(tmp_path, {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}).job
    assert job is not None and job.optimizer.type == "Adam"
    job = draft(tmp_path, {"optimizer": {"type": "Adam"}}).job
    assert job is not None and job.optimizer.type == "AdamW"  # DeepSpeed's default for Adam


def test_sgd(tmp_path: Path) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}}
    job = draft(tmp_path, config).job
    assert job is not None
    optimizer = job.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.momentum, optimizer.nesterov) == ("SGD", 0.1, 0.9, True)
    assert optimizer.weight_decay == 0.0


def test_dropout_overrides_the_model(tmp_path: Path) -> None:
    job = draft(tmp_path, {}, dropout=0.1).job
    assert job is not None and job.model.dropout == job.model.attention_dropout == 0.1


def test_the_default_json_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_path("ds_configs/zero1.json").is_absolute()
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "zero1.json").write_text("{}", encoding="utf-8")
    assert config_path("ds_configs/zero1.json") == Path("ds_configs/zero1.json")


@pytest.mark.parametrize(
    ("given", "steps", "interval"),
    [(None, 30, 25), (None, 250, 25), (None, 1500, 150), (7, 30, 7), (0, 30, 0)],
)
def test_a_short_run_is_evaluated_seldom(
    given: int | None, steps: int, interval: int, tmp_path: Path
) -> None:
    job = draft(tmp_path, {}, eval_interval=given, train_steps=steps).job
    assert job.eval_interval == interval
