"""``python -m pipeline.deploy WHAT [options]``: prints what a scheduler needs to start a job. No torch.

    kubernetes    an Indexed Job with its service and hostfile
    kubeflow      the same as a Kubeflow TrainJob with its runtime
    slurm_hosts   inside a Slurm allocation: its hostfile, for launches with these options

Exit code 0, or 2 with every problem.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from pipeline.base.command import run_command
from pipeline.base.problems import EXIT_FINISHED, EXIT_WRONG_JOB, JobError
from pipeline.cluster.launcher_options import split_arguments
from pipeline.deployment.allocation import allocated_hosts, allocation_problems, hostfile_text
from pipeline.deployment.description import read_deployment
from pipeline.deployment.manifests import kubeflow_manifest, kubernetes_manifest
from pipeline.job.report import console, print_problems

PROGRAM = "python -m pipeline.deploy"
MANIFESTS = {"kubernetes": kubernetes_manifest, "kubeflow": kubeflow_manifest}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was asked for; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Writes what a scheduler needs to start a job.", allow_abbrev=False
    )
    parser.add_argument("what", choices=(*MANIFESTS, "slurm_hosts"))
    what, rest = parser.parse_known_args(arguments[:1])[0].what, list(arguments[1:])
    try:
        print(_slurm_hosts(rest) if what == "slurm_hosts" else _manifest(what, rest), end="")
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    return EXIT_FINISHED


def _manifest(what: str, arguments: list[str]) -> str:
    deployment = read_deployment(arguments, f"{PROGRAM} {what}")
    return MANIFESTS[what](deployment, shlex.join(["python", "-m", "pipeline.deploy", what, *arguments]))


def _slurm_hosts(arguments: list[str]) -> str:
    usage = "%(prog)s [--slots N] [options of launch.sh]"
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} slurm_hosts", usage=usage, allow_abbrev=False)
    parser.add_argument("--slots", type=int, metavar="N", help="ranks on each host (default: its GPUs)")
    given, options = parser.parse_known_args(arguments)
    if problems := allocation_problems(split_arguments(options)[0]):
        raise JobError(problems)
    hosts = allocated_hosts(given.slots)
    return hostfile_text(hosts, "The hosts of a Slurm allocation, and their GPUs.")


if __name__ == "__main__":
    run_command(main)
