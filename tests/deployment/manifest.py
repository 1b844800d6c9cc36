"""What is in a manifest, and what Kubernetes makes of it."""

from __future__ import annotations

import re
from typing import Any

from tests.deployment.schemas import documents


def by_kind(text: str) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in documents(text)}


def pod_and_container(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod's spec, and its container with what a TrainJob fills in."""
    kinds = by_kind(text)
    if "Job" in kinds:
        pod = kinds["Job"]["spec"]["template"]["spec"]
        return pod, pod["containers"][0]
    jobs = kinds["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    pod, trainer = jobs[0]["template"]["spec"]["template"]["spec"], kinds["TrainJob"]["spec"]["trainer"]
    return pod, {**pod["containers"][0], **trainer, "resources": trainer["resourcesPerNode"]}


def words_of_pod(container: dict[str, Any], index: int) -> list[str]:
    """What launch.sh is given in the pod with this number, Kubernetes' own expansion done."""
    words = [*container["command"], *container["args"]]
    assert words[0] == "./launch.sh"
    return [expand(word, {"JOB_COMPLETION_INDEX": str(index)}) for word in words[1:]]


def expand(word: str, variables: dict[str, str]) -> str:
    """Kubernetes' expansion, from left to right: $$ is $, and $(NAME) the value of a known variable."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, word)
