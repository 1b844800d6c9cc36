"""A checkpoint that the code of an earlier day wrote (torch 2.13, DeepSpeed 0.19.8) resumes as it did then.

`fixtures/pp2_tp2_zero1.tar.xz` holds its text, model.json, ds.json and the folder of its run: two steps,
AdamW, ZeRO 1 on two stages of two tensor ranks. `fixtures/losses.json` holds the steps after it, as that code
took them on from there. Neither is ever made anew: they stand for what users have on their disks.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.checkpoints.layouts import find
from tests.checkpoints.runs import losses
from tests.harness import run_job

FIXTURES = Path(__file__).parent / "fixtures"
SAME, OTHER = "pp2 tp2 zero1", "dp2 zero2"
# Other CPUs add in another order; another layout as well.
TOLERANCE = 1e-5


def arguments(config: str) -> list[str]:
    """The command line, relative to the folder that the fixture makes; the data's names are such paths."""
    return [
        *("--deepspeed_config", config, "--model", "model.json", "--data", "text", "--seq_length", "16"),
        *("--train_steps", "4", "--sample_tokens", "0", "--eval_samples", "0", "--output_dir", "run"),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURES / "pp2_tp2_zero1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("layout", [SAME, OTHER])
def test_resumes_with_the_losses_of_its_day(folder: Path, layout: str) -> None:
    config = json.loads((folder / "ds.json").read_text(encoding="utf-8"))
    common = {key: config[key] for key in ("train_batch_size", "gradient_clipping", "optimizer")}
    (folder / "other.json").write_text(json.dumps(common | find(OTHER).config), encoding="utf-8")
    command = arguments("ds.json" if layout == SAME else "other.json")
    said = run_job(command, find(layout).ranks, cwd=folder).check().stdout[0]
    assert "resumed from run/checkpoints/global_step2" in said
    expected = json.loads((FIXTURES / "losses.json").read_text(encoding="utf-8"))
    found = [[step, loss] for step, loss, _ in losses(folder / "run") if step > 2]
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=TOLERANCE)
