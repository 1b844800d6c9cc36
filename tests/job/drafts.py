"""Short ways to describe a job to the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.base.problems import Problem
from pipeline.job.options import Options
from pipeline.job.resolve import Draft, examine
from pipeline.job.world import Host, World

CPU, A100, V100 = ("cpu", None, False), ("cuda", "NVIDIA A100-SXM4-80GB", True), ("cuda", "Tesla V100", False)


def world(*slots: int, device: tuple[str, str | None, bool] = CPU) -> World:
    """Hosts node0, node1 ... with that many ranks each."""
    kind, name, bf16 = device
    hosts = tuple(Host(f"node{index}", count) for index, count in enumerate(slots))
    return World(hosts, kind, name, bf16)  # type: ignore[arg-type]


def draft(folder: Path, config: dict[str, Any] | str, ranks: World | None = None, **options: Any) -> Draft:
    """The draft of a tiny job with that DeepSpeed JSON (a dict, or text), two CPU ranks by default."""
    path = folder / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    options = {"model": "tiny", "output_dir": str(folder / "run"), **options}
    return examine(Options(deepspeed_config=str(path), **options), ranks or world(2))


def found(problems: list[Problem], key: str) -> list[Problem]:
    """The problems of one key, whose file and line are left out of the comparison."""
    return [problem for problem in problems if problem.key.split(" (")[0] == key]
