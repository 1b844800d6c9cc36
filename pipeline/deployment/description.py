"""What a job on Kubernetes is made of: hosts as a hostfile counts them, image, storage, options."""

from __future__ import annotations

import argparse
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.base.problems import JobError, Problem
from pipeline.base.words import few
from pipeline.cluster.forwarded_environment import is_secret
from pipeline.cluster.hostfile import read_hostfile, select_hosts
from pipeline.cluster.launcher_options import LauncherOptions, launcher_problems, split_arguments
from pipeline.data.inputs import credentials_problem, is_remote
from pipeline.job.options import Options, parse_options
from pipeline.job.world import Host

# Where every pod finds the storage that all share.
STORAGE = "/storage"
# Room for "-node-0-" and a host's number in a host name's 63 characters, and for suffixes of controllers.
LONGEST_NAME = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:-]*?(:(?P<tag>[\w][\w.-]*)|@sha256:[0-9a-f]{64})", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_START = "the manifest decides it: each pod starts its own ranks, without ssh"
_ALL_PODS = "a job here has all of its pods or waits for them: Kubernetes makes new ones"
# What the manifest decides, with the reason; the first pod is the rendezvous.
_MANIFESTS_OWN = {
    **dict.fromkeys(("launcher", "launcher_args", "ssh_port", "no_ssh_check", "no_ssh"), _OWN_START),
    **dict.fromkeys(("node_rank", "master_addr", "master_port", "launch_addr"), _OWN_START),
    "allow_fewer_hosts": _ALL_PODS,
}


@dataclass(frozen=True)
class Deployment:
    """A job on Kubernetes, one pod per host.

    Attributes:
        name: Of the job and its service.
        image: The container image, with a tag or digest.
        claim: PersistentVolumeClaim that every host mounts at `STORAGE`.
        hosts: Pods.
        slots: GPUs, hence ranks, of each.
        arguments: What launch.sh is given beside its place: options of the job and of the launcher.
        stop_timeout: Seconds that ranks may take to save after a SIGTERM.
        max_restarts: Failures, each of all pods, after which the job counts as failed.
        secret: Secret whose keys become environment variables.
        variables: Other environment variables.
    """

    name: str
    image: str
    claim: str
    hosts: int
    slots: int
    arguments: tuple[str, ...]
    stop_timeout: float
    max_restarts: int = 3
    secret: str | None = None
    variables: tuple[tuple[str, str], ...] = ()


def read_deployment(arguments: Sequence[str], prog: str) -> Deployment:
    """Read a command line: options of the manifest, of the launcher and of the job.

    Raises:
        SystemExit: code 2 after a message, for an option that does not exist or a value of the wrong type.
        JobError: every other problem.
    """
    given, rest = _parser(prog).parse_known_args(list(arguments))
    launcher, job_arguments = split_arguments(rest)
    options = parse_options(job_arguments, Options, prog)
    hosts, problems = _hosts(given)
    problems += _own_problems(given) + _launcher_problems(launcher) + _output_problems(options)
    problems += [problem for text in given.env for problem in _variable_problems(text)]
    problems += _credentials_problems(options)
    if problems:
        raise JobError(problems)
    output = () if options.output_dir else ("--output_dir", f"{STORAGE}/runs/{given.name}")
    return Deployment(
        name=given.name,
        image=given.image,
        claim=given.claim,
        hosts=len(hosts),
        slots=hosts[0].slots,
        arguments=(*rest, *output),
        stop_timeout=launcher.stop_timeout,
        max_restarts=given.max_restarts,
        secret=given.secret,
        variables=tuple((text.partition("=")[0], text.partition("=")[2]) for text in given.env),
    )


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s --hostfile FILE --image IMAGE --claim CLAIM [options] [options of launch.sh]",
        allow_abbrev=False,
        description="Writes the manifest of a job with one pod for each host of a hostfile.",
    )
    add = parser.add_argument
    add(
        "-H",
        "--hostfile",
        required=True,
        metavar="FILE",
        help="number of hosts and slots; names do not matter",
    )
    add("-i", "--include", default="", metavar="HOST[:SLOT,..]@..", help="use only these")
    add("-e", "--exclude", default="", metavar="HOST[:SLOT,..]@..", help="leave these out")
    add("--num_nodes", type=int, metavar="N", help="use the first N hosts")
    add("--num_gpus", "--num_accelerators", type=int, metavar="N", help="use N GPUs of each host")
    add("--name", default="pretrain", help="name of the job (default: %(default)s)")
    add("--image", required=True, help="container image with a tag or digest; see deploy/container/")
    add("--claim", required=True, help=f"PersistentVolumeClaim that all hosts can write, at {STORAGE}")
    add("--secret", help="Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="another variable; may be repeated")
    add("--max_restarts", type=int, default=3, metavar="N", help="failures to survive (default: %(default)s)")
    return parser


def _hosts(given: argparse.Namespace) -> tuple[tuple[Host, ...], list[Problem]]:
    hosts, problems = read_hostfile(given.hostfile)
    if not problems:
        filters = (given.include, given.exclude, given.num_nodes, given.num_gpus)
        hosts, problems = select_hosts(hosts, *filters)
    if not problems and len({host.slots for host in hosts}) > 1:
        rule = "pods of one job are alike, so every host must have as many slots"
        slots = few(f"{host.name} {host.slots}" for host in hosts)
        problems = (Problem(given.hostfile, slots, rule, "Give --num_gpus N, or leave hosts out"),)
    return hosts, list(problems)


def _own_problems(given: argparse.Namespace) -> list[Problem]:
    problems = []
    if not _NAME.fullmatch(given.name) or len(given.name) > LONGEST_NAME:
        rule = f"must be at most {LONGEST_NAME} of a-z, 0-9 and '-', beginning with a letter"
        problems.append(Problem("name", given.name, rule, "Give such a name"))
    for key in ("claim", "secret"):
        value = getattr(given, key)
        if value is not None and not (_OBJECT_NAME.fullmatch(value) and len(value) <= 253):
            rule = "must be the name of a Kubernetes object: a-z, 0-9, '-' and '.'"
            problems.append(Problem(key, value, rule, "See kubectl get pvc,secret"))
    match = _IMAGE.fullmatch(given.image)
    if match is None or match["tag"] == "latest":
        rule = (
            "must end in a tag other than latest, or in a digest: pods that restart must be the same program"
        )
        problems.append(Problem("image", given.image, rule, "Write registry/name:tag"))
    if not 0 <= given.max_restarts <= 1000:
        problems.append(
            Problem("max_restarts", given.max_restarts, "must be from 0 to 1000", "Give such a number")
        )
    return problems


def _launcher_problems(launcher: LauncherOptions) -> list[Problem]:
    default, problems = LauncherOptions(), launcher_problems(launcher)
    keys = [key for key in _MANIFESTS_OWN if getattr(launcher, key) != getattr(default, key)]
    if keys:  # their values may be wrong besides, which no longer matters
        problems = [problem for problem in problems if problem.key not in _MANIFESTS_OWN]
    own = [Problem(key, getattr(launcher, key), _MANIFESTS_OWN[key], "Leave it out") for key in keys]
    return problems + own


def _output_problems(options: Options) -> list[Problem]:
    # In the pods' file system, which is not this one's.
    if options.output_dir is None or posixpath.normpath(options.output_dir).startswith(f"{STORAGE}/"):
        return []
    rule = f"is lost with its pod: only {STORAGE} outlives it"
    return [Problem("output_dir", options.output_dir, rule, f"Give a folder below {STORAGE}")]


def _credentials_problems(options: Options) -> list[Problem]:
    addresses = [*options.data, *(text.partition("=")[2] for text in options.validation)]
    found = [credentials_problem(address) for address in addresses if is_remote(address)]
    return [problem for problem in found if problem is not None]


def _variable_problems(text: str) -> list[Problem]:
    name, equals, _ = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        return [Problem("env", text, "must be NAME=VALUE", "Write it so")]
    if is_secret(name):
        # The value is not repeated.
        rule = "looks like a secret, which a manifest must not hold"
        return [Problem("env", name, rule, "Put it into a Secret, and give --secret NAME")]
    return []
