"""Tests on several processes at once (pytest-xdist): who runs what, and what must not run beside anything.

    controller ─┬─ worker gw0 ── its own fork server, ports, hosts, tmp_path
                └─ worker gw1 ── ...

A file's tests stay together, so that fixtures and caches of a module are made once; long files come first, so
that no worker is left with one at the end. Tests marked `alone` measure time: they come last, and each waits
until no other test runs.

Ports are given by the kernel and held while they are in use, hosts live in namespaces of their own, and every
test writes below its own `tmp_path`: nothing else has to be shared out.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.harness.client import Call

MAX_WORKERS = 4
ALONE = "alone"
_PLAN_FILE = "plan.json"
# Guesses in seconds, by mark, to put the long files first. A test that raises its own time limit is long.
_SECONDS = {"timeout": 25.0, "multihost": 10.0, "slow": 2.0}
_SECONDS_OTHERWISE = 0.05


def num_workers() -> int:
    """One more than there are cores, since many tests wait, and not so many that ranks exhaust the memory."""
    return min(len(os.sched_getaffinity(0)) + 1, MAX_WORKERS)


class Controller:
    """A plugin of the process that hands out the tests."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._folder = tempfile.TemporaryDirectory(prefix="test-workers-")

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker the folder that all share."""
        node.workerinput["folder"] = self._folder.name

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """The scheduler that follows the workers' plan."""
        return _scheduler(config, log, Path(self._folder.name, _PLAN_FILE))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker counted."""
        self.calls += [Call(*values) for values in getattr(node, "workeroutput", {}).get("calls", ())]

    def pytest_unconfigure(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


def _scheduler(config: pytest.Config, log: Any, plan: Path) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Planned(LoadScopeScheduling):
        """Hands out units in the order of the collection."""

        units: dict[str, str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            if self.units is None:
                self.units = json.loads(plan.read_text(encoding="utf-8"))
            return self.units[nodeid]

    config.option.loadscopereorder = False
    return Planned(config, log)


class Worker:
    """A plugin of each process that runs tests.

    Args:
        config: The process's; `workerinput` is what the controller told it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = Path(config.workerinput["folder"])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order the tests, and say which stay together. All workers say the same."""
        seconds: Counter[str] = Counter()
        for item in items:
            seconds[_file(item)] += _guess(item)
        items.sort(key=lambda item: (_is_alone(item), -seconds[_file(item)]))
        plan = {item.nodeid: ALONE if _is_alone(item) else _file(item) for item in items}
        partial = self._folder / self._config.workerinput["workerid"]
        partial.write_text(json.dumps(plan), encoding="utf-8")
        partial.replace(self._folder / _PLAN_FILE)

    # Outermost: the wait is no part of the test's own time limit.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test beside those of other workers, or beside none."""
        with _turn(self._folder, alone=_is_alone(item)):
            return (yield)

    def pytest_sessionfinish(self) -> None:
        """Report this worker's calls on ranks."""
        calls = [(call.name, call.world_size, call.seconds) for call in harness.statistics()]
        self._config.workeroutput["calls"] = calls


@contextmanager
def _turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the lock of all running tests, for oneself or with others.

    The queue before it lets nobody overtake one who waits to be alone.
    """
    with (folder / "queue").open("a") as queue, (folder / "running").open("a") as running:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker(ALONE) is not None


def _guess(item: pytest.Item) -> float:
    found = [seconds for mark, seconds in _SECONDS.items() if item.get_closest_marker(mark)]
    return max(found, default=_SECONDS_OTHERWISE)
