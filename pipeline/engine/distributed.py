"""Starting and ending torch.distributed as DeepSpeed needs it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import deepspeed
import torch
import torch.distributed as dist

from pipeline.base.problems import job_error
from pipeline.cluster.world import available_cores
from pipeline.engine.deepspeed_patches import skip_inference_op


def start_distributed(device: Literal["cpu", "cuda"], local_rank: int, timeout: timedelta) -> None:
    """Join the process group: NCCL on GPUs, gloo on CPUs.

    Args:
        device: Kind of device, as the job decided.
        local_rank: This rank's GPU on its host.
        timeout: How long a collective may wait for other ranks before it fails.

    Raises:
        JobError: the driver shows GPUs that torch cannot use.
    """
    if device == "cuda":
        _require_cuda()
        torch.cuda.set_device(local_rank)
    else:
        skip_inference_op()
    backend = "nccl" if device == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout)


def share_cores(num_ranks: int) -> None:
    """Use this CPU rank's share of its host's cores: each of the `num_ranks` ranks there takes all otherwise.

    OMP_NUM_THREADS counts where a user or a launcher has set it.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // num_ranks))


def _require_cuda() -> None:
    if torch.cuda.is_available():
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    rule = f"this host has GPUs, but torch {torch.__version__} (built for {build}) cannot use them"
    remedy = "Install a torch build that fits the driver, or set DS_ACCELERATOR=cpu to train on the CPU"
    raise job_error("device", "cuda", rule, remedy)


def stop_distributed() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
