"""One rank: a forked process that calls the function, leaves a result or an error, and ends."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.harness.processes import die_with_parent, redirect_standard_streams
from tests.harness.protocol import RankError, RankFiles, Request, write_pickle

# Not SIGUSR1, which asks a job to stop (batch systems announce the end of a job with it).
STACKS_SIGNAL = signal.SIGUSR2
# Where the code under test takes that signal, too, faulthandler's own timer writes the stacks, this many
# seconds after the time limit.
STACKS_FALLBACK_DELAY = 1.0


def init_deepspeed_distributed(timeout: float | None = None) -> None:
    """Start DeepSpeed's process group over gloo, in a rank of `run_ranks`.

    Args:
        timeout: Seconds that a collective of the world group waits; default: `run_ranks`'s group_timeout.
    """
    import deepspeed
    import torch.distributed.distributed_c10d as c10d

    # The shared-memory op serves CPU inference. Building it takes minutes, and a build that was killed
    # leaves a lock on which every later run waits for ever.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    limit = c10d.default_pg_timeout if timeout is None else timedelta(seconds=timeout)
    deepspeed.init_distributed(dist_backend="gloo", timeout=limit, auto_mpi_discovery=False, verbose=False)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What the `deepspeed` launcher sets in each rank of a one-host job."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_rank(
    request: Request,
    function: Callable[..., Any],
    args: tuple,
    rank: int,
    folder: Path,
    port: int,
    release: int,
) -> None:
    """Be rank `rank`; does not return.

    Args:
        release: Read end of a pipe that the supervisor closes when every rank has reported.
    """
    files = RankFiles(folder, rank)
    redirect_standard_streams(files.stdout, files.stderr)
    _watch(files, request.timeout)
    os.environ.update(rank_environment(rank, request.world_size, port))
    _prepare_torch(request.group_timeout)
    code = _call(function, args, files)
    sys.stdout.flush()
    sys.stderr.flush()
    if request.hold:
        os.read(release, 1)
    # Not sys.exit: the stack below belongs to the supervisor, and the exit handlers to the fork server.
    os._exit(code)


def forked_from(parent: int, target: Callable[..., None], *args: Any) -> int:
    """Fork a process that runs `target` and dies with `parent`, which is this one. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        target(*args)
        code = 0
    except BaseException:  # noqa: BLE001  the boundary of the process: nothing above may run in the child
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watch(files: RankFiles, timeout: float) -> None:
    """Write the stacks of all threads on a signal, and on a timer in case the signal is taken."""
    stacks = files.stacks.open("w")
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    faulthandler.dump_traceback_later(timeout + STACKS_FALLBACK_DELAY, file=stacks)


def _prepare_torch(group_timeout: float) -> None:
    """One thread per rank, and a time limit on groups made without one (DeepSpeed makes its that way)."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    torch.set_num_threads(1)
    c10d.default_pg_timeout = timedelta(seconds=group_timeout)


def _call(function: Callable[..., Any], args: tuple, files: RankFiles) -> int:
    """Call the function, record what came of it, and return the exit code for the process."""
    try:
        write_pickle(files.result, function(*args))
        return 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        error = leaving
    except BaseException as raised:  # noqa: BLE001  recorded, and raised again in the test's process
        code = 1
        error = raised
    # The first frame is this function: the reader's own code begins one below.
    lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next or error.__traceback__)
    write_pickle(files.error, RankError(time.monotonic(), "".join(lines)))
    return code
