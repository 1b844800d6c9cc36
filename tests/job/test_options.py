"""The command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.base.fields import check, fields_of
from pipeline.base.problems import JobError
from pipeline.cluster.launcher_options import split_arguments
from pipeline.job.options import (
    CheckOptions,
    Options,
    from_json,
    option_problems,
    parse_options,
    spelled_out,
)
from pipeline.job.resolve import examine
from pipeline.job.run_file import run_json
from pipeline.job.schema import DeepSpeedConfig
from tests.job.drafts import V100, world


def test_defaults() -> None:
    assert parse_options([]) == Options()


def test_takes_underscores_lists_and_deepspeeds_own() -> None:
    arguments = ["--deepspeed", "--local_rank=3", "--data", "a", "b", "--seq_length", "64", "--print_config"]
    options = parse_options(arguments)
    assert (options.deepspeed, options.local_rank, options.data) == (True, 3, ("a", "b"))
    assert (options.seq_length, options.print_config) == (64, True)
    assert parse_options(["--local_rank", "0"]).local_rank == 0


def test_a_list_given_in_parts_is_whole_and_of_single_values_the_last_counts() -> None:
    arguments = "--data a b --seed 1 --validation v=x --data=c --allow-pickle m.a --seed 2 --validation w=y"
    options = parse_options([*arguments.split(), "--data", "d", "--allow_pickle", "m.b"])
    assert (options.data, options.validation) == (("a", "b", "c", "d"), ("v=x", "w=y"))
    assert (options.allow_pickle, options.seed) == (("m.a", "m.b"), 2)
    launcher, rest = split_arguments(["--exclude", "h1@h2:0", "-e", "h3", "--include=h4"])
    assert (launcher.exclude, launcher.include, rest) == ("h1@h2:0@h3", "h4", [])


def test_the_world_size_belongs_to_the_check() -> None:
    assert parse_options(["--world_size", "4"], CheckOptions).world_size == 4
    for arguments in (["--world_size", "4"], ["--hostfile", "f"]):
        with pytest.raises(JobError, match=r"--(world_size|hostfile)"):
            parse_options(arguments)


@pytest.mark.parametrize(
    ("arguments", "rule", "remedy"),
    [
        ("--train_step 3", "there is no such option", "The nearest option is --train_steps"),
        ("--num_gpu 3", "there is no such option", "The nearest option is --num_gpus"),
        ("--zzz", "there is no such option", "--help lists the options"),
        (
            "--learning_rate 3e-4",
            "is optimizer.params.lr of the DeepSpeed JSON",
            "--set optimizer.params.lr=3e-4",
        ),
        ("--lr=3e-4", "is optimizer.params.lr of the DeepSpeed JSON", "--set optimizer.params.lr=3e-4"),
        ("--batch-size 8", "is train_batch_size of the DeepSpeed JSON", "--set train_batch_size=8"),
        ("--gradient_accumulation_steps 4", "of the DeepSpeed JSON", "--set gradient_accumulation_steps=4"),
        ("--fp16", "is fp16.enabled of the DeepSpeed JSON", "--set fp16.enabled=true"),
        ("--bf16 true", "is bf16.enabled of the DeepSpeed JSON", "--set bf16.enabled=true"),
        ("--zero_stage 3", "of the DeepSpeed JSON", "--set zero_optimization.stage=3"),
        ("--autotp_size 2", "of the DeepSpeed JSON", "--set tensor_parallel.autotp_size=2"),
        ("--fp16 False", "is fp16.enabled of the DeepSpeed JSON", "--set fp16.enabled=false"),
        ("--optim adamw_torch", "is optimizer.type of the DeepSpeed JSON", "--set optimizer.type=AdamW"),
        ("--optim lion", "is optimizer.type of the DeepSpeed JSON", "VALUE one of AdamW, Adam, SGD"),
        ("--lr_scheduler_type cosine", "is scheduler.type of the", "--set scheduler.type=WarmupCosineLR"),
        ("--lr_scheduler_type constant", "of the DeepSpeed JSON", "Give --set scheduler=null, or write it"),
        ("--resume_from_checkpoint True", "has another name here", "Give --resume auto"),
        ("--train_file a b", "has another name here", "Give --data a b"),
        ("--no-strict", "there is no such option", "--strict is off unless given"),
        ("--set", "is given without a value", "leave --set out"),
        ("--max_steps 9", "has another name here", "Give --train_steps 9"),
        ("--hidden-size 64", "is an argument of Megatron-LM or GPT-NeoX", '"hidden_size": 64'),
        ("--block_size 64", "has another name here", "Give --seq_length 64"),
        ("--n_layer 3", "is an argument of nanoGPT", '"num_hidden_layers": 3'),
        ("--exit-duration-in-mins 90", "has another name here", "Give --time_limit 90m"),
        ("--use-distributed-optimizer", "is ZeRO stage 1 here", "--set zero_optimization.stage=1"),
        ("--compile", "blocks are not compiled", "Leave it out"),
        ("--seed many", "must be a whole number", "Give a whole number"),
        ("--dropout=much", "must be a number", "Give a number"),
    ],
)
def test_a_wrong_option_is_answered_with_the_right_one(arguments: str, rule: str, remedy: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_options(arguments.split(), others=("num_gpus",))
    (problem,) = caught.value.problems
    assert rule in problem.rule and remedy in problem.remedy


def test_the_remedy_of_an_option_that_is_a_key_is_taken() -> None:
    """All problems come at once, and what they say to give is right."""
    wrong = "--lr 3e-4 --fp16 --warmup_steps 5 --zero_stage 2 --gradient_checkpointing".split()
    with pytest.raises(JobError) as caught:
        parse_options(wrong)
    remedies = [problem.remedy.removeprefix("Give ").partition(",")[0] for problem in caught.value.problems]
    assert len(remedies) == 5
    made = examine(parse_options(["--model", "tiny", *" ".join(remedies).split()]), world(2, device=V100))
    assert made.errors == [] and made.optimizer.lr == 3e-4 and made.job.activation_checkpointing == "full"


@pytest.mark.parametrize(("arguments", "text"), [(["--seed"], "--seed"), (["stray"], "stray")])
def test_a_wrong_command_line_exits_with_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_options(arguments)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("form", ["--deepspeed {}", "--deepspeed={}", "--deepspeed_config {}"])
def test_the_json_is_named_as_trainer_scripts_name_it(form: str) -> None:
    assert parse_options(form.format("ds.json").split()) == Options(deepspeed_config="ds.json")


def test_values_over_the_json(tmp_path: Path) -> None:
    """The last of a key counts, run.json keeps them, and those given beside it are added."""
    config = tmp_path / "ds.json"
    config.write_text(
        '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 1}}}'
    )
    given = ["--deepspeed_config", str(config), "--set", "optimizer.params.lr=3e-4", "optimizer.type=SGD"]
    made = examine(
        parse_options([*given, "--set", "optimizer.params.lr=0.5", "train_batch_size=24"]), world(2)
    )
    assert made.errors == []
    assert (made.optimizer.type, made.optimizer.lr, made.batch.train_batch_size) == ("SGD", 0.5, 24)
    assert made.job.json["optimizer"] == {"type": "SGD", "params": {"lr": 0.5}}
    run = tmp_path / "run.json"
    run.write_text(json.dumps(run_json(made.job)))
    again = examine(parse_options(["--config", str(run), "--set", "zero_optimization.stage=2"]), world(2))
    assert (again.optimizer.lr, again.job.zero_stage) == (0.5, 2)
    other = parse_options(["--config", "none", "--config", str(run), "--deepspeed_config", "other.json"])
    assert (other.config, other.set) == (str(run), ())


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        ("lr", "set", "is not KEY=VALUE"),
        ("optimizer..lr=1", "set", "is not KEY=VALUE"),
        ("optimizer=[1", "set", "expected ',' or ']'"),
        ("optimizer.type.name=1", "set", "optimizer.type is no object that could hold it"),
        ("optimizer.params.lrr=1", "optimizer.params.lrr (--set)", "no such key in optimizer.params"),
        ("zero_optimisation.stage=1", "zero_optimisation (--set)", "there is no such key"),
        ("zero_optimization.stage=7", "zero_optimization.stage (--set)", "at most 3"),
        ("gradient_clipping=NaN", "gradient_clipping (--set)", "must be a number"),
        ("gradient_clipping=1e999", "gradient_clipping (--set)", "must be a number"),
    ],
)
def test_a_wrong_value_over_the_json_is_named(text: str, key: str, rule: str) -> None:
    problems = examine(Options(set=(text,)), world(2)).errors
    assert [(problem.key, rule in problem.rule) for problem in problems] == [(key, True)]


def test_json_round_trip() -> None:
    options = Options(data=("a", "b"), seed=5, dropout=0.1)
    assert from_json(options.to_json()) == options
    with pytest.raises(JobError, match="The nearest name is seed"):
        from_json({"seeed": 1})
    for name, value in {"seed": "1", "dropout": True, "data": "a", "model": None, "train_steps": 1.5}.items():
        with pytest.raises(JobError, match=f"options.{name}"):
            from_json({name: value})


@pytest.mark.parametrize(
    "content", [None, "", "{}", "[]", '{"options": {"sed": 1}}', '{"options": 3}', '{"options": []}']
)
def test_an_unusable_run_file_is_a_problem(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(JobError):
        parse_options(["--config", str(path)])


# Smallest value of each whole-number option.
LOWEST = {
    "seq_length": 1,
    "train_steps": 1,
    "train_tokens": 1,
    "eval_interval": 0,
    "eval_samples": 0,
    "save_interval": 0,
    "keep_last": 1,
    "keep_every": 1,
    "keep_best": 1,
    "log_interval": 1,
    "seed": 0,
    "sample_tokens": 0,
}


def test_ranges() -> None:
    for name, lowest in LOWEST.items():
        assert option_problems(Options(**{name: lowest})) == []
        for value in (lowest - 1, 2**63):
            (problem,) = option_problems(Options(**{name: value}))
            assert problem.key == name
    wrong = {
        "dropout": (-0.1, 1.0, float("nan")),
        "eval_fraction": (-0.1, 1.0, float("nan")),
        "cache_size": (0.0, -1.0, float("inf"), float("nan")),
        "started_at": (-1.0, float("inf"), float("nan")),
        "on_bad_record": ("ignore", ""),
        "save_failure": ("skip",),
        "stop_stamp": ("x",),
        "allow_pickle": (("eval",),),
    }
    for name, values in wrong.items():
        for value in values:
            (problem,) = option_problems(Options(**{name: value}))
            assert problem.key == name


def test_a_whole_number_or_share_without_a_range_is_an_oversight() -> None:
    free = {"local_rank", "world_size"}  # of a launcher, and the check's
    for name, field in fields_of(CheckOptions).items():
        numbers = [form for form in field.forms if form.kind in (int, float)]
        assert name in free or all(form.limits.low is not None for form in numbers), name


@pytest.mark.parametrize("value", ["0", "36501d", "9" * 400, "9" * 5000])
def test_a_time_limit_is_a_length_that_can_be_counted(value: str) -> None:
    (problem,) = option_problems(Options(time_limit=value))
    assert problem.key == "time_limit"


@pytest.mark.parametrize("arguments", [["--data"], ["--data", "--seed", "3"]])
def test_data_without_a_path_is_not_the_default_text(arguments: list[str]) -> None:
    with pytest.raises(JobError, match="is given without a value"):
        parse_options(arguments)


def test_names_are_not_empty_and_texts_are_text() -> None:
    for name in ("model", "output_dir", "deepspeed_config", "resume", "sample_prompt"):
        for value in ("", "\udcff"):
            problems = option_problems(Options(**{name: value}))
            assert bool(problems) == (name != "sample_prompt" or value != "")
            assert {problem.key for problem in problems} <= {name}
    assert [p.value for p in option_problems(Options(data=("a", "", "\udcff")))] == ["", "\udcff"]


def test_a_name_too_long_for_a_path_is_a_problem(tmp_path: Path) -> None:
    long = "x" * 5000
    for name in ("model", "data", "output_dir", "deepspeed_config", "resume"):
        options = {"output_dir": str(tmp_path), name: (long,) if name == "data" else long}
        made = examine(Options(**options), world(2))
        assert any(problem.key == name for problem in made.errors), name


def test_resume_names_a_checkpoint(tmp_path: Path) -> None:
    assert option_problems(Options(resume=str(tmp_path))) == []
    (problem,) = option_problems(Options(resume="alway"))
    assert problem.key == "resume"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("~/x", "/home/me/x"),
        ("~", "/home/me"),
        ("$SCRATCH/x", "/scratch/x"),
        ("a${SCRATCH}b", "a/scratchb"),
        ("a~$", "a~$"),
        ("s3://bucket/$SCRATCH/~", "s3://bucket/$SCRATCH/~"),
    ],
)
def test_paths_are_read_as_a_shell_reads_them(
    given: str, read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every path of a command line, of a run.json and of the JSON; and so that all hosts read the same."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    line = [
        f"--output_dir={given}",
        "--data",
        given,
        "b",
        "--validation",
        f"v={given}",
        "--sample_prompt",
        given,
    ]
    options = parse_options(line)
    assert options == Options(
        output_dir=read, data=(read, "b"), validation=(f"v={read}",), sample_prompt=given
    )
    assert parse_options(spelled_out(line, Options)) == options
    (tmp_path / "run.json").write_text(json.dumps({"options": {"output_dir": given}}), encoding="utf-8")
    assert parse_options(["--config", str(tmp_path / "run.json")]).output_dir == read
    assert split_arguments(["--hostfile", given])[0].hostfile == read
    monitors = {"tensorboard": {"enabled": True, "output_path": given}}
    values = json.loads(json.dumps(monitors))
    assert list(check(DeepSpeedConfig, values, str)) == []
    assert values["tensorboard"]["output_path"] == read


@pytest.mark.parametrize(
    ("path", "why"),
    [("$NO_SUCH/x", "the variable NO_SUCH is not set"), ("~nobody-here/x", "no home folder of")],
)
def test_a_path_that_cannot_be_read_is_refused(
    path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("output_dir", "data", "cache_dir", "resume", "stop_file", "deepspeed_config", "tokenizer"):
        with pytest.raises(JobError, match=f"(?s){name}.*{why}"):
            parse_options([f"--{name}", path])
    values = {"csv_monitor": {"output_path": path}}
    assert [why in problem.rule for problem in check(DeepSpeedConfig, values, str)] == [True]
    with pytest.raises(SystemExit, match="2"):
        split_arguments(["--hostfile", path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$NO_SUCH").mkdir()  # what has this very name is meant
    assert parse_options(["--data", "$NO_SUCH"]).data == ("$NO_SUCH",)
