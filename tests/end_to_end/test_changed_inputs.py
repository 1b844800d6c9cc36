"""A job is resolved once: what its user's files become after the start changes neither the run, nor its
checkpoints, nor what a later start resumes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.tokenizer import ByteTokenizer
from tests.end_to_end.jobs import Workshop, replace_argument, run_faulty_job, write_text
from tests.harness import run_job

MODEL = {"model_type": "gpt2", "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 257}
STEPS = 4


def change_after_step(_: list[str], rank: int, step: int, broken: list[str], moved: list[str]) -> None:
    """After so many steps, files `broken` hold no valid word any more, and what is `moved` is not there."""
    from pipeline.engine.engine import TrainEngine

    train_step = TrainEngine.train_step

    def changing(engine: TrainEngine, *args: Any) -> Any:
        result = train_step(engine, *args)
        if engine.step == step and rank == 0:
            for path in broken:
                Path(path).write_text('{"sources": [{"data": 7}]')
            for path in moved:
                Path(path).rename(f"{path}.away")
        return result

    TrainEngine.train_step = changing


def arguments(shop: Workshop, run: str, *more: str, steps: int = STEPS) -> list[str]:
    """A run on a blend with a validation set, whose every file lies in the user's folder."""
    mine = shop.folder / "mine"
    if not mine.exists():
        mine.mkdir()
        for seed, name in enumerate(("books", "code", "exam")):
            write_text(mine / name, seed, 2)
        ByteTokenizer().save(mine / "tokenizer")
        (mine / "model").mkdir()
        (mine / "model" / "config.json").write_text(json.dumps(MODEL))
        ByteTokenizer().save(mine / "model")
        parts = {"books": 0.6, "code": 0.4}
        sources = [{"name": name, "data": str(mine / name), "weight": share} for name, share in parts.items()]
        (mine / "blend.json").write_text(json.dumps({"sources": sources}))
        shutil.copy(shop.config("original"), mine / "ds.json")
    return [
        *("--deepspeed_config", str(mine / "ds.json"), "--model", str(mine / "model")),
        *("--data_blend", str(mine / "blend.json"), "--validation", f"exam={mine / 'exam'}"),
        *("--seq_length", "32", "--train_steps", str(steps), "--save_interval", "1", "--eval_interval", "2"),
        *("--sample_tokens", "4", "--log_samples", "--output_dir", str(shop.folder / run), *more),
    ]


def manifests(shop: Workshop, run: str) -> dict[str, dict[str, Any]]:
    """What each checkpoint says of the run that saved it."""
    found = sorted((shop.folder / run / "checkpoints").glob("*/manifest.json"))
    read = {path.parent.name: json.loads(path.read_text()) for path in found}
    return {tag: {key: each[key] for key in ("identity", "settings", "layout")} for tag, each in read.items()}


def whole_run(shop: Workshop, *more: str) -> None:
    run_job(arguments(shop, "whole", *more, steps=STEPS + 2), 1).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "moved", "more"),
    [
        (["blend.json"], [], []),
        (["blend.json", "ds.json", "model/config.json"], ["tokenizer"], ["--tokenizer", "{}/tokenizer"]),
        ([], [""], []),
    ],
    ids=["blend edited", "files broken, tokenizer gone", "everything gone"],
)
def test_files_changed_after_the_start_change_nothing(
    tmp_path: Path, broken: list[str], moved: list[str], more: list[str]
) -> None:
    shop, mine = Workshop(tmp_path), tmp_path / "mine"
    more = [word.format(mine) for word in more]
    whole_run(shop, *more)
    shutil.copytree(mine, tmp_path / "kept")
    names = [[str(mine / name) for name in each] for each in (broken, moved)]
    part = arguments(shop, "run", *more)
    result = run_faulty_job(part, 1, change_after_step, 1, *names)
    assert result.exit_codes == (0,), result.stdout[0] + result.stderr[0]
    assert "could not be saved" not in result.stdout[0] + result.stderr[0]
    saved = manifests(shop, "run")
    assert list(saved) == [f"global_step{step}" for step in range(1, STEPS + 1)]
    assert all(each == saved["global_step1"] for each in saved.values()), "what was in force at the start"
    assert (shop.latest("run") / "tokenizer" / "tokenizer.json").is_file()

    shutil.rmtree(mine, ignore_errors=True)
    (tmp_path / "kept").rename(mine)
    said = run_job(arguments(shop, "run", *more, steps=STEPS + 2), 1).check().stdout[0]
    assert "resumed from" in said and "data." not in said, "only the length is another one"
    assert shop.steps("run") == shop.steps("whole")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gradient_clipping": 0.5}, "gradient_clipping 1.0 on rank 0, 0.5 on rank 1"),
        ({"pipeline": {"stages": 2}}, "layout.pipeline 1 on rank 0, 2 on rank 1"),
    ],
    ids=["another number", "another layout"],
)
def test_a_file_changed_while_ranks_start_ends_them_all(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    shop = Workshop(tmp_path)
    before, after = shop.config("before"), shop.config("after", **change)
    result = run_faulty_job(shop.arguments("run", before), 2, replace_argument, 1, before, after)
    assert result.exit_codes == (1, 1)
    for stderr in result.stderr:
        assert "JobMismatch: ranks [1] have read another job than rank 0" in stderr
        assert said in stderr
    assert not (tmp_path / "run" / "run.json").exists()
