"""A checkpoint whose digests do not match is skipped by all ranks, one that would run things refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from pipeline.checkpoints.files import digest_of
from pipeline.checkpoints.manifest import _digest
from tests.checkpoints.test_unpickling import Calls
from tests.end_to_end.jobs import Workshop
from tests.harness import run_job


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
def test_a_flipped_bit_costs_one_interval_and_no_step_of_the_metrics(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), "--save_interval", "2", steps=6)
    run_job(arguments, 2).check()
    whole, folder = shop.steps("run"), shop.folder / "run" / "checkpoints"
    for step in (4, 6):
        shard = max((folder / f"global_step{step}").glob("*.pt"), key=lambda path: path.stat().st_size)
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    result = run_job(arguments, 2).check()
    said = flat(result.stdout[0])
    for step in (6, 4):
        assert f"skipped {folder}/global_step{step}: it is damaged: " in said
    assert f"resumed from {folder}/global_step2" in said
    assert shop.steps("run") == whole
    assert shop.latest("run").name == "global_step6"
    again = run_job(arguments, 2).check()
    assert "the run had finished at step 6 before" in again.stdout[0]


@pytest.mark.slow
def test_a_file_that_would_run_something_ends_the_start_on_every_rank(shop: Workshop):
    arguments = shop.arguments("run", shop.config())
    run_job(arguments, 2).check()
    path, witness = shop.latest("run"), shop.folder / "witness"
    shard = sorted(path.glob("*.pt"))[0]
    torch.save(Calls(os.system, f"touch {witness}"), shard)
    _sign_again(path, shard)
    result = run_job(arguments, 2)
    assert result.exit_codes == (2, 2)
    assert "would call posix.system" in flat(result.stderr[0])
    assert "--allow_pickle posix.system" in flat(result.stderr[0])
    assert not witness.exists()


@pytest.mark.slow
def test_old_checkpoints_go_and_new_settings_are_told(shop: Workshop):
    arguments = shop.arguments("run", shop.config(), "--save_interval", "1", "--keep_last", "1", steps=3)
    run_job(arguments, 2).check()
    folder = shop.folder / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step3", "latest"]
    changed = shop.config(
        "changed", train_batch_size=4, gradient_clipping=0.5, zero_optimization={"stage": 1}
    )
    more = ["--deepspeed_config", changed, "--train_steps", "5", "--keep_every", "4"]
    result = run_job([*arguments, *more], 2).check()
    said = flat(result.stdout[0])
    assert f"resumed from {folder}/global_step3; layout changed: zero_stage 0 -> 1" in said
    for change in ("batch.train_batch_size: 8 -> 4", "gradient_clipping: 1 -> 0.5", "train_steps: 3 -> 5"):
        assert change in said
    assert sorted(path.name for path in folder.iterdir()) == ["global_step4", "global_step5", "latest"]
    assert [line["step"] for line in shop.steps("run")] == [1, 2, 3, 4, 5]


def _sign_again(path: Path, changed: Path) -> None:
    """What somebody would do who can write there."""
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    entry = manifest["files"][changed.name]
    entry |= {"bytes": changed.stat().st_size, "digest": digest_of(changed)}
    manifest["digest"] = _digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
