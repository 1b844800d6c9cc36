"""Rates of a step: tokens and model operations per second, and their share of a device's peak. No torch.

A device that is not known by name has no known peak, and no utilisation is reported for it: a guess would
look like a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.job.world import device_kind
from pipeline.training.metrics import StepMetrics

if TYPE_CHECKING:
    from pipeline.engine.engine import StepResult


def peak_tflops(device_name: str | None, dtype: str) -> float | None:
    """Dense peak of one device in TFLOP/s; None on CPU, on unknown devices and for emulated types.

    Args:
        device_name: As torch.cuda.get_device_name() says it; None on CPU.
        dtype: Type of the products: ``fp32``, ``fp16`` or ``bf16``.
    """
    device = device_kind(device_name)
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
        self,
        step: int,
        result: StepResult,
        *,
        tokens: int,
        step_time: float,
        data_time: float,
        save_time: float = 0.0,
        time: float = 0.0,
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
            time=time,
            save_time=save_time,
        )
