"""What is wrong with a job: exit code 2, key, value, rule and remedy, all at once, and nothing written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline import check
from tests.end_to_end.jobs import Workshop, write_text
from tests.harness import run_job


class Case(NamedTuple):
    """A change to a good job, and what the refusal must say.

    Attributes:
        config: Changes to the JSON.
        options: Further options.
        says: Key, value, rule and remedy, as parts of the text.
        ranks: Size of the world.
    """

    name: str
    config: dict[str, Any]
    options: tuple[str, ...]
    says: tuple[str, ...]
    ranks: int = 2


def tensor(size: int) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": size}}


BOTH = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
CASES = (
    Case("world", tensor(2), (), ("world size = 3", "3 / 2 is not whole", "Use 2 or 4 ranks"), 3),
    Case("heads", tensor(8), (), ("tensor_parallel.autotp_size = 8", "attention heads 4", "Use 1, 2"), 8),
    Case("stages", {"pipeline": {"stages": 9}}, (), ("pipeline.stages = 9", "3 layers"), 9),
    Case("sequence", {"sequence_parallel_size": 3}, (), ("sequence_parallel_size = 3", "length 32", "30"), 3),
    Case(
        "sequence heads",
        {"sequence_parallel_size": 8},
        (),
        ("sequence_parallel_size = 8", "4 attention heads", "Use 1, 2 or 4"),
        8,
    ),
    Case("unknown model", {}, ("--model", "tinny"), ("model = 'tinny'", "no preset", "tiny")),
    Case("missing model", {}, ("--model", "no/config.json"), ("model = 'no/config.json'", "no such file")),
    Case("unknown key", {"gradient_cliping": 1.0}, (), ("gradient_cliping = 1.0", "gradient_clipping")),
    Case(
        "zero 2 and pipeline",
        {"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}},
        (),
        ("zero_optimization.stage = 2", "must be 0 or 1 with 2 pipeline stages", "Use stage 0 or 1"),
    ),
    Case(
        "both precisions", BOTH, (), ("fp16.enabled = True", "excludes bf16.enabled", "Turn one of them off")
    ),
    Case("negative batch", {"train_batch_size": -8}, (), ("train_batch_size = -8", "at least 1")),
    Case("zero micro-batch", {"train_micro_batch_size_per_gpu": 0}, (), ("per_gpu = 0", "at least 1")),
    Case("batch", {"train_batch_size": 7}, (), ("train_batch_size = 7", "7 / 2 leaves 1", "Use 6 or 8")),
    Case("no steps", {}, ("--train_steps", "0"), ("train_steps = 0",)),
    Case("positions", {}, ("--seq_length", "2048"), ("seq_length = 2048", "1024 positions", "at most 1024")),
    Case(
        "no data",
        {},
        ("--data", "nowhere"),
        ("data = 'nowhere'", "does not exist", "Give the path of a text"),
    ),
    Case(
        "no checkpoint",
        {},
        ("--resume", "nowhere"),
        ("resume = 'nowhere'", "nor an existing checkpoint", "Correct the path"),
    ),
    Case("dropout", {}, ("--dropout", "1.5"), ("dropout = 1.5",)),
    Case("dualpipev", {"pipeline": {"schedule": "dualpipev"}}, (), ("needs at least 2 pipeline stages",)),
)


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def checked(capsys: pytest.CaptureFixture[str], arguments: list[str], ranks: int) -> tuple[int, str]:
    """Exit code and text of ``python -m pipeline.check``."""
    code = check.main([*arguments, "--world_size", str(ranks)])
    shown = capsys.readouterr()
    return code, flat(shown.out + shown.err)


def flat(text: str) -> str:
    """Problems on one line each, as ``key = value``: without file and line."""
    return re.sub(r" \(\S+:\d+\)", "", " ".join(text.split()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_refused_by_the_check(case: Case, shop: Workshop, capsys: pytest.CaptureFixture[str]):
    arguments = [*shop.arguments("run", shop.config(**case.config)), *case.options]
    code, shown = checked(capsys, arguments, case.ranks)
    assert code == 2
    for part in case.says:
        assert part in shown, shown
    assert not (shop.folder / "run").exists()


def test_the_unchanged_job_is_accepted(shop: Workshop, capsys: pytest.CaptureFixture[str]):
    code, shown = checked(capsys, shop.arguments("run", shop.config()), 2)
    assert code == 0, shown
    assert not (shop.folder / "run").exists()


def test_all_problems_come_together(shop: Workshop, capsys: pytest.CaptureFixture[str]):
    config = shop.config(
        **BOTH,
        train_batch_size=-1,
        gradient_cliping=1.0,
        pipeline={"stages": 2},
        zero_optimization={"stage": 3},
    )
    arguments = shop.arguments("run", config, "--seq_length", "2048", "--dropout", "-1", "--data", "nowhere")
    code, shown = checked(capsys, arguments, 4)
    assert code == 2
    for key in (
        "fp16.enabled",
        "train_batch_size",
        "gradient_cliping",
        "zero_optimization.stage",
        "seq_length",
        "dropout",
        "data",
    ):
        assert f"{key} = " in shown, key
    result = run_job(arguments, 4)
    assert result.exit_codes == (2, 2, 2, 2)
    said = flat(result.stderr[0])
    assert all(f"{key} = " in said for key in ("fp16.enabled", "zero_optimization.stage", "seq_length"))
    # The ranks of a host find the same; one of them speaks.
    assert result.stderr[1:] == result.stdout[1:] == ("", "", "")
    assert not (shop.folder / "run").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node1 slots=2\nnode1 slots=2\n", "node1"),
        ("node1 slots=-1\n", "slots"),
        ("node1 slots\n", "slots"),
        ("", "host"),
        (None, "cannot be read"),
    ],
    ids=["twice", "negative", "malformed", "empty", "missing"],
)
def test_a_wrong_hostfile_is_refused(
    text: str | None, says: str, shop: Workshop, capsys: pytest.CaptureFixture[str]
):
    path = shop.folder / "hosts"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code = check.main(["--hostfile", str(path), *shop.arguments("run", shop.config())])
    shown = capsys.readouterr()
    assert code == 2
    assert "hostfile" in shown.out + shown.err
    assert says in shown.out + shown.err


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_folder_that_cannot_be_is_refused(kind: str, shop: Workshop, capsys: pytest.CaptureFixture[str]):
    (shop.folder / "run").write_text("", encoding="utf-8")
    arguments = shop.arguments("run" if kind == "file" else "run/below", shop.config())
    code, shown = checked(capsys, arguments, 2)
    assert code == 2
    assert "output_dir = " in shown
    result = run_job(arguments, 2)
    assert result.exit_codes == (2, 2), result.stderr
    assert "output_dir = " in flat(result.stderr[0])


def test_a_folder_of_another_run_is_refused_and_left_alone(shop: Workshop):
    config = shop.config()
    run_job(shop.arguments("run", config), 1).check()
    before = _contents(shop.folder / "run")
    result = run_job(shop.arguments("run", config, "--seed", "7", "--seq_length", "16"), 1)
    assert result.exit_codes == (2,)
    said = flat(result.stderr[0])
    assert "holds another run: seed 1234 there, 7 here; seq_length 32 there, 16 here" in said
    assert "Use another --output_dir" in said
    assert _contents(shop.folder / "run") == before


def test_resume_with_another_optimizer_is_refused(shop: Workshop, capsys: pytest.CaptureFixture[str]):
    run_job(shop.arguments("run", shop.config()), 2).check()
    before = _contents(shop.folder / "run")
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    other = shop.config("other", zero_optimization={"stage": 1}, optimizer=sgd)
    code, shown = checked(capsys, shop.arguments("run", other), 2)
    assert code == 2
    for part in ("was saved in another layout", "zero_stage 0 -> 1", "optimizer AdamW -> SGD"):
        assert part in shown
    result = run_job(shop.arguments("run", other), 2)
    assert result.exit_codes == (2, 2)
    assert "cannot use the optimizer state of" in flat(result.stderr[0])
    assert _contents(shop.folder / "run") == before


def test_resume_with_other_data_is_refused(shop: Workshop):
    """The same paths, other content: only reading it tells."""
    arguments = shop.arguments("run", shop.config(), steps=1)
    run_job(arguments, 2).check()
    write_text(shop.folder / "text", seed=5)
    result = run_job([*arguments, "--train_steps", "3"], 2)
    assert result.exit_codes == (2, 2)
    said = flat(result.stderr[0])
    assert "data = " in said and "holds other tokens" in said and "Restore the data" in said
    assert [line["step"] for line in shop.steps("run")] == [1]
    assert shop.outcome("run")["status"] == "wrong_job"


def test_resume_of_another_runs_checkpoint_is_refused(shop: Workshop, capsys: pytest.CaptureFixture[str]):
    run_job(shop.arguments("run", shop.config()), 1).check()
    arguments = shop.arguments("other", shop.config(), "--resume", str(shop.latest("run")), "--seed", "7")
    code, shown = checked(capsys, arguments, 1)
    assert code == 2
    assert "belongs to another run: seed 1234 there, 7 here" in shown
    assert not (shop.folder / "other").exists()


@pytest.mark.parametrize("damage", ["shorter", "missing", "manifest"])
def test_a_damaged_checkpoint_is_refused(damage: str, shop: Workshop, capsys: pytest.CaptureFixture[str]):
    run_job(shop.arguments("run", shop.config()), 1).check()
    path = shop.latest("run")
    shard = next(iter(sorted(path.glob("*.pt"))))
    if damage == "shorter":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "missing":
        shard.unlink()
    else:
        (path / "manifest.json").write_text("{", encoding="utf-8")
    code, shown = checked(capsys, shop.arguments("run", shop.config()), 1)
    assert code == 2
    assert "resume = " in shown
    assert ("manifest.json cannot be read" if damage == "manifest" else shard.name) in shown
    assert "Name another checkpoint with --resume PATH" in shown
    assert run_job(shop.arguments("run", shop.config()), 1).exit_codes == (2,)


def test_numbers_that_somebody_changed_are_refused_before_a_step(shop: Workshop):
    arguments = [*shop.arguments("run", shop.config(), steps=2), "--log_samples"]
    run_job(arguments, 1).check()
    path, samples = (shop.folder / "run" / name for name in ("metrics.jsonl", "samples.jsonl"))
    for file in (path, samples):
        file.write_text("{}\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    before = _contents(shop.folder / "run")
    result = run_job([*arguments, "--train_steps", "3"], 1)
    assert result.exit_codes == (2,)
    said = flat(result.stderr[0])
    assert "metrics.jsonl, line 1: not a metrics object" in said and "move the file away" in said
    assert "samples.jsonl, line 1: not the samples of a step" in said
    assert _contents(shop.folder / "run") == before
    path.unlink()
    samples.unlink()
    run_job([*arguments, "--train_steps", "3"], 1).check()
    assert [line["step"] for line in shop.steps("run")] == [3]


def test_data_too_small_is_refused_by_every_rank_and_leaves_the_folder_free(shop: Workshop):
    """Only known once the text is tokens: the ranks find it, before they meet."""
    small = shop.folder / "small"
    small.mkdir()
    for number in range(2):
        (small / f"{number}.txt").write_text("short", encoding="utf-8")
    arguments = shop.arguments("run", shop.config())
    result = run_job([str(small) if each == shop.text() else each for each in arguments], 2)
    assert result.exit_codes == (2, 2)
    said = flat(result.stderr[0])
    assert "data = " in said and "Give more text, or a smaller --seq_length" in said
    assert not (shop.folder / "run" / "run.json").exists()
    run_job(arguments, 2).check()
    saved = json.loads((shop.folder / "run" / "run.json").read_text(encoding="utf-8"))
    assert saved["options"]["data"] == [shop.text()]


def _contents(folder: Path) -> dict[str, bytes]:
    """Files of a run but for the word about its last start."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "outcome.json")
    return {str(path): path.read_bytes() for path in files}
