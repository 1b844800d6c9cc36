"""CPU ranks of one host share its cores: threads that wait for a core make a step fifty times slower."""

from __future__ import annotations

import pytest
import torch

from pipeline.engine import distributed


@pytest.mark.parametrize(("ranks", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (16, 1)])
def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(distributed, "available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    distributed.share_cores(ranks)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    distributed.share_cores(ranks)
    assert set_to == [threads]
