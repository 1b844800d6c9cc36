"""Stop signals, sent to real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.training.signals import SAME_KEYPRESS_SECONDS, StopRequest

ROOT = Path(__file__).parents[2]

# A training loop: ends with 3 at the step boundary after a request.
LOOP = """
    with StopRequest(announce=True) as stop:
        print("ready", flush=True)
        while not stop.number:
            time.sleep(0.01)
        print(stop.number.name, flush=True)
    sys.exit(3)
"""

# The main thread waits in C for a lock that it holds itself, as a rank waits for a peer that is gone.
STUCK = """
    lock = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None)
    with StopRequest(announce=True):
        libc.pthread_mutex_lock(lock)
        print("ready", flush=True)
        libc.pthread_mutex_lock(lock)
"""

# A step that takes long after the request.
SLOW = LOOP.replace("    sys.exit", "        time.sleep(1.5)\n    sys.exit")


@contextmanager
def started(body: str) -> Iterator[subprocess.Popen]:
    imports = (
        "import ctypes, os, sys, time\nfrom pipeline.training.signals import StoppedEarly, StopRequest\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", imports + textwrap.dedent(body)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_for_a_stop_and_says_so_once(number):
    with started(LOOP) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (3, f"{number.name}\n")
    assert err.count(f"{number.name}: stopping after this step.") == 1
    assert ("Ctrl-C again" in err) == (number == signal.SIGINT)


def test_other_ranks_stop_silently():
    with started(LOOP.replace("announce=True", "")) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (3, "SIGTERM\n", "")


@pytest.mark.slow
def test_the_launchers_sigterm_after_ctrl_c_changes_nothing():
    with started(SLOW) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "SIGINT\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 3
    assert err.count("stopping") == 1


@pytest.mark.slow
def test_one_ctrl_c_that_arrives_twice_is_one():
    with started(SLOW) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "SIGINT\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert process.returncode == 3


@pytest.mark.parametrize("body", [SLOW, STUCK])
def test_a_second_ctrl_c_ends_the_process_even_inside_c_code(body):
    with started(body) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(SAME_KEYPRESS_SECONDS + 0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert process.returncode == 1


def test_a_forked_child_ends_at_sigterm_and_ignores_ctrl_c():
    body = """
        with StopRequest(announce=True) as stop:
            child = os.fork()
            if child == 0:
                time.sleep(5)  # not for ever, in case it does not end as it should
                os._exit(0)
            time.sleep(0.1)
            print("ready", flush=True)
            os.kill(child, 2)
            time.sleep(0.2)
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            os.kill(child, 15)
            _, status = os.waitpid(child, 0)
            assert not stop.number
        sys.exit(os.WTERMSIG(status))
    """
    with started(body) as process:
        _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (15, "")


def test_handlers_and_wakeup_descriptor_are_put_back():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    outer = signal.set_wakeup_fd(writer.fileno())
    threads = threading.active_count()
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.number
            assert stop.number.name == "SIGUSR1"
        assert [signal.getsignal(number) for number in numbers] == before
        assert signal.set_wakeup_fd(outer) == writer.fileno()
        assert threading.active_count() == threads
    finally:
        reader.close()
        writer.close()


# Where ranks meet; `met` is what it takes them.
MEETING = """
    with StopRequest(early=True) as stop:
        try:
            with stop.meeting():
                print("ready", flush=True)
                {met}
            print(stop.number.name, flush=True)
        except StoppedEarly as request:
            print("early", request, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("met", "said"),
    [
        ("time.sleep(0.5)", "SIGTERM"),  # kept for what the ranks agree on
        ("time.sleep(0.5); raise RuntimeError('peer')", "early SIGTERM"),  # others have left
    ],
)
def test_a_signal_while_ranks_meet_is_for_all_of_them(met: str, said: str):
    """Others may have met already: this rank must not be missing in what they do next."""
    with started(MEETING.format(met=met)) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (3, f"{said}\n"), err


def test_nothing_is_requested_at_first():
    with StopRequest() as stop:
        assert not stop.number
        assert stop.number is None


def test_only_the_main_thread_can_install_it():
    errors = []

    def enter() -> None:
        try:
            with StopRequest():
                pass
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "main thread" in errors[0]
