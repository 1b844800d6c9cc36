"""Hosts as the checks see them: what two healthy A100 servers answer, to be spoiled in one point."""

from __future__ import annotations

import copy
from typing import Any

from pipeline.job.world import Host
from pipeline.launch.host_check.ask import Answers, HostReport
from pipeline.launch.host_check.comparison import Survey

GIB = 2**30
GPU = {
    "name": "NVIDIA A100-SXM4-80GB", "memory.total": "81920", "memory.free": "81000",
    "driver_version": "580.95.05", "compute_cap": "8.0",
}  # fmt: skip
FACTS: dict[str, Any] = {
    "user": {"name": "ada", "home": "/home/ada"},
    "machine": {"host": "", "arch": "x86_64", "boot": ""},
    "python": {"version": "3.11.7", "path": "/nfs/job/.venv/bin/python"},
    "packages": {
        "torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "deepspeed": "0.19.8",
        "transformers": "5.24.0", "numpy": "2.4.6", "datasets": "5.2.0", "accelerate": "1.15.0",
    },
    "project": {"digest": "0123456789ab", "cwd": True},
    "files": {"/nfs/job/zero1.json": "aaaa"},
    "data": {"/nfs/text": {"files": 3, "bytes": 3000, "digest": "bbbb"}},
    "gpus": {
        "smi": "/usr/bin/nvidia-smi", "driver": True, "failed": None, "processes": [],
        "gpus": [{"index": str(index), **GPU} for index in range(8)],
    },
    "memory": {"cores": 64, "total": 1000 * GIB, "free": 900 * GIB},
    "limits": {"files": [65536, 65536], "locked": [None, None], "rdma": ["mlx5_0"]},
    "shared_memory": {"total": 500 * GIB, "free": 500 * GIB},
    "folders": {
        "/nfs/runs": {
            "total": 10**15, "free": 10**14, "nearest": "/nfs", "writable": True, "type": "nfs4",
        },
    },
    "locks": [],
    "names": [],
    "environment": {},
    "commands": {},
    "doors": {"own": None, "net": None, "interface": "eth0"},
    "began": 0.0,
    "port": None,
}  # fmt: skip


def facts(place: int = 1, **changes: Any) -> dict[str, Any]:
    """The facts of host number `place`, with `changes`: ``packages={"torch": None}`` changes that one entry,
    anything that is no dict replaces the fact."""
    result = copy.deepcopy(FACTS)
    result["machine"] |= {"host": f"dgx-{place}", "boot": f"boot-{place}", "address": f"10.0.0.{place}"}
    result["names"] = [f"10.0.0.{place}"]
    result["doors"] |= {"own": [f"10.0.0.{place}", 40000], "net": [f"10.0.0.{place}", 40001]}
    result["port"] = 29500 if place == 1 else None
    for name, change in changes.items():
        result[name] = result[name] | change if isinstance(change, dict) else change
    return result


def report(place: int = 1, name: str = "", slots: int = 8, **changes: Any) -> HostReport:
    """The report of a healthy host; keywords of HostReport are set there, others change its facts."""
    own = {
        key: changes.pop(key)
        for key in ("failure", "noise", "clock", "seen", "reached", "reports", "unreached")
        if key in changes
    }
    seen = own.pop("seen", {"/nfs/runs": [0, 1, 2]})
    return HostReport(Host(name or f"dgx-{place}", slots), facts(place, **changes), seen=seen, **own)


def survey(*reports: HostReport, here: dict[str, Any] | None = None, **values: Any) -> Survey:
    """What the checks get; this machine is a login host of the same installation."""
    mine = HostReport(Host("here", 1), here or facts(9))
    values = {"device": "cuda", "world_size": 16, **values}
    return Survey(Answers(mine, reports, "10.0.0.1"), **values)
