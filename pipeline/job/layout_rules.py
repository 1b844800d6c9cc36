"""Checks of the world, the parallel sizes and the model. Listed in `pipeline.job.rules`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

from pipeline.base.problems import Problem
from pipeline.base.words import counted, listed, size
from pipeline.data.tokenizer_folder import BYTES
from pipeline.job.deepspeed_dict import training_of
from pipeline.job.facts import Facts
from pipeline.job.world import GB, LARGEST_MEMORY
from pipeline.model.memory import RankMemory, Training, rank_memory


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
        "feed-forward size": f.model.ffn_hidden_size,
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
    of_tensor = axis == "tensor"
    sizes, beside = range(1, f.model.num_heads + 1), f.sequence if of_tensor else f.tensor
    for other in dict.fromkeys((beside, 1)):
        if legal := [size for size in sizes if _fits(f, *((size, other) if of_tensor else (other, size)))]:
            key = "sequence_parallel_size" if of_tensor else "tensor_parallel.autotp_size"
            return f"Use {listed(legal)}" + (f", with {key} 1" if other != beside else "")
    return "Use 1 for it and for the other parallel sizes"


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


# More than this is rare among GPUs that nobody has asked: A100 and H100 have it.
USUAL_MEMORY = 80 * GB


def memory(f: Facts) -> Iterable[Problem]:
    held = rank_memory(f.model, f.training)
    if f.world.device == "cuda":
        yield from _device_memory(f, held)
    yield from _host_memory(f, held)


def _device_memory(f: Facts, held: RankMemory) -> Iterable[Problem]:
    """An error where state alone exceeds the GPU, or the largest there is; a warning where more may."""
    own = f.world.known_memory
    device, limit = (f.world.device_name or "the GPU", own) if own else ("the largest GPU", LARGEST_MEMORY)
    state = f"weights, gradients and optimizer state of a rank take {size(held.state)}"
    key = "zero_optimization.stage"
    if held.state > limit:
        rule = f"{state}, and {device} has {size(limit)}"
        yield f.settings.problem(key, rule, _least_change(f, limit), f.zero_stage)
    elif not own and held.state > USUAL_MEMORY:
        rule = f"{state}: more than the {size(USUAL_MEMORY)} of an A100 or H100, and no GPU was asked"
        remedy = f"Check with --hosts or --device. Else: {_least_change(f, USUAL_MEMORY)}"
        yield f.settings.problem(key, rule, remedy, f.zero_stage, "warning")
    elif own and held.total > own:
        rule = f"{state}, with activations and buffers {size(held.total)}, and {device} has {size(own)}"
        remedy = f"If it runs out of memory: {_least_change(f, own, with_activations=True)}"
        key = "train_micro_batch_size_per_gpu"
        yield f.settings.problem(key, rule, remedy, f.training.micro_batch, "warning")


def _host_memory(f: Facts, held: RankMemory) -> Iterable[Problem]:
    ranks, has = f.world.size, f.world.host_memory
    on_cpu = f.world.device == "cpu"
    needed = ranks * (held.host + (held.total if on_cpu else 0))
    if has is not None and needed > has:
        what = "" if on_cpu else "offloaded state of "
        take = "takes" if what or ranks == 1 else "take"
        who = f"{what}{counted(ranks, 'rank')} {take}"
        rule = f"{who} {size(needed)} of this host's memory, which has {size(has)}"
        remedy = "Use a smaller model or more hosts, or offload less"
        if on_cpu:
            less = _least_change(f, has // ranks, with_activations=True)
            remedy = f"{less}; pipeline.check with --device checks for GPUs"
        yield Problem("model", f.model.name, rule, remedy, "warning")


# Of what the formulas say: as much less is tried where nobody knows how much was missing.
_USUALLY_MISSING = 10


def less_memory(f: Facts, missing: int | None, on_host: bool) -> str:
    """What to change after a rank has run out of memory, in one line: the least that, by the formulas, saves
    the bytes that were missing.

    Args:
        missing: Bytes; None: not known.
        on_host: In host memory, which is all there is on a CPU.
    """
    held = rank_memory(f.model, f.training)
    if on_host and f.world.device == "cuda":
        less = "offload less" if held.host else "leave --async_save out" if f.options.async_save else ""
        own = f"offloaded state of a rank takes {size(held.host)} of it: " if held.host else ""
        remedy = f"{own}use more hosts, or fewer ranks on each{f', or {less}' if less else ''}"
        return f"{remedy[0].upper()}{remedy[1:]}"
    needs = f"A rank needs {size(held.total)} by the formulas"
    if missing is not None and missing >= held.total:
        return f"{needs}: free what else is in use there, raise a limit, or use a smaller model"
    share = (f.world.host_memory or 0) // f.world.size if on_host else f.world.known_memory
    most = min(held.total, share or held.total)
    least = most - max(missing or 0, held.total // _USUALLY_MISSING)
    return f"{needs}. {_least_change(f, least, with_activations=True)}"


# Tokens of a sample: below this a model learns little.
_SHORTEST = 128
# What to do, and what a rank then holds.
_Change = tuple[str, Training]


def _least_change(f: Facts, limit: int, with_activations: bool = False) -> str:
    """The first of some changes with which a rank's state fits, each larger than the one before; with all
    that a step needs besides, where asked."""
    changes = itertools.chain([("", f.training)], _of_state(f), _of_ranks(f))
    if with_activations:
        changes = (less for words, training in changes for less in _of_activations(words, training))
        changes = itertools.chain(changes, _of_length(f.training))
    for words, training in changes:
        held = rank_memory(f.model, training)
        needed = held.total if with_activations else held.state
        if words and needed <= limit:
            host = f", {size(held.host)} of host memory for each rank" if held.host else ""
            return f"{words}: {size(needed)}{host}"
    return "Use a smaller model"


def _of_state(f: Facts) -> Iterator[_Change]:
    """Changes of the JSON that need less memory for weights, gradients and optimizer, the smallest first."""
    highest = 3 if f.stages == 1 else 1
    stage = "zero_optimization.stage"
    for number in range(f.zero_stage + 1, highest + 1):
        yield f"Set {stage} to {number}", _with(f, {stage: number})
    half = "bf16" if f.world.bf16_native else "fp16"
    on_cpu = f.world.device == "cpu"  # DeepSpeed has no fp16 there, and host memory is all there is
    format_keys = {f"{half}.enabled": True} if f.compute == "fp32" and not (on_cpu and half == "fp16") else {}
    if format_keys:
        for number in range(max(f.zero_stage, 1), highest + 1):
            words = f"Turn {half} on and set {stage} to {number}"
            yield words, _with(f, {**format_keys, stage: number})
    if highest == 3 and not on_cpu:
        words = f"Set {stage} to 3 and, in it, offload_optimizer.device to cpu"
        keys = {stage: 3, "zero_optimization.offload_optimizer.device": "cpu"}
        yield words, _with(f, keys)
        keys["zero_optimization.offload_param.device"] = "cpu"
        yield f"{words} and offload_param.device to cpu", _with(f, keys)


def _with(f: Facts, keys: dict[str, Any]) -> Training:
    """The training with other values of some keys, and the same ranks and batch."""
    now = f.training
    return training_of(f.with_keys(keys), f.batch, now.mesh, now.boundaries, now.moments)


def _of_activations(words: str, training: Training) -> Iterator[_Change]:
    """The change, and the change with less that is kept of a step, the smallest first."""
    now = training.micro_batch
    smaller = [("", training)]
    for micro in (each for each in range(now - 1, 0, -1) if now % each == 0):
        steps = training.micro_batches * (now // micro)
        batch = f"train_micro_batch_size_per_gpu to {micro} and gradient_accumulation_steps to {steps}"
        smaller.append((f"set {batch}", replace(training, micro_batch=micro, micro_batches=steps)))
    recomputed = [] if training.recompute == "full" else ["set activation_checkpointing.mode to full"]
    for mode in ["", *recomputed]:
        for batch, each in smaller:
            text = "; ".join(part for part in (words, mode, batch) if part)
            yield text[:1].upper() + text[1:], replace(each, recompute="full") if mode else each


def _of_length(training: Training) -> Iterator[_Change]:
    """Half the tokens of a sample each time, with as little as can be kept of a step."""
    *_, (words, least) = _of_activations("", training)
    length = training.sequence_length // 2
    while length >= _SHORTEST:
        text = f"{words}; give --seq_length {length}" if words else f"Give --seq_length {length}"
        yield text, replace(least, sequence_length=length)
        length //= 2


def _of_ranks(f: Facts) -> Iterator[_Change]:
    """More ranks: in twice as many replicas each time, then in larger tensor groups as well. CPU ranks would
    share the memory that there is."""
    if f.world.device == "cpu":
        return
    stage = 3 if f.stages == 1 else 1
    most = f.world.hosts[0].slots
    for tensor in (f.tensor * 2**power for power in range(4)):
        if tensor > f.tensor and (tensor > most or any(size % tensor for size in _sliced(f).values())):
            continue
        keys = {"zero_optimization.stage": stage, "tensor_parallel.autotp_size": tensor}
        larger = _with(f, keys)
        mesh = replace(larger.mesh, tensor=tensor)
        while mesh.world_size <= 2**16:
            if mesh.world_size > f.world.size:
                also = f", tensor_parallel.autotp_size {tensor}" if tensor > f.tensor else ""
                yield f"Use {mesh.world_size} ranks with ZeRO stage {stage}{also}", replace(larger, mesh=mesh)
            mesh = replace(mesh, data=2 * mesh.data)
