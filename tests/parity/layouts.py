"""The matrix. What runs with every change is in `FAST`, what takes longer in `SLOW`.

Of `SLOW` those always run that together show each setting, and any two that may meet in an error and occur
together (`test_layouts.what_settings_meet`); the rest are repeats.
"""

from __future__ import annotations

from dataclasses import replace

from tests.parity.cases import Case

CPU = {"device": "cpu", "pin_memory": False}
OPTIMIZER_ON_CPU = {"offload_optimizer": CPU}
ALL_ON_CPU = {"offload_optimizer": CPU, "offload_param": CPU}
# The norms are between 1 and 3, so that every step is clipped. The rate makes up for it.
CLIP = {"clip": 0.05, "learning_rate": 10.0}

FP16 = {"precision": "fp16", "accumulate": "fp16"}

# Pipeline, data, sequence and tensor parallelism in one job.
FOUR_AXES = Case(
    pipeline=2, data=2, sequence=2, tensor=2, zero=1, accumulation=4, model="five layers", **CLIP
)
FAST = (
    Case(),
    Case(accumulation=4, **CLIP),
    # one axis at a time
    Case(data=2),
    Case(tensor=2),
    Case(sequence=2),
    Case(pipeline=2, accumulation=4),
    # ZeRO
    Case(data=2, zero=1, accumulation=4, **CLIP),
    Case(data=2, zero=2, accumulation=2),
    Case(data=2, zero=3),
    Case(tensor=2, zero=3, model="qk norm", **CLIP),
    Case(sequence=2, zero=1, model="llama"),
    # two axes and more
    Case(pipeline=2, zero=1, accumulation=2, model="untied", **CLIP),
    Case(pipeline=2, accumulation=4, schedule="dualpipev", **CLIP),
    Case(sequence=2, tensor=2, zero=1, model="qk norm", recompute="selective", **CLIP),
    Case(pipeline=2, tensor=2, zero=1, accumulation=2, **CLIP),
    Case(data=2, zero=2, model="dropout", accumulation=2),
    # fp16
    Case(tensor=2, **FP16),
    Case(pipeline=2, accumulation=2, **FP16, **CLIP),
)

_AXES = (
    Case(model="llama", recompute="full"),
    Case(model="no bias"),
    Case(accumulation=4, clip=0.002, learning_rate=250.0),
    Case(optimizer="momentum", accumulation=2),
    Case(data=2, accumulation=4, **CLIP),
    Case(data=3, batch=12, accumulation=2),
    Case(data=4, model="untied", accumulation=2),
    Case(tensor=2, model="untied", **CLIP),
    Case(tensor=2, model="llama", accumulation=4),
    Case(tensor=2, model="five layers", **CLIP),
    Case(tensor=4, model="five layers", **CLIP),
    Case(tensor=4, model="llama, 4 kv heads"),
    Case(sequence=2, model="qwen", accumulation=4, **CLIP),
    Case(sequence=4, model="llama", **CLIP),  # two copies of each kv head
    Case(sequence=8, model="llama"),  # four copies
    Case(sequence=4, model="gpt"),
    Case(pipeline=2, accumulation=1),
    Case(pipeline=2, accumulation=4, model="llama", **CLIP),
    Case(pipeline=3, accumulation=4, model="five layers", **CLIP),
    Case(pipeline=4, accumulation=8, model="seven layers"),
    Case(pipeline=4, accumulation=8, model="qwen", **CLIP),
    Case(pipeline=2, accumulation=2, partition="uniform", model="five layers"),
    Case(pipeline=2, accumulation=2, partition=(2, 5), **CLIP),
    # a first stage of one matrix, no norm and no bias
    Case(pipeline=2, zero=1, accumulation=2, partition=(2, 5), model="llama", **CLIP),
    Case(pipeline=3, accumulation=3, batch=6, partition=(3, 1, 3), model="untied"),
)

_ZERO = (
    *(Case(zero=stage, accumulation=4, **CLIP) for stage in (1, 2, 3)),
    *(Case(data=2, zero=stage, accumulation=4, **CLIP) for stage in (2, 3)),
    *(Case(data=2, zero=stage, optimizer="momentum") for stage in (1, 2, 3)),
    *(Case(data=3, zero=stage, batch=6, model="untied", accumulation=2) for stage in (1, 2, 3)),
    *(Case(tensor=2, zero=stage, model="qk norm", **CLIP) for stage in (0, 1, 2)),
    *(Case(sequence=2, zero=stage, model="five layers", accumulation=4, **CLIP) for stage in (0, 1, 2, 3)),
    *(Case(data=2, tensor=2, zero=stage, model="llama", accumulation=2, **CLIP) for stage in (0, 1, 2, 3)),
    *(Case(data=2, sequence=2, zero=stage, model="qwen", **CLIP) for stage in (0, 1, 2, 3)),
    *(Case(sequence=2, tensor=2, zero=stage, model="llama", accumulation=4) for stage in (0, 2, 3)),
    Case(data=2, zero=3, zero_options={"stage3_param_persistence_threshold": 100_000}, **CLIP),
    *(Case(data=2, zero=stage, zero_options=OPTIMIZER_ON_CPU, **CLIP) for stage in (1, 2, 3)),
    Case(data=2, zero=2, zero_options=OPTIMIZER_ON_CPU, accumulation=4, **CLIP),
    Case(data=2, zero=3, zero_options=ALL_ON_CPU, accumulation=2, **CLIP),
    Case(sequence=2, tensor=2, zero=3, zero_options=ALL_ON_CPU, model="qwen", **CLIP),
    Case(tensor=2, zero=2, zero_options=OPTIMIZER_ON_CPU, **CLIP),
)

_MIXED = (
    Case(pipeline=2, data=2, accumulation=2, **CLIP),
    Case(pipeline=2, data=2, zero=1, accumulation=4, model="llama", **CLIP),
    Case(pipeline=2, sequence=2, accumulation=2, model="llama", **CLIP),
    Case(pipeline=2, sequence=2, zero=1, accumulation=4),
    Case(pipeline=2, tensor=2, accumulation=4, model="qk norm", **CLIP),
    Case(pipeline=3, tensor=2, zero=1, accumulation=4, model="five layers", **CLIP),
    Case(pipeline=2, data=3, batch=12, zero=1, accumulation=2, model="five layers"),
    Case(data=2, sequence=2, tensor=2, zero=3, model="qk norm", **CLIP),
    Case(pipeline=2, data=2, sequence=2, zero=1, accumulation=2, model="qwen", **CLIP),
    Case(pipeline=2, sequence=2, tensor=2, zero=1, accumulation=2, model="five layers", **CLIP),
)

_DUALPIPEV = (
    Case(pipeline=2, zero=1, accumulation=4, schedule="dualpipev", model="five layers", **CLIP),
    Case(pipeline=2, accumulation=8, schedule="dualpipev", model="llama"),
    Case(pipeline=2, data=2, zero=1, accumulation=4, schedule="dualpipev", model="qwen", **CLIP),
    Case(pipeline=3, accumulation=8, schedule="dualpipev", model="seven layers", **CLIP),
    Case(
        pipeline=2,
        sequence=2,
        tensor=2,
        zero=1,
        accumulation=4,
        schedule="dualpipev",
        model="five layers",
        **CLIP,
    ),
)

ADAM = {"optimizer": "AdamW", "learning_rate": 0.01, "weight_decay": 0.1}
_ADAM = (
    Case(accumulation=2, **ADAM),
    *(Case(data=2, zero=stage, **ADAM) for stage in (0, 1, 2, 3)),
    Case(tensor=2, **ADAM),
    Case(pipeline=2, accumulation=2, **ADAM),
    Case(pipeline=2, tensor=2, zero=1, accumulation=2, **ADAM),
    Case(data=2, zero=2, zero_options=OPTIMIZER_ON_CPU, **ADAM),
    Case(data=2, zero=3, zero_options=ALL_ON_CPU, **ADAM),
)

_BF16 = tuple(
    replace(case, precision="bf16")
    for case in (
        Case(zero=1, accumulation=4),
        Case(data=2, zero=1, model="llama", **CLIP),
        Case(data=2, zero=2, accumulation=2, **CLIP),
        Case(data=2, zero=3, model="qk norm", accumulation=2, **CLIP),
        Case(sequence=2, tensor=2, zero=1, recompute="full", **CLIP),
        Case(pipeline=2, zero=1, accumulation=4, **CLIP),
        Case(pipeline=2, tensor=2, zero=1, accumulation=2, model="llama", **CLIP),
        Case(pipeline=2, data=3, batch=6, zero=1, accumulation=2),
        Case(pipeline=2, zero=1, accumulation=4, schedule="dualpipev"),
        # a last stage with nothing but the tied weight
        Case(pipeline=2, zero=1, accumulation=2, partition=(6, 1), **CLIP),
        Case(data=2, zero=0, accumulate="bf16", **CLIP),
        Case(tensor=2, zero=0, accumulate="bf16", **CLIP),
        Case(pipeline=2, zero=0, accumulation=2, accumulate="bf16", **CLIP),
        Case(data=2, zero=2, zero_options=OPTIMIZER_ON_CPU),
    )
)

_FP16 = tuple(
    replace(case, **FP16)
    for case in (
        Case(accumulation=4, **CLIP),
        Case(scaling="fixed"),
        Case(scaling="too large"),
        Case(scaling="kept"),
        Case(data=2, **CLIP),
        Case(data=2, scaling="fixed", recompute="full"),
        Case(data=2, **ADAM),
        Case(tensor=2, model="qk norm", **CLIP),
        Case(sequence=2, model="llama", **CLIP),
        Case(pipeline=2, accumulation=2, scaling="too large"),
        Case(pipeline=2, accumulation=4, scaling="kept", schedule="dualpipev"),
        # a first stage of one matrix, no norm and no bias; a last one with nothing but the tied weight
        Case(pipeline=2, tensor=2, accumulation=2, partition=(2, 5), model="llama", **CLIP),
        Case(pipeline=2, accumulation=2, partition=(6, 1), scaling="too large", **CLIP),
        Case(pipeline=2, data=3, batch=12, accumulation=2, model="five layers"),
        replace(FOUR_AXES, zero=0),
        replace(FOUR_AXES, zero=0, schedule="dualpipev"),
        *(Case(data=2, zero=stage) for stage in (1, 2, 3)),
        Case(data=2, zero=1, scaling="fixed", accumulation=2, **CLIP),
        Case(sequence=2, tensor=2, zero=3, model="qk norm", **CLIP),
        Case(pipeline=2, tensor=2, zero=1, accumulation=2, **CLIP),
        Case(pipeline=2, zero=1, accumulation=4, schedule="dualpipev"),
    )
)

_RECOMPUTE = tuple(
    replace(case, recompute=recompute)
    for case in (
        Case(model="llama"),
        Case(pipeline=2, accumulation=4),
        Case(pipeline=2, accumulation=4, schedule="dualpipev"),
        Case(data=2, zero=3, model="qwen", **CLIP),
        Case(sequence=2, tensor=2, zero=2, model="qk norm", accumulation=2, **CLIP),
    )
    for recompute in ("full", "selective")
    if (case.model, case.data) != ("llama", 1) or recompute != "full"
)

_DROPOUT = tuple(
    replace(case, model="dropout")
    for case in (
        Case(accumulation=4),
        Case(recompute="full"),
        Case(recompute="selective", accumulation=2),
        Case(tensor=2, **CLIP),
        Case(sequence=2, recompute="full"),
        Case(data=2, zero=3, recompute="full", accumulation=2),
        Case(sequence=2, tensor=2, zero=2, recompute="selective"),
        Case(pipeline=2, accumulation=4, recompute="full", **CLIP),
        Case(pipeline=2, accumulation=4, schedule="dualpipev"),
        Case(pipeline=2, data=2, sequence=2, zero=1, accumulation=2, recompute="selective"),
    )
)

SLOW = (*_AXES, *_ZERO, *_MIXED, *_DUALPIPEV, *_ADAM, *_BF16, *_FP16, *_RECOMPUTE, *_DROPOUT)
