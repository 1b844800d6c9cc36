"""Hostfiles and filters that DeepSpeed's launcher misreads: each is refused before a start, with its reason.

The comments say what the launcher does instead (version 0.19.8).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.check import main

TWO = "h1 slots=2\nh2 slots=2\n"
REFUSED = [
    # It warns, and trains on this machine alone.
    (None, "", "hostfile = '{path}': the named hostfile cannot be read (No such file or directory)"),
    # 2 and 1 slots: its pattern has no end.
    ("h1 slots=2.9\n", "", "line 1 = 'h1 slots=2.9': slots must be a whole number, not '2.9'"),
    ("h1 slots=1x\n", "", "line 1 = 'h1 slots=1x': slots must be a whole number, not '1x'"),
    ("h1 slots=2 # two\n", "", "line 1 = 'h1 slots=2 # two': '# two' follows the slot count"),
    # A host without ranks, which is the rendezvous where it comes first: everybody waits for it.
    ("h1 slots=0\nh2 slots=2\n", "", "line 1 = 'h1 slots=0': slots must be at least 1, not 0"),
    # Errors of its own, without a line number or a remedy.
    ("h1 slots=2\nh2\n", "", "line 2 = 'h2': the slot count is missing"),
    ("h1:2\n", "", "line 1 = 'h1:2': 'h1:2' is not a host name that is safe in a shell command"),
    ("h1 slots = 2\n", "", "line 1 = 'h1 slots = 2': a line is `host slots=N`, without spaces around '='"),
    ("h1 slots=-1\n", "", "line 1 = 'h1 slots=-1': slots must be at least 1, not -1"),
    ("h1 slots=2\nh1 slots=2\n", "", "line 2 = 'h1 slots=2': host h1 is listed on line 1 already"),
    ("\n# nobody\n", "", "hostfile = '{path}': the hostfile names no host"),
    # Passed to ssh and a shell as it is.
    ("h[1-2] slots=2\n", "", "'h[1-2]' is not a host name that is safe in a shell command"),
    ("h1;id slots=2\n", "", "'h1;id' is not a host name that is safe in a shell command"),
    # 8 ranks on 4 GPUs, all 2 hosts, and all GPUs.
    (TWO, "--num_gpus 4", "num_gpus = 4: must be from 1 to the smallest host's slots, 2"),
    (TWO, "--num_nodes 5", "num_nodes = 5: must be from 1 to the number of hosts, 2"),
    (TWO, "--num_gpus 0", "num_gpus = 0: must be from 1 to the smallest host's slots, 2"),
    # A bare IndexError.
    (TWO, "--exclude h1@h2", "exclude = 'h1@h2': no slot is left"),
    (TWO, "--include h[1-2]", "include = 'h[1-2]': there is no host 'h[1-2]'. The hosts are h1"),
    (TWO, "--include h1:2", "include = 'h1:2': host 'h1' has no slot 2"),
    # With one host left, the job starts here without that launcher.
    (TWO, "--launcher openmpi --include h1", "include = 'h1': openmpi starts all of a hostfile"),
    (TWO, "--launcher mpich --num_nodes 1", "num_nodes = 1: mpich starts all of a hostfile"),
    (
        "h1 slots=1\nh2 slots=2\n",
        "--launcher mpich",
        "needs the same number of slots on every host (h1 has 1",
    ),
    # Each host takes the name for itself.
    ("localhost slots=2\nh2 slots=2\n", "", "'localhost': means another machine on every host"),
    ("h1 slots=2\nada@127.0.0.1 slots=2\n", "", "'ada@127.0.0.1': means another machine on every host"),
]


@pytest.mark.parametrize(("text", "arguments", "message"), REFUSED, ids=lambda value: repr(value)[:40])
def test_refused_with_its_reason(
    text: str | None, arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    command = ["--hostfile", str(path), "--output_dir", str(tmp_path / "run"), *arguments.split()]
    assert main(command) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert message.replace("{path}", str(path)) in shown
    assert "This job cannot start: 1 error." in shown


TAKEN = [
    # The hostfile's order counts, not that of the filter: it decides who has rank 0.
    (TWO, "--include h2@h1", "4 on h1 x 2, h2 x 2"),
    (TWO, "--include h2", "2 on h2 x 2"),
    (TWO, "--exclude h1:0", "3 on h1 x 1, h2 x 2"),
    # Unequal numbers of slots: ranks take their places from the launch, not from the launcher's division.
    ("h1 slots=1\nh2 slots=2\n", "", "3 on h1 x 1, h2 x 2"),
    ("# c\r\n\r\nh1\tslots=2\r\n  h2   slots=2  \r\n", "", "4 on h1 x 2, h2 x 2"),
]


@pytest.mark.parametrize(("text", "arguments", "world"), TAKEN)
def test_what_is_taken_is_printed(
    text: str, arguments: str, world: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_bytes(text.encode())
    command = [
        "--hostfile",
        str(tmp_path / "hosts"),
        "--output_dir",
        str(tmp_path / "run"),
        *arguments.split(),
    ]
    main(command)
    assert world in capsys.readouterr().out
