"""Manifests for Kubernetes and Kubeflow: commented YAML from templates, with every value quoted.

    pod i    launch.sh --no_ssh --node_rank i --master_addr POD_0 --hostfile HOSTS ...

Each pod starts and watches its own ranks; they meet at the first pod, which the headless service names.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Sequence
from pathlib import Path

from pipeline.base.problems import EXIT_STOPPED, EXIT_WRONG_JOB
from pipeline.deployment.allocation import hostfile_text
from pipeline.deployment.description import STORAGE, Deployment
from pipeline.job.world import Host

TEMPLATES = Path(__file__).parent / "templates"
# Seconds between the end of the ranks' time to save and the kill of their pod: the launch ends them itself.
KILL_MARGIN = 30
# Set in every pod of an Indexed Job, which those of a job set are, too.
INDEX = "$(JOB_COMPLETION_INDEX)"


class _Template(string.Template):
    """``@{name}``, since ``$(NAME)`` is Kubernetes' own."""

    delimiter = "@"


def kubernetes_manifest(deployment: Deployment, command: str) -> str:
    """An Indexed Job, its headless service and its hostfile; `command` is named as their origin."""
    hosts = [f"{deployment.name}-{index}.{deployment.name}" for index in range(deployment.hosts)]
    return _fill("kubernetes.yaml", deployment, command, hosts)


def kubeflow_manifest(deployment: Deployment, command: str) -> str:
    """A TrainJob (Kubeflow Trainer v2), its runtime and its hostfile; `command` is named as their origin."""
    # JobSet names pods by job set, replicated job, replica of it and pod.
    hosts = [f"{deployment.name}-node-0-{index}.{deployment.name}" for index in range(deployment.hosts)]
    return _fill("kubeflow.yaml", deployment, command, hosts)


def _fill(template: str, deployment: Deployment, command: str, hosts: Sequence[str]) -> str:
    launch = ["./launch.sh", "--no_ssh", "--node_rank", INDEX, "--master_addr", hosts[0]]
    launch += ["--hostfile", "/etc/job/hostfile"]
    hostfile = hostfile_text([Host(name, deployment.slots) for name in hosts], "One pod per host.")
    grace = math.ceil(deployment.stop_timeout) + KILL_MARGIN
    values = {
        # A comment, on one line.
        "command": "".join(each if each.isprintable() else " " for each in command),
        "name": deployment.name,
        "image": quote(deployment.image),
        "claim": deployment.claim,
        "storage": STORAGE,
        "hosts": deployment.hosts,
        "slots": deployment.slots,
        "grace": grace,
        "max_restarts": deployment.max_restarts,
        "pod_failures": deployment.max_restarts * deployment.hosts,
        "wrong_job": EXIT_WRONG_JOB,
        "stopped": EXIT_STOPPED,
    }
    blocks = {
        "hostfile": hostfile.splitlines(),
        "launch": [f"- {quote(word)}" for word in launch],
        "arguments": [f"- {quote(literal(word))}" for word in deployment.arguments],
        "secret": _secret(deployment.secret),
        "variables": _variables(deployment.variables),
    }
    lines = (TEMPLATES / template).read_text(encoding="utf-8").splitlines()
    return "".join(f"{line}\n" for each in lines for line in _line(each, values, blocks))


def _line(line: str, values: dict[str, object], blocks: dict[str, list[str]]) -> list[str]:
    """A template's line, filled in; a block's name alone becomes its lines at that indentation."""
    name = line.strip().removeprefix("@{").removesuffix("}")
    if line.strip() == f"@{{{name}}}" and name in blocks:
        indentation = line[: len(line) - len(line.lstrip())]
        return [indentation + each for each in blocks[name]]
    return [_Template(line).substitute(values)]


def _secret(name: str | None) -> list[str]:
    if name is None:
        return ["# envFrom: [{secretRef: {name: MY_SECRET}}]"]
    return [f"envFrom: [{{secretRef: {{name: {quote(name)}}}}}]"]


def _variables(variables: Sequence[tuple[str, str]]) -> list[str]:
    if not variables:
        return ["# env: [{name: NCCL_DEBUG, value: INFO}]"]
    return ["env:", *(f"  - {{name: {name}, value: {quote(literal(value))}}}" for name, value in variables)]


def literal(word: str) -> str:
    """A word that arrives as it is: Kubernetes makes one dollar of two, and a value of ``$(NAME)``."""
    return word.replace("$", "$$")


def quote(word: str) -> str:
    """A YAML string in double quotes: JSON, whose escapes YAML shares."""
    text = json.dumps(word, ensure_ascii=False)
    # YAML takes fewer characters as they are than JSON does.
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text)
