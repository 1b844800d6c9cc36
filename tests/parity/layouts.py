"""The matrix."""

from __future__ import annotations

from tests.parity.cases import Case

CPU = {"device": "cpu", "pin_memory": False}
OFFLOAD = (("offload_optimizer", CPU),)
CLIP = {"clip": 0.05, "learning_rate": 10.0}
ALL_CLIP = CLIP

FAST = (
    Case(),
    Case(accumulation=4, **CLIP),
    Case(data=2),
    Case(tensor=2),
    Case(sequence=2),
    Case(pipeline=2, accumulation=4),
    Case(data=2, zero=1, accumulation=4, **CLIP),
    Case(data=2, zero=2, accumulation=2),
    Case(data=2, zero=3),
    Case(tensor=2, zero=3, model="qk norm", **CLIP),
    Case(sequence=2, zero=1, model="llama"),
    Case(pipeline=2, zero=1, accumulation=2, model="untied", **CLIP),
    Case(pipeline=2, accumulation=4, schedule="dualpipev", **CLIP),
    Case(sequence=2, tensor=2, zero=1, model="qk norm", recompute="selective", **CLIP),
    Case(pipeline=2, tensor=2, zero=1, accumulation=2, **CLIP),
)
