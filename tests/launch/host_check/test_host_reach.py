"""Programs on other hosts: the ways there, what is said when there is no way, and nothing left behind."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.cluster import host_probe
from pipeline.cluster.host_probe import REQUEST, TOKEN
from pipeline.job.world import Host
from pipeline.launch.host_check import session as session_module
from pipeline.launch.host_check.ask import Question, ask_hosts, remote_shell
from pipeline.launch.host_check.session import (
    Output,
    Session,
    close_all,
    failure_of,
    local_command,
    remote_command,
    srun_command,
)

SSH_SAYS = [
    ("ssh: Could not resolve hostname h2: Name or service not known", "unknown name"),
    ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "key changed"),
    ("Host key verification failed.", "unknown key"),
    ("No ED25519 host key is known for h2 and you have requested strict checking.", "unknown key"),
    ("@ WARNING: UNPROTECTED PRIVATE KEY FILE! @\nh2: Permission denied (publickey).", "key file open"),
    ("Bad owner or permissions on /home/ada/.ssh/config", "key file open"),
    ("ada@h2: Permission denied (publickey,password).", "asks"),
    ("ada@h2: Permission denied (publickey,keyboard-interactive).", "asks"),
    ("ada@h2: Permission denied (publickey).", "denied"),
    ("Received disconnect from h2: Too many authentication failures", "denied"),
    ("ssh: connect to host h2 port 22: No route to host", "no route"),
    ("ssh: connect to host h2 port 22: Network is unreachable", "no route"),
    ("ssh: connect to host h2 port 22: Connection refused", "refused"),
    ("ssh: connect to host h2 port 22: Connection timed out", "timed out"),
    ("Timeout, server h2 not responding.", "timed out"),
    ("Connection timed out during banner exchange", "timed out"),
    ("kex_exchange_identification: Connection closed by remote host", "hung up"),
    ("Connection reset by 10.0.0.2 port 22", "hung up"),
    ("something else", "ssh failed"),
]


@pytest.mark.parametrize(("errors", "kind"), SSH_SAYS)
def test_the_cause_is_told_from_what_ssh_says(errors: str, kind: str) -> None:
    failure = failure_of(Output("", errors + "\n", 255))
    assert failure.kind == kind
    assert failure.rule and failure.remedy


def test_what_is_not_ssh_itself() -> None:
    assert failure_of(Output("", "", None)).kind == "no answer"
    failure = failure_of(Output("", "there is no Python\n", 127))
    assert failure.kind == "no check" and "there is no Python" in failure.rule
    failure = failure_of(Output("", "srun: error: Unable to allocate resources: Invalid node name\n", 1))
    assert failure.kind == "srun failed" and "Invalid node name" in failure.rule
    failure = failure_of(Output("This account is currently not available.\n", "", 1))
    assert "not available" in failure.rule


def test_ssh_never_prompts_and_accepts_no_key() -> None:
    command = " ".join(remote_command("u@h2", "echo it's", 2222))
    assert "-o BatchMode=yes" in command and "-p 2222 -- u@h2 exec sh -c" in command
    assert "StrictHostKeyChecking" not in command
    assert shlex.split(remote_command("h2", "echo it's")[-1]) == ["exec", "sh", "-c", "echo it's"]


def test_slurm_is_another_way() -> None:
    assert srun_command("u@h2", "true")[-4:] == ["--nodelist=h2", "sh", "-c", "unset SSH_CONNECTION; true"]
    assert remote_shell("slurm")(Host("h2", 1), "true")[0] == "srun"
    assert remote_shell("openmpi", 2222)(Host("h2", 1), "true")[0] == "ssh"


def session(script: str) -> Session:
    return Session(local_command(script), "MARK:")


def test_answers_are_told_from_noise() -> None:
    talk = session("echo hello; printf 'half MARK:one\\n'; read line; echo MARK:$line; echo bad >&2; cat")
    deadline = time.monotonic() + 10
    assert talk.answer(deadline)[0] == "one"
    talk.send("two")
    text, came = talk.answer(deadline)
    assert text == "two" and abs(came - time.time()) < 5
    (said,) = close_all([talk])
    assert (said.noise, said.errors, said.return_code) == ("hello\nhalf ", "bad\n", None)


def test_a_program_that_ends_says_how() -> None:
    talk = session("exit 7")
    assert talk.answer(time.monotonic() + 10) is None
    assert close_all([talk])[0].return_code == 7


@pytest.mark.slow
def test_a_program_that_does_not_end_is_killed_with_its_children() -> None:
    talk = session("sleep 61.5 & sleep 61.5; echo")
    assert talk.answer(time.monotonic() + 0.1) is None
    began = time.monotonic()
    assert close_all([talk])[0].return_code is None
    assert time.monotonic() - began < 10
    assert not [each for each in psutil.process_iter() if "61.5" in _words(each)]


@pytest.mark.alone
def test_hosts_that_hang_are_given_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_GRACE_SECONDS", 0.3)
    hung = [session("sleep 63.5") for _ in range(8)]
    began = time.monotonic()
    assert all(said.return_code is None for said in close_all(hung))
    assert time.monotonic() - began < 1.5
    assert not [each for each in psutil.process_iter() if "63.5" in _words(each)]


@pytest.mark.parametrize(("limit", "shorts"), [("-Sn", 0), ("-n", 30)])
def test_many_hosts_need_many_open_files(tmp_path: Path, limit: str, shorts: int) -> None:
    """The soft limit is raised; under the hard one the hosts are named for which there is no room."""
    code = (
        "from pipeline.cluster.hostfile import Host\n"
        "from pipeline.launch.host_check.ask import Question, ask_hosts\n"
        f"question = Question({str(tmp_path)!r}, {str(tmp_path)!r})\n"
        "hosts = [Host(f'h{number}', 1) for number in range(80)]\n"
        "answers = ask_hosts(hosts, question, lambda host, script: ['true'])\n"
        "assert answers.here.failure is None\n"
        "short = [each for each in answers.hosts if 'Too many open files' in each.failure.rule]\n"
        f"assert {shorts} <= len(short) <= 2 * {shorts}, len(short)\n"
    )
    command = f"ulimit {limit} 100 && exec {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    subprocess.run(["bash", "-c", command], cwd=Path(__file__).parents[3], check=True)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def ask(tmp_path: Path, shell, **changes):
    values = {"project": str(tmp_path), "cwd": str(tmp_path), "folders": (str(tmp_path / "run"),), **changes}
    return ask_hosts([Host("h1", 1), Host("h2", 1)], Question(**values), shell, seconds=10)


def here(host: Host, script: str) -> list[str]:
    return local_command(script)


def test_hosts_see_each_other_through_a_folder_and_a_port(tmp_path: Path) -> None:
    answers = ask(tmp_path, here, address="localhost", listen=0)
    for found in (answers.here, *answers.hosts):
        assert found.failure is None
        assert list(found.seen.values()) == [[0, 1, 2]]
        assert found.reached is None
    assert isinstance(answers.hosts[0].facts["port"], int)
    assert answers.hosts[1].facts["port"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_rendezvous_that_is_not_reached_says_why(tmp_path: Path) -> None:
    answers = ask(tmp_path, here, address="no.such.host.invalid", listen=0)
    assert all(found.reached for found in answers.hosts)
    assert answers.address == "no.such.host.invalid"


def test_a_host_without_this_python_takes_another_and_says_so(tmp_path: Path) -> None:
    answers = ask(tmp_path, lambda host, script: local_command(script.replace(sys.executable, "/no/python")))
    path = answers.hosts[0].facts["python"]["path"]
    assert path != sys.executable and Path(path).name.startswith("python3")


def test_as_many_paths_as_there_are(tmp_path: Path) -> None:
    """More than an argument holds, which is 128 KiB, and than a pipe does; a start-up file takes a line."""
    paths = tuple(str(tmp_path / f"{number:060d}") for number in range(3000))
    (tmp_path / f"{7:060d}").touch()
    answers = ask(tmp_path, lambda h, s: local_command(f"read -r line; {s}"), data=paths, folders=())
    for found in (answers.here, *answers.hosts):
        assert found.failure is None
        assert [path for path, what in found.facts["data"].items() if what] == [paths[7]]
        assert len(found.facts["data"]) == len(paths)


@pytest.mark.slow
def test_one_silent_host_keeps_nobody(tmp_path: Path) -> None:
    """Not with a question, either, that is longer than what a host takes unread."""
    began = time.monotonic()
    data = tuple(f"{number:0100d}" for number in range(2000))
    values = Question(str(tmp_path), str(tmp_path), data=data, folders=(str(tmp_path),))
    hosts = [Host("h1", 1), Host("h2", 1)]
    answers = ask_hosts(hosts, values, lambda h, s: local_command(s if h.name == "h1" else "sleep 62.5"), 1.5)
    assert time.monotonic() - began < 10
    assert answers.hosts[0].failure is None
    assert answers.hosts[1].failure.kind == "no answer"


def test_a_clock_that_is_off_is_measured(tmp_path: Path) -> None:
    # The probe's own clock is moved, by what it calls time.time.
    ahead = "import time; now = time.time; time.time = lambda: now() + 90; "
    answers = ask(tmp_path, lambda h, s: local_command(s.replace("-c 'import", f"-c '{ahead}import")))
    assert 85 < answers.hosts[0].clock <= 90
    assert answers.here.clock == 0


def test_the_probe_leaves_nothing_when_its_connection_is_cut(tmp_path: Path) -> None:
    values = Question(str(tmp_path), str(tmp_path), folders=(str(tmp_path),))
    request = {**vars(values), "run": "r", "index": 0}
    probe = Path(host_probe.__file__)
    command = [sys.executable, "-I", probe, "30"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(f"\n{REQUEST}{json.dumps(request)}\n")
        process.stdin.flush()
        process.stdout.readline()
        assert [path.name for path in tmp_path.iterdir()] == [f"{TOKEN}r-0"]
        process.stdin.close()
        assert process.wait(10) == 0
    assert list(tmp_path.iterdir()) == []
