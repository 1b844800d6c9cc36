"""The hosts of the tests: apart where hosts are apart, one where they share, and gone without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.hosts import Hosts, requirements
from tests.hosts.trouble import TROUBLES

pytestmark = pytest.mark.multihost
PROJECT = Path(__file__).resolve().parents[1]
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1"]


@pytest.mark.slow
def test_each_is_a_host_of_its_own(hosts: Hosts) -> None:
    for name in ("h0", "h1", "h2"):
        script = "hostname; echo $HOME; getent hosts $(hostname); ls /dev/shm | wc -l; touch /dev/shm/mine"
        done = hosts.run("h0", [*SSH, name, script], timeout=10)
        assert done.stdout.split() == [name, "/run/home", hosts.address(name), name, "0"], done.stderr
    assert hosts.run("h1", ["ps", "-o", "comm=", "-p", "1"], timeout=10).stdout == "sshd\n"


def test_the_project_and_its_interpreter_are_there(hosts: Hosts) -> None:
    command = f"cd {PROJECT} && {sys.executable} -m pipeline.check --world_size 2"
    done = hosts.run("h0", [*SSH, "h2", command], timeout=30)
    assert "This job can start." in done.stdout, done.stderr


def test_a_pattern_kills_in_its_own_host_only(hosts: Hosts) -> None:
    command = ["sleep", "30.125"]
    sleepers = {name: hosts.start(name, command) for name in ("h1", "h2")}
    # A process is seen as nsenter first.
    hosts.wait_until(lambda: all(hosts.processes(name) == ["sleep 30.125"] for name in sleepers), 10)
    hosts.run("h0", [*SSH, "h1", "pkill", "-f", "sleep.30"], timeout=10)
    assert sleepers["h1"].wait(5) == -signal.SIGTERM
    assert hosts.processes("h1") == []
    assert hosts.processes("h2") == ["sleep 30.125"]
    sleepers["h2"].send_signal(signal.SIGINT)
    assert sleepers["h2"].wait(5) == -signal.SIGINT


def test_a_command_that_takes_too_long_is_ended(hosts: Hosts) -> None:
    with pytest.raises(AssertionError, match=r"still running after 0\.3 s\nhere"):
        hosts.run("h1", ["sh", "-c", "echo here; sleep 30"], timeout=0.3)
    hosts.wait_until(lambda: hosts.processes("h1") == [], 5)


MESSAGES = {
    "wrong_host_key": "REMOTE HOST IDENTIFICATION HAS CHANGED",
    "unknown_host_key": "Host key verification failed",
    "password": "Permission denied (publickey,password",
    "unresolvable": "Could not resolve hostname h2",
    "refused": "Connection refused",
    "down": "timed out",
    "silent": "timed out",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TROUBLES)
def test_ssh_fails_as_it_is_told_to_and_works_again(hosts: Hosts, kind: str) -> None:
    command = [*SSH, "h2", "true"]
    with hosts.ssh_trouble("h2", kind):
        done = hosts.run("h0", command, timeout=10)
        assert (done.returncode, MESSAGES[kind] in done.stderr) == (255, True), done.stderr
        assert hosts.run("h0", [*SSH, "h1", "true"], timeout=10).returncode == 0
    assert hosts.run("h0", command, timeout=10).returncode == 0


def test_one_host_has_another_version_of_a_file(make_hosts, tmp_path: Path) -> None:
    hosts = make_hosts(1)
    file = tmp_path / "version.txt"
    file.write_text("old")
    hosts.replace_file("h1", file, "new")
    assert [hosts.run(name, ["cat", file], timeout=5).stdout for name in ("h0", "h1")] == ["old", "new"]
    assert file.read_text() == "old"


def test_disks_of_their_own_fill_alone_and_outlive_a_crash(make_hosts) -> None:
    hosts = make_hosts(2, shared=False, disk=2**20)
    kept = hosts.folder / "kept"
    assert hosts.run("h1", ["sh", "-c", f"echo h1 > {kept}"], timeout=5).returncode == 0
    assert not hosts.path("h2", kept).exists() and not kept.exists()
    hosts.fill_disk("h1")
    more = ["cp", "/etc/hosts", f"{hosts.folder}/more"]
    assert "No space left" in hosts.run("h1", more, timeout=5).stderr
    assert hosts.run("h2", more, timeout=5).returncode == 0
    hosts.empty_disk("h1")
    assert hosts.run("h1", more, timeout=5).returncode == 0
    hosts.crash("h1")
    assert hosts.processes("h1") == []
    with pytest.raises(RuntimeError, match="h1 is down"):
        hosts.run("h1", ["true"], timeout=5)
    hosts.boot("h1")
    assert hosts.path("h1", kept).read_text() == "h1\n"
    assert hosts.run("h2", [*SSH, "h1", "true"], timeout=10).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("power_loss", [False, True])
def test_peers_of_a_crashed_host(make_hosts, power_loss: bool) -> None:
    hosts = make_hosts(2)
    session = hosts.start("h1", ["ssh", "-v", "h2", "sleep 60"])
    hosts.wait_until(lambda: "sleep 60" in hosts.processes("h2"), 10)
    hosts.crash("h2", power_loss=power_loss)
    if power_loss:
        time.sleep(1.5)
        assert session.returncode is None
    else:
        assert session.wait(5) == 255


def test_nothing_is_left(make_hosts) -> None:
    def seen() -> tuple[object, ...]:
        links = subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
        return links, Path("/proc/self/mounts").read_text()

    before = seen()
    hosts = make_hosts(1)
    assert seen() == before
    sleeper = hosts.start("h1", ["setsid", "sleep", "60"])
    inside = [psutil.Process(hosts._outer).pid, *(p.pid for p in psutil.Process(hosts._outer).children(True))]
    hosts.close()
    assert sleeper.wait(1) != 0
    assert seen() == before
    assert not any(psutil.pid_exists(pid) for pid in inside)
    assert not hosts.folder.exists() and not hosts._state.exists()


def test_they_end_with_the_process_that_made_them() -> None:
    if reason := requirements.why_no_hosts():
        pytest.skip(reason)
    program = (
        "import os, signal; from tests.hosts import Hosts\n"
        "hosts = Hosts(1); print(hosts._outer, hosts._state, hosts.folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL, done.stderr
    outer, *folders = done.stdout.split()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(int(outer)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(outer))
    for folder in folders:
        subprocess.run(["rm", "-r", folder], check=True)


def test_the_reason_is_exact_where_there_can_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    why = requirements.why_no_hosts.__wrapped__
    monkeypatch.setattr(requirements, "find", lambda name: None if name == "pdsh" else "/bin/true")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert why() == "hosts need commands that are missing: pdsh (package pdsh)"
    monkeypatch.setattr(requirements, "find", lambda name: "/bin/true")
    monkeypatch.setattr(requirements, "NAMESPACES", ("--nonsense",))
    assert "the kernel refuses" in why() and "nonsense" in why()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in why()
