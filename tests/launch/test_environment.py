"""What is said about a machine: tried on the machines that newcomers have, and on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.problems import Problem
from pipeline.job.report import console
from pipeline.launch import environment
from pipeline.launch.environment import Environment, environment_problems, environment_table, training_devices
from tests.launch.host_check.host_facts import GIB, GPU, facts

PROJECT = Path(__file__).resolve().parents[2]
A100 = {
    "name": GPU["name"],
    "capability": "8.0",
    "memory": 80 * GIB,
    "dtype": "bfloat16",
    "tflops": 250.0,
    "right": True,
}
CPU = {"dtype": "float32", "tflops": 1.0, "right": True}
PROGRAMS = {"commands": dict.fromkeys(environment.PROGRAMS, "/usr/bin/it")}
NO_GPUS = {"gpus": {"smi": None, "driver": False, "cards": 0, "failed": None, "gpus": [], "processes": []}}
CPU_BUILD = {"torch": "2.13.0+cpu", "cuda": None, "nccl": None}


def rates(count: int = 8, **changes: Any) -> dict[str, Any]:
    """What torch says on a server of A100; a key such as ``gpu3`` changes that one."""
    devices = [dict(A100) for _ in range(count)]
    for key in [key for key in changes if key.startswith("gpu")]:
        devices[int(key[3:])] |= changes.pop(key)
    built = ["sm_75", "sm_80", "sm_90"]
    return {
        "torch": "2.13.0+cu130", "cuda": "13.0", "built_for": built, "error": None, "devices": devices,
        "cpu": CPU, **changes,
    }  # fmt: skip


def machine(
    torch: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **changes: Any
) -> Environment:
    return Environment(facts(1, **{**PROGRAMS, **changes}), torch or rates(), environ or {})


def judged(found: Environment) -> tuple[list[Problem], str | None]:
    problems = environment_problems(found)
    return problems, training_devices(found, problems)


def test_a_healthy_server() -> None:
    assert judged(machine()) == ([], f"on 8 x {GPU['name']}")


def test_a_laptop_without_gpus() -> None:
    found = machine(rates(0, torch="2.13.0+cpu", cuda=None), packages=CPU_BUILD, **NO_GPUS)
    problems, devices = judged(found)
    assert problems == [] and devices.startswith("on the CPU (")


ERRORS = [
    (machine(rates(0), packages=CPU_BUILD), "torch", "CPU build, and the machine has 8 GPUs", "CUDA build"),
    (
        machine(rates(0, error="too old"), gpus={"gpus": [{**GPU, "index": "0", "driver_version": "535.1"}]}),
        "driver", "torch's CUDA 13.0 needs driver 580 or newer", "Update the driver",
    ),
    (
        machine(rates(0), gpus={"gpus": [], "failed": "couldn't communicate with the NVIDIA driver"}),
        "driver", "the NVIDIA driver does not work (couldn't communicate", "Reboot",
    ),
    (machine(rates(0)), "torch", "nvidia-smi shows 8 GPUs, and torch sees none", "/dev/nvidia*"),
    (machine(rates(0, error="CUDA unknown error")), "torch", "none (CUDA unknown error)", "VISIBLE"),
    (machine(packages={"torch": None, "cuda": None}), "torch", "is not installed for", "--setup_only"),
    (machine(packages={"deepspeed": None}), "deepspeed", "is not installed for", "--setup_only"),
    (machine({"error": "no libcudart.so.13"}), "torch", "does not work (no libcudart.so.13", "Remove .venv"),
    (
        machine(rates(gpu3={"error": "CUDA error: no kernel image is available", "capability": "7.0"})),
        "GPU 3", "was not built for compute capability 7.0 (but for sm_75, sm_80, sm_90)", "still supports",
    ),
    (machine(rates(gpu3={"error": "out of memory"})), "GPU 3", "product fails (out of memory)", "dmesg"),
    (machine(rates(gpu3={"right": False})), "GPU 3", "the GPU or its memory is broken", "exchanged"),
    (machine(rates(cpu={"error": "Illegal instruction"})), "CPU", "fails (Illegal", "--setup_only"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "key", "rule", "remedy"), ERRORS, ids=lambda value: str(value)[:30])
def test_what_keeps_a_machine_from_training(found: Environment, key: str, rule: str, remedy: str) -> None:
    problems, devices = judged(found)
    (problem,) = [problem for problem in problems if problem.severity == "error"]
    assert (problem.key, devices) == (key, None)
    assert rule in problem.rule and remedy in problem.remedy


WARNINGS = [
    (machine(rates(0), {"CUDA_VISIBLE_DEVICES": ""}), "CUDA_VISIBLE_DEVICES", "hides this", "CPU"),
    (machine(rates(0), {"CUDA_VISIBLE_DEVICES": "-1"}), "CUDA_VISIBLE_DEVICES", "hides", "CPU"),
    (machine(environ={"DS_ACCELERATOR": "cpu"}), "DS_ACCELERATOR", "training here is on the CPU", "CPU"),
    (
        machine(rates(0), gpus={"smi": None, "driver": False, "cards": 4, "gpus": []}),
        "driver", "there are 4 NVIDIA cards and no driver for them", "CPU",
    ),
    (machine(packages={"torch": "2.12.0+cu130"}), "torch", "is tested with 2.13.0", "A100"),
    (machine(rates(gpu3={"tflops": 100.0})), "GPU 3", "100 TFLOP/s, where the median", "A100"),
    (machine(memory={"free": GIB}), "memory", "two ranks take about 2 GiB", "A100"),
    (machine(shared_memory={"total": 64 * 2**20}), "/dev/shm", "a container's default", "A100"),
    (machine(folders={"/nfs/runs": {"free": GIB, "type": "nfs"}}), "/nfs/runs", "less than 5 GiB", "A100"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "key", "rule", "trains"), WARNINGS, ids=lambda value: str(value)[:30])
def test_what_is_worth_a_look(found: Environment, key: str, rule: str, trains: str) -> None:
    (problem,), devices = judged(found)
    assert (problem.key, problem.severity) == (key, "warning")
    assert rule in problem.rule and problem.remedy
    assert trains in devices


def test_gpus_that_nvidia_smi_cannot_show_count_where_torch_sees_them() -> None:
    found = machine(gpus={"smi": None, "driver": True, "gpus": []})
    assert judged(found) == ([], f"on 8 x {GPU['name']}")


def shown(found: Environment, capsys: pytest.CaptureFixture[str]) -> str:
    console().print(environment_table(found))
    return " ".join(capsys.readouterr().out.split())


def test_the_table_shows_the_gpus_and_their_rates(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(machine(commands=dict.fromkeys(environment.PROGRAMS)), capsys)
    for part in (
        "driver 580.95.05",
        "GPU 7 NVIDIA A100-SXM4-80GB, 81000 of 81920 MiB free",
        "torch's GPU 7 NVIDIA A100-SXM4-80GB, 250 TFLOP/s in bfloat16",
        "built for CUDA 13.0, NCCL 2.28.9",
        "not there gcc, g++, nvcc",
    ):
        assert part in text, text


@pytest.mark.parametrize("found", [found for found, *_ in (*ERRORS, *WARNINGS)])
def test_the_table_shows_every_machine(found: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    assert "This machine" in shown(found, capsys)


@pytest.mark.parametrize("name", ["packages", "gpus", "memory", "limits", "shared_memory", "folders"])
def test_a_fact_that_cannot_be_found_out_hides_no_other(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Environment({**facts(1, **PROGRAMS), name: {"error": "OSError: no"}}, rates(), {})
    environment_problems(found)
    assert "This machine" in shown(found, capsys)


def check_environment(**environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "pipeline.check", "--environment"]
    return subprocess.run(
        command, cwd=PROJECT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_this_machine_can_train() -> None:
    done = check_environment(DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "This machine can train: on the CPU" in done.stdout
    assert "TFLOP/s in float32" in done.stdout
    # torch is asked in another process.
    assert "| torch\n" not in done.stderr and "rich" in done.stderr


def test_a_torch_that_does_not_work_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    done = check_environment(PYTHONPATH=str(tmp_path), DS_ACCELERATOR="cpu")
    assert done.returncode == 2
    assert "libcudart.so.13: cannot open" in done.stdout
    assert "This machine cannot train as it is." in done.stdout


@pytest.mark.slow
def test_the_answer_of_torch_is_what_is_judged() -> None:
    command = [sys.executable, "-m", "pipeline.training.device_rates"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=True)
    answer = json.loads(done.stdout.rpartition(environment._MARK)[2])
    assert set(answer) == set(rates())
    assert set(answer["cpu"]) == set(CPU) and answer["cpu"]["right"] and answer["cpu"]["tflops"] > 0
