"""What this machine computes with, asked of the CUDA driver itself, and which driver a torch needs.

The driver library is the one that torch uses, and honours CUDA_VISIBLE_DEVICES as torch does; asking it
takes a fraction of a second and needs no nvidia-smi.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.base.problems import Problem

_CUDA_SUCCESS = 0
_CUDA_ERROR_NO_DEVICE = 100
# CUdevice_attribute of the driver interface.
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
# The number of this host. With it, the launcher sets CUDA_VISIBLE_DEVICES, on machines without GPUs, too.
_SET_BY_DEEPSPEED_LAUNCHER = "CROSS_RANK"
# Ampere (8.0) is the first generation with bf16 arithmetic.
BF16_CAPABILITY = (8, 0)
# The oldest driver branch for each major version of CUDA ("CUDA Compatibility", minor version
# compatibility, table 1): every build of that major version runs on it and on newer ones.
_OLDEST_BRANCH = {"11": 450, "12": 525, "13": 580}


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use.

    Attributes:
        index: Its number on this machine, as CUDA_VISIBLE_DEVICES and the launcher count.
        name: As the driver names it, such as ``NVIDIA A100-SXM4-80GB``.
        capability: Compute capability, such as (8, 0).
        memory: Bytes; None where the driver does not say.
    """

    index: int
    name: str
    capability: tuple[int, int]
    memory: int | None = None


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[tuple[Gpu, ...], tuple[Problem, ...]]:
    """The GPUs this process may use; none without a driver or with an empty CUDA_VISIBLE_DEVICES.

    A driver that is there and does not work is a problem, not a machine without GPUs.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return (), ()
    if visible is not None and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", visible):
        rule = "DeepSpeed's launcher selects GPUs by number only"
        return (), (Problem("CUDA_VISIBLE_DEVICES", visible, rule, "Give numbers, as in 0,1"),)
    gpus, problems = _ask_driver()
    if visible is None or problems:
        return gpus, problems
    indices = [int(index) for index in visible.split(",")]
    if not gpus and _SET_BY_DEEPSPEED_LAUNCHER in environ and not _machine_has_gpus(environ):
        return (), ()  # the launcher numbers the ranks of a CPU machine so, too: nobody asked for GPUs
    if len(gpus) != len(indices):
        rule = f"the driver offers {len(gpus)} of these {len(indices)} GPUs"
        remedy = "List each GPU once, by a number that nvidia-smi shows, or unset it"
        return (), (Problem("CUDA_VISIBLE_DEVICES", visible, rule, remedy),)
    named = zip(indices, gpus, strict=True)
    return tuple(replace(gpu, index=index) for index, gpu in named), ()


def _ask_driver() -> tuple[tuple[Gpu, ...], tuple[Problem, ...]]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no NVIDIA driver: a machine without GPUs
        return (), ()
    status = driver.cuInit(0)
    if status == _CUDA_ERROR_NO_DEVICE:
        return (), ()
    if status != _CUDA_SUCCESS:
        rule = f"the CUDA driver is installed but does not start (error {status})"
        remedy = "Repair the driver (nvidia-smi must work), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        return (), (Problem("GPUs", "libcuda.so.1", rule, remedy),)
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return tuple(_describe(driver, index) for index in range(count.value)), ()


def _machine_has_gpus(environ: Mapping[str, str]) -> bool:
    """Whether the driver offers any where CUDA_VISIBLE_DEVICES does not hide them; asked in a new process,
    because the driver reads that variable once."""
    unrestricted = {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    program = (
        f"import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0) == {_CUDA_ERROR_NO_DEVICE})"
    )
    command = [sys.executable, "-I", "-c", program]
    return subprocess.run(command, env=unrestricted, stderr=subprocess.DEVNULL).returncode == 0


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), index)
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, index)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, index)
    memory = ctypes.c_size_t()
    known = driver.cuDeviceTotalMem_v2(ctypes.byref(memory), index) == _CUDA_SUCCESS
    return Gpu(index, name.value.decode(), (major.value, minor.value), memory.value if known else None)


def driver_needed(driver: str, cuda: str) -> int | None:
    """The driver branch that a build for CUDA `cuda` (such as 12.8) needs, if `driver` is older; else None.

    A major version of CUDA that is not known here is not checked.
    """
    needed = _OLDEST_BRANCH.get(cuda.partition(".")[0])
    branch = driver.partition(".")[0]
    return needed if needed is not None and branch.isdecimal() and int(branch) < needed else None
