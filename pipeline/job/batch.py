"""Batch sizes from what is given: any two of three, one of them, or none.

train_batch_size = micro-batch * accumulation steps * data parallel size. Sequence, tensor and pipeline
peers work on the same sequences and do not multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.base.fields import AUTO
from pipeline.base.problems import job_error
from pipeline.job.job import Batch, Resolved

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"

# A micro-batch left open holds at most this many activations of one layer per rank, tokens * hidden size:
# 16 sequences of 1,024 tokens at width 1,024, 32 MiB in bf16.
MICRO_BATCH_ACTIVATIONS = 2**24


@dataclass(frozen=True)
class BatchRequest:
    """What is known before the sizes are.

    Attributes:
        train, micro, steps: Sizes as given; None where open.
        train_auto: train_batch_size is "auto", not just absent: the model's usual batch is wanted even
            though a micro-batch is given.
        data: Data parallel size.
        usual: The model's usual train batch; None if it has none.
        tokens: Tokens of one sequence that one rank holds (sequence length / sequence parallel size).
        sequence_length, hidden_size: Of the model and run.
        least_steps: Micro-batches that the pipeline schedule needs.
        wanted_steps: Micro-batches that keep the pipeline busy, if the batch has as many sequences.
    """

    train: int | None
    micro: int | None
    steps: int | None
    train_auto: bool
    data: int
    usual: int | None
    tokens: int
    sequence_length: int
    hidden_size: int
    least_steps: int = 1
    wanted_steps: int = 1


def resolve_batch(
    request: BatchRequest, where: Callable[[str], str] = str
) -> tuple[Batch, tuple[Resolved, ...]]:
    """The three sizes, and which of them were decided here.

    Args:
        where: Dotted key -> what problems call it (file and line).

    Raises:
        JobError: they do not multiply; the arithmetic is shown.
    """
    train, notes = _train(request, where)
    if request.micro is not None:
        micro = request.micro
        steps = request.steps or _quotient(train, micro, request.data, MICRO, where)
    elif request.steps is not None:
        steps = request.steps
        micro = _quotient(train, steps, request.data, STEPS, where)
    else:
        micro = _open_micro(request, _quotient(train, 1, request.data, None, where))
        steps = train // (micro * request.data)
    product = micro * steps * request.data
    if train != product:
        rule = f"must be {MICRO} {micro} * {STEPS} {steps} * {request.data} data ranks = {product}"
        raise job_error(where(TRAIN), train, rule, f"Use {product}, or leave one of the three out")
    return Batch(train, micro, steps, request.sequence_length), notes + _notes(request, micro, steps)


def _train(request: BatchRequest, where: Callable[[str], str]) -> tuple[int, tuple[Resolved, ...]]:
    """The train batch, where it is given or follows from the others or from the model."""
    micro, steps, data = request.micro, request.steps, request.data
    if request.train is not None:
        return request.train, ()
    if micro is not None and (steps is not None or not request.train_auto):
        steps = steps or 1
        train = micro * steps * data
        return train, (Resolved(TRAIN, train, f"{micro} * {steps} * {data} data ranks"),)
    if request.usual is None:
        rule = "a model read from a file has no usual batch"
        raise job_error(where(TRAIN), AUTO, rule, f"Give {TRAIN} or {MICRO}")
    unit = (micro or 1) * (steps or request.least_steps) * data
    train = -(-request.usual // unit) * unit
    reason = f"the model's usual {request.usual}"
    if train != request.usual:
        reason += f", rounded up to a multiple of {unit}"
    return train, (Resolved(TRAIN, train, reason),)


def _quotient(train: int, factor: int, data: int, factor_key: str | None, where: Callable[[str], str]) -> int:
    """train / (factor * data).

    Raises:
        JobError: it is not a whole number.
    """
    quotient, rest = divmod(train, factor * data)
    if rest == 0 and quotient > 0:
        return quotient
    named = f"{factor} ({factor_key}) * " if factor_key else ""
    unit = factor * data
    rule = f"must be a multiple of {named}{data} (data ranks) = {unit}, and {train} / {unit} leaves {rest}"
    near = max(train // unit, 1) * unit
    raise job_error(where(TRAIN), train, rule, f"Use {near} or {near + unit}, or change the layout")


def _open_micro(request: BatchRequest, replica: int) -> int:
    """The largest micro-batch that divides a replica's sequences, leaves enough micro-batches for the
    pipeline, and fits the activation bound."""
    bound = max(1, MICRO_BATCH_ACTIVATIONS // (request.tokens * request.hidden_size))
    bound = min(bound, max(1, replica // request.wanted_steps))
    return max(size for size in range(1, min(bound, replica) + 1) if replica % size == 0)


def _notes(request: BatchRequest, micro: int, steps: int) -> tuple[Resolved, ...]:
    notes = []
    if request.micro is None:
        bound = f"at most {MICRO_BATCH_ACTIVATIONS:,} tokens * hidden size per rank"
        if request.wanted_steps > 1:
            bound += f" and {request.wanted_steps} micro-batches for the pipeline"
        open_both = request.steps is None
        notes.append(Resolved(MICRO, micro, f"largest divisor, {bound}" if open_both else "what is left"))
    if request.steps is None:
        notes.append(Resolved(STEPS, steps, "what is left"))
    return tuple(notes)
