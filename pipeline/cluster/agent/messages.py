"""What agents and coordinator say to each other, kind by kind: fields and their types. No torch.

A peer that says anything else is parted with; what it says would otherwise end the process that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from pipeline.cluster.agent.connection import Message
from pipeline.cluster.agent.rank_table import Phase
from pipeline.cluster.outcome import Kind, Status

_NONE = type(None)
_TEXT, _NUMBER, _SECONDS = (str,), (int,), (int, float)
Fields = Mapping[str, tuple[type, ...]]

# By "is", from an agent.
REPORTS: dict[str, Fields] = {
    "beat": {},
    "progress": {"phase": _TEXT, "step": _NUMBER},
    "saved": {"step": _NUMBER},
    "folder": {"path": _TEXT},
    "ending": {"status": _TEXT, "step": _NUMBER, "message": _TEXT},
    "failure": {"kind": _TEXT, "step": _NUMBER, "message": _TEXT},
    "signal": {"signal": _TEXT},
    "log": {"text": _TEXT},
    "trouble": {"text": _TEXT},
    "missing": {"ranks": (list,)},
    "stacks": {"text": _TEXT},
    "ended": {"code": (int, _NONE), "by_agent": (bool,), "tail": _TEXT},
}
# By "do", from the coordinator.
ORDERS: dict[str, Fields] = {
    "accept": {"proof": _TEXT},
    "refuse": {"reason": _TEXT, "wrong_job": (bool,)},
    "beat": {},
    "start": {
        "address": _TEXT, "port": _NUMBER, "environment": (dict,), "arguments": (list,), "logs": (str, _NONE),
        "mark": _TEXT,
    },
    "together": {},
    "stop": {"signal": _TEXT},
    "stacks": {},
    "end": {"grace": _SECONDS},
    "log": {"logs": _TEXT, "mark": _TEXT},
    "keep": {"rank": _NUMBER, "text": _TEXT},
    "release": {"outcome": (dict,), "lost": (list,)},
}  # fmt: skip
_WORDS = {
    "phase": get_args(Phase),
    "status": get_args(Status),
    "kind": get_args(Kind),
    "signal": ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"),
}


def is_report(message: Message) -> bool:
    """Whether an agent may say this."""
    return _fits(message, REPORTS.get(str(message.get("is"))))


def is_order(message: Message) -> bool:
    """Whether the coordinator may say this."""
    return _fits(message, ORDERS.get(str(message.get("do"))))


def _fits(message: Message, fields: Fields | None) -> bool:
    if fields is None:
        return False
    return all(
        type(message.get(name)) in types and message[name] in _WORDS.get(name, (message[name],))
        for name, types in fields.items()
    ) and isinstance(message.get("text", ""), str)
