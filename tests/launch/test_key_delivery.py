"""How the key of a start comes to its hosts: the programs of a remote shell run here."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

import pytest

from pipeline.cluster.agent.handshake import read_key
from pipeline.job.world import Host
from pipeline.launch import key_delivery
from pipeline.launch.host_check import session
from pipeline.launch.host_check.session import Session, local_command
from pipeline.launch.key_delivery import NotDelivered, deliver_key, withdraw_key

HOSTS = (Host("h1", 2), Host("h2", 2), Host("h3", 2))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(key_delivery, "FOLDER", str(tmp_path))
    monkeypatch.setattr(session, "_GRACE_SECONDS", 0.3)
    return tmp_path


def test_every_host_has_it_alone_and_no_command_line_does(folder: Path) -> None:
    """Three hosts that share the folder, of which each writes it. A shell's start-up file takes a line."""
    scripts = []

    def shell(host: Host, script: str) -> list[str]:
        scripts.append(script)
        return local_command("read -r answer; " + script)

    path = Path(deliver_key(HOSTS, shell, "the-key"))
    assert read_key(str(path)) == "the-key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(folder.iterdir()) == [path]
    assert len(scripts) == 3 and not any("the-key" in script for script in scripts)


def test_a_file_that_another_user_has_made_beside_it_gets_no_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is on a command line, so that names made from it can be foreseen."""
    monkeypatch.setattr(key_delivery.secrets, "token_hex", lambda _: "seen")
    foreseen = [folder / f".launch_key_seen{end}" for end in ("", ".0", ".1", ".2")]
    with contextlib.ExitStack() as stack:
        for each in foreseen:
            each.touch()
        traps = [stack.enter_context(each.open()) for each in foreseen]
        path = deliver_key(HOSTS, lambda host, script: local_command(script), "the-key")
        assert [trap.read() for trap in traps] == [""] * 4
    assert read_key(path) == "the-key"


def test_what_a_killed_start_left_is_removed_after_a_day(folder: Path) -> None:
    old, new, other = folder / ".launch_key_1", folder / ".launch_key_2", folder / "another"
    for file, age in ((old, 25), (new, 23), (other, 99)):
        file.touch()
        os.utime(file, (time.time() - 3600 * age,) * 2)
    path = Path(deliver_key(HOSTS[:1], lambda host, script: local_command(script), "k"))
    assert sorted(folder.iterdir()) == sorted([new, other, path])


def test_a_start_without_all_its_agents_takes_it_away_again(folder: Path) -> None:
    def shell(host: Host, script: str) -> list[str]:
        return local_command("sleep 60" if host.name == "h2" else script)

    path = deliver_key(HOSTS[:1], shell, "k")
    began = time.monotonic()
    withdraw_key(HOSTS, shell, path, seconds=0.5)
    assert list(folder.iterdir()) == []
    assert time.monotonic() - began < 8


def test_hosts_without_it_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shell(host: Host, script: str) -> list[str]:
        if host.name == "h2":
            return local_command("echo 'ssh: connect to host h2 port 22: No route to host' >&2; exit 255")
        if host.name == "h3":
            return local_command(script.replace(str(folder), str(folder / "missing")))
        return local_command(script)

    with pytest.raises(NotDelivered) as caught:
        deliver_key(HOSTS, shell, "k")
    first, second = str(caught.value).splitlines()
    assert first.startswith("h2: ") and "{host}" not in first
    assert second.startswith("h3: the key of this start cannot be left in") and "missing" in second
    assert list(folder.iterdir()) == []  # nor has the other host any more


def test_a_request_to_stop_meanwhile_leaves_it_nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Session.answer

    def interrupted(asked: Session, deadline: float) -> object:
        assert answer(asked, deadline) is not None and list(folder.iterdir())
        monkeypatch.setattr(Session, "answer", answer)
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deliver_key(HOSTS, lambda host, script: local_command(script), "k")
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_given_up(folder: Path) -> None:
    began = time.monotonic()
    with pytest.raises(NotDelivered, match="h1: "):
        deliver_key(HOSTS[:1], lambda host, script: local_command("sleep 60"), "k", seconds=0.3)
    assert time.monotonic() - began < 8


def test_without_ssh_here_that_is_said() -> None:
    with pytest.raises(NotDelivered, match="no-such-ssh"):
        deliver_key(HOSTS, lambda host, script: ["no-such-ssh"], "k")
