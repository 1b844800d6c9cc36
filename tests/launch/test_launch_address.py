"""Where hosts find the launch, as far as ssh's configuration tells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.job.world import Host
from pipeline.launch.host_check import host_check


def test_an_ssh_that_does_not_answer_is_a_launch_without_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec /bin/sleep 20\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host_check, "_SSH_SECONDS", 0.2)
    world = SimpleNamespace(is_local=False, hosts=(Host("known-to-ssh.invalid", 1),))
    with pytest.raises(
        host_check.NoAddress, match=r"ssh -G known-to-ssh.* takes more than 0.2 s.*--launch_addr"
    ):
        host_check.launch_address(world, SimpleNamespace(launch_addr=None))  # type: ignore[arg-type]
