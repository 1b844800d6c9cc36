"""What benchmarks print and write: the machine, tables, JSON. No torch."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.cluster.devices import visible_gpus

LIBRARIES = ("torch", "deepspeed", "transformers", "accelerate")


def machine(device: str) -> dict[str, Any]:
    """What was measured on."""
    gpus = visible_gpus()[0] if device == "cuda" else ()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": gpus[0].name if gpus else "cpu",
        "gpus": len(gpus),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round: what slows a whole round down cancels."""
    return median(a / b for a, b in zip(numerator, denominator, strict=True))


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, relative to the median; 0 for fewer than 4 values."""
    ordered, count = sorted(values), len(values)
    if count < 4:
        return 0.0
    return (ordered[(3 * count) // 4] - ordered[count // 4]) / 2 / median(ordered)


class Report:
    """Lines and tables for people, one JSON file for programs.

    Args:
        title: First line.
        device: Of the ranks.
        settings: What is measured with, as plain JSON values.
    """

    def __init__(self, title: str, device: str, settings: dict[str, Any]) -> None:
        self.console = Console(highlight=False, soft_wrap=True, width=120)
        self.values: dict[str, Any] = {"benchmark": title, "machine": machine(device), "settings": settings}
        self.console.print(title)
        for name in ("machine", "settings"):
            parts = (f"{key} {value}" for key, value in self.values[name].items())
            self.console.print(f"{name}: {', '.join(parts)}")

    def say(self, line: str) -> None:
        self.console.print(line)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table; all columns but the first are aligned to the right."""
        table = Table(box=None)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        self.console.print(table)

    def write(self, path: str | None, **values: Any) -> None:
        """Write everything known and `values` to `path`, if there is one."""
        self.values.update(values)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(self.values, indent=2) + "\n", encoding="utf-8")
