"""The check goes to real hosts: what is fine, every way not to get there, and what differs there."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pipeline.job.world import Host
from pipeline.launch.host_check.ask import Question, ask_hosts, remote_shell
from tests.hosts import Hosts
from tests.hosts.slurm import start_slurm, why_no_slurm

pytestmark = pytest.mark.multihost
PROJECT = Path(__file__).resolve().parents[3]
SETTINGS = PROJECT / "pipeline" / "job" / "facts.py"


def check(
    hosts: Hosts,
    *arguments: str | Path,
    names: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Exit code and output, blanks made one, of the check on the login host."""
    command = [sys.executable, "-m", "pipeline.check", "--hosts", "--output_dir", hosts.folder / "run"]
    command += ["--hostfile", hosts.write_hostfile(2, names), *arguments]
    done = hosts.run("h0", command, timeout=60, cwd=PROJECT, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_healthy_hosts_can_start_and_nothing_stays_behind(hosts: Hosts) -> None:
    code, shown = check(hosts)
    assert code == 0, shown
    for text in (
        "reachable 2 of 2 ok",
        "user root ok",
        "output folder shared ok",
        "rendezvous listens on ",
        # The hosts have no GPUs, which only they could tell.
        "4 on h1 x 2, h2 x 2; cpu",
        "This job can start.",
    ):
        assert text in shown, shown
    assert list(hosts.folder.iterdir()) == []
    assert hosts.processes("h1") == hosts.processes("h2") == []


REACHED = {
    "wrong_host_key": (
        "key changed",
        "its ssh host key is not the one in known_hosts",
        "ssh-keygen -R {host}",
    ),
    "unknown_host_key": ("unknown key", "a start asks no questions", "(ssh {host})"),
    "password": ("asks", "it would ask for a password", "ssh-copy-id {host}"),
    "unresolvable": ("unknown name", "its name cannot be resolved", "add {host} to /etc/hosts"),
    "refused": ("refused", "no ssh server listens", "Start sshd on {host}"),
    # Which of the two depends on what the kernel remembers of the neighbour.
    "down": ("no route|timed out", "it", "it"),
    "silent": ("timed out", "it is down, or a firewall drops the packets", "--exclude {host}"),
}


@pytest.mark.slow
def test_every_way_not_to_reach_a_host_is_told_apart_at_once(make_hosts) -> None:
    hosts = make_hosts(1 + len(REACHED))
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        for name, kind in zip(hosts.names[1:], REACHED, strict=True):
            stack.enter_context(hosts.ssh_trouble(name, kind))
        code, shown = check(hosts)
    # The slowest of them, not the sum.
    assert time.monotonic() - began < 30
    assert code == 2
    assert "reachable 1 of 8 error" in shown
    for name, (kind, rule, remedy) in zip(hosts.names[1:], REACHED.values(), strict=True):
        line = shown.partition(f"error: {name}: reachable = ")[2].partition("error: ")[0]
        assert any(line.startswith(f"'{each}': ") for each in kind.split("|")), (name, shown)
        assert rule in line
        assert remedy.replace("{host}", name) in line
    assert "This job cannot start: 7 errors." in shown


def other_file(hosts: Hosts, package: str, name: str) -> None:
    """Let a file on h2 say that the package has version 0.1."""
    distribution = importlib.metadata.distribution(package)
    path = Path(str(distribution.locate_file(name)))
    hosts.replace_file("h2", path, path.read_text().replace(distribution.version, "0.1"))


@pytest.mark.slow
def test_what_differs_on_a_host_is_named(make_hosts) -> None:
    hosts = make_hosts(2)
    hosts.replace_file("h2", SETTINGS, SETTINGS.read_text() + "\n# changed\n")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}
    other_file(hosts, "torch", "torch/version.py")
    other_file(hosts, "deepspeed", f"deepspeed-{versions['deepspeed']}.dist-info/METADATA")
    lock = hosts.path("h2", "/run/home/.cache/torch_extensions/py311_cpu/op/lock")
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 7200,) * 2)
    assert hosts.run("h2", ["sh", "-c", "echo 127.0.1.1 h2 > /etc/hosts"], timeout=5).returncode == 0
    (hosts.path("h1", "/run/home") / ".bashrc").write_text(
        "echo Welcome to h1\nread -p 'Continue? ' answer\n"
    )
    busy = "import socket, time; s = socket.create_server(('', 29500)); time.sleep(60)"
    server = hosts.start("h1", [sys.executable, "-c", busy])
    hosts.wait_until(lambda: hosts.run("h1", ["bash", "-c", "</dev/tcp/h1/29500"], 5).returncode == 0, 10)
    code, shown = check(hosts, "--master_port", "29500")
    server.kill()
    assert code == 2
    for text in (
        "error: h2: code = ",
        f"error: h2: torch = '0.1': must be {versions['torch']}, as on h1",
        f"error: h2: deepspeed = '0.1': must be {versions['deepspeed']}, as on this machine",
        "error: h2: compiled ops = '/run/home/.cache/torch_extensions/py311_cpu/op/lock",
        "On h2: rm /run/home/.cache/torch_extensions/py311_cpu/op/lock",
        "warning: h2: own name = '127.0.1.1': the host takes its own name (h2) for 127.0.1.1",
        "error: h1: rendezvous = 'Address already in use'",
        "warning: h1: shell = 'Welcome to h1'",
        "This job cannot start: 5 errors.",
    ):
        assert text in shown, shown


@pytest.mark.slow
def test_names_that_lead_where_nobody_comes(make_hosts) -> None:
    """One to a network that no other host has; the other, of the machine that starts the job and takes part
    in it, to itself. The addresses by which hosts see each other do, and ranks are told to use these."""
    hosts = make_hosts(1)
    hosts.lead_astray("h1")
    hosts.lead_astray("h0", "127.0.1.1")
    code, shown = check(hosts, names=["h0", "h1"])
    assert code == 0, shown
    for text in (
        "warning: h0: own name = '127.0.1.1': the host takes its own name (h0) for 127.0.1.1: no other",
        "warning: h1: own name = '10.1.9.2': the host takes its own name (h1) for 10.1.9.2: h0 cannot reach",
        "ranks are told to use eth0 (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
    ):
        assert text in shown, shown


@pytest.mark.slow
def test_separate_disks_and_a_full_one(make_hosts) -> None:
    hosts = make_hosts(2, shared=False, disk=64 * 2**20)
    code, shown = check(hosts)
    assert code == 0 and "output folder its own ok" in shown, shown
    hosts.fill_disk("h2")
    code, shown = check(hosts)
    assert code == 2
    assert "error: h2: free disk = " in shown and "0 B are free" in shown, shown


@pytest.mark.slow
def test_a_host_that_never_answers_is_given_up(make_hosts) -> None:
    """A start-up file that waits longer than the check does."""
    hosts = make_hosts(1)
    (hosts.path("h1", "/run/home") / ".bashrc").write_text("sleep 30\n")
    script = "from tests.launch.host_check.test_hosts_over_ssh import ask_once; ask_once()"
    done = hosts.run("h0", [sys.executable, "-c", script], timeout=30, cwd=PROJECT)
    assert done.stdout.split() == ["no", "answer"], done.stderr


def ask_once() -> None:
    """On the login host: print why h1 gave no answer."""
    answers = ask_hosts([Host("h1", 1)], Question("/", "/"), remote_shell(), seconds=2)
    print(answers.hosts[0].failure.kind)


def test_names_that_only_ssh_knows(make_hosts) -> None:
    """Aliases of ~/.ssh/config: the hosts meet at the addresses by which ssh reached them."""
    hosts = make_hosts(2)
    config = hosts.path("h0", "/run/home/.ssh/config")
    config.write_text("".join(f"Host big{n}\n  HostName {hosts.address(f'h{n}')}\n" for n in (1, 2)))
    code, shown = check(hosts, names=["big1", "big2"])
    assert code == 0, shown
    assert "rendezvous listens on" in shown and "ok" in shown


@pytest.mark.slow
def test_slurm_needs_no_ssh(make_hosts) -> None:
    if reason := why_no_slurm():
        pytest.skip(reason)
    hosts = make_hosts(2)
    env = start_slurm(hosts, slots=2)
    with hosts.ssh_trouble("h2", "password"):
        code, shown = check(hosts, "--launcher", "slurm", env=env)
    assert code == 0, shown
    assert "reachable 2 of 2 ok" in shown and "rendezvous listens on" in shown, shown


def test_a_start_goes_to_the_hosts_first(hosts: Hosts) -> None:
    launch = [sys.executable, PROJECT / "pipeline" / "launch" / "launch.py", "--hostfile"]
    launch += [hosts.write_hostfile(1), "--output_dir", hosts.folder / "run"]
    with hosts.ssh_trouble("h2", "password"):
        done = hosts.run("h0", launch, timeout=60, cwd=PROJECT)
    assert done.returncode == 2
    assert "h2: reachable = 'asks'" in done.stderr and "This job cannot start: 1 error." in done.stderr
    assert "Starting" not in done.stderr
    assert list(hosts.folder.iterdir()) == []
