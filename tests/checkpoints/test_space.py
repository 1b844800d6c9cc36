"""Whether a checkpoint fits: asked of the disk that the checkpoints lie on."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from pipeline.checkpoints import space
from tests.checkpoints.saved_runs import job_in

Usage = namedtuple("Usage", "free")


@pytest.mark.parametrize("small", ["run", "large"])
def test_checkpoints_may_be_a_link_to_another_disk(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = job_in(tmp_path)
    Path(job.output_dir).mkdir(exist_ok=True)
    (tmp_path / "large").mkdir()
    (Path(job.output_dir) / "checkpoints").symlink_to(tmp_path / "large")

    def usage(path: Path) -> Usage:
        on = "large" if Path(path).resolve() == (tmp_path / "large").resolve() else "run"
        return Usage(0 if on == small else 10**12)

    monkeypatch.setattr(space.shutil, "disk_usage", usage)
    assert bool(space.space_problems(job)) == (small == "large")
