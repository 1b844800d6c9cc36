"""The world of a job as data: its hosts, the ranks on each, and what they compute with.

`pipeline.cluster.world` finds it: in a hostfile, on this machine, or in a rank's environment. Of GPUs that
are known by name, the table below has what can be said without a driver.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Literal

LOCALHOST = "localhost"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Host:
    """One machine of a job.

    Attributes:
        name: As in the hostfile (``host``, ``user@host`` or an address); ``localhost`` for this machine.
        slots: Ranks on it.
        devices: Their device numbers on that host, one per slot.
    """

    name: str
    slots: int
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            object.__setattr__(self, "devices", tuple(range(self.slots)))
        if len(self.devices) != self.slots:
            raise ValueError(f"host {self.name}: {self.slots} slots, but devices {self.devices}")


@dataclass(frozen=True)
class World:
    """The ranks of a job.

    Attributes:
        hosts: In rank order: the first host carries the first ranks.
        device: What the ranks compute on.
        device_name: As the driver names it; None on CPU, and for hosts that were not asked.
        bf16_native: Whether that device has bf16 arithmetic. Assumed for hosts that were not asked.
        hostfile: The file the hosts come from, None for this machine.
        device_memory: Bytes of a GPU, of the smallest one; None: nobody has asked.
        host_memory: Bytes of this machine, where it is the only host; None: not known.
        interface: Network interface by which the hosts reach each other, where their names do not tell ranks.
        assumed: Where the device comes from, if it was not asked; empty where it was.
    """

    hosts: tuple[Host, ...]
    device: Literal["cpu", "cuda"]
    device_name: str | None = None
    bf16_native: bool = False
    hostfile: str | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    interface: str | None = None
    assumed: str = ""

    @property
    def known_memory(self) -> int | None:
        """Bytes of a GPU: as asked, else as its name says."""
        return self.device_memory or memory_by_name(self.device_name)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(host.slots for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Whether this machine is the only host."""
        return all(is_this_machine(host.name) for host in self.hosts)


def is_this_machine(name: str) -> bool:
    """Whether a hostfile's name means the machine this runs on, by its name alone."""
    return name in {LOCALHOST, LOOPBACK, socket.gethostname(), socket.gethostname().partition(".")[0]}


@dataclass(frozen=True)
class DeviceKind:
    """One kind of GPU. Rates are dense, without sparsity, at boost clock; 16-bit products accumulate in fp32,
    and fp32 is without TF32 (torch's default).

    Attributes:
        name: Short, as ``--device`` takes it.
        memory: Sizes it is sold with, in GB as printed on it (2^30 bytes).
        pattern: Regular expression found in the driver's name for it.
        half: TFLOP/s with fp16 and, if `bf16`, with bf16.
        single: TFLOP/s with fp32.
        source: Where this is published.
        bf16: Whether bf16 is native.
    """

    name: str
    memory: tuple[int, ...]
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


GB = 2**30
_H200, _H100, _V100 = (f"NVIDIA {name} data sheet" for name in ("H200", "H100", "V100"))
_ADA = "NVIDIA Ada GPU architecture white paper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper"

# A slice of a GPU (MIG, vGPU) has an unknown share of its rates and memory.
_SLICE = re.compile(r"\bMIG\b|\bGRID\b")

# The first match counts, so that special versions come before the plain name.
DEVICES = (
    DeviceKind("gb200", (186,), r"\bGB200\b", 2500.0, 80.0, "NVIDIA GB200 NVL72 data sheet"),
    DeviceKind("b200", (180,), r"\bB200\b", 2250.0, 75.0, "NVIDIA HGX B200 data sheet"),
    DeviceKind("h200-nvl", (141,), r"\bH200 NVL\b", 835.5, 60.0, _H200),
    DeviceKind("h200", (141,), r"\bH200\b", 989.5, 67.0, _H200),
    DeviceKind("gh200", (96, 144), r"\bGH200\b", 989.5, 67.0, "NVIDIA GH200 data sheet"),
    DeviceKind("h20", (96,), r"\bH20\b", 148.0, 44.0, "NVIDIA H20 data sheet"),
    DeviceKind("h100-pcie", (80,), r"\bH[18]00 PCIe\b", 756.0, 51.0, _H100),
    DeviceKind("h100-nvl", (94,), r"\bH100 NVL\b", 835.5, 60.0, _H100),
    DeviceKind("h100", (80,), r"\bH[18]00\b", 989.5, 67.0, _H100),
    DeviceKind("a100", (40, 80), r"\bA[18]00\b", 312.0, 19.5, "NVIDIA A100 data sheet"),
    DeviceKind("a40", (48,), r"\bA40\b", 149.7, 37.4, "NVIDIA A40 data sheet"),
    DeviceKind("a30", (24,), r"\bA30\b", 165.0, 10.3, "NVIDIA A30 data sheet"),
    DeviceKind("a10g", (24,), r"\bA10G\b", 70.0, 35.0, "NVIDIA A10G data sheet"),
    DeviceKind("a10", (24,), r"\bA10\b", 125.0, 31.2, "NVIDIA A10 data sheet"),
    DeviceKind("l40s", (48,), r"\bL40S\b", 362.0, 91.6, "NVIDIA L40S data sheet"),
    DeviceKind("l40", (48,), r"\bL40\b", 181.0, 90.5, "NVIDIA L40 data sheet"),
    DeviceKind("l4", (24,), r"\bL4\b", 121.0, 30.3, "NVIDIA L4 data sheet"),
    DeviceKind("v100s", (32,), r"\bV100S", 130.0, 16.4, _V100, bf16=False),
    DeviceKind("v100-pcie", (16, 32), r"\bV100-PCIE", 112.0, 14.0, _V100, bf16=False),
    DeviceKind("v100", (16, 32), r"\bV100\b", 125.0, 15.7, _V100, bf16=False),
    DeviceKind("t4", (16,), r"\bT4\b", 65.0, 8.1, "NVIDIA T4 data sheet", bf16=False),
    DeviceKind("p100-pcie", (12, 16), r"\bP100-PCIE", 18.7, 9.3, "NVIDIA P100 data sheet", bf16=False),
    DeviceKind("p100", (16,), r"\bP100\b", 21.2, 10.6, "NVIDIA P100 data sheet", bf16=False),
    DeviceKind("rtx-6000-ada", (48,), r"\bRTX 6000 Ada\b", 364.0, 91.1, "NVIDIA RTX 6000 Ada data sheet"),
    DeviceKind("rtx-a6000", (48,), r"\bRTX A6000\b", 154.8, 38.7, "NVIDIA RTX A6000 data sheet"),
    DeviceKind(
        "rtx-5090",
        (32,),
        r"\bRTX 5090\b(?! Laptop)",
        209.5,
        104.8,
        _BLACKWELL,
    ),
    DeviceKind("rtx-4090", (24,), r"\bRTX 4090\b(?! D\b| Laptop)", 165.2, 82.6, _ADA),
    DeviceKind("rtx-3090-ti", (24,), r"\bRTX 3090 Ti\b", 80.0, 40.0, _AMPERE),
    DeviceKind("rtx-3090", (24,), r"\bRTX 3090\b", 71.0, 35.6, _AMPERE),
)
# No single GPU has more (NVIDIA B300).
LARGEST_MEMORY = 288 * GB


def device_kind(driver_name: str | None) -> DeviceKind | None:
    """The kind of a GPU by the driver's name for it; None on CPU, for slices of a GPU and unknown names."""
    if driver_name is None or _SLICE.search(driver_name):
        return None
    return next((kind for kind in DEVICES if re.search(kind.pattern, driver_name)), None)


def memory_by_name(driver_name: str | None) -> int | None:
    """Bytes of a GPU by the driver's name for it; None where that leaves a choice."""
    kind = device_kind(driver_name)
    if kind is None or driver_name is None or " + " in driver_name:
        return None
    sizes = [size for size in kind.memory if re.search(rf"\b{size}GB\b", driver_name)] or kind.memory
    return sizes[0] * GB if len(sizes) == 1 else None


def devices_by_name() -> dict[str, tuple[DeviceKind, int]]:
    """Kind and bytes by the names of ``--device``: ``v100-32gb``, and ``t4`` where there is one size."""
    found = {f"{kind.name}-{size}gb": (kind, size * GB) for kind in DEVICES for size in kind.memory}
    return found | {kind.name: (kind, kind.memory[0] * GB) for kind in DEVICES if len(kind.memory) == 1}
