"""Time limits, stop files, and how they are reported."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline import pretrain
from pipeline.base.problems import JobError
from pipeline.base.user_input import parse_duration
from pipeline.checkpoints.output import space_problems
from pipeline.cluster.agent.rank_link import RankLink
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.job.job import Job
from pipeline.job.options import Options, option_problems, parse_options
from pipeline.job.stop_file import read_stamp, stamp_of, stamped, with_stamp
from pipeline.training import rank, stopping
from pipeline.training.preparing import _stopping
from pipeline.training.signals import StopRequest
from pipeline.training.stopping import STOP_FILE, TIME_LIMIT, StopFile, Stopping, TimeLimit, reason_text
from tests.checkpoints.saved_runs import job_in


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3600", 3600),
        ("90m", 5400),
        ("3h30m", 12600),
        ("2d", 172800),
        ("1d2h3m4s", 93784),
        ("30:00", 1800),
        ("12:30:00", 45000),
        ("1-12", 129600),
        ("1-12:00", 129600),
        ("1-12:00:05", 129605),
    ],
)
def test_lengths_of_time(text: str, seconds: int):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "1.5h", "-3", "1h30", "30m2h", "1-24:00", "10:60", "1:2:3:4", "h", "³"]
)
def test_what_is_no_length_of_time(text: str):
    with pytest.raises(ValueError, match=r"length of time|more than"):
        parse_duration(text)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_limit_leaves_time_for_a_save_and_a_step():
    clock = Clock()
    limit = TimeLimit(100, None, first_save=20, clock=clock)
    limit.record_step(2)
    assert limit.margin == 1.5 * (20 + 2) + stopping.LEAVING_SECONDS
    clock.now += 100 - limit.margin - 0.1
    assert not limit.reached
    clock.now += 0.2
    assert limit.reached


def test_a_measured_save_replaces_the_guess_and_the_slowest_counts():
    limit = TimeLimit(100, None, first_save=20, clock=Clock())
    limit.record_save(4)
    assert limit.margin == 1.5 * 4 + stopping.LEAVING_SECONDS
    limit.record_save(6)
    limit.record_save(5)
    assert limit.margin == 1.5 * 6 + stopping.LEAVING_SECONDS


def test_a_slow_first_step_is_forgotten():
    limit = TimeLimit(100, None, first_save=0, clock=Clock())
    limit.record_step(50)
    for _ in range(300):
        limit.record_step(1)
    assert limit.margin == 1.5 + stopping.LEAVING_SECONDS


def test_a_limit_counts_from_the_launch():
    clock = Clock()
    limit = TimeLimit(100, time.time() - 60, first_save=0, clock=clock)
    clock.now += 100 - 60 - stopping.LEAVING_SECONDS - 1
    assert not limit.reached
    clock.now += 1.5
    assert limit.reached


def test_a_launch_in_the_future_is_now():
    """The launch's host may be ahead."""
    clock = Clock()
    limit = TimeLimit(100, time.time() + 3600, first_save=0, clock=clock)
    clock.now += 96
    assert limit.reached


@pytest.fixture
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "FILE_SECONDS", 0.0)


@pytest.mark.usefixtures("look_always")
def test_a_file_that_appears_counts(tmp_path: Path):
    file = StopFile(tmp_path / "STOP", removed_when_obeyed=True, before=None)
    assert not file.seen()
    (tmp_path / "STOP").touch()
    assert file.seen()
    file.obeyed()
    assert not (tmp_path / "STOP").exists()
    assert file.seen()  # what was seen was seen


@pytest.mark.usefixtures("look_always")
def test_a_file_from_before_counts_when_it_is_touched(tmp_path: Path):
    path = tmp_path / "STOP"
    path.touch()
    os.utime(path, (1, 1))
    file = StopFile(path, removed_when_obeyed=False, before=stamp_of(path))
    assert not file.seen()
    path.touch()
    assert file.seen()
    file.obeyed()
    assert path.exists()


def test_a_file_is_looked_for_now_and_then_only(tmp_path: Path):
    file = StopFile(tmp_path / "STOP", removed_when_obeyed=True, before=None)
    assert not file.seen()
    (tmp_path / "STOP").touch()
    assert not file.seen()


@pytest.mark.usefixtures("look_always")
def test_what_cannot_be_removed_does_not_undo_the_stop(tmp_path: Path):
    file = StopFile(tmp_path / "STOP", removed_when_obeyed=True, before=None)
    (tmp_path / "STOP").mkdir()
    assert file.seen()
    file.obeyed()
    there = stamp_of(tmp_path / "STOP")
    assert not StopFile(tmp_path / "STOP", removed_when_obeyed=True, before=there).seen()


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("stale", [True, False])
def test_a_file_that_appears_while_the_job_is_read_counts(
    named: bool, stale: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It takes seconds until rank 0 looks again; one that was there before does not count."""
    path = tmp_path / "run" / "STOP"
    path.parent.mkdir()
    if stale:
        path.touch()
        os.utime(path, (1, 1))
    codes = []

    def read(options: Options, *_: object) -> Job:
        if not stale:
            path.touch()
        job = job_in(tmp_path)
        return replace(job, stops=replace(job.stops, file=options.stop_file))

    def be(job: Job, environment: RankEnvironment, stop: StopRequest, link: RankLink) -> int:
        codes.append(_stopping(job, environment.rank, stop).code())
        return 0

    monkeypatch.setattr(rank, "read_job", read)
    monkeypatch.setattr(rank, "_train", be)
    arguments = ["--stop_file", str(path)] if named else ["--output_dir", str(path.parent)]
    assert pretrain.main(arguments) == 0
    assert codes == [0 if stale else STOP_FILE]


def test_the_launchs_look_counts_on_its_own_system_only(tmp_path: Path):
    path = tmp_path / "STOP"
    first = with_stamp(Options(output_dir=str(tmp_path)), str(tmp_path))
    assert with_stamp(Options(), None) == Options()
    assert read_stamp(first.stop_stamp) is None
    path.touch()
    assert with_stamp(first, str(tmp_path)) == first
    _, _, there = first.stop_stamp.partition(":")
    elsewhere = with_stamp(replace(first, stop_stamp=f"another system:{there}"), str(tmp_path))
    assert read_stamp(elsewhere.stop_stamp) == stamp_of(path)
    assert read_stamp(with_stamp(first, str(tmp_path / "other")).stop_stamp) is None
    for options, problems in ((first, 0), (elsewhere, 0), (Options(stop_stamp="7:none"), 1)):
        assert len(list(option_problems(options))) == problems


def test_an_agent_looks_for_the_file_that_the_command_line_names(tmp_path: Path):
    for given, path in (
        (["--output_dir", str(tmp_path)], tmp_path / "STOP"),
        ([f"--output_dir={tmp_path}", "--stop_file", "x:1:y"], Path("x:1:y")),
    ):
        line = stamped(given)
        options = parse_options(line)
        assert line == [*given, "--stop_stamp", options.stop_stamp] == stamped(line)
        assert options == with_stamp(options, options.output_dir) != parse_options(given)
        assert options.stop_stamp.endswith(f":none:{path}")
        assert not option_problems(options)
    assert stamped([]) == []  # MPI's launchers add nothing
    assert stamped(["--config", "run.json", "--output_dir"]) == ["--config", "run.json", "--output_dir"]


@pytest.mark.usefixtures("look_always")
def test_codes_and_their_words(tmp_path: Path):
    clock = Clock()
    limit = TimeLimit(100, None, 0, clock)
    with StopRequest() as signals:
        stops = Stopping(signals, limit, StopFile(tmp_path / "STOP", removed_when_obeyed=True, before=None))
        assert stops.code() == 0
        (tmp_path / "STOP").touch()
        assert stops.code() == STOP_FILE
        clock.now += 100
        assert stops.code() == TIME_LIMIT
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stops.code() == signal.SIGUSR1
        stops.obeyed()
    assert not (tmp_path / "STOP").exists()
    assert reason_text((0, STOP_FILE)) == "stop file"
    assert reason_text((0, TIME_LIMIT)) == "time limit"
    assert reason_text((3, signal.SIGTERM)) == "SIGTERM on rank 3"


def test_a_rank_goes_on_where_later_checkpoints_may_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A warning of the check is none of a rank's refusals."""
    options = parse_options(["--model", "tiny", "--output_dir", str(tmp_path), "--save_interval", "1"])
    place = RankEnvironment(0, 1, 0, 1, "127.0.0.1", 29500)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200 * 10**6))
    job = rank.read_job(options, place, None)
    assert [problem.severity for problem in space_problems(job)] == ["warning"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(JobError, match="no space left"):
        rank.read_job(options, place, None)
