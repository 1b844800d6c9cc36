"""The fork server: imports torch and DeepSpeed once, then forks a supervisor for each request.

Run as ``python -m tests.harness.server DESCRIPTOR`` with one end of a socket pair. A request is one
line, the folder that holds it; the answer, one line, comes when everything that belonged to it is gone.
When the other end closes, whatever runs is killed and the server leaves.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import shutil
import socket
import sys
from pathlib import Path

from tests.harness.processes import adopt_orphans, end_descendants, num_threads, redirect_standard_streams
from tests.harness.protocol import SUPERVISOR_LOG
from tests.harness.rank import forked_from
from tests.harness.supervisor import supervise

# DeepSpeed and torch import most of themselves late: another 1,400 modules and two CPU seconds, per rank.
PRELOADED = (
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.pipe.dualpipev",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "pytest",  # test modules import it
    "torch._dynamo",  # by the first torch.optim optimizer
)


def preload() -> None:
    """Import what every rank needs, and make sure that it is safe to fork afterwards.

    Raises:
        RuntimeError: an import has left threads behind.
    """
    import torch

    for module in PRELOADED:
        importlib.import_module(module)
    torch.set_num_threads(1)
    if num_threads() > 1:
        raise RuntimeError(f"{num_threads()} threads after importing torch and deepspeed: cannot fork safely")
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that the ranks share


def serve(connection: socket.socket) -> None:
    """Answer requests, one at a time, until the other end closes."""
    with connection, connection.makefile("rw") as stream:
        preload()
        for line in stream:
            folder = Path(line.rstrip("\n"))
            supervisor = forked_from(os.getpid(), _supervise_logged, folder)
            if not _ended_before_client(supervisor, connection):
                shutil.rmtree(folder, ignore_errors=True)  # a client that was not killed does it, too
                break
            stream.write("done\n")
            stream.flush()
    end_descendants()


def _supervise_logged(folder: Path) -> None:
    log = folder / SUPERVISOR_LOG
    redirect_standard_streams(log, log)
    supervise(folder)


def _ended_before_client(supervisor: int, connection: socket.socket) -> bool:
    """Wait for the supervisor or for the client to go; kill the supervisor and all below it in either case.

    The client sends nothing while it waits, so a readable connection is a closed one.
    """
    process = os.pidfd_open(supervisor)
    try:
        ready, _, _ = select.select([process, connection], [], [])
    finally:
        os.close(process)
    end_descendants()
    return process in ready


if __name__ == "__main__":
    adopt_orphans()
    serve(socket.socket(fileno=int(sys.argv[1])))
