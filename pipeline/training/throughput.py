"""Rates of a step: tokens and model operations per second, and their share of a device's peak. No torch.

Peaks are dense rates without sparsity, at boost clock, from NVIDIA's data sheets and architecture white
papers; 16-bit products accumulate in fp32, fp32 is without TF32 (torch's default). A device that is not in
the table has no known peak, and no utilisation is reported for it: a guess would look like a measurement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.training.metrics import StepMetrics

if TYPE_CHECKING:
    from pipeline.engine.engine import StepResult


@dataclass(frozen=True)
class DevicePeak:
    """Peak rates of one kind of GPU.

    Attributes:
        pattern: Regular expression found in `torch.cuda.get_device_name()`.
        half: TFLOP/s with fp16 and, if `bf16`, with bf16.
        single: TFLOP/s with fp32.
        source: Where the rates are published.
        bf16: Whether bf16 is native.
    """

    pattern: str
    half: float
    single: float
    source: str
    bf16: bool = True

    def tflops(self, dtype: str) -> float | None:
        """Peak for ``fp32``, ``fp16`` or ``bf16``; None where the device does not compute it natively."""
        if dtype == "fp32":
            return self.single
        return self.half if dtype == "fp16" or self.bf16 else None


_ADA = "NVIDIA Ada GPU architecture white paper"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper"

# A slice of a GPU (MIG, vGPU) has an unknown share of its peak.
_SLICE = re.compile(r"\bMIG\b|\bGRID\b")

# The first match counts, so that special versions come before the plain name.
DEVICES = (
    DevicePeak(r"\bGB200\b", 2500.0, 80.0, "NVIDIA GB200 NVL72 data sheet"),
    DevicePeak(r"\bB200\b", 2250.0, 75.0, "NVIDIA HGX B200 data sheet"),
    DevicePeak(r"\bH200 NVL\b", 835.5, 60.0, "NVIDIA H200 data sheet"),
    DevicePeak(r"\bH200\b", 989.5, 67.0, "NVIDIA H200 data sheet"),
    DevicePeak(r"\bGH200\b", 989.5, 67.0, "NVIDIA GH200 data sheet"),
    DevicePeak(r"\bH20\b", 148.0, 44.0, "NVIDIA H20 data sheet"),
    DevicePeak(r"\bH[18]00 PCIe\b", 756.0, 51.0, "NVIDIA H100 data sheet"),
    DevicePeak(r"\bH100 NVL\b", 835.5, 60.0, "NVIDIA H100 data sheet"),
    DevicePeak(r"\bH[18]00\b", 989.5, 67.0, "NVIDIA H100 data sheet"),
    DevicePeak(r"\bA[18]00\b", 312.0, 19.5, "NVIDIA A100 data sheet"),
    DevicePeak(r"\bA40\b", 149.7, 37.4, "NVIDIA A40 data sheet"),
    DevicePeak(r"\bA30\b", 165.0, 10.3, "NVIDIA A30 data sheet"),
    DevicePeak(r"\bA10G\b", 70.0, 35.0, "NVIDIA A10G data sheet"),
    DevicePeak(r"\bA10\b", 125.0, 31.2, "NVIDIA A10 data sheet"),
    DevicePeak(r"\bL40S\b", 362.0, 91.6, "NVIDIA L40S data sheet"),
    DevicePeak(r"\bL40\b", 181.0, 90.5, "NVIDIA L40 data sheet"),
    DevicePeak(r"\bL4\b", 121.0, 30.3, "NVIDIA L4 data sheet"),
    DevicePeak(r"\bV100S", 130.0, 16.4, "NVIDIA V100 data sheet", bf16=False),
    DevicePeak(r"\bV100-PCIE", 112.0, 14.0, "NVIDIA V100 data sheet", bf16=False),
    DevicePeak(r"\bV100\b", 125.0, 15.7, "NVIDIA V100 data sheet", bf16=False),
    DevicePeak(r"\bT4\b", 65.0, 8.1, "NVIDIA T4 data sheet", bf16=False),
    DevicePeak(r"\bRTX 6000 Ada\b", 364.0, 91.1, "NVIDIA RTX 6000 Ada data sheet"),
    DevicePeak(r"\bRTX A6000\b", 154.8, 38.7, "NVIDIA RTX A6000 data sheet"),
    DevicePeak(r"\bRTX 5090\b(?! Laptop)", 209.5, 104.8, "NVIDIA RTX Blackwell GPU architecture white paper"),
    DevicePeak(r"\bRTX 4090\b(?! D\b| Laptop)", 165.2, 82.6, _ADA),
    DevicePeak(r"\bRTX 3090 Ti\b", 80.0, 40.0, _AMPERE),
    DevicePeak(r"\bRTX 3090\b", 71.0, 35.6, _AMPERE),
)


def peak_tflops(device_name: str | None, dtype: str) -> float | None:
    """Dense peak of one device in TFLOP/s; None on CPU, on unknown devices and for emulated types.

    Args:
        device_name: As torch.cuda.get_device_name() says it; None on CPU.
        dtype: Type of the products: ``fp32``, ``fp16`` or ``bf16``.
    """
    if device_name is None or _SLICE.search(device_name):
        return None
    matches = (device for device in DEVICES if re.search(device.pattern, device_name))
    device = next(matches, None)
    return device.tflops(dtype) if device else None


def mfu(tflops_per_device: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation, 0 to 1: achieved over peak rate; None where the peak is unknown."""
    return None if peak is None else tflops_per_device / peak


@dataclass(frozen=True)
class Speedometer:
    """Turns a step's duration into rates.

    Attributes:
        tokens_per_step: Of the whole job, each counted once.
        flops_per_token: Model operations, forward and backward, recomputation excluded.
        num_devices: Ranks of the job.
        peak_flops: Dense peak of one device at the job's precision, operations per second; None if
            it is not known, and then there is no MFU.
    """

    tokens_per_step: int
    flops_per_token: float
    num_devices: int
    peak_flops: float | None = None

    def measure(
        self, step: int, result: StepResult, *, tokens: int, step_time: float, data_time: float
    ) -> StepMetrics:
        """The metrics of a step that took `step_time` seconds; arguments as `StepMetrics` has them."""
        rate = self.tokens_per_step / step_time
        flops = rate * self.flops_per_token / self.num_devices
        return StepMetrics(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=tokens,
            step_time=step_time,
            tokens_per_second=rate,
            tflops_per_device=flops / 1e12,
            mfu=flops / self.peak_flops if self.peak_flops else None,
            data_time=data_time,
            skipped=result.skipped,
        )
