"""Which environment variables of a launch reach the ranks. Only this module decides it.

Ranks on this machine inherit everything. Launchers forward little to other hosts, and what they do is on
command lines, which everybody on a host can read and a shell does read; so the variables below go through the
coordinator's connection, for every launcher alike. The variables of DeepSpeed's ``.deepspeed_env`` files go
the same way. Values may be secrets and are never printed.

DeepSpeed splits every line of such a file at its first ``=``, comments and blank lines included, and pastes
the value into a shell command: a line ``# NCCL_X=1`` comments the whole start out, and it returns 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.base.problems import Problem
from pipeline.base.user_input import is_file, lines_of, read_text, unusual_space
from pipeline.base.words import few

# Whole names, and beginnings that end in "*".
FORWARDED = (
    # communication and devices
    "NCCL*", "GLOO_*", "UCX*", "MV2*", "FI_*", "OMP_NUM_THREADS", "DS_ACCELERATOR", "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_*", "TORCH_*", "TORCHINDUCTOR_*", "TRITON_*",
    # libraries and their caches
    "PYTHON*", "HF_*", "TRANSFORMERS_*", "TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME",
    # object stores and proxies
    "AWS_*", "S3_*", "FSSPEC_*", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "GCS_*",
    "AZURE_*", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
    # monitors
    "WANDB_*", "MLFLOW*", "COMET_*",
)  # fmt: skip
# What DeepSpeed's launcher writes onto the command lines of other hosts, whatever the value has in it. All of
# these are forwarded above.
_EXPORTED = ("MLFLOW", "MV2", "NCCL", "UCX", "PYTHON")
# Without these Python does not come up on a host as it does here: they cannot wait for the coordinator.
FIND_MODULES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE")
# Neither a shell nor pdsh, which replaces %h, %n and %u, makes anything else of this.
PLAIN = re.compile(r"[\w@+=:,./-]*")
_SECRET = re.compile(
    r"SECRET|TOKEN(?!IZER|S(_|$))|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|(^|_)KEYS?(_|$)"
)
# Their values only say where a secret is kept.
_PLACE = re.compile(r"GOOGLE_APPLICATION_CREDENTIALS|.*_(FILE|PATH|DIR)")
ENV_FILE = ".deepspeed_env"
# The launcher puts a value with other characters between double quotes.
_UNQUOTED = re.compile(r"[\w@%+=:,./-]*")
# These have a meaning inside double quotes.
_READ_BY_SHELLS = re.compile(r'["$`\\]')
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_forwarded(name: str) -> bool:
    """Whether a variable of the launch reaches ranks on other hosts."""
    return any(name.startswith(known[:-1]) if known.endswith("*") else name == known for known in FORWARDED)


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret."""
    return _SECRET.search(name.upper()) is not None and not _PLACE.fullmatch(name.upper())


def forwarded(environ: Mapping[str, str], files: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables for every rank, in the order of their names. `files`: of the ``.deepspeed_env`` files."""
    chosen = {name: value for name, value in environ.items() if is_forwarded(name)} | dict(files)
    return tuple(sorted(chosen.items()))


def on_interface(name: str | None, variables: Mapping[str, str]) -> dict[str, str]:
    """What tells gloo and NCCL the network interface to use, beside the `variables` that ranks have."""
    told = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {key: value for key, value in told.items() if key not in variables}


def launcher_environment(environ: Mapping[str, str], is_local: bool) -> dict[str, str]:
    """The deepspeed launcher's own environment. `is_local`: its ranks inherit it.

    It puts some variables, and those of the ``.deepspeed_env`` files, on the command lines of other hosts.
    The ranks have them from the coordinator: only such are left as Python reads before, and as no shell does.
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


def deepspeed_env(
    home: Path, cwd: Path, environ: Mapping[str, str], launcher: str | None = None
) -> tuple[dict[str, str], list[Problem]]:
    """The variables that the launcher would set on the hosts, and what is wrong with its files.

    The file in `home` is read first, the one in `cwd` wins. DS_ENV_FILE is another name for them.
    """
    name = environ.get("DS_ENV_FILE", ENV_FILE)
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    for path in dict.fromkeys((home / name, cwd / name)):
        if not is_file(path):
            continue
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            problems.append(Problem(str(path), ENV_FILE, f"cannot be read ({error})", "Correct or remove it"))
            continue
        for number, line in enumerate(lines_of(text), start=1):
            key, _, value = line.partition("=")
            if rule := _wrong(line, launcher):
                problems.append(Problem(f"{path} line {number}", _without_value(line), *rule))
            else:
                variables[key.strip()] = value.strip()
    return variables, problems


@dataclass(frozen=True)
class _Service:
    """Where a monitor's service looks for its key.

    Attributes:
        variables: Any of which brings it.
        files: Below the home folder or the current one, or ($) where a variable says.
        words: Any of which in one of these files means that the service has what it needs.
    """

    variables: tuple[str, ...]
    files: tuple[str, ...]
    words: tuple[str, ...]
    remedy: str


_SERVICES = {
    "wandb": _Service(
        ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"),
        (".netrc", "_netrc", ".config/wandb/settings", "wandb/settings", "$NETRC"),
        ("wandb", "api_key", "mode", "$WANDB_BASE_URL"),
        "Set WANDB_API_KEY, or run wandb login; WANDB_MODE=offline records without a key",
    ),
    "comet": _Service(
        ("COMET_API_KEY",),
        (".comet.config", "$COMET_CONFIG"),
        ("api_key",),
        "Set COMET_API_KEY; comet.online = false in the JSON records without a key",
    ),
}
_OFFLINE = ("offline", "dryrun", "disabled")


def missing_keys(
    monitors: Mapping[str, Mapping[str, object]], home: Path, cwd: Path, environ: Mapping[str, str]
) -> list[Problem]:
    """The services among the enabled `monitors` for which there is no key on this machine, so that nothing
    would be seen there."""
    problems = []
    for name, service in _SERVICES.items():
        if (block := monitors.get(name)) is None:
            continue
        offline = environ.get("WANDB_MODE") in _OFFLINE if name == "wandb" else not block["online"]
        if offline or block.get("api_key") or any(environ.get(each) for each in service.variables):
            continue
        words = [_given(word, environ) for word in service.words]
        places = [folder / _given(file, environ) for file in service.files for folder in (home, cwd)]
        if not any(_holds(place, [urlsplit(word).hostname or word for word in words]) for place in places):
            looked = few((*service.variables, *service.files))
            rule = f"the service needs a key, and there is none in {looked}"
            problems.append(Problem(f"{name}.enabled", True, rule, service.remedy))
    return problems


def _given(name: str, environ: Mapping[str, str]) -> str:
    return environ.get(name[1:], "") if name.startswith("$") else name


def _holds(path: Path, words: Sequence[str]) -> bool:
    try:
        text = read_text(path)
    except (OSError, ValueError):  # of no use to the service either
        return False
    return any(word and word in text for word in words)


def _wrong(line: str, launcher: str | None) -> tuple[str, str] | None:
    """(rule, remedy) of the first thing wrong with a line."""
    key, equals, value = (part.strip() for part in line.partition("="))
    if not line.strip():
        return "the launcher stops at an empty line", "Remove it"
    if line.lstrip().startswith("#"):
        return "a comment makes the launcher start nothing, and call that success", "Remove it"
    if not equals:
        return "a line is NAME=VALUE", "Write NAME=VALUE, or remove it"
    if not _VARIABLE.fullmatch(key):
        return f"'{key}' is not a variable's name", "Write NAME=VALUE, without export"
    if space := unusual_space(line.strip()):
        return f"the character {space} does not arrive everywhere", "Use blanks or tabs, and ends of lines"
    if _READ_BY_SHELLS.search(value):
        rule = "the value passes through a shell, which takes quotes, $, ` and \\ out of it"
        return rule, "Write the value without them; quotes around it are not needed"
    if launcher not in (None, "pdsh") and not _UNQUOTED.fullmatch(value):
        rule = f"with {launcher} no shell takes off the quotes that the launcher puts around such a value"
        return rule, f"Use only letters, digits and @%+=:,./- in it, or set it by {launcher}'s own means"
    return None


def _without_value(line: str) -> str:
    key, equals, _ = line.partition("=")
    return f"{key}{equals}..." if equals else key
