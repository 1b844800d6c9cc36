"""Manifests follow the published schemas and hold what they were asked for; wrong requests are refused."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import deploy
from pipeline.base.problems import EXIT_STOPPED, EXIT_WRONG_JOB
from pipeline.cluster.hostfile import read_hostfile
from pipeline.cluster.launcher_options import split_arguments
from tests.deployment.manifest import by_kind, expand, pod_and_container, words_of_pod
from tests.deployment.schemas import documents, validate

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
REQUIRED = ["--hostfile", "hostfiles/a100x4", "--image", "registry.example.com/gpt:1", "--claim", "training"]
KINDS = ("kubernetes", "kubeflow")


@pytest.fixture(autouse=True)
def in_the_projects_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def make(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def make(what: str, *more: str) -> str:
        assert deploy.main([what, *REQUIRED, *more]) == 0
        return capsys.readouterr().out

    return make


# Schemas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", KINDS)
def test_manifests_follow_the_published_schemas(what: str, make: Callable[..., str]) -> None:
    text = make(what, "--secret", "store", "--env", "NCCL_DEBUG=INFO", "--model", "gpt2-xl")
    for document in documents(text):
        validate(document)


def set_at(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    *parents, last = path.split(".")

    def change(document: dict[str, Any]) -> None:
        for name in parents:
            document = document[int(name)] if name.isdecimal() else document[name]
        document[int(last) if last.isdecimal() else last] = value

    return change


POD = "spec.template.spec"
NODE = "spec.template.spec.replicatedJobs.0.template.spec.template.spec"
WRONG = [
    ("kubernetes", "Job", "apiVersion", "batch/v2"),
    ("kubernetes", "Job", "spec.complitionMode", "Indexed"),
    ("kubernetes", "Job", "spec.backoffLimit", "many"),
    ("kubernetes", "Job", "spec.podFailurePolicy.rules.0.onExitCodes", {"operator": "In", "values": ["2"]}),
    ("kubernetes", "Job", f"{POD}.containers.0.resources.gpus", 8),
    ("kubernetes", "Job", f"{POD}.volumes.2.emptyDir.size", "16Gi"),
    ("kubernetes", "Service", "spec.publishNotReady", True),
    ("kubernetes", "ConfigMap", "data.hostfile", ["h1 slots=8"]),
    ("kubeflow", "TrainJob", "kind", "TrainingJob"),
    ("kubeflow", "TrainJob", "spec.trainer.numNodes", "4"),
    ("kubeflow", "TrainJob", "spec.trainer.numHosts", 4),
    ("kubeflow", "TrainJob", "spec.runtimeRef", {"kind": "TrainingRuntime"}),
    ("kubeflow", "TrainingRuntime", "spec.template.spec.failurePolicy.restarts", 3),
    ("kubeflow", "TrainingRuntime", f"{NODE}.containers.0.volumeMounts.0.path", "/storage"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "kind", "path", "value"), WRONG, ids=lambda value: str(value)[:50])
def test_a_wrong_field_is_found(
    what: str, kind: str, path: str, value: object, make: Callable[..., str]
) -> None:
    document = by_kind(make(what))[kind]
    validate(document)
    changed = copy.deepcopy(document)
    set_at(path, value)(changed)
    assert changed != document
    with pytest.raises(AssertionError):
        validate(changed)


# What is in them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_shipped_manifests_are_what_their_command_makes(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text(encoding="utf-8")
    for document in documents(text):
        validate(document)
    command = re.search(r"^#   (python -m pipeline\.deploy .*)$", text, re.MULTILINE)
    if path.name == "claim.yaml":
        assert command is None
        return
    assert deploy.main(shlex.split(command[1])[3:]) == 0
    assert capsys.readouterr().out == text


def test_there_are_manifests_of_each_form() -> None:
    names = {kind for path in EXAMPLES for kind in by_kind(path.read_text(encoding="utf-8"))}
    assert {"Job", "Service", "ConfigMap", "TrainJob", "TrainingRuntime", "PersistentVolumeClaim"} == names


@pytest.mark.parametrize("what", KINDS)
def test_every_pod_starts_its_own_ranks_and_meets_the_others_at_the_first(
    what: str, make: Callable[..., str], tmp_path: Path
) -> None:
    text = make(what, "--num_nodes", "3", "--num_gpus", "4")
    pod, container = pod_and_container(text)
    launcher, job = split_arguments(words_of_pod(container, 1))
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(by_kind(text)["ConfigMap"]["data"]["hostfile"])
    hosts, problems = read_hostfile(hostfile)
    assert problems == ()
    assert [host.slots for host in hosts] == [4, 4, 4]
    assert launcher.no_ssh and launcher.node_rank == 1
    assert launcher.master_addr == hosts[0].name
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert launcher.hostfile == f"{mounts['hosts']}/hostfile"
    assert job == ["--output_dir", f"{mounts['storage']}/runs/pretrain"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory" and mounts["shm"] == "/dev/shm"
    assert pod["terminationGracePeriodSeconds"] > launcher.stop_timeout


def test_the_names_are_those_that_kubernetes_gives(make: Callable[..., str]) -> None:
    text = make("kubernetes", "--name", "first")
    kinds = by_kind(text)
    # An Indexed Job's pods are called <job>-<index>; their subdomain is the headless service.
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    assert kinds["Service"]["metadata"]["name"] == kinds["Job"]["spec"]["template"]["spec"]["subdomain"]
    job = kinds["Job"]["metadata"]["name"]
    assert kinds["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": job}
    assert "first-3.first slots=8" in kinds["ConfigMap"]["data"]["hostfile"]
    assert kinds["Job"]["spec"]["completions"] == kinds["Job"]["spec"]["parallelism"] == 4
    # A job set's pods are called <set>-<replicated job>-<replica>-<index>.<set>.
    kinds = by_kind(make("kubeflow", "--name", "first"))
    replicated = kinds["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]
    assert replicated["name"] == "node"
    assert "first-node-0-3.first slots=8" in kinds["ConfigMap"]["data"]["hostfile"]


def exit_code_actions(spec: dict[str, Any]) -> dict[int, str]:
    rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    return {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}


def test_exit_codes_decide_what_happens_next(make: Callable[..., str]) -> None:
    job = by_kind(make("kubernetes", "--max_restarts", "2"))["Job"]["spec"]
    expected = {EXIT_WRONG_JOB: "FailJob", EXIT_STOPPED: "Ignore"}
    assert exit_code_actions(job) == expected
    assert job["backoffLimit"] == 2 * 4
    job_set = by_kind(make("kubeflow", "--max_restarts", "2"))["TrainingRuntime"]["spec"]["template"]["spec"]
    assert job_set["failurePolicy"]["maxRestarts"] == 2
    node = job_set["replicatedJobs"][0]["template"]["spec"]
    assert exit_code_actions(node) == expected
    # Kubernetes takes a failure policy with this restart policy only.
    for each in (job, node):
        assert each["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("what", KINDS)
def test_arguments_arrive_as_they_were_given(what: str, make: Callable[..., str]) -> None:
    odd = [
        "--sample_prompt",
        'it\'s "a" $(HOME) $$(X) pa$$word $$$ $HOME #no: {comment}\n\t\x7f\u0085 \u2028 ü 😀 - null',
    ]
    text = make(what, *odd, "--output_dir", "/storage/runs/é", "--stop_timeout", "1000.5")
    pod, container = pod_and_container(text)
    words = words_of_pod(container, 1)
    assert words[-6:] == [*odd, "--output_dir", "/storage/runs/é", "--stop_timeout", "1000.5"]
    assert pod["terminationGracePeriodSeconds"] == 1031


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("word", ["null", "true", "on", "e1"])
def test_names_stay_strings(what: str, word: str, make: Callable[..., str]) -> None:
    text = make(what, "--name", word, "--claim", "123", "--secret", "1e3", "--env", "A=$(B) off")
    for document in documents(text):
        validate(document)
        assert document["metadata"]["name"].startswith(word)
    container = pod_and_container(text)[1]
    assert container["envFrom"] == [{"secretRef": {"name": "1e3"}}]
    assert container["env"] == [{"name": "A", "value": "$$(B) off"}]


def test_both_names_of_the_number_of_gpus_mean_it(make: Callable[..., str]) -> None:
    text = make("kubernetes", "--num_accelerators", "4")
    container = pod_and_container(text)[1]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert "pretrain-0.pretrain slots=4" in by_kind(text)["ConfigMap"]["data"]["hostfile"]
    assert "--num_accelerators" not in words_of_pod(container, 0)


@pytest.mark.parametrize("value", ["pa$$word $$(X)", "$", "$$$(A)$", "$(A", "a$b"])
def test_variables_arrive_as_they_were_given(value: str, make: Callable[..., str]) -> None:
    container = pod_and_container(make("kubernetes", "--env", f"P={value}"))[1]
    assert expand(container["env"][0]["value"], {"A": "wrong", "X": "wrong"}) == value


# What is refused ---------------------------------------------------------------------------------------

REFUSED = [
    (["--name", "My_Job"], "name", "beginning with a letter"),
    (["--name", "a" * 41], "name", "at most 40"),
    (["--image", "registry.example.com:5000/gpt"], "image", "tag"),
    (["--image", "gpt:latest"], "image", "latest"),
    (["--claim", "My Claim"], "claim", "Kubernetes object"),
    (["--secret", "../x"], "secret", "Kubernetes object"),
    (["--env", "NAME"], "env", "NAME=VALUE"),
    (["--env", "9=1"], "env", "NAME=VALUE"),
    (["--max_restarts", "-1"], "max_restarts", "from 0"),
    (["--output_dir", "runs/mine"], "output_dir", "/storage"),
    (["--output_dir", "/storage/../tmp"], "output_dir", "/storage"),
    (["--data", "s3://user:hush@bucket/x.txt"], "data", "holds credentials"),
    (["--validation", "dev=https://host/x.txt?sig=hush"], "data", "holds credentials"),
    (["--node_rank", "1"], "node_rank", "the manifest decides"),
    (["--launcher", "openmpi"], "launcher", "the manifest decides"),
    (["--allow_fewer_hosts", "1"], "allow_fewer_hosts", "has all of its pods"),
    (["--stop_timeout", "0"], "stop_timeout", "at least"),
    (["--hostfile", "hostfiles/none"], "hostfile", "cannot be read"),
    (["--num_nodes", "5"], "num_nodes", "4"),
]


@pytest.mark.parametrize(("arguments", "key", "words"), REFUSED, ids=lambda value: str(value)[:30])
def test_wrong_requests_are_refused(
    arguments: list[str], key: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy.main(["kubernetes", *REQUIRED, *arguments]) == EXIT_WRONG_JOB
    captured = capsys.readouterr()
    assert captured.out == ""
    said = " ".join(captured.err.split())
    assert f"error: {key} = " in said and words in said
    assert said.count("error:") == 1
    assert "hush" not in said


def test_all_that_is_wrong_is_said_together(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [word for given, _, _ in REFUSED[:8] for word in given]
    assert deploy.main(["kubeflow", *REQUIRED, *arguments]) == EXIT_WRONG_JOB
    # A later value replaces an earlier one of the same option, except for --env.
    assert capsys.readouterr().err.count("error:") == 6


def test_hosts_with_unequal_slots_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("h1 slots=8\nh2 slots=4\n")
    unequal = ["--hostfile", str(hostfile)]
    assert deploy.main(["kubernetes", *REQUIRED, *unequal]) == EXIT_WRONG_JOB
    assert "h1 8, h2 4" in " ".join(capsys.readouterr().err.split())
    assert deploy.main(["kubernetes", *REQUIRED, *unequal, "--num_gpus", "4"]) == 0


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "aws_session_token", "DB_PASSWORD"),
        *("MYPASSWORD", "WANDB_APIKEY", "SIGNING_KEY"),
    ],
)
def test_secrets_are_not_written_into_a_manifest(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy.main(["kubernetes", *REQUIRED, "--env", f"{name}=hush-hush"]) == EXIT_WRONG_JOB
    captured = capsys.readouterr()
    assert name in captured.err
    assert "hush-hush" not in captured.out + captured.err


def test_variables_with_innocent_names_are_taken(make: Callable[..., str]) -> None:
    names = ["TOKENIZERS_PARALLELISM", "NCCL_IB_PKEY_NONE", "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN_PATH"]
    text = make("kubernetes", *(word for name in names for word in ("--env", f"{name}=1")))
    assert [each["name"] for each in pod_and_container(text)[1]["env"]] == names


@pytest.mark.parametrize("arguments", [["--no_such_option"], ["--train_steps", "many"]])
def test_unknown_options_of_the_job_end_with_code_2(arguments: list[str]) -> None:
    assert deploy.main(["kubernetes", *REQUIRED, *arguments]) == EXIT_WRONG_JOB


def test_an_option_of_the_launcher_that_is_no_number_ends_with_code_2() -> None:
    with pytest.raises(SystemExit) as caught:
        deploy.main(["kubernetes", *REQUIRED, "--max_restarts", "x"])
    assert caught.value.code == EXIT_WRONG_JOB


# The image ---------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, in order, with their lines joined."""
    text = (ROOT / "deploy" / "container" / "Dockerfile").read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = [line.strip() for line in code.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.partition(" ")[0], " ".join(line.partition(" ")[2].split())) for line in lines]


def test_the_image_is_pinned_and_runs_without_root_or_ssh() -> None:
    found = instructions()
    known = {"FROM", "ENV", "RUN", "USER", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in found} <= known
    bases = [value for name, value in found if name == "FROM"]
    assert len(bases) == 1 and re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", bases[0])
    assert [value for name, value in found if name == "USER"] == ["trainer"]
    user = next(value for name, value in found if name == "RUN" and "useradd" in value)
    pod, _ = pod_and_container((ROOT / "deploy/kubernetes/indexed_job.yaml").read_text(encoding="utf-8"))
    assert f"--uid {pod['securityContext']['runAsUser']} " in user
    assert not any("ssh" in value for _, value in found)
    # What the manifests' ./launch.sh is relative to; and what is copied exists.
    assert [value for name, value in found if name == "WORKDIR"] == ["/opt/pipeline"]
    copied = [word for name, value in found if name == "COPY" for word in value.split()[1:-1]]
    assert copied and all((ROOT / path).exists() for path in copied)
    # The set-up's layer comes before the code's: launch.sh finds there what it runs.
    places = [value for name, value in found if name == "COPY"]
    assert any(value.endswith("pipeline/launch/install.py pipeline/launch/") for value in places)
    for folder in ("pipeline", "ds_configs", "hostfiles", "launch.sh", "constraints.txt"):
        assert folder in copied
