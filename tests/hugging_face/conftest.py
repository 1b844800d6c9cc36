"""What the commands set for their whole process is put back after each test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from transformers.utils import logging as transformers_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    yield
    logging.disable(logging.NOTSET)
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()
