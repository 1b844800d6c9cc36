"""What one machine has to train with, what is missing, and what to do about it: as problems, and as a table.

facts      the probe's, as for the hosts of a job    ─┐
torch      a process of its own: devices, rates       ├─ problems ── "this machine can train: ..."
environ    CUDA_VISIBLE_DEVICES, DS_ACCELERATOR      ─┘
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pipeline.base.problems import Problem
from pipeline.base.user_input import home_folder
from pipeline.base.words import size
from pipeline.cluster.devices import driver_needed
from pipeline.cluster.world import available_cores
from pipeline.job.resolve import PROJECT
from pipeline.launch.host_check.ask import Question, ask_hosts, remote_shell
from pipeline.launch.host_check.comparison import failed

RATES_SECONDS = 180
PROGRAMS = ("gcc", "g++", "nvcc", "ninja", "ssh", "pdsh", "mpirun", "srun")
_MARK = "DEVICE-RATES:"
# A GPU this far below the machine's median is throttled, shared or broken.
_SLOW_SHARE = 0.8
_LEAST_DISK, _LEAST_MEMORY, _LEAST_SHARED_MEMORY = 5 * 2**30, 4 * 2**30, 64 * 2**20


@dataclass(frozen=True)
class Environment:
    """What was found on this machine.

    Attributes:
        facts: The probe's.
        rates: What torch said (`pipeline.training.device_rates.describe`), or {"error": why it said nothing}.
        environ: Variables that choose devices.
    """

    facts: Mapping[str, Any]
    rates: Mapping[str, Any]
    environ: Mapping[str, str]

    def fact(self, name: str) -> Mapping[str, Any]:
        """A fact that is a mapping; empty where it could not be found out."""
        return {} if failed(self.facts, name) else self.facts[name]

    @property
    def packages(self) -> Mapping[str, str | None]:
        """Versions by name; None where a package is not installed."""
        return defaultdict(lambda: None, self.fact("packages"))

    @property
    def gpus(self) -> list[dict[str, str]]:
        """As nvidia-smi tells: those that are there, visible to torch or not."""
        return self.fact("gpus").get("gpus", [])

    @property
    def devices(self) -> list[dict[str, Any]]:
        """The GPUs on which torch can compute."""
        return [device for device in self.rates.get("devices", []) if "error" not in device]

    @property
    def wants_gpus(self) -> bool:
        """Whether a job here would take the GPUs."""
        return self.environ.get("DS_ACCELERATOR") != "cpu" and not self.hides_gpus

    @property
    def hides_gpus(self) -> bool:
        visible = self.environ.get("CUDA_VISIBLE_DEVICES")
        return visible is not None and visible.strip() in ("", "-1")


def examine_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Ask this machine, and torch in a process of its own; takes some seconds."""
    home = str(home_folder())
    question = Question(
        str(PROJECT), str(Path.cwd()), folders=(str(Path.cwd()), home, "/tmp"), commands=PROGRAMS
    )
    here = ask_hosts((), question, remote_shell()).here
    if here.failure is not None:
        raise OSError(here.failure.rule)
    return Environment(here.facts, _ask_torch(environ), environ)


def _ask_torch(environ: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "pipeline.training.device_rates"]
    try:
        done = subprocess.run(
            command, cwd=PROJECT, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=RATES_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"it did not answer within {RATES_SECONDS} s"}
    _, mark, answer = done.stdout.rpartition(_MARK)
    if mark:
        return json.loads(answer)
    last = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
    return {"error": last[0]}


def environment_problems(found: Environment) -> list[Problem]:
    """Errors keep a job from starting here; warnings are worth a look."""
    problems = [*_torch_problems(found), *_version_problems(found)]
    if found.wants_gpus:
        problems += _gpu_problems(found)
    elif found.gpus:
        problems.append(_hidden(found))
    return [*problems, *_machine_problems(found)]


def _torch_problems(found: Environment) -> Iterator[Problem]:
    packages = found.packages
    for name in ("torch", "deepspeed"):
        if packages[name] is None:
            rule = f"is not installed for {sys.executable}"
            yield Problem(name, None, rule, "Run ./launch.sh --setup_only, and use .venv/bin/python")
    if packages["torch"] and "torch" not in found.rates:
        rule = f"torch is installed and does not work ({found.rates['error']})"
        yield Problem("torch", packages["torch"], rule, "Remove .venv and run ./launch.sh --setup_only")
    elif "torch" in found.rates and "error" in found.rates["cpu"]:
        rule = f"a matrix product on the CPU fails ({found.rates['cpu']['error']})"
        yield Problem("CPU", packages["torch"], rule, "Remove .venv and run ./launch.sh --setup_only")


def _version_problems(found: Environment) -> Iterator[Problem]:
    text = (PROJECT / "constraints.txt").read_text(encoding="utf-8")
    for name in ("torch", "deepspeed"):
        pinned = re.search(rf"^{name}==(\S+)", text, re.MULTILINE)
        has = found.packages[name]
        if pinned and has and has.partition("+")[0] != pinned[1]:
            rule = f"the project is tested with {pinned[1]}"
            yield Problem(
                name, has, rule, "Run ./launch.sh --setup_only, and use .venv/bin/python", "warning"
            )


def _hidden(found: Environment) -> Problem:
    key = "CUDA_VISIBLE_DEVICES" if found.hides_gpus else "DS_ACCELERATOR"
    rule = f"hides this machine's {len(found.gpus)} GPUs: training here is on the CPU"
    return Problem(key, found.environ[key], rule, f"Unset it to use them: unset {key}", "warning")


def _gpu_problems(found: Environment) -> Iterator[Problem]:
    gpus = found.fact("gpus")
    packages, there = found.packages, len(found.gpus)
    if gpus.get("failed"):
        remedy = "Reboot, or reinstall the driver: nvidia-smi must work"
        yield Problem("driver", "broken", f"the NVIDIA driver does not work ({gpus['failed']})", remedy)
    elif gpus.get("cards") and not gpus["driver"]:
        rule = f"there are {gpus['cards']} NVIDIA cards and no driver for them: training here is on the CPU"
        remedy = "Install NVIDIA's driver, or start the container with --gpus all"
        yield Problem("driver", "none", rule, remedy, "warning")
    if not there:
        return
    driver, cuda = found.gpus[0]["driver_version"], packages["cuda"]
    if packages["torch"] and cuda is None:
        rule = f"this is torch's CPU build, and the machine has {there} GPUs, which a start would choose"
        remedy = "Install the CUDA build (pip install --force-reinstall torch), or set DS_ACCELERATOR=cpu"
        yield Problem("torch", packages["torch"], rule, remedy)
    elif cuda and (needed := driver_needed(driver, cuda)):
        rule = f"torch's CUDA {cuda} needs driver {needed} or newer"
        remedy = f"Update the driver, or install a torch built for an older CUDA than {cuda}"
        yield Problem("driver", driver, rule, remedy)
    elif "torch" in found.rates:
        yield from _device_problems(found)


def _device_problems(found: Environment) -> Iterator[Problem]:
    if found.rates["error"] or not found.rates["devices"]:
        said = f" ({found.rates['error']})" if found.rates["error"] else ""
        rule = f"nvidia-smi shows {len(found.gpus)} GPUs, and torch sees none{said}"
        remedy = "See CUDA_VISIBLE_DEVICES, /dev/nvidia* and the permissions of the container"
        yield Problem("torch", found.rates["torch"], rule, remedy)
        return
    rates = [device["tflops"] for device in found.devices]
    for index, device in enumerate(found.rates["devices"]):
        key = f"GPU {index}"
        if "error" in device:
            yield _failing(key, device, found.rates["built_for"])
        elif not device["right"]:
            rule = "a matrix product is wrong: the GPU or its memory is broken"
            yield Problem(key, device["name"], rule, "Take it out of the hostfile, and have it exchanged")
        elif device["tflops"] < _SLOW_SHARE * statistics.median(rates):
            median = statistics.median(rates)
            rule = f"{device['tflops']:.0f} TFLOP/s, where the median of this machine's GPUs is {median:.0f}"
            remedy = "See nvidia-smi -q -d PERFORMANCE: heat, a power limit, or another process"
            yield Problem(key, device["name"], rule, remedy, "warning")


def _failing(key: str, device: Mapping[str, Any], built_for: list[str]) -> Problem:
    capability = device.get("capability")
    if capability and "no kernel image" in device["error"]:
        rule = f"torch was not built for compute capability {capability} (but for {', '.join(built_for)})"
        return Problem(key, device["name"], rule, "Install a torch whose CUDA still supports this GPU")
    rule = f"a matrix product fails ({device['error']})"
    remedy = "See nvidia-smi and dmesg: other processes, a fallen bus, memory errors"
    return Problem(key, device.get("name", "unknown"), rule, remedy)


def _machine_problems(found: Environment) -> Iterator[Problem]:
    for path, folder in found.fact("folders").items():
        if folder["free"] < _LEAST_DISK and path != "/tmp":
            rule = "less than 5 GiB are free: an installation with CUDA takes about 10, checkpoints more"
            yield Problem(path, f"{size(folder['free'])} free", rule, "Make room", "warning")
    if found.fact("memory").get("free", _LEAST_MEMORY) < _LEAST_MEMORY:
        value = f"{size(found.fact('memory')['free'])} free"
        yield Problem("memory", value, "two ranks take about 2 GiB", "End other programs", "warning")
    shared = found.fact("shared_memory")
    if shared and shared["total"] <= _LEAST_SHARED_MEMORY:
        rule = "is a container's default, too small for NCCL between GPUs and for data workers"
        remedy = "Start the container with --ipc=host or --shm-size=8g"
        yield Problem("/dev/shm", size(shared["total"]), rule, remedy, "warning")


def training_devices(found: Environment, problems: list[Problem]) -> str | None:
    """What a job here would train on, in words; None if it could not."""
    if any(problem.severity == "error" for problem in problems):
        return None
    if found.wants_gpus and found.devices:
        names = sorted({device["name"] for device in found.devices})
        return f"on {len(found.devices)} x {' + '.join(names)}"
    return f"on the CPU ({available_cores()} cores)"


def environment_table(found: Environment) -> Table:
    """One line for each thing that matters to training."""
    table = Table(box=None, show_header=False, title="This machine", title_justify="left", title_style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(found):
        table.add_row(Text(name, "dim"), Text(text))
    return table


def _rows(found: Environment) -> Iterator[tuple[str, str]]:
    facts, packages = found.facts, found.packages
    yield "host", f"{facts['machine']['host']}, {facts['machine']['arch']}"
    yield "Python", f"{facts['python']['version']}, {facts['python']['path']}"
    yield "torch", _torch(packages)
    for name in ("deepspeed", "transformers"):
        yield name, packages[name] or "not installed"
    yield "driver", _driver(found)
    yield from _devices(found)
    if memory := found.fact("memory"):
        yield "CPU", f"{memory['cores']} cores, {_rate(found.rates.get('cpu'))}"
        yield "memory", f"{size(memory['free'])} of {size(memory['total'])} free"
    if shared := found.fact("shared_memory"):
        yield "/dev/shm", size(shared["total"])
    for path, folder in found.fact("folders").items():
        yield f"disk at {path}", f"{size(folder['free'])} free ({folder['type']})"
    if limits := found.fact("limits"):
        files, locked = limits["files"][0], limits["locked"][0]
        shown = "unlimited" if locked is None else size(locked)
        yield "limits", f"{'unlimited' if files is None else f'{files:,}'} open files, {shown} locked memory"
    yield from _programs(facts["commands"])


def _torch(packages: Mapping[str, str | None]) -> str:
    if packages["torch"] is None:
        return "not installed"
    build = f"built for CUDA {packages['cuda']}" if packages["cuda"] else "CPU build"
    nccl = f", NCCL {packages['nccl']}" if packages["nccl"] else ""
    return f"{packages['torch']}, {build}{nccl}"


def _driver(found: Environment) -> str:
    if found.gpus:
        return found.gpus[0]["driver_version"]
    gpus = found.fact("gpus")
    if gpus.get("failed"):
        return "does not work"
    return "there, but no nvidia-smi to ask" if gpus.get("driver") else "none: no NVIDIA GPU is in use here"


def _devices(found: Environment) -> Iterator[tuple[str, str]]:
    """Each GPU: as nvidia-smi tells, and as torch computes. The numbers agree unless variables hide some."""
    for gpu in found.gpus:
        yield f"GPU {gpu['index']}", f"{gpu['name']}, {gpu['memory.free']} of {gpu['memory.total']} MiB free"
    for index, device in enumerate(found.rates.get("devices", [])):
        name = device.get("name", "unknown")
        yield f"torch's GPU {index}", f"{name}, {_rate(device)}"
    if found.gpus and not found.rates.get("devices"):
        yield "torch's GPUs", "none"


def _rate(rate: dict[str, Any] | None) -> str:
    """A matrix product's rate, in words."""
    if rate is None:
        return "unknown to torch"
    if "error" in rate:
        return "a matrix product fails"
    right = "" if rate["right"] else ", and a wrong result"
    return f"{rate['tflops']:.3g} TFLOP/s in {rate['dtype']}{right}"


def _programs(commands: dict[str, str | None]) -> Iterator[tuple[str, str]]:
    """Compilers are for compiled ops only; one of the launchers is for several hosts."""
    there = [name for name in PROGRAMS if commands[name]]
    missing = [name for name in PROGRAMS if not commands[name]]
    yield "programs", ", ".join(there) or "none"
    if missing:
        yield "not there", f"{', '.join(missing)} (none is needed to train here)"
