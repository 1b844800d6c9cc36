"""What all tests share: GPU tests need a GPU, long repeats run on request, and the fork server of the
distributed tests ends with them."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Iterator

import pytest

from tests import harness, workers
from tests.hosts.fixtures import hosts, make_hosts

# Fixtures for all tests.
__all__ = ["hosts", "make_hosts"]

LONGEST_CALLS_SHOWN = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeats", action="store_true", help="also run the tests marked repeats")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores it, and so would everything that tests start and then interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # nohup ignores it. A handler keeps the tests going, too, and is not inherited by what they start.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(workers.Worker(config), "tests-worker")
    elif config.getoption("dist", "no") != "no":
        config.pluginmanager.register(workers.Controller(), "tests-controller")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means."""
    return workers.num_workers()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _cuda_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
    if not config.getoption("repeats"):
        left_out = [item for item in items if item.get_closest_marker("repeats")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup() -> None:
    """References are computed in this process, beside the ranks and the other test processes: one core."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show where the time on ranks went."""
    controller = config.pluginmanager.get_plugin("tests-controller")
    calls = controller.calls if controller else harness.statistics()
    calls = sorted(calls, key=lambda call: call.seconds, reverse=True)
    if calls:
        seconds = sum(call.seconds for call in calls)
        terminalreporter.write_line(f"{len(calls)} calls on ranks took {seconds:.1f} s; the longest:")
    for call in calls[:LONGEST_CALLS_SHOWN]:
        terminalreporter.write_line(f"  {call.seconds:6.2f} s  {call.world_size:2d} ranks  {call.name}")
