"""Brings the key of a start to its hosts: by the remote shell of the host checks, through standard input.

The name of the file is random and appears on command lines; its content does not. Agents remove it
when all of them have come, and the launch itself where not all did. What a start that was killed has left is
removed by a later one, after a day.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from pipeline.base.words import ends
from pipeline.job.world import Host
from pipeline.launch.host_check.ask import RemoteShell
from pipeline.launch.host_check.session import Output, Session, close_all, failure_of, no_client, room_for

DELIVERY_SECONDS = 60.0
# At the end of a start, which a host that is gone must not hold up.
WITHDRAWAL_SECONDS = 10.0
# Every host has it, and a home folder may be read-only. /dev/shm is emptied at a user's last logout.
FOLDER = "/tmp"
_BEGINNING = ".launch_key_"
_MARK = "KEY:"
# Lines before the key are for start-up files of shells that ask something. Hosts may share the folder. Each
# writes a file whose name is drawn there: one made from the path, which is on a command line, could be
# foreseen by another user, who would own the file.
_SCRIPT = (
    "umask 077; find {folder} -maxdepth 1 -type f -user \"$(id -u)\" -name '{beginning}*' -mmin +1440 "
    "-exec rm -f {{}} + 2>/dev/null; while read -r line; do case $line in key=*) break;; esac; done; "
    'case $line in key=*) own=$(mktemp {path}.XXXXXXXX) && printf %s "${{line#key=}}" >"$own" && '
    'mv -f "$own" {path} && echo {mark};; *) false;; esac || exit 3; cat >/dev/null'
)
_NOT_WRITTEN = 3


class NotDelivered(Exception):
    """Hosts that do not have the key; the message names them, with the reason and what to do."""


def deliver_key(
    hosts: Sequence[Host], shell: RemoteShell, key: str, seconds: float = DELIVERY_SECONDS
) -> str:
    """Leave the key on every host, in parallel; the path of its file there. No host keeps it where this
    fails, or is interrupted.

    Raises:
        NotDelivered: some host does not have it.
    """
    path = f"{FOLDER}/{_BEGINNING}{secrets.token_hex(16)}"
    sessions: list[Session] = []
    try:
        _leave_key(hosts, shell, key, path, sessions, seconds)
    except BaseException:  # a request to stop included
        withdraw_key(hosts[: len(sessions)], shell, path, min(seconds, WITHDRAWAL_SECONDS))
        raise
    return path


def _leave_key(
    hosts: Sequence[Host], shell: RemoteShell, key: str, path: str, sessions: list[Session], seconds: float
) -> None:
    """`sessions`: receives one for each host that is connected to."""
    room_for(len(hosts))
    try:
        for host in hosts:
            names = {"folder": FOLDER, "beginning": _BEGINNING, "path": path, "mark": _MARK}
            command = shell(host, _SCRIPT.format(**names))
            try:
                session = Session(command, _MARK)
            except OSError as error:
                failure = no_client(command[0], error)
                raise NotDelivered(f"{failure.rule}. {failure.remedy}") from error
            sessions.append(session)
            session.send(f"\n\nkey={key}")
        deadline = time.monotonic() + seconds
        has = [session.answer(deadline) is not None for session in sessions]
    finally:
        outputs = close_all(sessions)
    problems = [
        f"{host.name}: {_why(host, output)}"
        for host, there, output in zip(hosts, has, outputs, strict=True)
        if not there
    ]
    if problems:
        raise NotDelivered("\n".join(ends(problems, 12)))


def withdraw_key(
    hosts: Sequence[Host], shell: RemoteShell, path: str, seconds: float = WITHDRAWAL_SECONDS
) -> None:
    """Remove the key's file from every host that answers, in parallel."""
    sessions: list[Session] = []
    try:
        for host in hosts:
            sessions.append(Session(shell(host, f"rm -f {path} {path}.* && echo {_MARK}"), _MARK))
        deadline = time.monotonic() + seconds
        for session in sessions:
            session.answer(deadline)
    finally:
        close_all(sessions)


def _why(host: Host, output: Output) -> str:
    if output.return_code == _NOT_WRITTEN:
        words = output.errors.strip().splitlines()[-1:] or ["nothing"]
        return f"the key of this start cannot be left in {FOLDER} there (it says: {words[0][:200]})"
    failure = failure_of(output)
    return f"{failure.rule}. {failure.remedy.replace('{host}', host.name)}"
