"""Two hosts, each with a disk of its own: saved, verified and loaded without a common folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.base.problems import JobError
from pipeline.checkpoints import saver
from pipeline.checkpoints.load import load_checkpoint
from pipeline.checkpoints.manifest import TrainState, read_checkpoint
from pipeline.checkpoints.resume import select_checkpoint
from pipeline.checkpoints.verification import Verifier, agree_on_checkpoint
from pipeline.engine.build import build_engine
from pipeline.engine.engine import TrainEngine
from pipeline.job.job import Job
from tests.checkpoints.small import job, save_checkpoint, start, train
from tests.harness import run_ranks

ADAM = {"type": "AdamW", "params": {"lr": 0.1}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 1": {"zero_optimization": {"stage": 1}},
    "zero 3": {"zero_optimization": {"stage": 3}},
    "tensor": {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}},
    "pipeline": {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_host_keeps_its_own_and_gets_what_it_needs(name: str, tmp_path: Path):
    jobs = []
    for host in ("host0", "host1"):
        (tmp_path / host).mkdir()
        jobs.append(job(tmp_path / host, optimizer=ADAM, **LAYOUTS[name]))
    assert run_ranks(save_and_resume, 2, jobs) == [True, True]
    checkpoints = [read_checkpoint(tmp_path / h / "run/checkpoints/global_step1") for h in ("host0", "host1")]
    assert [each.shared for each in checkpoints] == [False, False]
    assert checkpoints[0].files == checkpoints[1].files
    for index, each in enumerate(checkpoints):
        own = [n for n, entry in each.files.items() if "optim_states" in n and entry.host == index]
        assert all((each.path / name).exists() for name in own)


def save_and_resume(jobs: list[Job]) -> bool:
    """Two steps in one go, and with a stop between, are the same."""
    mine = jobs[int(os.environ["RANK"])]
    engine = on_own_host(start(mine))
    train(engine, 1)
    save_checkpoint(engine, mine, TrainState(step=1))
    wanted = train(engine, 2)
    parallel = engine.parallel
    agreed = agree_on_checkpoint(mine, select_checkpoint(mine), Verifier(parallel, 0))
    assert agreed.checkpoint is not None
    engine = on_own_host(build_engine(mine, parallel))
    load_checkpoint(engine, agreed.checkpoint)
    result = train(engine, 2)
    assert torch.isfinite(torch.tensor(result.loss))
    return (result.loss, result.grad_norm) == (wanted.loss, wanted.grad_norm)


def on_own_host(engine: TrainEngine) -> TrainEngine:
    """As if this rank were the only one of its host."""
    engine.deepspeed.local_rank = 0
    return engine


def test_nothing_is_removed_before_the_new_one_counts_on_every_host(tmp_path: Path):
    jobs = []
    for host in ("host0", "host1"):
        (tmp_path / host).mkdir()
        made = job(tmp_path / host, optimizer=ADAM, zero_optimization={"stage": 1})
        jobs.append(replace(made, saves=replace(made.saves, keep_last=1)))
    first, second = run_ranks(save_where_one_host_cannot, 2, jobs)
    assert first == (1, ["global_step1", "global_step2", "latest"])
    assert second == (1, ["global_step1", "latest"])


def save_where_one_host_cannot(jobs: list[Job]) -> tuple[int, list[str]]:
    """The second host's disk refuses the manifest of step 2: what both resume from, and what is here."""
    rank = int(os.environ["RANK"])
    engine = on_own_host(start(jobs[rank]))
    saving = saver.Saver(engine, jobs[rank])
    saving.begin(TrainState(step=1))
    if rank == 1:
        saver.write_manifest = lambda *_: saving.folder.mkdir()  # which is there
    train(engine, 1)
    with pytest.raises(saver.SaveFailed):
        saving.begin(TrainState(step=2))
    agreed = agree_on_checkpoint(jobs[rank], select_checkpoint(jobs[rank]), Verifier(engine.parallel, 0))
    assert agreed.checkpoint is not None
    return agreed.checkpoint.state.step, sorted(path.name for path in saving.folder.iterdir())


def test_a_change_that_needs_the_parts_of_others_is_refused_on_every_rank(tmp_path: Path):
    """Offload is no part of the layout, and changes what lies where in the files."""
    saving, going_on = [], []
    for host in ("host0", "host1"):
        (tmp_path / host).mkdir()
        saving.append(job(tmp_path / host, optimizer=ADAM, zero_optimization={"stage": 1}))
        turned = {"stage": 1, "round_robin_gradients": True}
        going_on.append(job(tmp_path / host, optimizer=ADAM, zero_optimization=turned))
    refused = run_ranks(save_and_change, 2, saving, going_on)
    assert all("each of its hosts holds a part" in said and "with the settings" in said for said in refused)
    assert refused[0].replace("host0", "host1") == refused[1]


def save_and_change(saving: list[Job], going_on: list[Job]) -> str:
    rank = int(os.environ["RANK"])
    engine = on_own_host(start(saving[rank]))
    train(engine, 1)
    save_checkpoint(engine, saving[rank], TrainState(step=1))
    checkpoint = select_checkpoint(going_on[rank]).checkpoint
    assert checkpoint is not None
    engine = on_own_host(build_engine(going_on[rank], engine.parallel))
    with pytest.raises(JobError) as refused:
        load_checkpoint(engine, checkpoint)
    return str(refused.value)
