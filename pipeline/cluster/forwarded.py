"""Which environment variables of a launch reach the ranks. This is the one place that says so. No torch.

Ranks on this machine inherit everything. Launchers forward little to other hosts, and what they do stands on
command lines, which everybody on a host can read and a shell does read; so the variables below go through the
hub's connection, for every launcher alike. DeepSpeed's ``.deepspeed_env`` files go the same way. Values are
never printed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Whole names, and beginnings that end in "*".
FORWARDED = (
    # communication and devices
    "NCCL*", "GLOO_*", "UCX*", "MV2*", "FI_*", "OMP_NUM_THREADS", "DS_ACCELERATOR", "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_*", "TORCH_*", "TORCHINDUCTOR_*", "TRITON_*",
    # libraries and their caches
    "PYTHON*", "HF_*", "TRANSFORMERS_*", "TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME",
    # object stores and the way to them
    "AWS_*", "S3_*", "FSSPEC_*", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "GCS_*",
    "AZURE_*", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
    # monitors
    "WANDB_*", "MLFLOW*", "COMET_*",
)  # fmt: skip
# What DeepSpeed's launcher writes onto the command lines of other hosts, whatever the value has in it. All of
# these are forwarded above.
_EXPORTED = ("MLFLOW", "MV2", "NCCL", "UCX", "PYTHON")
# Without these Python does not come up on a host as it does here, so that they cannot wait for the hub.
FIND_MODULES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE")
# Neither a shell nor pdsh, which replaces %h, %n and %u, makes anything else of this.
PLAIN = re.compile(r"[\w@+=:,./-]*")
_SECRET = re.compile(
    r"SECRET|TOKEN(?!IZER|S(_|$))|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|(^|_)KEYS?(_|$)"
)
# Their values only say where a secret lies.
_PLACE = re.compile(r"GOOGLE_APPLICATION_CREDENTIALS|.*_(FILE|PATH|DIR)")


def is_forwarded(name: str) -> bool:
    """Whether a variable of the launch reaches ranks on other hosts."""
    return any(name.startswith(known[:-1]) if known.endswith("*") else name == known for known in FORWARDED)


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is nobody's business."""
    return _SECRET.search(name.upper()) is not None and not _PLACE.fullmatch(name.upper())


def forwarded(environ: Mapping[str, str], files: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables for every rank, in the order of their names. `files`: of the ``.deepspeed_env`` files."""
    chosen = {name: value for name, value in environ.items() if is_forwarded(name)} | dict(files)
    return tuple(sorted(chosen.items()))


def launcher_environment(environ: Mapping[str, str], is_local: bool) -> dict[str, str]:
    """The deepspeed launcher's own environment. `is_local`: its ranks inherit it.

    It puts some variables, and those of the ``.deepspeed_env`` files, on the command lines of other hosts.
    The ranks have them from the hub, so that only such are left as Python reads before, and as no shell does.
    """
    result = dict(environ) | {"DS_ENV_FILE": os.devnull}
    if not is_local:
        result = {name: value for name, value in result.items() if not is_secret(name)}
        result = {name: value for name, value in result.items() if _may_be_exported(name, value)}
        # A host that is gone is noticed by ssh, too, and nobody is asked for a password.
        ours = "-o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
        result["PDSH_SSH_ARGS_APPEND"] = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} {ours}".strip()
    return result


def _may_be_exported(name: str, value: str) -> bool:
    if not name.startswith(_EXPORTED):
        return True
    return name.startswith("PYTHON") and PLAIN.fullmatch(name + value) is not None
