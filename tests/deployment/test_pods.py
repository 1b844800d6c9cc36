"""The pods of a manifest, started here with exactly its command: training, eviction, going on.

What Kubernetes would do is done by hand: the index is expanded, volumes are folders, and the first pod's name
is this machine's address.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline import deploy
from pipeline.cluster.rank_environment import LOOPBACK, free_port
from pipeline.job.problems import EXIT_FINISHED, EXIT_STOPPED
from tests.deployment.manifest import by_kind, pod_and_container, words_of_pod
from tests.end_to_end.jobs import Workshop

ROOT = Path(__file__).resolve().parents[2]
PODS = 2


@dataclass(frozen=True)
class Cluster:
    """A manifest, and the storage of its pods."""

    text: str
    storage: Path
    port: int

    def start(self, index: int) -> subprocess.Popen[str]:
        """A pod's only container."""
        pod, container = pod_and_container(self.text)
        hosts = self.storage / "hosts"
        hosts.mkdir(exist_ok=True)
        (hosts / "hostfile").write_text(by_kind(self.text)["ConfigMap"]["data"]["hostfile"])
        places = {"storage": self.storage, "hosts": hosts}
        words = words_of_pod(container, index)
        for mount in container["volumeMounts"]:
            if mount["name"] in places:
                words = [re.sub(rf"^{mount['mountPath']}\b", str(places[mount["name"]]), w) for w in words]
        first = words[words.index("--master_addr") + 1]
        words = [LOOPBACK if word == first else word for word in words]
        # A pod has all ports for itself.
        command = [sys.executable, ROOT / "pipeline" / "cluster" / "launch.py", *words]
        command += ["--master_port", str(self.port)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {each["name"]: each["value"] for each in container.get("env", [])}
        environment["JOB_COMPLETION_INDEX"] = str(index)
        assert pod["restartPolicy"] == "Never"
        return subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )


def finish(pods: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for the pods; their output."""
    try:
        return [pod.communicate(timeout=120)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cluster:
    monkeypatch.chdir(ROOT)
    storage = tmp_path / "storage"
    workshop = Workshop(storage)
    text = Path(workshop.text())
    workshop.config()
    job: list[Any] = ["--model", "tiny", "--seq_length", "32", "--sample_tokens", "0", "--eval_samples", "4"]
    job += ["--deepspeed_config", "/storage/config.json", "--data", f"/storage/{text.name}"]
    job += ["--train_steps", "150", "--eval_interval", "0", "--stop_timeout", "60", "--log_interval", "1"]
    hosts = ["--hostfile", "hostfiles/a100x4", "--num_nodes", str(PODS), "--num_gpus", "1"]
    assert deploy.main(["kubernetes", *hosts, "--image", "gpt:1", "--claim", "training", *job]) == 0
    return Cluster(capsys.readouterr().out, storage, free_port())


@pytest.mark.slow
def test_pods_train_stop_when_one_is_evicted_and_go_on(cluster: Cluster) -> None:
    run = cluster.storage / "runs" / "pretrain"
    pods = [cluster.start(index) for index in range(PODS)]
    try:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline and all(pod.poll() is None for pod in pods)
            time.sleep(0.05)
        # An eviction of the pod that is not the first.
        pods[1].send_signal(signal.SIGTERM)
    except BaseException:
        for pod in pods:
            pod.kill()
        raise
    outputs = finish(pods)
    assert [pod.returncode for pod in pods] == [EXIT_STOPPED] * PODS, outputs
    stopped = int(re.search(r"stopped after step (\d+) of 150", outputs[0])[1])
    assert (run / "checkpoints" / f"global_step{stopped}").is_dir()
    # The description of the job is printed once, by the first pod.
    assert ["This job can start." in output for output in outputs] == [True, False]
    # Both pods are replaced; the second may come much earlier, or later.
    first, second = cluster.start(0), None
    lock = run / "lock"
    deadline = time.monotonic() + 60
    while not _locked(lock):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    second = cluster.start(1)
    outputs = finish([first, second])
    assert [first.returncode, second.returncode] == [EXIT_FINISHED] * PODS, outputs
    assert f"global_step{stopped}" in outputs[0] and "finished 150 steps" in outputs[0]


def _locked(path: Path) -> bool:
    """Whether rank 0 of the first pod is there already."""
    held = subprocess.run(["flock", "--nonblock", "--shared", path, "true"], check=False)
    return held.returncode != 0
