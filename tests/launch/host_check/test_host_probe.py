"""The facts that a host tells about itself, each against something that the test has made."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster import host_probe as probe

SMI = """#!/bin/sh
case $1 in
--query-gpu=index,name,memory.total,memory.free,driver_version,compute_cap)
    echo '0, NVIDIA A100-SXM4-80GB, 81920, 81000, 580.95.05, 8.0'
    echo '1, NVIDIA A100-SXM4-80GB, 81920, 512, 580.95.05, 8.0';;
--query-compute-apps=*) echo '4711, /usr/bin/python, 80000';;
*) exit 9;;
esac
"""


def request(**values: Any) -> dict[str, Any]:
    return {
        "project": "/", "cwd": "/", "files": [], "data": [], "folders": [], "environment": {}, "commands": [],
        "run": "r", "index": 0, **values,
    }  # fmt: skip


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program called nvidia-smi first on the PATH."""

    def write(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return write


def test_gpus_as_nvidia_smi_tells(smi) -> None:
    smi(SMI)
    found = probe.gpus(request())
    assert found["failed"] is None
    assert found["gpus"][1] == {
        "index": "1", "name": "NVIDIA A100-SXM4-80GB", "memory.total": "81920", "memory.free": "512",
        "driver_version": "580.95.05", "compute_cap": "8.0",
    }  # fmt: skip
    assert found["processes"] == [["4711", "/usr/bin/python", "80000"]]


def test_a_driver_that_fails_or_hangs(smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi("#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\nexit 18\n")
    assert "version mismatch" in probe.gpus(request())["failed"]
    monkeypatch.setattr(probe, "NVIDIA_SMI_SECONDS", 0.2)
    smi("#!/bin/sh\nexec sleep 20\n")
    assert probe.gpus(request())["failed"] == "nvidia-smi does not answer within 0.2 s"


def test_a_host_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = probe.gpus(request())
    assert (found["smi"], found["gpus"], found["failed"]) == (None, [], None)


def test_the_digest_of_the_code_changes_with_it(tmp_path: Path) -> None:
    assert probe.project(request(project=str(tmp_path)))["digest"] is None
    code = tmp_path / "pipeline" / "job"
    code.mkdir(parents=True)
    digests = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("c.txt", "3")):
        (code / name).write_text(text)
        digests.append(probe.project(request(project=str(tmp_path)))["digest"])
    assert len(set(digests)) == 3 and digests[2] == digests[3]
    assert not probe.project(request(cwd=str(tmp_path / "none")))["cwd"]


def test_what_editors_keep_beside_the_code_is_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "pipeline" / ".copies").mkdir(parents=True)
    (tmp_path / "pipeline" / "a.py").write_text("1")
    before = probe.project(request(project=str(tmp_path)))
    (tmp_path / "pipeline" / ".#a.py").symlink_to("me@laptop.4711:1")  # a.py is open in Emacs
    (tmp_path / "pipeline" / ".copies" / "a.py").write_text("2")
    assert probe.project(request(project=str(tmp_path))) == before


def test_data_is_described_by_names_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "text" / "deep").mkdir(parents=True)
    (tmp_path / "text" / "a.txt").write_text("12345")
    (tmp_path / "text" / "deep" / "b.txt").write_text("123")
    for suffix in ("bin", "idx"):
        (tmp_path / f"tokens.{suffix}").write_text("1234")
    paths = {name: str(tmp_path / name) for name in ("text", "tokens", "text/a.txt", "none")}
    found = probe.data(request(data=list(paths.values())))
    sizes = {
        name: found[path] and (found[path]["files"], found[path]["bytes"]) for name, path in paths.items()
    }
    assert sizes == {"text": (2, 8), "tokens": (2, 8), "text/a.txt": (1, 5), "none": None}
    (tmp_path / "text" / "a.txt").write_text("123456")
    again = probe.data(request(data=[paths["text"]]))
    assert again[paths["text"]]["digest"] != found[paths["text"]]["digest"]


def test_files_by_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("same")
    one, other, none = (str(tmp_path / name) for name in ("a", "b", "c"))
    found = probe.files(request(files=[one, other, none]))
    assert found[one] == found[other] and found[none] is None


def test_a_lock_is_held_while_somebody_has_it_open(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "op" / "lock"
    lock.parent.mkdir(parents=True)
    asked = request(environment={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert probe.locks(asked) == []
    with lock.open("w"):
        (held,) = probe.locks(asked)
    os.utime(lock, (time.time() - 3600,) * 2)
    (stale,) = probe.locks(asked)
    assert (held["path"], held["held"]) == (str(lock), True)
    assert stale["held"] is False and 3500 < stale["age"] < 3700


def test_folders_that_do_not_exist_yet_are_judged_by_the_nearest_that_does(tmp_path: Path) -> None:
    path = str(tmp_path / "runs" / "one")
    found = probe.folders(request(folders=[path]))[path]
    assert (found["nearest"], found["writable"]) == (str(tmp_path), True)
    assert 0 < found["free"] <= found["total"] and found["type"] != "unknown"
    assert probe.folders(request(folders=["/dev/shm/x"]))["/dev/shm/x"]["type"] == "tmpfs"


def test_tokens_are_seen_and_taken_away(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    made = [token for index in (0, 2) for token in probe.leave_tokens(request(folders=[path], index=index))]
    (tmp_path / f"{probe.TOKEN}other-1").touch()
    assert probe.see_tokens(request(folders=[path])) == {path: [0, 2]}
    # Two folders in one: the token is there already, and is not taken away twice.
    assert probe.leave_tokens(request(folders=[path, path], index=3)) == [tmp_path / f"{probe.TOKEN}r-3"]
    assert all(token.exists() for token in made)


def test_ports() -> None:
    server, port = probe.listen(0)
    assert server is not None and 15_000 <= port < 32_768
    with server:
        assert probe.connect(["127.0.0.1", port]) is None
        assert not socket.has_dualstack_ipv6() or probe.connect(["::1", port]) is None
        assert probe.listen(port) == (None, "Address already in use")
    assert probe.connect(["127.0.0.1", port]) == "Connection refused"
    assert "Name or service not known" in (probe.connect(["no.such.host.invalid", port]) or "")
    assert probe.connect(None) is None
    assert probe.listen(None) == (None, None)


def test_telling_variables_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "NCCL_SOCKET_IFNAME",
        "LD_PRELOAD",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "OMP_NUM_THREADS",
    ):
        monkeypatch.setenv(name, "x")
    found = set(probe.environment(request()))
    assert {"NCCL_SOCKET_IFNAME", "LD_PRELOAD", "OMP_NUM_THREADS"} <= found
    assert not found & {"WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"}


def test_the_rest_is_what_this_machine_is() -> None:
    import torch

    asked = request(commands=["sh", "no-such-program"])
    answer = probe.ask(asked)
    assert not [name for name, found in answer.items() if isinstance(found, dict) and "error" in found]
    assert answer["machine"]["host"] == socket.gethostname()
    assert (answer["packages"]["torch"], answer["packages"]["cuda"]) == (
        torch.__version__,
        torch.version.cuda,
    )
    assert answer["memory"]["cores"] == len(os.sched_getaffinity(0))
    assert answer["commands"]["no-such-program"] is None and answer["commands"]["sh"]
    assert answer["limits"]["files"][0] > 0
