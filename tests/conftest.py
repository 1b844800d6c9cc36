"""What all tests share: GPU tests need a GPU, and the fork server of the distributed tests ends with them."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator

import pytest

from tests import harness
from tests.hosts.fixtures import hosts, make_hosts

# Fixtures for all tests.
__all__ = ["hosts", "make_hosts"]

LONGEST_CALLS_SHOWN = 5


def pytest_configure() -> None:
    # A shell's background job ignores it, and so would everything that tests start and then interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _cuda_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@functools.cache
def _cuda_available() -> bool:
    # Imported here: most test runs collect no GPU test, and half the tests need no torch at all.
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def _rank_server() -> Iterator[None]:
    """The fork server starts with the first call of `run_ranks` and ends with the session."""
    yield
    harness.stop_server()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show where the time on ranks went."""
    calls = sorted(harness.statistics(), key=lambda call: call.seconds, reverse=True)
    if calls:
        seconds = sum(call.seconds for call in calls)
        terminalreporter.write_line(f"{len(calls)} calls on ranks took {seconds:.1f} s; the longest:")
    for call in calls[:LONGEST_CALLS_SHOWN]:
        terminalreporter.write_line(f"  {call.seconds:6.2f} s  {call.world_size:2d} ranks  {call.name}")
