"""The pods of a manifest on two hosts inside this machine, with their command: training, eviction, return.

What Kubernetes would do is done by hand: it knows the pods' names, expands the index, and puts folders in the
place of volumes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline import deploy
from pipeline.base.problems import EXIT_FINISHED, EXIT_STOPPED
from pipeline.cluster.hostfile import read_hostfile
from tests.deployment.manifest import by_kind, pod_and_container, words_of_pod
from tests.end_to_end.jobs import Workshop
from tests.hosts import HostProcess, Hosts

# As a Secret brings them.
CREDENTIALS = {
    "AWS_SECRET_ACCESS_KEY": "hush-hush-aws",
    "HF_TOKEN": "hush-hush-hub",
    "WANDB_API_KEY": "hush-hush-wandb",
}
ROOT = Path(__file__).resolve().parents[2]
STEPS = 150
SECONDS = 240


@dataclass(frozen=True)
class Cluster:
    """A manifest, hosts for its pods, and their storage."""

    text: str
    hosts: Hosts
    storage: Path

    def place(self) -> None:
        """The config map, and the names of the pods on each host."""
        (self.storage / "hosts").mkdir()
        hostfile = self.storage / "hosts" / "hostfile"
        hostfile.write_text(by_kind(self.text)["ConfigMap"]["data"]["hostfile"])
        pods = [pod.name for pod in read_hostfile(hostfile)[0]]
        addresses = [self.hosts.address(host) for host in self.hosts.names]
        names = "".join(f"{address} {pod}\n" for address, pod in zip(addresses, pods, strict=True))
        for host in self.hosts.names:
            known = self.hosts.path(host, "/etc/hosts").read_text()
            self.hosts.replace_file(host, Path("/etc/hosts"), known + names)

    def start(self, index: int) -> HostProcess:
        """A pod's only container."""
        _, container = pod_and_container(self.text)
        words = words_of_pod(container, index)
        places = {"storage": self.storage, "hosts": self.storage / "hosts"}
        for mount in container["volumeMounts"]:
            if mount["name"] in places:
                place = str(places[mount["name"]])
                words = [re.sub(rf"^{mount['mountPath']}\b", place, word) for word in words]
        # launch.sh without the set-up is this line.
        command = [sys.executable, ROOT / "pipeline" / "launch" / "launch.py", *words]
        environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **CREDENTIALS}
        return self.hosts.start(self.hosts.names[index], command, env=environment, cwd=ROOT)


@pytest.fixture
def cluster(
    make_hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cluster:
    monkeypatch.chdir(ROOT)
    workshop = Workshop(tmp_path)
    text, config = Path(workshop.text()).name, Path(workshop.config()).name
    job = ["--model", "tiny", "--seq_length", "32", "--sample_tokens", "0", "--eval_samples", "4"]
    job += ["--deepspeed_config", f"/storage/{config}", "--data", f"/storage/{text}", "--stop_timeout", "60"]
    job += ["--train_steps", str(STEPS), "--eval_interval", "0", "--log_interval", "1"]
    hosts = ["--hostfile", "hostfiles/a100x4", "--num_nodes", "2", "--num_gpus", "1"]
    assert deploy.main(["kubernetes", *hosts, "--image", "gpt:1", "--claim", "training", *job]) == 0
    cluster = Cluster(capsys.readouterr().out, make_hosts(2), tmp_path)
    cluster.place()
    return cluster


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.timeout(600)
def test_pods_train_stop_when_one_is_evicted_and_go_on(cluster: Cluster) -> None:
    run = cluster.storage / "runs" / "pretrain"
    pods = [cluster.start(0), cluster.start(1)]

    def has_trained() -> bool:
        assert [pod.stderr for pod in pods if pod.returncode is not None] == []
        metrics = run / "metrics.jsonl"
        return metrics.exists() and bool(metrics.read_text())

    cluster.hosts.wait_until(has_trained, SECONDS, "the first step")
    # Command lines can be read by every user of a host.
    commands = [line for host in cluster.hosts.names for line in cluster.hosts.processes(host)]
    assert sum("pretrain.py" in line for line in commands) >= 2
    assert [line for line in commands if "hush-hush" in line] == []
    # An eviction of the pod that is not the first.
    pods[1].send_signal(signal.SIGTERM)
    assert [pod.wait(SECONDS) for pod in pods] == [EXIT_STOPPED] * 2, said(pods)
    stopped = int(re.search(rf"stopped after step (\d+) of {STEPS}", said(pods))[1])
    assert (run / "checkpoints" / f"global_step{stopped}").is_dir()
    # The description of the job is printed once, by the first pod.
    assert ["This job can start." in pod.stdout for pod in pods] == [True, False]

    # Both are replaced, the second when rank 0 is there already and holds the folder.
    first = cluster.start(0)
    cluster.hosts.wait_until(lambda: first.returncode is not None or locked(run / "lock"), SECONDS, "rank 0")
    second = cluster.start(1)
    assert [first.wait(SECONDS), second.wait(SECONDS)] == [EXIT_FINISHED] * 2, said([first, second])
    assert f"global_step{stopped}" in first.stdout and f"finished {STEPS} steps" in first.stdout
    assert "hush-hush" not in said([*pods, first, second])
    files = [path for path in cluster.storage.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if b"hush-hush" in path.read_bytes()] == []


def said(pods: list[HostProcess]) -> str:
    return "\n".join(pod.stdout + pod.stderr for pod in pods)


def locked(path: Path) -> bool:
    """Whether rank 0 has taken the folder."""
    return path.exists() and subprocess.run(["flock", "-n", "-s", path, "true"], check=False).returncode != 0
