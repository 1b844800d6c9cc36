"""What this machine has, as a table for a newcomer. rich; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from pipeline.base.words import size
from pipeline.launch.environment import PROGRAMS, Environment
from pipeline.launch.host_check.judge import failed


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
    if not failed(facts, "memory"):
        memory = facts["memory"]
        yield "CPU", f"{memory['cores']} cores, {_rate(found.rates.get('cpu'))}"
        yield "memory", f"{size(memory['free'])} of {size(memory['total'])} free"
    if not failed(facts, "shared_memory"):
        yield "/dev/shm", size(facts["shared_memory"]["total"])
    for path, folder in {} if failed(facts, "folders") else facts["folders"].items():
        yield f"disk at {path}", f"{size(folder['free'])} free ({folder['type']})"
    if not failed(facts, "limits"):
        files, locked = facts["limits"]["files"][0], facts["limits"]["locked"][0]
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
    gpus = {} if failed(found.facts, "gpus") else found.facts["gpus"]
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
        return "torch does not tell"
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
