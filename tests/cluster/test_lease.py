"""Where locks do not reach: a lease excludes others while its holder lives, and no longer."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.files import file_system_of, is_local
from pipeline.cluster.folder_lock import FolderLease, LeaseTaken, Timing, own_lease, read_lease

QUICK = Timing(beat=0.05, expiry=0.6, look=0.05, settle=0.1)


def on_host(folder: Path, host: str, **changes: Any) -> FolderLease:
    """The lease of a job on that host, which shares no locks with others."""
    own = replace(own_lease(), host=host, boot=f"boot of {host}")
    said: list[str] = []
    settings = {"lock_decides": False, "timing": QUICK, "lost": said.append, **changes}
    lease = FolderLease(folder, own=own, **settings)
    lease.said = said
    return lease


def test_a_second_host_is_refused_while_the_first_beats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = on_host(tmp_path, "one"), on_host(tmp_path, "two")
    first.take()
    with pytest.raises(LeaseTaken) as caught:
        second.take()
    assert caught.value.lease.host == "one"
    assert "a job on one" in capsys.readouterr().err
    first.release()
    assert read_lease(tmp_path) is None
    second.take()
    second.release()


@pytest.mark.alone
def test_a_dead_host_does_not_hold_it_for_ever(tmp_path: Path) -> None:
    first, second = on_host(tmp_path, "one"), on_host(tmp_path, "two")
    first.take()
    first._ended.set()  # the plug is pulled
    begin = time.monotonic()
    second.take()
    assert QUICK.expiry <= time.monotonic() - begin < 10 * QUICK.expiry
    second.release()


def test_a_full_disk_gives_the_folder_to_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = on_host(tmp_path, "one"), on_host(tmp_path, "two")
    first.take()
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if first.own.holder in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(LeaseTaken) as caught:
        second.take()
    assert caught.value.lease is None or caught.value.lease.host == "one"
    first.release()


def test_clocks_do_not_matter(tmp_path: Path) -> None:
    """A lease whose file is from the future, and one from 1970."""
    for moment in (0, time.time() + 1e6):
        first, second = on_host(tmp_path, "one"), on_host(tmp_path, "two")
        first.take()
        os.utime(first.path, (moment, moment))
        with pytest.raises(LeaseTaken):
            second.take()
        first.release()


def test_of_two_that_come_at_once_one_stays(tmp_path: Path) -> None:
    leases = [on_host(tmp_path, f"host{index}") for index in range(4)]
    held, gate = [], threading.Barrier(len(leases))

    def try_it(lease: FolderLease) -> None:
        gate.wait()
        try:
            lease.take()
            held.append(lease)
        except LeaseTaken:
            pass

    threads = [threading.Thread(target=try_it, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1
    assert read_lease(tmp_path).host == held[0].own.host
    held[0].release()


def test_a_holder_that_was_taken_for_dead_ends(tmp_path: Path) -> None:
    first, second = on_host(tmp_path, "one"), on_host(tmp_path, "two")
    first.take()
    second._write()
    deadline = time.monotonic() + 10
    while not first.said and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "another job has taken" in first.said[0]
    first.release()
    assert read_lease(tmp_path).host == "two"  # it leaves the other's alone


def test_on_one_system_a_lock_that_is_free_or_a_process_that_is_gone_tells_at_once(tmp_path: Path) -> None:
    slow = replace(QUICK, expiry=1e6)
    for works in (True, False):
        with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
            gone = replace(own_lease(), pid=process.pid)
        FolderLease(tmp_path, False, own=gone)._write()
        lease = FolderLease(tmp_path, lock_decides=False, lock_works=works, timing=slow)
        lease.take()
        lease.release()


def test_without_locks_a_process_that_lives_tells_at_once(tmp_path: Path) -> None:
    FolderLease(tmp_path, False)._write()
    with pytest.raises(LeaseTaken):
        FolderLease(tmp_path, False, lock_works=False, timing=replace(QUICK, expiry=1e6)).take()


def test_a_host_that_was_started_again_has_its_own_disk_at_once(tmp_path: Path) -> None:
    before = on_host(tmp_path, "one")
    before._write()
    after = FolderLease(
        tmp_path,
        lock_decides=True,
        own=replace(own_lease(), host="one", boot="next"),
        timing=replace(QUICK, expiry=1e6),
    )
    after.take()
    after.release()


def test_a_lease_that_is_garbage_is_watched_like_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lease.json").write_bytes(b"{")
    lease = on_host(tmp_path, "one")
    begin = time.monotonic()
    lease.take()
    assert time.monotonic() - begin >= QUICK.expiry
    assert "another job" in capsys.readouterr().err
    lease.release()


def test_a_folder_that_is_gone_for_a_while_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lease = on_host(folder, "one")
    lease.take()
    shutil.rmtree(folder)
    time.sleep(4 * QUICK.beat)
    folder.mkdir()
    deadline = time.monotonic() + 10
    while read_lease(folder) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert read_lease(folder).holder == lease.own.holder
    assert lease.said == []
    lease.release()


def test_kinds_of_file_systems(tmp_path: Path) -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    assert not is_local(Path("/proc"))
    assert file_system_of(tmp_path)
