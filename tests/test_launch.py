"""launch.sh and what it starts: arguments, the launcher's command line, exit codes, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.cluster import campaign, launch, launcher_command
from pipeline.cluster.hostfile import Host
from pipeline.cluster.hub import Hub
from pipeline.cluster.hub_settings import HubSettings
from pipeline.cluster.launcher_command import Launch, plan_launch
from pipeline.cluster.launcher_options import LauncherOptions, launcher_problems, split_arguments
from pipeline.cluster.outcome import Outcome, read_outcome, write_outcome
from pipeline.cluster.run import Result, conclude, run_launch
from pipeline.cluster.start import rank_variables
from pipeline.cluster.supervise import Ended, Supervisor
from pipeline.cluster.ticket import OPTION, Ticket, encode, split_ticket
from pipeline.cluster.world import World
from pipeline.job.problems import Problem

ROOT = Path(__file__).parents[1]
CPU = World((Host("localhost", 2),), "cpu")
GPUS = World((Host("localhost", 2, (2, 3)),), "cuda", "NVIDIA A100-SXM4-80GB", True)
LOCAL_FILE = World((Host("localhost", 2),), "cpu", hostfile="hosts")
REMOTE = World((Host("h1", 8), Host("h2", 8)), "cuda", None, True, "hosts")
ONE_REMOTE = World((Host("h2", 8),), "cuda", None, True, "hosts")


# Arguments ---------------------------------------------------------------------------------------------


def test_launcher_options_are_taken_out_wherever_they_stand() -> None:
    options, job = split_arguments(
        "--data a b --hostfile=hosts --seed 1 --num_gpus 4 --include_x -e h1 --resume never".split()
    )
    assert options == LauncherOptions(hostfile="hosts", num_gpus=4, exclude="h1")
    assert job == "--data a b --seed 1 --include_x --resume never".split()


def test_job_arguments_arrive_as_they_are() -> None:
    given = ["--sample_prompt", 'it\'s "a b" $X', "--data", "a b"]
    assert split_arguments(given) == (LauncherOptions(), given)


def test_abbreviations_are_left_to_the_job_which_refuses_them() -> None:
    assert split_arguments(["--num_g", "2"])[1] == ["--num_g", "2"]


@pytest.mark.parametrize("arguments", ["--num_gpus two", "--launcher carrier_pigeon", "--hostfile"])
def test_values_of_the_wrong_type_end_with_code_2(arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        split_arguments(arguments.split())
    assert caught.value.code == 2


def problems_of(arguments: str) -> list[Problem]:
    return launcher_problems(split_arguments(arguments.split())[0])


def test_impossible_launcher_options_are_collected() -> None:
    problems = problems_of(
        "--master_port 70000 --ssh_port 0 --stop_timeout -1 --failure_timeout 1 --step_timeout 0 --no_ssh"
    )
    assert [problem.key for problem in problems] == [
        "master_port", "ssh_port", "stop_timeout", "failure_timeout", "step_timeout", "no_ssh",
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["nan", "inf", "0"])
def test_a_time_that_never_comes_is_refused(value: str) -> None:
    assert [problem.key for problem in problems_of(f"--stop_timeout {value}")] == ["stop_timeout"]


@pytest.mark.parametrize("value", ["", "h1 h2", "h1;id", "-x"])
def test_an_address_that_a_shell_would_read_is_refused(value: str) -> None:
    assert [p.key for p in launcher_problems(LauncherOptions(master_addr=value))] == ["master_addr"]
    for good in ("h1.example.org", "10.0.0.1", "fe80::1"):
        assert launcher_problems(LauncherOptions(master_addr=good)) == []


def test_a_place_below_the_first_host_is_refused() -> None:
    (problem,) = problems_of("--no_ssh --node_rank -1 --master_addr h1")
    assert problem.rule == "hosts are counted from 0"


def test_a_wrong_job_starts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(campaign, "start_once", lambda *_: pytest.fail("something was started"))
    arguments = "--hostfile no/such/file --master_port 0 --seq_length -3 --train_steps -1"
    assert launch.main(arguments.split()) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "no/such/file" in printed
    assert "master_port" in printed
    assert "seq_length" in printed
    assert "train_steps" in printed


def test_the_dict_for_deepspeed_is_printed_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(campaign, "start_once", lambda *_: Result(0))
    assert launch.main(["--print_config", "--output_dir", str(tmp_path)]) == 0
    assert '"train_micro_batch_size_per_gpu"' in capsys.readouterr().out


# The launcher's command line ---------------------------------------------------------------------------


def command(options: LauncherOptions, world: World) -> str:
    plan = plan_launch(options, world, Ticket(), {}, script="job.py", deepspeed=("deepspeed",))
    *line, ticket = plan.command
    assert ticket == encode(Ticket())
    return " ".join(line).replace(str(plan.master_port), "PORT")


@pytest.mark.parametrize(
    ("options", "world", "expected"),
    [
        ({}, CPU, "--num_gpus 2 --master_port PORT --master_addr 127.0.0.1"),
        ({"num_gpus": 2}, CPU, "--num_gpus 2 --master_port PORT --master_addr 127.0.0.1"),
        ({}, GPUS, "--include localhost:2,3 --master_port PORT --master_addr 127.0.0.1"),
        (
            {},
            LOCAL_FILE,
            "--hostfile hosts --master_port PORT --master_addr 127.0.0.1 --no_ssh_check",
        ),
        (
            {"num_nodes": 2, "num_gpus": 8, "ssh_port": 2222, "launcher": "openmpi"},
            REMOTE,
            "--hostfile hosts --num_nodes 2 --num_gpus 8 --master_port PORT --master_addr h1 --no_ssh_check"
            " --launcher openmpi --ssh_port 2222",
        ),
        (
            {"include": "h2", "master_addr": "10.0.0.2"},
            ONE_REMOTE,
            "--hostfile hosts --include h2 --force_multi --master_port PORT --master_addr 10.0.0.2"
            " --no_ssh_check --enable_each_rank_log None --log_level=critical",
        ),
        (
            {"no_ssh": True, "node_rank": 0, "master_addr": "h1", "launcher_args": "-x A"},
            REMOTE,
            "--hostfile hosts --master_port PORT --master_addr h1"
            " --no_ssh --node_rank 0 --launcher_args=-x A",
        ),
    ],
)
def test_everything_the_launcher_would_guess_is_said(options: dict, world: World, expected: str) -> None:
    assert command(LauncherOptions(**options), world) == f"deepspeed --log_level critical {expected} job.py"


HARD_TO_PASS = ("", "a b", "'", '"', "$HOME", "`id`", "x;true", "a&b", "%n %h", '{"a": 1}', "\\", "\n", "ü")


def test_job_arguments_survive_every_shell(tmp_path: Path) -> None:
    """As pdsh does it: the words joined by blanks, through two shells."""
    argument = encode(Ticket(arguments=HARD_TO_PASS, hosts=(("h1", 2),), key_file="k"))
    line = f"sh -c 'echo {argument}'"
    arrived = subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout.strip()
    ticket, arguments = split_ticket(["--local_rank=3", arrived])
    assert arguments == ["--local_rank=3", *HARD_TO_PASS]
    assert (ticket.hosts, ticket.key_file) == ((("h1", 2),), "k")


def test_a_ticket_that_was_cut_is_no_ticket() -> None:
    with pytest.raises(ValueError, match="did not arrive whole"):
        split_ticket([encode(Ticket())[:-4]])
    assert split_ticket(["--seed", "1"]) == (Ticket(), ["--seed", "1"])
    assert not any(character in OPTION for character in "$'\" %;&")


def test_a_given_port_is_used_and_remote_hosts_get_deepspeeds() -> None:
    assert plan_launch(LauncherOptions(master_port=1234), CPU, Ticket(), {}).master_port == 1234
    assert plan_launch(LauncherOptions(), REMOTE, Ticket(), {}).master_port == 29500


def test_cpu_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_command, "available_cores", lambda: 8)
    assert plan_launch(LauncherOptions(), CPU, Ticket(), {"A": "b"}).environment == {
        "A": "b", "OMP_NUM_THREADS": "4", "DS_ACCELERATOR": "cpu", "DS_ENV_FILE": os.devnull,
    }  # fmt: skip
    kept = plan_launch(LauncherOptions(), CPU, Ticket(), {"OMP_NUM_THREADS": "1"}).environment
    assert kept["OMP_NUM_THREADS"] == "1"
    assert plan_launch(LauncherOptions(), GPUS, Ticket(), {"A": "b"}).environment == {
        "A": "b",
        "DS_ENV_FILE": os.devnull,
    }


def test_no_secret_is_on_a_command_line() -> None:
    given = {"UCX_TLS": "tcp", "MLFLOW_TRACKING_TOKEN": "abc", "AWS_SECRET_ACCESS_KEY": "def", "HOME": "/"}
    environment = plan_launch(LauncherOptions(), REMOTE, Ticket(), given).environment
    assert "abc" not in environment.values() and "def" not in environment.values()
    # They reach the ranks through the hub.
    assert dict(rank_variables(given, is_local=False)) == {k: v for k, v in given.items() if k != "HOME"}
    assert "BatchMode=yes" in environment["PDSH_SSH_ARGS_APPEND"]


# Exit codes --------------------------------------------------------------------------------------------


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
    return run_launch(Launch((sys.executable, str(script)), environment, 7), folder, stop_timeout).code


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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_that_the_launcher_leaves_behind_are_ended(tmp_path: Path) -> None:
    child = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    keep = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    assert start(tmp_path, child + keep + "os.kill(os.getpid(), signal.SIGKILL)") == 1
    assert not is_running(int((tmp_path / "pid").read_text()))


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


@pytest.mark.parametrize("with_hub", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_before_there_are_ranks_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture, with_hub: bool, number: signal.Signals
) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(f"import os, time; os.kill(os.getppid(), {int(number)}); time.sleep(60)")
    hub = Hub(HubSettings(2, "token", 60.0, None), print) if with_hub else None
    launch = Launch((sys.executable, str(script)), dict(os.environ), 7)
    began = time.monotonic()
    assert run_launch(launch, tmp_path, 20.0, hub).code == 3
    assert time.monotonic() - began < 5
    said = capsys.readouterr().err
    assert f"Stopped before the first step ({number.name}): this start had nothing to save." in said
    assert "without a word" not in said


def test_guards_say_by_their_exit_code_that_ranks_had_not_begun() -> None:
    """Where each host has a launch of its own, and no rank knew its output folder yet."""
    assert conclude(None, Ended(3, signal.SIGTERM, killed=False)) == 3
    assert conclude(None, Ended(3, signal.SIGTERM, killed=True)) == 1
    assert conclude(None, Ended(3, None, killed=False)) == 1


def test_guards_say_by_their_exit_code_that_the_job_is_wrong() -> None:
    assert conclude(None, Ended(2, None, killed=False), says_by_code=True) == 2
    assert conclude(None, Ended(2, None, killed=False)) == 1  # with a hub, nobody has said so
    assert conclude(None, Ended(1, None, killed=False), says_by_code=True) == 1


def test_a_rank_outside_the_checked_world_is_a_wrong_job(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Whatever its launcher makes of the exit code."""
    hub = Hub(HubSettings(2, "token", 60.0, None), print)
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("token")
    ticket = Ticket(hosts=(("here", 2),), address="127.0.0.1", port=hub.port, key_file=str(tmp_path / "key"))
    rank = [sys.executable, str(STAND_IN.with_name("stand_in.py")), encode(ticket)]
    launcher = f"import subprocess; subprocess.run({rank!r}, check=False)"
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_SIZE": "3"}
    environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7"}
    assert run_launch(Launch((sys.executable, "-c", launcher), environment, 7), tmp_path, 20.0, hub).code == 2
    assert "the world that was checked has 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_during_the_check_says_so(tmp_path: Path, number: signal.Signals) -> None:
    launch = str(ROOT / "pipeline" / "cluster" / "launch.py")
    code = (
        "import os, runpy, sys, pipeline.cluster.campaign as campaign\n"
        f"campaign.run_job = lambda *_: os.kill(os.getpid(), {int(number)})\n"
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
    line = interrupt_an_import(signal.SIGTERM, "pipeline.check", "cluster/launch.py")
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (3, "Stopped by SIGTERM before anything was started.\n")


def test_an_interrupted_rank_that_does_not_listen_yet_prints_no_traceback(tmp_path: Path) -> None:
    """Its guard and the launch say what there is to say."""
    line = interrupt_an_import(signal.SIGINT, "pipeline.checkpoints.resume", "pretrain.py", "--guarded=x")
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    ended = Supervisor(1.0, print).run((sys.executable, "-c", "raise SystemExit(4)"), dict(os.environ))
    assert ended == Ended(4, None, False)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


# The real launcher -------------------------------------------------------------------------------------

STAND_IN = ROOT / "tests" / "cluster" / "start_stand_in.py"


@pytest.fixture
def drive(tmp_path: Path):
    """Starts stand-in ranks through the real launcher: `drive("--num_gpus", "2", steps=10)`."""
    started: list[subprocess.Popen] = []

    def run(*arguments: str, steps: int, more: tuple[str, ...] = ()) -> subprocess.Popen:
        line = [
            sys.executable,
            str(STAND_IN),
            *arguments,
            "--failure_timeout",
            "20",
            str(tmp_path),
            str(steps),
        ]
        environment = os.environ | {"DS_ACCELERATOR": "cpu"}
        started.append(subprocess.Popen([*line, "0.05", *more], env=environment, cwd=tmp_path))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def wait_for_ranks(folder: Path, count: int) -> list[dict]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        files = sorted((folder / "ranks").glob("[0-9]*.json"))
        if len(files) == count:
            return [json.loads(file.read_text()) for file in files]
        time.sleep(0.1)
    raise TimeoutError(f"{count} ranks did not start within 120 s")


@pytest.mark.slow
@pytest.mark.parametrize("hostfile", [False, True])
def test_two_ranks_start_through_deepspeed(tmp_path: Path, drive, hostfile: bool) -> None:
    where = ("--hostfile", str(ROOT / "hostfiles" / "localhost")) if hostfile else ("--num_gpus", "2")
    assert drive(*where, steps=2, more=("--text", "a b 'c' $HOME")).wait(150) == 0
    for rank, found in enumerate(wait_for_ranks(tmp_path, 2)):
        environment = found["environment"]
        assert (environment["RANK"], environment["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (environment["WORLD_SIZE"], environment["LOCAL_SIZE"]) == ("2", "2")
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert found["arguments"][-2:] == ["--text", "a b 'c' $HOME"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_every_rank_in_seconds(tmp_path: Path, drive, number: signal.Signals) -> None:
    process = drive("--num_gpus", "2", steps=6000)
    ranks = wait_for_ranks(tmp_path, 2)
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(60) == 3
    assert time.monotonic() - began < 15
    assert not any(is_running(rank["pid"]) for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["deepspeed launch", "deepspeed runner", "launch.sh"])
def test_a_killed_launcher_is_a_failure_and_leaves_nothing(tmp_path: Path, drive, victim: str) -> None:
    process = drive("--num_gpus", "2", steps=6000)
    ranks = wait_for_ranks(tmp_path, 2)
    launcher = ranks[0]["launcher"]
    runner = psutil.Process(launcher).ppid()
    pids = [rank[who] for rank in ranks for who in ("pid", "guard", "launcher")] + [runner]
    assert runner in [child.pid for child in psutil.Process(process.pid).children()]
    os.kill(
        {"deepspeed launch": launcher, "deepspeed runner": runner}.get(victim, process.pid), signal.SIGKILL
    )
    assert process.wait(60) == (-signal.SIGKILL if victim == "launch.sh" else 1)
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if is_running(pid)]
        time.sleep(0.1)
    assert read_outcome(tmp_path, int(ranks[0]["environment"]["MASTER_PORT"])).status == "failed"


# launch.sh ---------------------------------------------------------------------------------------------


def launch_sh(tmp_path: Path, pythons: dict[str, str]) -> subprocess.Popen:
    """launch.sh --setup_only with nothing on the PATH but a shell and the given python commands."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname"):
        (tools / tool).symlink_to(shutil.which(tool))
    for name, script in pythons.items():
        (tools / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
        (tools / name).chmod(0o755)
    shutil.copy(ROOT / "launch.sh", tmp_path)
    line = [str(tools / "bash"), str(tmp_path / "launch.sh"), "--setup_only"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, env={"PATH": str(tools)}, text=True, **pipes)


def run_launch_sh(tmp_path: Path, pythons: dict[str, str]) -> tuple[int, str]:
    """Its exit code and what it says."""
    process = launch_sh(tmp_path, pythons)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_another_projects_pipeline_in_the_current_folder_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").write_text("raise SystemExit(77)")
    last_line = (ROOT / "launch.sh").read_text(encoding="utf-8").splitlines()[-1]
    script = f"root={ROOT}\n{last_line.replace('$root/.venv/bin/python', sys.executable)}"
    line = ["bash", "-c", script, "launch.sh", "--train_steps", "0"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "train_steps = 0" in done.stderr


OLD_PYTHON = 'if [ "$1" = -V ]; then echo Python 3.9.1; else exit 1; fi'
NO_VENV_PYTHON = 'case "$*" in *ensurepip*) exit 1;; esac'


@pytest.mark.parametrize(
    ("pythons", "message"),
    [
        ({}, "there is no python3 on the PATH"),
        ({"python3": OLD_PYTHON}, "python3 is Python 3.9.1"),
        ({"python3": NO_VENV_PYTHON}, "apt-get install python3-venv"),
        ({"python3": OLD_PYTHON, "python3.12": NO_VENV_PYTHON}, "python3.12 cannot make virtual env"),
    ],
)
def test_a_machine_without_a_fitting_python_is_told_what_to_do(
    tmp_path: Path, pythons: dict[str, str], message: str
) -> None:
    code, said = run_launch_sh(tmp_path, pythons)
    assert code == 1
    assert message in said


def test_a_newer_python_beside_an_old_one_is_found(tmp_path: Path) -> None:
    good = f'case "$*" in *install.py*) echo "install $*" > {tmp_path}/called;; esac'
    assert run_launch_sh(tmp_path, {"python3": OLD_PYTHON, "python3.11": good})[0] == 0
    assert (tmp_path / "called").read_text().strip().endswith(f"install.py {tmp_path}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_the_set_up_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    called = tmp_path / "called"
    slow = f'case "$*" in *install.py*) echo $$ > {called}; exec {shutil.which("sleep")} 60;; esac'
    process = launch_sh(tmp_path, {"python3": slow})
    while not (called.exists() and called.read_text()):
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (3, "Stopped before anything was started.\n")
    assert not psutil.pid_exists(int(called.read_text()))


def test_a_set_up_that_fails_starts_nothing(tmp_path: Path) -> None:
    failing = 'case "$*" in *install.py*) exit 7;; esac'
    assert run_launch_sh(tmp_path, {"python3": failing}) == (7, "")
