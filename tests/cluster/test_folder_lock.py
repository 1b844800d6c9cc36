"""An output folder belongs to one job at a time, for as long as its first rank lives."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline import check
from pipeline.base import files
from pipeline.base.problems import EXIT_WRONG_JOB, JobError
from pipeline.cluster.folder_lock import Timing, only_job, running_problems
from pipeline.launch import launch, restart_loop

ROOT = Path(__file__).resolve().parents[2]


def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    assert running_problems(folder) == []
    assert not folder.exists()
    with only_job(folder):
        assert "another job is running" in running_problems(folder)[0].rule
        with pytest.raises(JobError, match="another job is running"), only_job(folder):
            pass
    assert running_problems(folder) == []
    with only_job(folder):
        pass


def test_a_job_that_is_killed_leaves_the_folder_free(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pipeline.cluster.folder_lock import only_job\n"
        "with only_job(sys.argv[1]): print('here', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert running_problems(tmp_path)
        holder.kill()
    assert running_problems(tmp_path) == []


def test_a_file_system_without_locks_excludes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    with only_job(tmp_path, Timing(settle=0.1)):
        assert "another job is running" in running_problems(tmp_path)[0].rule
        with pytest.raises(JobError, match="another job is running"), only_job(tmp_path):
            pass
    assert running_problems(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="cannot be written"), only_job(tmp_path / "file" / "folder"):
        pass


def test_a_start_in_the_folder_of_a_running_job_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restart_loop, "start_once", lambda *arguments: pytest.fail("ranks were started"))
    arguments = ["--output_dir", str(tmp_path), "--train_steps", "2"]
    with only_job(tmp_path):
        assert launch.main(arguments) == EXIT_WRONG_JOB
        assert "another job is running in this folder" in " ".join(capsys.readouterr().err.split())
        # The check says beforehand what the start would, and who it is.
        assert check.main(arguments) == EXIT_WRONG_JOB
        said = " ".join(capsys.readouterr().out.split())
        assert "another job is running in this folder" in said and "This job cannot start: 1 error" in said
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(psutil.Process().create_time()))
        assert f"(process {os.getpid()} on {socket.gethostname()}, since {since})" in said
        # Of imagined ranks it says nothing about this machine.
        assert check.main([*arguments, "--world_size", "2"]) == 0
    assert check.main(arguments) == 0


@pytest.mark.slow
def test_a_rank_that_comes_too_late_for_the_check_is_refused_and_says_why(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "pipeline" / "pretrain.py", "--output_dir", tmp_path]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    with only_job(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {"lock", "lease.json"}
        late = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert late.returncode == EXIT_WRONG_JOB, late.stderr
    assert "another job is running in this folder" in " ".join(late.stderr.split())
    assert f"(process {os.getpid()} on " in late.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]  # nothing else was written
