"""Ranks on several real hosts, through the real launcher: whatever goes, all end, and the first is named."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from deepspeed.launcher.multinode_runner import PDSHRunner

from tests.hosts import HostProcess, Hosts
from tests.hosts.launchers import launcher_environment

pytestmark = [pytest.mark.multihost, pytest.mark.slow]
START = Path(__file__).parents[1] / "start_stand_in.py"
FAILURE_TIMEOUT = 10
WORKERS = ("h1", "h2")
HARD_TO_PASS = ["", "a b", "it's", "$HOME", "`id`", "x;true", "%n", '{"a": 1}']


class Job:
    """Stand-in ranks that do not wait for each other, so that nothing but their agents ends them."""

    def __init__(
        self,
        hosts: Hosts,
        hostfile: Path,
        *words: str,
        steps: int = 6000,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ):
        self.hosts, self.folder = hosts, hosts.folder / "run"
        shutil.rmtree(self.folder, ignore_errors=True)
        line = [sys.executable, START, "--hostfile", hostfile, "--failure_timeout", FAILURE_TIMEOUT, *options]
        line += [self.folder, steps, "0.02", *words]
        variables = {"DS_ACCELERATOR": "cpu", "GLOO_MARK": "a b $X", "AWS_SECRET_ACCESS_KEY": "hidden"}
        variables |= environment or {}
        self.size = sum(int(row.split("=")[1]) for row in hostfile.read_text().splitlines())
        self.process: HostProcess = hosts.start("h0", [str(word) for word in line], env=variables, cwd="/tmp")

    def ranks(self) -> list[dict]:
        """What the ranks say about themselves, when all run."""
        files = [self.folder / "ranks" / f"{rank}.json" for rank in range(self.size)]

        def are_there() -> bool:
            assert self.process.returncode is None, self.process.stderr
            return all(file.exists() for file in files)

        self.hosts.wait_until(are_there, 90, "the ranks")
        return [json.loads(file.read_text()) for file in files]

    def ends(self, seconds: float = FAILURE_TIMEOUT + 25) -> int:
        """The exit code; seconds later nothing is left on any host but what a login there has."""
        code = self.process.wait(seconds)
        for name in WORKERS:
            self.hosts.wait_until(lambda name=name: not self._left(name), 10, f"{name}, where processes stay")
        return code

    def _left(self, name: str) -> list[str]:
        return [line for line in self.hosts.processes(name) if "python" in line]


def key_files(hosts: Hosts, name: str) -> set[str]:
    """Keys of starts that lie on a host."""
    return {line for line in hosts.run(name, ["ls", "-A", "/tmp"], 20).stdout.split() if "launch_key" in line}


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    """Hosts whose every test leaves them whole."""
    from tests.hosts import why_no_hosts

    if reason := why_no_hosts():
        pytest.skip(reason)
    with Hosts(2) as started:
        yield started


def test_options_variables_places_and_logs(pair: Hosts) -> None:
    """Unequal slots, words that shells would read and more of them than one argument holds, variables that
    the launcher does not pass on."""
    hostfile = pair.folder / "unequal"
    hostfile.write_text("h1 slots=1\nh2 slots=2\n")
    before = key_files(pair, "h1")  # of whatever else runs on this machine
    words = [*HARD_TO_PASS, *(f"{number:060d}" for number in range(3000))]
    job = Job(pair, hostfile, *words, steps=100)
    found = job.ranks()
    assert job.ends(90) == 0, job.process.stderr
    assert [rank["arguments"][-len(words) :] for rank in found] == [words] * 3
    places = [rank["environment"] for rank in found]
    assert [(place["RANK"], place["LOCAL_RANK"], place["LOCAL_SIZE"]) for place in places] == [
        ("0", "0", "1"), ("1", "0", "2"), ("2", "1", "2"),
    ]  # fmt: skip
    assert {place["MASTER_ADDR"] for place in places} == {pair.address("h1")}
    assert {place["GLOO_MARK"] for place in places} == {"a b $X"}
    assert {place["AWS_SECRET_ACCESS_KEY"] for place in places} == {"hidden"}
    assert "hidden" not in job.process.stdout + job.process.stderr
    assert "[INFO]" not in job.process.stdout + job.process.stderr  # the launchers of other hosts are quiet
    assert f"rendezvous at {pair.address('h1')}:{places[0]['MASTER_PORT']}" in job.process.stderr
    # The start's key was there for the agents only.
    for name in WORKERS:
        gone = partial(lambda name: key_files(pair, name) <= before, name)
        pair.wait_until(gone, 30, f"the end of the keys on {name}, those of other tests included")
    logs = sorted(path.name for path in job.folder.glob("logs/*/*.log"))
    assert logs == [f"rank_0000{rank}.log" for rank in range(3)]


@pytest.mark.repeats  # end_to_end/test_several_hosts.py begins on one other host
def test_a_single_other_host_is_used(pair: Hosts) -> None:
    """Not this one, as the launcher would have it."""
    job = Job(pair, pair.write_hostfile(1, ["h2"], "single"), steps=2)
    assert job.ends(90) == 0, job.process.stderr
    assert "Rank 0 is on h2" in job.process.stderr


@pytest.mark.repeats  # the same under another launcher is below
def test_a_rank_goes_while_the_others_wait_for_nobody(pair: Hosts) -> None:
    job = Job(pair, pair.write_hostfile(2), "3:9:signal=SIGKILL")
    assert job.ends(90) == 1
    assert "rank 3 on h2: was killed by SIGKILL (out of memory?)" in job.process.stderr
    assert json.loads((job.folder / "outcome.json").read_text())["rank"] == 3


def test_a_port_that_is_taken_on_the_first_host(pair: Hosts) -> None:
    listener = pair.start("h1", [sys.executable, "-m", "http.server", "23456"])
    try:
        job = Job(pair, pair.write_hostfile(1), options=["--master_port", "23456"])
        assert job.process.wait(60) == 1
        assert "port 23456 of the rendezvous is in use on h1" in job.process.stderr
    finally:
        listener.kill()


# The other two train in end_to_end/test_launchers.py, and pass exit codes on.
@pytest.mark.parametrize(
    "launcher",
    ["mpich", *(pytest.param(each, marks=pytest.mark.repeats) for each in ("openmpi", "slurm"))],
)
def test_a_rank_goes_under_another_launcher(pair: Hosts, launcher: str) -> None:
    """MPICH's way of starting ranks drops their exit codes."""
    environment = launcher_environment(pair, launcher)
    at_rest = {name: pair.processes(name) for name in pair.all_names}
    job = Job(
        pair,
        pair.write_hostfile(1),
        "1:9:signal=SIGKILL",
        options=["--launcher", launcher],
        environment=environment,
    )
    assert job.process.wait(60) == 1
    assert "rank 1 on h2: was killed by SIGKILL (out of memory?)" in job.process.stderr
    assert json.loads((job.folder / "outcome.json").read_text())["rank"] == 1
    pair.wait_until(lambda: {name: pair.processes(name) for name in at_rest} == at_rest, 5, "the last ends")


@pytest.mark.parametrize(
    ("host", "who", "told"),
    [
        # The runner then returns 0.
        ("h0", ["pdsh"], "the launcher ended (exit code 0) while ranks were running"),
        # cluster/agent/test_agents.py kills what started an agent, launch/test_real_launcher.py DeepSpeed's.
        pytest.param(
            "h2",
            ["-f", "deepspeed.launcher.launch"],
            "on h2: the launcher that started it is gone",
            marks=pytest.mark.repeats,
        ),
    ],
)
def test_a_launcher_is_killed(pair: Hosts, host: str, who: list[str], told: str) -> None:
    job = Job(pair, pair.write_hostfile(1))
    job.ranks()
    pair.run(host, ["pkill", "-KILL", *who], timeout=5)
    assert job.ends() == 1
    assert told in job.process.stderr


def test_the_ssh_of_one_host_is_killed(pair: Hosts) -> None:
    """Which the launcher says in its own words, and goes on waiting. What Ctrl-C of another job's plain
    `deepspeed` kills by name on these hosts is not this job."""
    job = Job(pair, pair.write_hostfile(1))
    job.ranks()

    def log() -> int:
        return sum(file.stat().st_size for file in job.folder.glob("logs/*/rank_00000.log"))

    arguments = dict.fromkeys(("ssh_port", "venv_script", "save_pid", "enable_each_rank_log"))
    arguments |= {"launcher_args": "", "user_script": "", "user_args": [], "master_addr": "h1"}
    arguments |= dict.fromkeys(("no_python", "module", "no_local_rank"), False) | {"master_port": 29500}
    _, kill, _ = PDSHRunner(argparse.Namespace(**arguments), "").get_cmd({}, {"h1": 1, "h2": 1})
    assert pair.run("h0", kill, 20, env={"PDSH_RCMD_TYPE": "ssh"}).returncode in (0, 1)
    written = log()
    pair.wait_until(lambda: log() > written or job.process.returncode is not None, 20, "further steps")
    assert job.process.returncode is None, job.process.stderr
    pair.run("h0", ["pkill", "-KILL", "-f", "ssh .* h2 export"], timeout=5)
    assert job.ends() == 1
    assert "rank 1 on h2: the ssh connection by which it was started is gone" in job.process.stderr


def test_a_plain_deepspeed_hangs_up(pair: Hosts) -> None:
    """Its ssh stays behind, and nobody hears the ranks: they save, and end."""
    folder = pair.folder / "plain"
    script = str(START.parents[1] / "cluster" / "agent" / "stand_in.py")
    line = ["deepspeed", "--hostfile", pair.write_hostfile(1), script, folder, "60000", "0.02"]
    job = pair.start("h0", [str(word) for word in line], env={"DS_ACCELERATOR": "cpu"}, cwd="/tmp")
    pair.wait_until(lambda: len(list(folder.glob("ranks/?.json"))) == 2, 90, "the ranks")
    for who in (["-f", "bin/deepspeed"], ["pdsh"]):
        pair.run("h0", ["pkill", "-HUP", *who], timeout=5)
    job.wait(10)
    pair.wait_until(lambda: (folder / "outcome.json").exists(), 30, "the outcome")
    assert json.loads((folder / "outcome.json").read_text())["status"] == "stopped"
    pair.wait_until(lambda: not any("stand_in" in line for n in WORKERS for line in pair.processes(n)), 20)


def test_a_notice_to_the_ranks_of_one_host_ends_all_of_them_well(pair: Hosts) -> None:
    job = Job(pair, pair.write_hostfile(1))
    job.ranks()
    pair.run("h2", ["pkill", "-USR1", "-f", "stand_in.py.*--launch_spec"], timeout=5)
    assert job.ends() == 3
    assert "SIGUSR1 on h2: every rank saves and ends" in job.process.stderr


# Without the login host, an agent hears as little of the coordinator as one that is unplugged; a host crashes
# in end_to_end/test_several_hosts.py.
@pytest.mark.parametrize(
    "what", ["unplug", *(pytest.param(each, marks=pytest.mark.repeats) for each in ("crash", "login host"))]
)
def test_a_host_is_gone(make_hosts, what: str) -> None:
    hosts = make_hosts(2)
    job = Job(hosts, hosts.write_hostfile(1))
    job.ranks()
    began = time.monotonic()
    if what == "login host":
        hosts.crash("h0", power_loss=True)
    elif what == "crash":
        hosts.crash("h2")
    else:
        hosts.unplug("h2")
    # The one that is cut off ends its ranks by itself.
    alive = [name for name in WORKERS if what != "crash" or name == "h1"]
    hosts.wait_until(
        lambda: not any("stand_in" in line for name in alive for line in hosts.processes(name)),
        FAILURE_TIMEOUT + 5,
        "the end of the ranks",
    )
    assert time.monotonic() - began < FAILURE_TIMEOUT + 5
    if what != "login host":
        assert job.process.wait(25) == 1
        told = (
            "connection to its agent on h2 is lost"
            if what == "crash"
            else "nothing was heard from h2 for 5 s"
        )
        assert told in job.process.stderr
        assert json.loads((job.folder / "outcome.json").read_text())["rank"] == 1
