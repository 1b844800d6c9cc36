"""Checks of who ranks run as, and of what they run and read: the same on every host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.launch.host_check.ask import HostReport
from pipeline.launch.host_check.judge import Check, Survey, Wrong, alike, as_here, each, failed, size


def _same_user(check: Check, survey: Survey) -> Iterator[Wrong]:
    """A hostfile that names the user (user@host) says what is wanted."""
    return (wrong for wrong in as_here(check, survey) if "@" not in wrong.host)


def _missing_folder(report: HostReport, survey: Survey) -> Wrong | None:
    if report.facts["project"]["cwd"]:
        return None
    remedy = "Make it on {host}, or start from a folder that all hosts have"
    return Wrong(report.host.name, "missing", "ranks start in this machine's current folder", remedy)


def _missing_torch(report: HostReport, survey: Survey) -> Wrong | None:
    if report.facts["packages"]["torch"]:
        return None
    return Wrong(report.host.name, "none", "torch is not installed for the Python that ranks use")


def _cpu_build(report: HostReport, survey: Survey) -> Wrong | None:
    packages = report.facts["packages"]
    if survey.device == "cpu" or not packages["torch"] or packages["cuda"]:
        return None
    remedy = "Install the CUDA build of torch, or set DS_ACCELERATOR=cpu to train on the CPU"
    return Wrong(report.host.name, packages["torch"], "this build of torch cannot use the GPUs", remedy)


def _files(check: Check, survey: Survey) -> Iterator[Wrong]:
    """Ranks read the job's description themselves: each on its own host."""
    yield from _each_path(check, survey, "is read by every rank, and must be as on this machine")


def _data(check: Check, survey: Survey) -> Iterator[Wrong]:
    yield from _each_path(check, survey, "is read by every rank, and must hold the same files")


def _each_path(check: Check, survey: Survey, rule: str) -> Iterator[Wrong]:
    if failed(survey.here, check.fact):
        return
    for report in survey.hosts:
        if failed(report.facts, check.fact):
            continue
        found = report.facts[check.fact]
        for path, wanted in survey.here[check.fact].items():
            if found[path] != wanted:
                yield Wrong(report.host.name, f"{path}: {_told(found[path])}", f"{rule} ({_told(wanted)})")


def _told(found: Any) -> str:
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
