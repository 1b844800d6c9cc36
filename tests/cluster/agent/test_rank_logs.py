"""Every rank's log: what is written, where, and what becomes of it at the end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from pipeline.cluster.agent.rank_output import (
    KEPT_STARTS,
    MAX_LINE,
    NonBlockingWriter,
    PlainLines,
    RankOutput,
    Tail,
    forget_old_starts,
)
from tests.cluster.agent.agents import Start


def test_nothing_is_kept_twice_where_hosts_share_a_folder(tmp_path: Path) -> None:
    output = RankOutput(1)
    output.log(b"a line\n")
    assert output.kept_elsewhere("mark") == ""  # no folder yet
    output.log_to(tmp_path / "logs")
    assert output.kept_elsewhere("mark") == "a line\n"
    first = RankOutput(0)
    first.log_to(tmp_path / "logs")
    first.write_mark("mark")
    assert output.kept_elsewhere("mark") == ""
    assert output.kept_elsewhere("another start's") == "a line\n"
    first.add_log_of(2, "from afar\n")
    first.add_log_of(2, "a full disk has kept the mark away\n")
    output.close()
    first.close()
    assert (tmp_path / "logs" / "rank_00002.log").read_text() == "from afar\n"


def test_logs_stay_where_they_are_when_the_first_host_is_gone(tmp_path: Path) -> None:
    start = Start(tmp_path, world_size=2)

    def agent(rank: int) -> socket.socket:
        stream = socket.create_connection(("127.0.0.1", start.coordinator.port))
        stream.sendall(start.hello(rank=rank, host_number=rank, host=f"h{rank + 1}"))
        return stream

    def say(stream: socket.socket, what: str, **fields: object) -> None:
        stream.sendall(json.dumps({"is": what, **fields}).encode() + b"\n")

    with agent(0) as first, agent(1) as second, contextlib.closing(start.coordinator):
        start.until(lambda: start.coordinator.world_is_here)
        say(first, "folder", path="/run")
        for _ in range(2):
            say(second, "trouble", text="logs cannot be written")
        start.until(lambda: "h2: logs cannot be written" in start.said)
        first.close()
        start.until(lambda: start.coordinator.table.failures)
        say(second, "log", text="its last words")
        say(second, "ended", code=1, by_agent=True, tail="")
        start.until(lambda: start.coordinator.outcome is not None)
    assert any(line.startswith("The connection to rank 0 (h1) was lost") for line in start.said)
    assert start.said.count("h2: logs cannot be written") == 1
    assert (
        "The first host, which gathers the logs, is gone: those of rank 1 (h2) stay in /run/logs/"
        in start.said[-1]
    )


def test_a_log_that_cannot_be_written_is_said_once_and_goes_on_when_it_can(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    output, deadline, said = RankOutput(1), time.monotonic() + 10, ""
    output.log(b"lost\n")
    output.log_to(tmp_path / "logs" / "start")
    while not said and time.monotonic() < deadline:
        said = output.new_trouble()
    assert said.startswith(f"logs cannot be written in {tmp_path}/logs/start: ")
    assert output.new_trouble() == ""
    (tmp_path / "logs").unlink()
    output.log(b"later\n")
    output.close()
    log = (tmp_path / "logs" / "start" / "rank_00001.log").read_text()
    assert log == "[5 bytes could not be written]\nlater\n"
    first = RankOutput(0)
    first.log_to(tmp_path / "no folder")
    first.add_log_of(7, "from afar\n")
    assert "No such file or directory" in first.new_trouble()


def test_a_rank_that_never_pauses_leaves_its_agent_time() -> None:
    output, turns = RankOutput(1), []
    stdout, stderr = output.open()
    with subprocess.Popen(["sh", "-c", "exec yes >&2"], stdout=stdout, stderr=stderr) as flood:
        output.started()
        end = threading.Timer(3.0, flood.kill)
        end.start()
        while len(turns) < 5 or not output.tail():
            began = time.monotonic()
            output.pump()
            turns.append(time.monotonic() - began)
        end.cancel()
        flood.kill()
    assert max(turns) < 1.5
    output.pump(at_end=True)
    assert not output.readers  # what was left has been read to its end


def test_logs_have_lines_without_the_drawing_of_a_terminal() -> None:
    lines = PlainLines()
    drawn = b"\x1b[?25lbar 1\r\x1b[2Kstep 1 \x1b[1mbold\x1b[0m\nbar 2\r\x1b[2Kstep"
    assert lines.feed(drawn) == b"step 1 bold\n"
    assert lines.feed(b" 2\r\n") == b"step 2\n"
    lines.feed(b"\x1b[2K\rlast")
    assert lines.rest() == b"last\n"


def test_a_line_that_never_ends_does_not_grow() -> None:
    """A progress bar without line ends, and bytes without any sense."""
    bar = PlainLines()
    for step in range(10_000):
        assert bar.feed(f"\r{step:,} of many {'#' * 50}".encode()) == b""
    assert len(bar._line) < MAX_LINE + 100
    assert bar.feed(b"\r\x1b[2Kdone\n") == b"done\n"
    noise = PlainLines()
    fed = b"".join(noise.feed(b"x" * 1000) for _ in range(200))
    assert len(noise._line) < MAX_LINE + 1000
    assert (fed + noise.rest()).replace(b"\n", b"") == b"x" * 200_000


def test_the_last_bytes_of_a_stream() -> None:
    tail = Tail(8)
    for piece in (b"abc\n", b"defgh\n", b"ij\n"):
        tail.feed(piece)
    assert tail.text == "efgh\nij\n"
    assert tail.lines(1) == "ij"


@pytest.mark.alone
def test_a_writer_that_nobody_reads_holds_nobody_up(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    writer = NonBlockingWriter(writer)
    began = time.monotonic()
    for _ in range(100):
        writer.write(b"x" * 10**5)
    writer.close(0.1)
    assert time.monotonic() - began < 2
    os.close(reader)


def test_only_the_last_starts_are_kept(tmp_path: Path) -> None:
    for number in range(KEPT_STARTS + 3):
        (tmp_path / f"20261130-0000{number:02}").mkdir()
    forget_old_starts(tmp_path)
    assert sorted(path.name[-2:] for path in tmp_path.iterdir())[0] == "03"
    assert len(list(tmp_path.iterdir())) == KEPT_STARTS
