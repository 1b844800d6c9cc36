"""``python -m pipeline.training.device_rates``: what torch sees on this machine, and how fast it multiplies.

A process of its own, so that the checks import no torch and outlive a driver that crashes. Prints one line
of JSON; what fails is reported in it, device by device.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

MARK = "DEVICE-RATES:"
# Square matrices: 2 * 8192^3 = 1.1e12 operations are a few milliseconds on a GPU, 2 * 1024^3 = 2.1e9 as many
# on a CPU.
_GPU_SIZE, _CPU_SIZE = 8192, 1024
_SECONDS = 0.5


def describe() -> dict[str, Any]:
    """torch's build, and each device with its rate."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "built_for": torch.cuda.get_arch_list(),
        "error": None,
        "devices": [],
    }
    try:
        count = torch.cuda.device_count()
        if count:
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the driver's words
        return {**found, "error": str(error).splitlines()[0], "cpu": rate(torch.device("cpu"))}
    found["devices"] = [_gpu(index) for index in range(count)]
    return {**found, "cpu": rate(torch.device("cpu"))}


def _gpu(index: int) -> dict[str, Any]:
    try:
        properties = torch.cuda.get_device_properties(index)
        known = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
        }
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    return {**known, **rate(torch.device("cuda", index))}


def rate(device: torch.device) -> dict[str, Any]:
    """TFLOP/s of a matrix product, and whether the product is right; {"error": text} where it fails.

    Every entry of a product of ones is the matrices' size, a power of 2, which each format holds exactly.
    """
    size = _GPU_SIZE if device.type == "cuda" else _CPU_SIZE
    try:
        dtype = _dtype(device)
        left = torch.ones(size, size, device=device, dtype=dtype)
        product = left @ left
        right = bool((product == size).all())
        done, began = 0, _now(device)
        while (spent := _now(device) - began) < _SECONDS:
            left @ left
            done += 1
        flops = done * 2 * size**3
    except RuntimeError as error:  # out of memory, no kernels for this GPU, an uncorrectable memory error
        return {"error": str(error).splitlines()[0]}
    return {"dtype": str(dtype).removeprefix("torch."), "tflops": flops / spent / 1e12, "right": right}


def _dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    sys.stdout.write(f"\n{MARK}{json.dumps(describe())}\n")
