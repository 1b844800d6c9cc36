"""W&B and Comet have one run per run, each step once, whatever network and starts there were.

The packages are stood in for: theirs need an account. Names of parameters, and what a service does with steps
that it has, are those of wandb 0.31 (tried against a small server) and comet_ml 3.58.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.base.json_reader import Document
from pipeline.job.deepspeed_dict import resolved_monitors
from pipeline.job.facts import Settings
from pipeline.training.tracked_runs import Start, tracked_runs

BLOCKS = {"wandb": {"project": "p", "group": "g", "team": "t"}}


class Wandb(SimpleNamespace):
    """The module: runs at the server, (step, row) each, and records on disk, as `wandb sync` finds them."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        self.server: dict[str, list] = {}
        self.inits: list[dict] = []
        self.online, self.settings = True, SimpleNamespace(mode="online")

    def setup(self) -> Any:
        return self

    def init(
        self, entity=None, project=None, dir=None, id=None, *, group=None, mode=None, resume=None
    ) -> Any:
        self.inits.append({"entity": entity, "project": project, "group": group, "id": id, "resume": resume})
        if self.settings.mode == "disabled":
            return SimpleNamespace(
                offline=False,
                disabled=True,
                starting_step=0,
                log=lambda row, step: None,
                finish=lambda exit_code: None,
            )
        offline = (mode or self.settings.mode) == "offline"
        if not offline and not self.online:
            raise self.Error("Failed to get resume status\nno such host")
        assert offline or resume == "allow"
        kind = "offline-run" if offline else "run"
        record = Path(dir) / "wandb" / f"{kind}-20260101_{len(self.inits):06}-{id}" / f"run-{id}.wandb"
        record.parent.mkdir(parents=True)
        rows = [] if offline else self.server.setdefault(id, [])
        return Run(rows, record, offline)

    def sync(self, folder: Path) -> None:
        for record in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
            marker = record.with_name(record.name + ".synced")
            if not marker.exists():
                self.server.setdefault(record.stem[4:], []).extend(json.loads(record.read_text()))
                marker.touch()


class Run:
    def __init__(self, rows: list, record: Path, offline: bool) -> None:
        self.offline, self.disabled, self._rows, self._record = offline, False, rows, record
        self.starting_step = rows[-1][0] + 1 if rows else 0

    def log(self, data: dict, step: int) -> None:
        if self._rows and step == self._rows[-1][0]:
            self._rows[-1][1].update(data)
        elif step >= self.starting_step and (not self._rows or step > self._rows[-1][0]):
            self._rows.append([step, data])
        else:
            raise AssertionError(f"W&B ignores step {step}")

    def finish(self, exit_code: int) -> None:
        self._record.write_text(json.dumps(self._rows) if self.offline else "")


@pytest.fixture
def wandb(monkeypatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(__import__("sys").modules, "wandb", module)
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    return module


class Job:
    """Starts of one run; metrics.jsonl is what they leave."""

    def __init__(self, folder: Path, blocks: dict) -> None:
        self.folder, self.blocks, self.lines = folder, blocks, {}

    def start(self, first: int, last: int, *, due: bool = False) -> None:
        recorded = max(self.lines, default=0)
        self.lines = {step: row for step, row in self.lines.items() if step < first}
        start = Start(self.folder, first - 1, recorded, due, samples_per_step=8)
        given = {key: {"enabled": True, **block} for key, block in self.blocks.items()}
        blocks = resolved_monitors(Settings(Document("ds.json", given)), str(self.folder))
        (run,) = tracked_runs(blocks, start, list(self.lines.items()))
        if due:
            run.log(first - 1, {"eval/loss": 0.5}, late=True)
        for step in range(first, last + 1):
            self.lines[step] = {"train/loss": float(step)}
            run.log(step, self.lines[step])
        run.close(failed=False)


def steps(rows: list) -> list[int]:
    return [step for step, _ in rows]


# Each start: W&B's mode, whether its server answers, the first step and the last.
FATES = {
    "online, trained again from 4": [("online", True, 1, 6), ("online", True, 5, 9)],
    "offline": [("offline", True, 1, 6), ("offline", True, 5, 9), ("offline", True, 8, 12)],
    "the network comes back": [("online", False, 1, 6), ("online", True, 5, 9)],
    "the network goes and comes": [("online", True, 1, 6), ("online", False, 5, 9), ("online", True, 8, 12)],
    "offline after online": [("online", True, 1, 6), ("offline", True, 5, 9), ("offline", True, 8, 12)],
}


@pytest.mark.parametrize("synced", [False, True], ids=["", "synced after each start"])
@pytest.mark.parametrize("fate", FATES.values(), ids=FATES)
def test_wandb_has_one_run_with_each_step_once(wandb, tmp_path, fate, synced):
    job = Job(tmp_path, BLOCKS)
    for mode, online, first, last in fate:
        wandb.settings.mode, wandb.online = mode, online
        job.start(first, last)
        if synced:
            wandb.sync(tmp_path)
    wandb.sync(tmp_path)
    ((run_id, rows),) = wandb.server.items()
    assert steps(rows) == list(range(1, fate[-1][3] + 1))
    given = {(call["entity"], call["project"], call["group"], call["id"]) for call in wandb.inits}
    assert given == {("t", "p", "g", run_id)}
    assert json.loads((tmp_path / "monitors.json").read_text())["id"] == run_id


def test_a_start_with_wandb_switched_off_loses_nothing_of_those_before(wandb, tmp_path):
    job = Job(tmp_path, BLOCKS)
    for wandb.settings.mode, first, last in (("offline", 1, 6), ("disabled", 5, 9), ("offline", 8, 12)):
        job.start(first, last)
    wandb.sync(tmp_path)
    (rows,) = wandb.server.values()
    assert steps(rows) == list(range(1, 13))


def test_a_run_from_the_first_step_is_another_run(wandb, tmp_path):
    job = Job(tmp_path, BLOCKS)
    job.start(1, 6)
    job.start(1, 3)
    assert [steps(rows) for rows in wandb.server.values()] == [[1, 2, 3, 4, 5, 6], [1, 2, 3]]


def test_wandb_gets_the_steps_before_it_was_turned_on(wandb, tmp_path):
    job = Job(tmp_path, BLOCKS)
    job.lines = {step: {"train/loss": float(step)} for step in range(1, 7)}
    job.start(7, 8)
    assert [steps(rows) for rows in wandb.server.values()] == [list(range(1, 9))]


def test_an_evaluation_that_was_left_to_the_next_start_is_not_lost(wandb, tmp_path):
    job = Job(tmp_path, BLOCKS)
    job.start(1, 4)
    job.start(5, 6, due=True)
    (rows,) = wandb.server.values()
    assert rows[4] == [5, {"eval/loss": 0.5, "train/loss": 5.0}]


def test_the_users_own_choices_win(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    Job(tmp_path, BLOCKS).start(1, 2)
    assert list(wandb.server) == ["mine"]
    assert list((tmp_path / "elsewhere/wandb").iterdir()) and not (tmp_path / "wandb").exists()


def test_a_spoilt_record_names_its_file(wandb, tmp_path):
    (tmp_path / "monitors.json").write_text("{")
    with pytest.raises(ValueError, match=r"monitors\.json cannot be read .*; remove it"):
        Job(tmp_path, BLOCKS).start(2, 3)


class Comet(SimpleNamespace):
    def __init__(self) -> None:
        self.points: dict[str | None, list] = {}
        self.starts: list[dict] = []
        self.reachable = True

    def ExperimentConfig(self, offline_directory=None) -> str:
        return offline_directory

    def start(
        self, api_key=None, workspace=None, project=None, *, experiment_key=None, mode=None, online=None,
        experiment_config=None,
    ) -> Any:  # fmt: skip
        self.starts.append({"project": project, "online": online, "archives": experiment_config})
        if online is not False and not self.reachable:
            raise ConnectionError("no such host")
        key = experiment_key or f"new {len(self.starts)}"
        return SimpleNamespace(
            log_metric=lambda name, value, step: self.points.setdefault(key, []).append(step),
            end=lambda: None,
        )


@pytest.fixture
def comet(monkeypatch) -> Comet:
    module = Comet()
    monkeypatch.setitem(__import__("sys").modules, "comet_ml", module)
    for name in ("COMET_EXPERIMENT_KEY", "COMET_OFFLINE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_comet_has_one_experiment_with_each_point_once(comet, tmp_path):
    job = Job(tmp_path, {"comet": {"project": "p", "samples_log_interval": 8}})
    job.start(1, 6)
    comet.reachable = False
    job.start(5, 9)
    ((key, points),) = comet.points.items()
    assert points == list(range(1, 10)) and len(key) == 32 and key.isalnum()
    archives = str(tmp_path / "comet")
    assert [start["online"] for start in comet.starts] == [True, True, False]
    assert {start["archives"] for start in comet.starts} == {archives}


def test_comets_interval_counts_samples(comet, tmp_path):
    Job(tmp_path, {"comet": {"samples_log_interval": 20}}).start(1, 8)
    assert list(comet.points.values()) == [[1, 4, 7]]


def test_comet_makes_an_experiment_for_each_start_where_asked_to(comet, tmp_path):
    job = Job(tmp_path, {"comet": {"mode": "create", "samples_log_interval": 1}})
    job.start(1, 3)
    job.start(3, 4)
    assert list(comet.points.values()) == [[1, 2, 3], [3, 4]]
