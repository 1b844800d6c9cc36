"""How a launch ends: exit codes follow the job's word, signals, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cluster.agent.coordinator import Coordinator
from pipeline.cluster.agent.launch_spec import CoordinatorSettings, LaunchSpec, encode
from pipeline.cluster.outcome import Outcome, read_outcome, write_outcome
from pipeline.launch.launcher_command import Launch
from pipeline.launch.launcher_process import LauncherExit, LauncherProcess
from pipeline.launch.start import conclude, run_launch
from tests.processes import is_running

ROOT = Path(__file__).parents[2]


def start(folder: Path, code: str, stop_timeout: float = 20.0) -> int:
    """Run Python code in place of the launcher; `say(status)` writes the job's word."""
    script = folder / "launcher.py"
    script.write_text(
        "import os, signal, subprocess, sys, time\n"
        "from pipeline.cluster.outcome import Outcome, write_outcome\n"
        "def say(status, port=7, rank=0):\n"
        f"    write_outcome({str(folder)!r}, Outcome(status, 5, port, rank))\n" + code
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return run_launch(Launch((sys.executable, str(script)), environment, 7), folder, stop_timeout).exit_code


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("say('finished')", 0),
        ("say('stopped'); sys.exit(3)", 3),
        ("say('stopped')", 3),
        ("say('failed'); sys.exit(1)", 1),
        ("say('failed')", 1),
        ("say('wrong_job'); sys.exit(2)", 2),
        ("pass", 1),  # the launcher says success, the job says nothing
        ("sys.exit(3)", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1),
        ("say('finished'); os.kill(os.getpid(), signal.SIGKILL)", 0),
        ("say('finished', port=8)", 1),  # another job in the same folder
        ("say('failed', rank=1); say('stopped')", 1),  # the first failure stays
    ],
)
def test_the_exit_code_is_the_jobs_word(tmp_path: Path, code: str, expected: int) -> None:
    assert start(tmp_path, code) == expected


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("sys.exit(-9)", "a rank was killed by SIGKILL (out of memory?)"),
        ("sys.exit(-11)", "a rank was killed by SIGSEGV"),
        ("sys.exit(7)", "its launcher returned 7"),
        ("os.kill(os.getpid(), signal.SIGABRT)", "its launcher was killed by SIGABRT"),
    ],
)
def test_a_death_without_a_word_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture, code: str, told: str
) -> None:
    assert start(tmp_path, code) == 1
    assert told in capsys.readouterr().err


def test_an_outcome_of_an_earlier_start_does_not_count(tmp_path: Path) -> None:
    write_outcome(tmp_path, Outcome("finished", 5, 7))
    assert start(tmp_path, "pass") == 1


def test_outcomes_that_cannot_be_understood_do_not_count(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"status": "great", "step": 1, "master_port": 7}'):
        (tmp_path / "outcome.json").write_text(text)
        assert read_outcome(tmp_path, 7) is None


@pytest.mark.parametrize("session", [False, True])
def test_processes_that_the_launcher_leaves_behind_are_ended(tmp_path: Path, session: bool) -> None:
    """In a session of their own, too, as pdsh starts ssh; but no process of somebody else."""
    child = f"child = subprocess.Popen(['sleep', '60'], start_new_session={session})\n"
    keep = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    with subprocess.Popen(["sleep", "60"]) as other:
        assert start(tmp_path, child + keep + "os.kill(os.getpid(), signal.SIGKILL)") == 1
        assert not is_running(int((tmp_path / "pid").read_text()))
        assert other.poll() is None
        other.kill()


def test_a_shared_connection_of_ssh_is_left_to_the_user(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "silence")
    code = (
        f"silence = os.open({str(tmp_path / 'silence')!r}, os.O_RDWR)\n"
        "master = subprocess.Popen(['ssh: /home/ada/.ssh/s [mux]'], executable='/bin/cat', stdin=silence)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(master.pid))\n"
    )
    assert start(tmp_path, code) == 1
    pid = int((tmp_path / "pid").read_text())
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)


def test_after_the_stop_timeout_everything_is_killed(tmp_path: Path) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getppid(), signal.SIGTERM)\n"
    began = time.monotonic()
    assert start(tmp_path, stubborn + "time.sleep(60)", stop_timeout=0.5) == 1
    assert time.monotonic() - began < 10


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    stubborn = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGINT); time.sleep(0.5); os.kill(os.getppid(), signal.SIGINT)\n"
    )
    began = time.monotonic()
    assert start(tmp_path, stubborn + "time.sleep(60)") == 1
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("with_coordinator", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_before_there_are_ranks_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture, with_coordinator: bool, number: signal.Signals
) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(f"import os, time; os.kill(os.getppid(), {int(number)}); time.sleep(60)")
    coordinator = Coordinator(CoordinatorSettings(2, "token", 60.0, None)) if with_coordinator else None
    launch = Launch((sys.executable, str(script)), dict(os.environ), 7)
    began = time.monotonic()
    assert run_launch(launch, tmp_path, 20.0, coordinator).exit_code == 3
    assert time.monotonic() - began < 5
    said = capsys.readouterr().err
    assert f"Stopped before the first step ({number.name}): this start had nothing to save." in said
    assert "without reporting" not in said


def test_an_early_stop_ends_no_other_job(tmp_path: Path) -> None:
    """At a SIGTERM DeepSpeed's launcher goes to its hosts, and kills by name."""
    script = tmp_path / "launcher.py"
    script.write_text(
        "import os, pathlib, signal, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({str(tmp_path / 'killed')!r}).touch())\n"
        "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    )
    coordinator = Coordinator(CoordinatorSettings(2, "token", 60.0, None), everywhere=True)
    launch = Launch((sys.executable, str(script)), dict(os.environ), 7)
    assert run_launch(launch, tmp_path, 20.0, coordinator).exit_code == 3
    assert not (tmp_path / "killed").exists()


def test_agents_say_by_their_exit_code_that_ranks_had_not_begun() -> None:
    """Where each host has a launch of its own, and no rank knew its output folder yet."""
    assert conclude(None, LauncherExit(3, signal.SIGTERM, killed=False)).exit_code == 3
    assert conclude(None, LauncherExit(3, signal.SIGTERM, killed=True)).exit_code == 1
    assert conclude(None, LauncherExit(3, None, killed=False)).exit_code == 1


def test_agents_say_by_their_exit_code_that_the_job_is_wrong() -> None:
    assert conclude(None, LauncherExit(2, None, killed=False), is_told_by_code=True).exit_code == 2
    assert conclude(None, LauncherExit(2, None, killed=False)).exit_code == 1  # a coordinator would know
    assert conclude(None, LauncherExit(1, None, killed=False), is_told_by_code=True).exit_code == 1


def test_a_rank_outside_the_checked_world_is_a_wrong_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its launcher makes of the exit code."""
    caplog.set_level("INFO", "pipeline.cluster.agent")
    coordinator = Coordinator(CoordinatorSettings(2, "token", 60.0, None))
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("token")
    spec = LaunchSpec(
        hosts=(("here", 2),), address="127.0.0.1", port=coordinator.port, key_file=str(tmp_path / "key")
    )
    rank = [sys.executable, str(ROOT / "tests" / "cluster" / "agent" / "stand_in.py"), encode(spec)]
    launcher = f"import subprocess; subprocess.run({rank!r}, check=False)"
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_SIZE": "3"}
    environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7"}
    assert (
        run_launch(
            Launch((sys.executable, "-c", launcher), environment, 7), tmp_path, 20.0, coordinator
        ).exit_code
        == 2
    )
    assert "the world that was checked has 2 ranks" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_during_the_check_says_so(tmp_path: Path, number: signal.Signals) -> None:
    launch = str(ROOT / "pipeline" / "launch" / "launch.py")
    code = (
        "import os, runpy, sys, pipeline.launch.restart_loop as restart_loop\n"
        f"restart_loop.run_job = lambda *_: os.kill(os.getpid(), {int(number)})\n"
        f"sys.argv = [{launch!r}]\n"
        f"runpy.run_path({launch!r}, run_name='__main__')\n"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3 and "while no rank was running" in done.stderr


def interrupt_an_import(number: signal.Signals, module: str, script: str, *arguments: str) -> list[str]:
    """A command that runs a script of the project, and gets a signal when it imports that module."""
    path = str(ROOT / "pipeline" / script)
    code = (
        "import os, runpy, sys\n"
        "class Late:\n"
        "    def find_spec(self, name, *_):\n"
        f"        name == {module!r} and os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Late())\n"
        f"sys.argv = {[path, *arguments]!r}\n"
        f"runpy.run_path({path!r}, run_name='__main__')\n"
    )
    return [sys.executable, "-c", code]


def test_a_stop_while_the_launch_is_being_imported_is_one(tmp_path: Path) -> None:
    """As by a batch system that ends a job in its first second: no traceback, no other code."""
    line = interrupt_an_import(signal.SIGTERM, "pipeline.launch.preflight", "launch/launch.py")
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (3, "Stopped by SIGTERM before anything was started.\n")


def test_an_interrupted_rank_that_does_not_listen_yet_prints_no_traceback(tmp_path: Path) -> None:
    """Its agent and the launch say what there is to say."""
    line = interrupt_an_import(signal.SIGINT, "pipeline.checkpoints.resume", "pretrain.py", "--agent=x")
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    ended = LauncherProcess(1.0).run((sys.executable, "-c", "raise SystemExit(4)"), dict(os.environ))
    assert ended == LauncherExit(4, None, False)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
