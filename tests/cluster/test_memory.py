"""Errors that say that memory ran out, and the control group that bounds it."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import numpy
import pytest
import torch

from pipeline.cluster.memory import memory_group, shortage_of

# As torch 2.13 raises it.
CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.25 GiB of which "
    "1.25 GiB is free. Including non-PyTorch memory, this process has 77.99 GiB memory in use. Of the "
    "allocated memory 70.10 GiB is allocated by PyTorch, and 6.83 GiB is reserved by PyTorch but unallocated."
)
HOST = r"out of memory \((?:host|ulimit -v|control group)\): "


def raised(fails) -> BaseException:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        fails()
    return caught.value


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError(CUDA),
            r"out of memory \(GPU 3\): 20 GiB asked for, 78 GiB of 79.2 GiB in use",
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), r"out of memory \(GPU\)"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), r"out of memory \(GPU\)"),
        (raised(lambda: torch.empty(10**14)), HOST + r"364 TiB asked for, .* in use"),
        (raised(lambda: numpy.empty(10**14)), HOST + r"728 TiB asked for, .* in use"),
        (raised(lambda: bytearray(10**16)), HOST + ".* of .* in use"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), HOST + ".* of .* in use"),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("Connection closed by peer"), None),
    ],
    ids=["cuda", "cuda runtime", "cublas", "torch", "numpy", "python", "system", "disk", "peer"],
)
def test_what_an_error_says_of_memory(error: BaseException, said: str | None) -> None:
    shortage = shortage_of(error)
    assert (shortage is not None) == (said is not None)
    assert said is None or re.fullmatch(said, str(shortage)), shortage


def test_what_was_missing_is_what_was_asked_for_less_what_was_free() -> None:
    shortage = shortage_of(torch.OutOfMemoryError(CUDA))
    assert shortage is not None and shortage.missing == 20 * 2**30 - int(1.25 * 2**30)


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        (
            "0::/user/job",
            "sys/fs/cgroup/user/job",
            {"memory.max": "1000", "memory.current": "900", "memory.events": "oom 3\noom_kill 2"},
        ),
        (
            "5:cpu,memory:/docker/far",
            "sys/fs/cgroup/memory",
            {
                "memory.limit_in_bytes": "1000",
                "memory.usage_in_bytes": "900",
                "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
            },
        ),
    ],
)
def test_the_control_group_of_either_version(
    tmp_path: Path, line: str, folder: str, files: dict[str, str]
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpuset:/\n{line}\n")
    assert memory_group(tmp_path) is None
    (tmp_path / folder).mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / folder / name).write_text(text)
    group = memory_group(tmp_path)
    assert group is not None and (group.limit, group.used, group.kills) == (1000, 900, 2)
    name = next(iter(files))
    for unlimited in ("max", str(2**63 - 4096)):
        (tmp_path / folder / name).write_text(unlimited)
        assert group.limit is None
