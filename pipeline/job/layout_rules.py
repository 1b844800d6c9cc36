"""Checks of the world, the parallel sizes and the model. Listed in `pipeline.job.rules`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from pipeline.base.problems import Problem
from pipeline.base.words import listed
from pipeline.data.tokenizer import BYTES
from pipeline.job.facts import Facts


def world(f: Facts) -> Iterable[Problem]:
    if f.world.size % f.model_parallel:
        sizes = f"{f.stages} (pipeline) * {f.sequence} (sequence) * {f.tensor} (tensor) = {f.model_parallel}"
        rule = f"must be a multiple of {sizes}; {f.world.size} / {f.model_parallel} is not whole"
        below = f.world.size // f.model_parallel * f.model_parallel
        ranks = f"{below} or {below + f.model_parallel}" if below else str(f.model_parallel)
        remedy = f"Use {ranks} ranks, or a smaller size of pipeline, sequence or tensor parallelism"
        yield Problem("world size", f.world.size, rule, remedy)


def tensor_in_host(f: Facts) -> Iterable[Problem]:
    ends = list(accumulate(host.slots for host in f.world.hosts))
    cut = [end for end in ends[:-1] if end % f.tensor]
    if cut:
        rule = f"a tensor group spans hosts (a host ends after rank {cut[0] - 1}), and talks in every layer"
        remedy = "Use a tensor size that divides the slots of each host"
        yield f.settings.problem("tensor_parallel.autotp_size", rule, remedy, f.tensor, severity="warning")


def _sliced(f: Facts) -> dict[str, int]:
    """What a tensor size must divide."""
    return {
        "attention heads": f.model.num_heads,
        "kv heads": f.model.num_kv_heads,
        "feed-forward width": f.model.ffn_hidden_size,
        "padded vocabulary": f.model.padded_vocab_size,
    }


def _fits(f: Facts, tensor: int, sequence: int) -> bool:
    """Whether these two sizes break no rule of this file."""
    if f.world.size % (f.stages * tensor * sequence) or f.sequence_length % sequence:
        return False
    if any(size % tensor for size in _sliced(f).values()):
        return False
    heads, kv_heads = f.model.num_heads // tensor, f.model.num_kv_heads // tensor
    return heads % sequence == 0 and (kv_heads % sequence == 0 or sequence % kv_heads == 0)


def _other_size(f: Facts, axis: str) -> str:
    """The sizes of one axis that go with all the other settings, as a remedy."""
    sizes = range(1, f.model.num_heads + 1)
    if axis == "tensor":
        legal = [size for size in sizes if _fits(f, size, f.sequence)]
    else:
        legal = [size for size in sizes if _fits(f, f.tensor, size)]
    return f"Use {listed(legal)}" if legal else "Use 1 for it and for the other parallel sizes"


def tensor_divides(f: Facts) -> Iterable[Problem]:
    wrong = [f"{name} {size}" for name, size in _sliced(f).items() if size % f.tensor]
    if wrong:
        rule = f"must divide {', '.join(wrong)} of {f.model.name}"
        yield f.settings.problem("tensor_parallel.autotp_size", rule, _other_size(f, "tensor"), f.tensor)


def sequence_divides(f: Facts) -> Iterable[Problem]:
    if f.sequence_length % f.sequence:
        rule = f"must divide the sequence length {f.sequence_length}"
        length = f.sequence_length // f.sequence * f.sequence or f.sequence
        remedy = f"{_other_size(f, 'sequence')}, or --seq_length {length}"
        yield f.settings.problem("sequence_parallel_size", rule, remedy, f.sequence)


def sequence_heads(f: Facts) -> Iterable[Problem]:
    heads = f.model.num_heads
    local = heads // f.tensor
    if heads % f.tensor == 0 and local % f.sequence:
        rule = f"must divide the {local} attention heads of a rank ({heads} / {f.tensor} tensor)"
        yield f.settings.problem("sequence_parallel_size", rule, _other_size(f, "sequence"), f.sequence)


def sequence_kv_heads(f: Facts) -> Iterable[Problem]:
    heads = f.model.num_kv_heads
    if heads % f.tensor:
        return
    local = heads // f.tensor
    if local % f.sequence and f.sequence % local:
        rule = (
            f"must divide, or be a multiple of, the {local} kv heads of a rank ({heads} / {f.tensor} tensor)"
        )
        yield f.settings.problem("sequence_parallel_size", rule, _other_size(f, "sequence"), f.sequence)


def positions(f: Facts) -> Iterable[Problem]:
    limit = f.model.max_position_embeddings
    if f.sequence_length > limit:
        rule = f"is longer than the {limit} positions of {f.model.name}"
        yield Problem("seq_length", f.sequence_length, rule, f"Use at most {limit}")


def vocabulary(f: Facts) -> Iterable[Problem]:
    if problems := f.failures.get("tokenizer"):
        yield from problems
        return
    needed, has = f.tokenizer.vocab_size, f.model.vocab_size
    if has < needed:
        rule = f"{f.model.name} has {has} token ids, and the {_called(f.tokenizer.name)} needs {needed}"
        remedy = f"Give --model a config.json whose vocab_size is at least {needed}"
        yield Problem("model", f.model.name, rule, remedy)


def _called(tokenizer: str) -> str:
    return "byte tokenizer" if tokenizer == BYTES else f"tokenizer {tokenizer}"


def dualpipev(f: Facts) -> Iterable[Problem]:
    if f.schedule == "dualpipev" and f.stages < 2:
        yield f.settings.problem(
            "pipeline.schedule", "needs at least 2 pipeline stages", "Set pipeline.stages"
        )


def partition_without_stages(f: Facts) -> Iterable[Problem]:
    if (
        f.settings.given("pipeline.partition")
        and f.stages == 1
        and isinstance(f.config.pipeline.partition, str)
    ):
        remedy = "Remove it, or set pipeline.stages"
        yield f.settings.problem("pipeline.partition", "acts with at least 2 pipeline stages", remedy)


def micro_batches(f: Facts) -> Iterable[Problem]:
    steps, least = f.batch.accumulation_steps, f.least_micro_batches
    if steps >= least:
        return
    dual = f.schedule == "dualpipev"
    rule = f"fewer micro-batches than the {f.stages} stages leave stages idle"
    if dual:
        rule = f"DualPipeV needs 2 * {f.stages} stages = {least}, and there are {steps}"
    key = "gradient_accumulation_steps"
    remedy = f"Use at least {least} micro-batches per step"
    yield f.settings.problem(key, rule, remedy, steps, "error" if dual else "warning")
