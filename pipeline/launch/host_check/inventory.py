"""Checks of what each host has: user, software and files, then GPUs, cores, memory and limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pipeline.base.words import size
from pipeline.cluster.devices import driver_needed
from pipeline.launch.host_check.ask import HostReport
from pipeline.launch.host_check.comparison import (
    Check,
    Fault,
    Finding,
    Survey,
    alike,
    alike_where_there,
    as_here,
    each,
    failed,
)

# A GPU of which less is free is used by somebody else; a driver and a desktop take a few percent.
FREE_SHARE = 0.9
# Shared memory per rank that NCCL and the data workers' tensors take, with room.
SHARED_MEMORY_PER_RANK = 64 * 2**20
# Sockets of NCCL's and gloo's groups, data files and libraries, per rank of the job and at all.
FILES_PER_RANK, FILES_AT_LEAST = 16, 512


def _same_user(check: Check, survey: Survey) -> Iterator[Finding]:
    """A hostfile that names the user (user@host) says what is wanted."""
    return (wrong for wrong in as_here(check, survey) if "@" not in wrong.host)


def _missing_folder(report: HostReport, survey: Survey) -> Fault | None:
    if report.facts["project"]["cwd"]:
        return None
    remedy = "Make it on {host}, or start from a folder that all hosts have"
    return "missing", "ranks start in this machine's current folder", remedy


def _missing_torch(report: HostReport, survey: Survey) -> Fault | None:
    if report.facts["packages"]["torch"]:
        return None
    return "none", "torch is not installed for the Python that ranks use"


def _cpu_build(report: HostReport, survey: Survey) -> Fault | None:
    packages = report.facts["packages"]
    if survey.device == "cpu" or not packages["torch"] or packages["cuda"]:
        return None
    remedy = "Install the CUDA build of torch, or set DS_ACCELERATOR=cpu to train on the CPU"
    return packages["torch"], "this build of torch cannot use the GPUs", remedy


def _files(check: Check, survey: Survey) -> Iterator[Finding]:
    """Ranks read the job's description themselves: each on its own host."""
    yield from _each_path(check, survey, "is read by every rank, and must be as on this machine")


def _data(check: Check, survey: Survey) -> Iterator[Finding]:
    yield from _each_path(check, survey, "is read by every rank, and must hold the same files")


def _each_path(check: Check, survey: Survey, rule: str) -> Iterator[Finding]:
    if failed(survey.here, check.fact):
        return
    for report in survey.hosts:
        if failed(report.facts, check.fact):
            continue
        found = report.facts[check.fact]
        for path, wanted in survey.here[check.fact].items():
            if found[path] != wanted:
                yield Finding(
                    report.host.name, f"{path}: {_shown(found[path])}", f"{rule} ({_shown(wanted)})"
                )


def _shown(found: Any) -> str:
    if isinstance(found, dict):
        return f"{found['files']:,} files, {size(found['bytes'])}, digest {found['digest']}"
    return f"digest {found}" if found else "missing"


def _show_paths(found: dict[str, Any]) -> str:
    missing = sum(value is None for value in found.values())
    if not found:
        return ""
    return f"{len(found)} described" + (f", {missing} missing" if missing else "")


def _package(name: str) -> Any:
    return lambda packages: packages[name] or ""


def used_gpus(report: HostReport) -> list[dict[str, str]]:
    """The GPUs of a host that the job uses, of those that it has."""
    devices = {str(device) for device in report.host.devices}
    return [gpu for gpu in report.facts["gpus"]["gpus"] if gpu["index"] in devices]


def can_count(report: HostReport) -> bool:
    """Whether the host's GPUs are known, be there some or none."""
    if failed(report.facts, "gpus"):
        return False
    gpus = report.facts["gpus"]
    return not gpus["failed"] and (gpus["smi"] is not None or not gpus["driver"])


def _show_gpus(found: dict[str, Any]) -> str:
    counts = Counter(gpu["name"] for gpu in found["gpus"])
    return " + ".join(f"{count} x {name}" for name, count in sorted(counts.items()))


def _enough(report: HostReport, survey: Survey) -> Fault | None:
    host, gpus = report.host, report.facts["gpus"]
    if survey.device == "cpu" or not can_count(report):
        return None
    missing = sorted(set(host.devices) - {int(gpu["index"]) for gpu in gpus["gpus"]})
    if not missing:
        return None
    value = _show_gpus(gpus) or "no GPU"
    return value, f"the job uses {host.slots} GPUs there, and there is no number {missing[0]}"


def _uncounted(report: HostReport, survey: Survey) -> Fault | None:
    gpus = report.facts["gpus"]
    if survey.device == "cpu" or can_count(report):
        return None
    if gpus["failed"]:
        remedy = "Repair the driver: nvidia-smi must work on {host}; often a reboot does it"
        return "broken driver", gpus["failed"], remedy
    rule = "there is an NVIDIA driver, and no nvidia-smi to ask it about the GPUs"
    return "no nvidia-smi", rule, "Put nvidia-smi on the PATH of ssh logins", "warning"


def _mixed(check: Check, survey: Survey) -> Iterator[Finding]:
    """The slowest GPU sets the pace, and the smallest memory the batch."""
    kinds = {
        report.host.name: " + ".join(sorted({gpu["name"] for gpu in used_gpus(report)}))
        for report in survey.hosts
        if survey.device == "cuda" and can_count(report) and used_gpus(report)
    }
    most = Counter(kinds.values()).most_common(1)[0][0] if kinds else ""
    for name, kind in kinds.items():
        if kind != most or " + " in kind:
            rule = f"other GPUs than elsewhere ({most}): the slowest sets the pace, the smallest the batch"
            yield Finding(name, kind, rule, "Use hosts and slots of one kind: --include", "warning")


def _old_driver(report: HostReport, survey: Survey) -> Fault | None:
    gpus, cuda = report.facts["gpus"]["gpus"], report.facts.get("packages", {}).get("cuda")
    if not gpus or not cuda or (needed := driver_needed(gpus[0]["driver_version"], cuda)) is None:
        return None
    rule = f"torch's CUDA {cuda} needs driver {needed} or newer"
    return gpus[0]["driver_version"], rule, "Update the driver on {host}", "error"


def _occupied(report: HostReport, survey: Survey) -> Fault | None:
    gpus = [gpu for gpu in used_gpus(report) if _share(gpu) < FREE_SHARE] if survey.device == "cuda" else []
    if not gpus:
        return None
    processes = ", ".join(f"{name} (pid {pid})" for pid, name, *_ in report.facts["gpus"]["processes"][:4])
    first = gpus[0]
    value = f"GPU {first['index']}: {first['memory.free']} of {first['memory.total']} MiB free"
    rule = f"{len(gpus)} of the GPUs are used by {processes or 'processes that it does not show'}"
    return value, rule


def _share(gpu: dict[str, str]) -> float:
    """Free share of a GPU's memory; one that does not tell (a MIG parent) counts as free."""
    free, total = gpu["memory.free"], gpu["memory.total"]
    return int(free) / int(total) if free.isdecimal() and total.isdecimal() else 1.0


def _show_free(found: dict[str, Any]) -> str:
    free = [int(gpu["memory.free"]) for gpu in found["gpus"] if gpu["memory.free"].isdecimal()]
    return f"from {size(min(free) * 2**20)}" if free else ""


def _few_cores(report: HostReport, survey: Survey) -> Fault | None:
    cores, slots = report.facts["memory"]["cores"], report.host.slots
    if cores >= slots:
        return None
    return f"{cores} cores", f"{slots} ranks there share them, and take turns"


def _small_shared_memory(report: HostReport, survey: Survey) -> Fault | None:
    free, needed = report.facts["shared_memory"]["free"], report.host.slots * SHARED_MEMORY_PER_RANK
    if free >= needed:
        return None
    return f"{size(free)} free", f"{report.host.slots} ranks need about {size(needed)}"


def _few_files(report: HostReport, survey: Survey) -> Fault | None:
    soft = report.facts["limits"]["files"][0]
    needed = FILES_AT_LEAST + FILES_PER_RANK * survey.world_size
    if soft is None or soft >= needed:
        return None
    return str(soft), f"a rank of {survey.world_size} may need about {needed}"


def _locked_memory(report: HostReport, survey: Survey) -> Fault | None:
    limits = report.facts["limits"]
    if survey.device == "cpu" or not limits["rdma"] or limits["locked"][0] is None:
        return None
    rule = f"NCCL locks its buffers for {', '.join(limits['rdma'])}, and fails where it may not"
    return size(limits["locked"][0]), rule


def _show_limit(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


_SAME_VERSION = "Install the versions of constraints.txt on every host (./launch.sh --setup_only does)"

SOFTWARE = (
    Check(
        "user", "user", lambda user: user["name"], (_same_user,),
        "Set User for it in ~/.ssh/config, or write user@{host} in the hostfile if that is meant",
    ),
    Check(
        "code", "project", lambda project: project["digest"] or "missing", (as_here,),
        "Bring the project's folder up to date there, at the same path",
    ),
    Check(
        "current folder", "project", lambda project: "there" if project["cwd"] else "missing",
        (each(_missing_folder),), "",
    ),
    Check("processor", "machine", lambda machine: machine["arch"], (alike,), "Use hosts of one architecture"),
    Check(
        "Python", "python", lambda python: f"{python['version']} {python['path']}", (as_here,),
        "Make the environment there at the same path: ./launch.sh --setup_only",
    ),
    Check(
        "torch", "packages", _package("torch"), (alike, each(_missing_torch), each(_cpu_build)),
        _SAME_VERSION,
    ),
    Check("CUDA of torch", "packages", _package("cuda"), (alike,), _SAME_VERSION),
    Check("NCCL", "packages", _package("nccl"), (alike,), _SAME_VERSION),
    Check("deepspeed", "packages", _package("deepspeed"), (as_here,), _SAME_VERSION),
    *(
        Check(name, "packages", _package(name), (alike,), _SAME_VERSION)
        for name in ("transformers", "datasets", "accelerate", "numpy")
    ),
    Check(
        "job files", "files", _show_paths, (_files,),
        "Copy it to the same path there, or keep it on a shared file system",
    ),
    Check(
        "data", "data", _show_paths, (_data,),
        "Copy it to the same path there, or keep it on a shared file system",
    ),
    Check(
        "environment", "environment", lambda found: " ".join("=".join(pair) for pair in found.items()),
        (alike,), "Set it on all hosts or on none, where logins get it: the shell's start-up file, or sshd's",
        "warning",
    ),
)  # fmt: skip

HARDWARE = (
    Check(
        "GPUs", "gpus", _show_gpus, (each(_uncounted), each(_enough), _mixed),
        "Lower its slots in the hostfile, or leave it out with --exclude {host}",
    ),
    Check(
        "driver", "gpus", lambda found: found["gpus"][0]["driver_version"] if found["gpus"] else "",
        (alike_where_there, each(_old_driver)), "Install one driver on all hosts", "warning",
    ),
    Check(
        "free GPU memory", "gpus", _show_free, (each(_occupied),),
        "End those processes, often those of a job before, or leave the GPUs out: --exclude {host}:NUMBER",
    ),
    Check(
        "cores and memory", "memory", lambda found: f"{found['cores']} cores, {size(found['total'])}",
        (each(_few_cores),), "Lower its slots in the hostfile", "warning",
    ),
    Check(
        "/dev/shm", "shared_memory", lambda found: f"{size(found['total'])}", (each(_small_shared_memory),),
        "Enlarge it: --shm-size or --ipc=host for containers, else mount -o remount,size=.. /dev/shm",
    ),
    Check(
        "open files", "limits", lambda found: _show_limit(found["files"][0]), (each(_few_files),),
        "Raise nofile in /etc/security/limits.conf (containers: --ulimit nofile=..), and log in again",
        "warning",
    ),
    Check(
        "locked memory", "limits",
        lambda found: "unlimited" if found["locked"][0] is None else size(found["locked"][0]),
        (each(_locked_memory),),
        "Set memlock to unlimited in /etc/security/limits.conf (containers: --ulimit memlock=-1)",
    ),
)  # fmt: skip
