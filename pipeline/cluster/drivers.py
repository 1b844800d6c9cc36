"""Which NVIDIA driver a CUDA build of torch needs. No torch."""

from __future__ import annotations

# The oldest driver branch for each major version of CUDA ("CUDA Compatibility", minor version
# compatibility, table 1): every build of that major version runs on it and on newer ones.
_OLDEST_BRANCH = {"11": 450, "12": 525, "13": 580}


def driver_needed(driver: str, cuda: str) -> int | None:
    """The driver branch that a build for CUDA `cuda` (such as 12.8) needs, if `driver` is older; else None.

    A major version of CUDA that is not known here is not judged.
    """
    needed = _OLDEST_BRANCH.get(cuda.partition(".")[0])
    branch = driver.partition(".")[0]
    return needed if needed is not None and branch.isdecimal() and int(branch) < needed else None
