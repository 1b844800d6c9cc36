"""Hosts for a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.hosts.hosts import Hosts
from tests.hosts.requirements import why_no_hosts


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """`Hosts`, ended with the test. Skips it, with the reason, where there can be none."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:

        def make(*args: object, **kwargs: object) -> Hosts:
            return stack.enter_context(Hosts(*args, **kwargs))

        yield make


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """h0, h1 and h2 with one file system, shared by a module's tests: leave them as they were."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    with Hosts(2) as started:
        yield started
