"""Every rule between two settings, as one table. Each is checked alone, so that all problems appear.

A rule reads what it needs from `Facts`; where that is unknown because it has a problem of its own, the
rule says nothing. docs/rules.md is made from this table by ``python -m pipeline.job.pages``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pipeline.data.tokenizer import ByteTokenizer
from pipeline.job.facts import Facts
from pipeline.job.problems import Problem
from pipeline.job.schema import KEYS
from pipeline.job.settings import Undecided
from pipeline.job.validate import AUTO

STAGE = "zero_optimization.stage"
ACCUMULATION = "data_types.grad_accum_dtype"


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: Short and stable, as the documentation lists it.
        sentence: What must hold.
        reason: Why.
        check: Its problems in a job; the remedy is in each.
    """

    name: str
    sentence: str
    reason: str
    check: Callable[[Facts], Iterable[Problem]]


def check_rules(facts: Facts) -> list[Problem]:
    """The problems of all rules, errors and warnings."""
    problems: list[Problem] = []
    for rule in RULES:
        try:
            problems += rule.check(facts)
        except Undecided:
            continue
    return problems


def _derived(part: str) -> Callable[[Facts], Iterable[Problem]]:
    """A rule that is checked where a part of the job is derived from its settings."""
    return lambda facts: facts.failures.get(part, ())


# World and layout


def _world(f: Facts) -> Iterable[Problem]:
    if f.world.size % f.model_parallel:
        sizes = f"{f.stages} (pipeline) * {f.sequence} (sequence) * {f.tensor} (tensor) = {f.model_parallel}"
        rule = f"must be a multiple of {sizes}; {f.world.size} / {f.model_parallel} is not whole"
        remedy = "Change pipeline.stages, sequence_parallel_size, tensor_parallel.autotp_size or the slots"
        yield Problem("world size", f.world.size, rule, remedy)


def _tensor_in_host(f: Facts) -> Iterable[Problem]:
    ends = list(accumulate(host.slots for host in f.world.hosts))
    cut = [end for end in ends[:-1] if end % f.tensor]
    if cut:
        rule = f"a tensor group spans hosts (a host ends after rank {cut[0] - 1}), and talks in every layer"
        remedy = "Use a tensor size that divides the slots of each host"
        yield f.config.problem("tensor_parallel.autotp_size", rule, remedy, f.tensor, warn=True)


def _tensor_divides(f: Facts) -> Iterable[Problem]:
    model = f.model
    sizes = {
        "attention heads": model.num_heads,
        "kv heads": model.num_kv_heads,
        "feed-forward width": model.ffn_hidden_size,
        "padded vocabulary": model.padded_vocab_size,
    }
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % f.tensor]
    if wrong:
        rule = f"must divide {', '.join(wrong)} of {model.name}"
        legal = [n for n in range(1, model.num_heads + 1) if all(size % n == 0 for size in sizes.values())]
        remedy = f"Use {_listed(legal)}"
        yield f.config.problem("tensor_parallel.autotp_size", rule, remedy, f.tensor)


def _sequence_divides(f: Facts) -> Iterable[Problem]:
    if f.sequence_length % f.sequence:
        rule = f"must divide the sequence length {f.sequence_length}"
        remedy = (
            f"Use another size, or --seq_length {f.sequence_length // f.sequence * f.sequence or f.sequence}"
        )
        yield f.config.problem("sequence_parallel_size", rule, remedy, f.sequence)


def _sequence_heads(f: Facts) -> Iterable[Problem]:
    heads = f.model.num_heads
    local = heads // f.tensor
    if heads % f.tensor == 0 and local % f.sequence:
        rule = f"must divide the {local} attention heads of a rank ({heads} / {f.tensor} tensor)"
        legal = [n for n in range(1, local + 1) if local % n == 0]
        yield f.config.problem("sequence_parallel_size", rule, f"Use {_listed(legal)}", f.sequence)


def _sequence_kv_heads(f: Facts) -> Iterable[Problem]:
    heads = f.model.num_kv_heads
    if heads % f.tensor:
        return
    local = heads // f.tensor
    if local % f.sequence and f.sequence % local:
        rule = (
            f"must divide, or be a multiple of, the {local} kv heads of a rank ({heads} / {f.tensor} tensor)"
        )
        legal = [n for n in range(1, 2 * local + 1) if local % n == 0 or n % local == 0]
        yield f.config.problem("sequence_parallel_size", rule, f"Use {_listed(legal)}", f.sequence)


def _positions(f: Facts) -> Iterable[Problem]:
    limit = f.model.max_position_embeddings
    if f.sequence_length > limit:
        rule = f"is longer than the {limit} positions of {f.model.name}"
        yield Problem("seq_length", f.sequence_length, rule, f"Use at most {limit}")


def _vocabulary(f: Facts) -> Iterable[Problem]:
    needed, has = ByteTokenizer.vocab_size, f.model.vocab_size
    if has < needed:
        rule = f"{f.model.name} has {has} token ids, and the byte tokenizer needs {needed}"
        yield Problem("model", f.model.name, rule, f"Use a vocabulary of at least {needed}")


def _dualpipev(f: Facts) -> Iterable[Problem]:
    if f.schedule == "dualpipev" and f.stages < 2:
        yield f.config.problem("pipeline.schedule", "needs at least 2 pipeline stages", "Set pipeline.stages")


def _partition_without_stages(f: Facts) -> Iterable[Problem]:
    if (
        f.config.given("pipeline.partition")
        and f.stages == 1
        and isinstance(f.config.get("pipeline.partition"), str)
    ):
        remedy = "Remove it, or set pipeline.stages"
        yield f.config.problem("pipeline.partition", "acts with at least 2 pipeline stages", remedy)


def _micro_batches(f: Facts) -> Iterable[Problem]:
    steps, least = f.batch.accumulation_steps, f.least_micro_batches
    if steps >= least:
        return
    dual = f.schedule == "dualpipev"
    rule = f"fewer micro-batches than the {f.stages} stages leave stages idle"
    if dual:
        rule = f"DualPipeV needs 2 * {f.stages} stages = {least}, and there are {steps}"
    key = "gradient_accumulation_steps"
    yield f.config.problem(key, rule, f"Use at least {least} micro-batches per step", steps, warn=not dual)


# ZeRO


def _zero_pipeline(f: Facts) -> Iterable[Problem]:
    if f.zero_stage >= 2 and f.stages > 1:
        rule = f"must be 0 or 1 with {f.stages} pipeline stages"
        yield f.config.problem(STAGE, rule, "Use stage 0 or 1, or one pipeline stage", f.zero_stage)


def _zero_keys(f: Facts) -> Iterable[Problem]:
    for key in KEYS.values():
        if key.zero_stages is None or not f.config.given(key.path) or f.zero_stage in key.zero_stages:
            continue
        if key.kind == "object":
            continue
        if key.path.endswith(".device") and f.config.get(key.path) == "none":
            continue
        rule = f"acts at ZeRO stage {_listed(key.zero_stages)}, and the stage is {f.zero_stage}"
        yield f.config.problem(key.path, rule, "Remove it, or change zero_optimization.stage")


def _nvme(f: Facts) -> Iterable[Problem]:
    for block in ("offload_optimizer", "offload_param"):
        path = f"zero_optimization.{block}"
        device = f.offload_device(block)
        if device == "nvme" and not f.config.given(f"{path}.nvme_path"):
            yield f.config.problem(f"{path}.device", "needs nvme_path beside it", f"Set {path}.nvme_path")
        if device == "nvme" and f.zero_stage in (1, 2):
            yield f.config.problem(f"{path}.device", "nvme needs ZeRO stage 3", "Use cpu, or stage 3")
        for name in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read",
                     "pipeline_write", "fast_init"):  # fmt: skip
            if device != "nvme" and f.config.given(f"{path}.{name}"):
                yield f.config.problem(f"{path}.{name}", f"acts with device nvme, not {device}", "Remove it")


def _aio(f: Facts) -> Iterable[Problem]:
    used = "nvme" in (f.offload_device("offload_optimizer"), f.offload_device("offload_param"))
    if f.config.get("aio") is not None and not used:
        yield f.config.problem("aio", "acts with offload to nvme only", "Remove it")


def _offload_ratio(f: Facts) -> Iterable[Problem]:
    key = "zero_optimization.offload_optimizer.ratio"
    if f.config.get(key, 1.0) < 1.0 and f.offload_device("offload_optimizer") != "cpu":
        yield f.config.problem(key, "acts with device cpu", "Set device to cpu, or remove it")


def _offload_pipeline(f: Facts) -> Iterable[Problem]:
    for block in ("offload_optimizer", "offload_param"):
        if f.stages > 1 and f.offload_device(block) != "none":
            key = f"zero_optimization.{block}.device"
            yield f.config.problem(key, f"must be none with {f.stages} pipeline stages", "Use one stage")


def _overlap_pipeline(f: Facts) -> Iterable[Problem]:
    key = "zero_optimization.overlap_comm"
    if f.stages > 1 and f.config.get(key, False):
        rule = f"is not possible with {f.stages} pipeline stages"
        yield f.config.problem(key, rule, "Set it to false, or use one stage")


def _second_shard(f: Facts) -> Iterable[Problem]:
    key = "zero_optimization.zero_hpz_partition_size"
    replicas = f.data * f.sequence
    if replicas % f.config.get(key, 1):
        rule = f"must divide the {replicas} ranks that ZeRO shards over"
        yield f.config.problem(key, rule, "Use the slots of a host divided by the tensor size")


def _bf16_optimizer_keys(f: Facts) -> Iterable[Problem]:
    if f.compute != "bf16" or f.accumulation != "fp32" or f.zero_stage != 1:
        return
    if f.offload_device("offload_optimizer") != "none":
        return
    for name in ("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_comm",
                 "use_multi_rank_bucket_allreduce", "allgather_partitions", "round_robin_gradients",
                 "parameter_alignment"):  # fmt: skip
        key = f"zero_optimization.{name}"
        if f.config.given(key):
            rule = "does not act at stage 1 with bf16 weights and fp32 accumulation"
            yield f.config.problem(key, rule, "Use stage 2 if you need it", warn=True)


# Precision


def _one_precision(f: Facts) -> Iterable[Problem]:
    if f.fp16 and f.bf16:
        yield f.config.problem("fp16.enabled", "excludes bf16.enabled", "Turn one of them off")


def _fp16_cuda(f: Facts) -> Iterable[Problem]:
    if f.fp16 and f.world.device != "cuda":
        yield f.config.problem("fp16.enabled", "needs CUDA devices", "Use bf16, or neither for fp32")


def _bf16_native(f: Facts) -> Iterable[Problem]:
    if f.config.get("bf16.enabled") is True and not f.world.bf16_native:
        name = f.world.device_name or f.world.device
        rule = f"{name} emulates bf16, which is slow"
        yield f.config.problem("bf16.enabled", rule, 'Use "auto" for bf16 where it is native', warn=True)


def _bf16_zero0(f: Facts) -> Iterable[Problem]:
    if f.compute == "bf16" and f.zero_stage == 0 and f.accumulation != "bf16":
        rule = "must be bf16 at ZeRO stage 0 with bf16 weights: DeepSpeed cannot sum in fp32 there"
        remedy = f"Use ZeRO stage 1, or accept the loss of bits with {ACCUMULATION} = bf16"
        yield f.config.problem(ACCUMULATION, rule, remedy, f.accumulation)


def _fp16_zero0(f: Facts) -> Iterable[Problem]:
    if f.compute == "fp16" and f.zero_stage == 0 and f.accumulation != "fp16":
        rule = "must be fp16 at ZeRO stage 0 with fp16 weights: DeepSpeed cannot sum in fp32 there"
        yield f.config.problem(ACCUMULATION, rule, "Use ZeRO stage 1", f.accumulation)


def _accumulation(f: Facts) -> Iterable[Problem]:
    if f.accumulation not in ("fp32", f.compute):
        rule = f"must be fp32 or the weights' {f.compute}"
        yield f.config.problem(ACCUMULATION, rule, f"Use fp32, or {f.accumulation} weights")


# Optimizer

_PARAMETERS_OF = {
    "AdamW": frozenset({"lr", "weight_decay", "fused", "betas", "eps", "torch_adam"}),
    "Adam": frozenset({"lr", "weight_decay", "fused", "betas", "eps", "torch_adam", "adam_w_mode"}),
    "SGD": frozenset({"lr", "weight_decay", "fused", "momentum", "nesterov"}),
}


def _optimizer_parameters(f: Facts) -> Iterable[Problem]:
    for name in f.config.get("optimizer.params", {}):
        key = f"optimizer.params.{name}"
        if name not in _PARAMETERS_OF[f.optimizer]:
            owners = [kind for kind, names in _PARAMETERS_OF.items() if name in names]
            remedy = f"Remove it, or use {' or '.join(owners)}"
            yield f.config.problem(key, f"is not a parameter of {f.optimizer}", remedy)


def _torch_adam(f: Facts) -> Iterable[Problem]:
    key = "optimizer.params.torch_adam"
    if f.config.get(key, True) is False:
        yield f.config.problem(key, "torch's Adam is the one used: it needs no compiler", "Remove it")


def _sgd_rate(f: Facts) -> Iterable[Problem]:
    key = "optimizer.params.lr"
    if f.optimizer == "SGD" and f.config.get(key, AUTO) == AUTO:
        yield f.config.problem(
            key, "the model's usual rate is meant for AdamW", "Give a number for SGD", AUTO
        )


def _betas(f: Facts) -> Iterable[Problem]:
    betas = f.config.get("optimizer.params.betas")
    if isinstance(betas, list) and (len(betas) != 2 or max(betas) >= 1):
        yield f.config.problem("optimizer.params.betas", "must be two numbers below 1", "Use [0.9, 0.95]")


def _nesterov(f: Facts) -> Iterable[Problem]:
    if f.config.get("optimizer.params.nesterov", False) and not f.config.get("optimizer.params.momentum", 0):
        yield f.config.problem("optimizer.params.nesterov", "needs momentum above 0", "Set momentum")


def _lr_scaling(f: Facts) -> Iterable[Problem]:
    rule = f.config.get("lr_scaling.rule", "none")
    base = f.config.get("lr_scaling.base_batch_size")
    if rule != "none" and base is None:
        remedy = "Set it to the batch for which lr was chosen"
        yield f.config.problem("lr_scaling.base_batch_size", f"is needed by rule {rule}", remedy)
    if rule == "none" and base is not None:
        remedy = "Set lr_scaling.rule to linear or sqrt, or remove it"
        yield f.config.problem("lr_scaling.base_batch_size", "does nothing with rule none", remedy)


# Options


def _one_length(f: Facts) -> Iterable[Problem]:
    if f.options.train_steps is not None and f.options.train_tokens is not None:
        rule = f"says the run's length a second time, beside train_steps = {f.options.train_steps}"
        yield Problem("train_tokens", f.options.train_tokens, rule, "Give one of the two")


def _evaluation(f: Facts) -> Iterable[Problem]:
    if f.options.eval_samples > 0 and f.options.eval_fraction == 0:
        rule = "no document is held out, so there is nothing to evaluate"
        yield Problem("eval_fraction", 0, rule, "Raise it, or give --eval_samples 0")


def _prompt(f: Facts) -> Iterable[Problem]:
    if f.options.sample_tokens > 0 and not f.options.sample_prompt:
        rule = "a sample continues a text of at least one character"
        yield Problem("sample_prompt", "", rule, "Give a prompt, or --sample_tokens 0")


def _data(f: Facts) -> Iterable[Problem]:
    for path in f.options.data:
        if not Path(path).exists():
            yield Problem("data", path, "there is no such file or folder", "Correct the path")


def _listed(numbers: Iterable[int]) -> str:
    names = [str(number) for number in numbers]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


RULES: tuple[Rule, ...] = (
    Rule("model", "The model is a preset or a readable file of a known kind",
         "nothing is guessed", _derived("model")),
    Rule("world", "pipeline * sequence * tensor divides the world; data is the quotient",
         "every rank has one place in the grid", _world),
    Rule("tensor in host", "A tensor group stays inside a host (warning)",
         "tensor peers exchange activations in every layer", _tensor_in_host),
    Rule("tensor divides", "The tensor size divides heads, kv heads, feed-forward width and vocabulary",
         "each rank holds equal slices", _tensor_divides),
    Rule("sequence divides", "The sequence size divides the sequence length",
         "each rank holds an equal slice of each sequence", _sequence_divides),
    Rule("sequence and heads", "The sequence size divides attention heads / tensor size",
         "the all-to-all gives each rank whole heads", _sequence_heads),
    Rule("sequence and kv heads", "The sequence size divides kv heads / tensor size, or is a multiple of it",
         "k and v heads are dealt out or repeated whole", _sequence_kv_heads),
    Rule("positions", "The sequence is no longer than the model's positions",
         "there is no row, or no trained rotation, beyond", _positions),
    Rule("vocabulary", "The model has an id for each of the tokenizer's",
         "every token has a row", _vocabulary),
    Rule("dualpipev", "DualPipeV needs at least two stages",
         "it runs two directions through a pipeline", _dualpipev),
    Rule("partition", "Every chunk of layers holds a layer with weights; a list fits stages and layers",
         "a chunk without weights has nothing to train", _derived("partition")),
    Rule("partition method", "A partition method needs at least two stages",
         "there is nothing to divide", _partition_without_stages),
    Rule("batch", "train_batch_size = micro-batch * accumulation steps * data parallel size, all whole",
         "every micro-batch has the same size", _derived("batch")),
    Rule("micro-batches", "DualPipeV needs 2 * stages micro-batches; 1F1B should have as many as stages "
         "(warning)", "stages stand idle until the pipeline is full", _micro_batches),
    Rule("ZeRO and pipeline", "ZeRO stages 2 and 3 need one pipeline stage",
         "their gradient shards are reduced per micro-batch, which a pipeline cannot", _zero_pipeline),
    Rule("ZeRO keys", "A key of zero_optimization is given only at a stage where it acts",
         "an ignored setting misleads", _zero_keys),
    Rule("NVMe", "NVMe offload needs ZeRO stage 3 and a path, and its keys need NVMe",
         "only stage 3 swaps", _nvme),
    Rule("aio", "aio needs offload to NVMe", "it serves nothing else", _aio),
    Rule("offload ratio", "A ratio needs offload of the optimizer to cpu",
         "it splits state between GPU and CPU", _offload_ratio),
    Rule("offload and pipeline", "Offload needs one pipeline stage",
         "DeepSpeed's pipeline engine is not tested with it", _offload_pipeline),
    Rule("overlap and pipeline", "overlap_comm needs one pipeline stage",
         "DeepSpeed turns it off under pipelines", _overlap_pipeline),
    Rule("second shard", "zero_hpz_partition_size divides data * sequence",
         "each second shard is whole", _second_shard),
    Rule("bf16 at stage 1", "Bucket settings do not act at stage 1 with bf16 and fp32 sums (warning)",
         "DeepSpeed uses another optimizer wrapper there", _bf16_optimizer_keys),
    Rule("one precision", "fp16 and bf16 exclude each other", "weights have one format", _one_precision),
    Rule("fp16 and CUDA", "fp16 needs CUDA", "DeepSpeed refuses it on CPUs", _fp16_cuda),
    Rule("native bf16", "bf16 = true on a device without it is slow (warning)",
         "it is emulated", _bf16_native),
    Rule("bf16 at stage 0", "bf16 at ZeRO stage 0 needs grad_accum_dtype = bf16, said explicitly",
         "DeepSpeed cannot sum in fp32 there", _bf16_zero0),
    Rule("fp16 at stage 0", "fp16 at ZeRO stage 0 sums in fp16",
         "DeepSpeed cannot sum in fp32 there", _fp16_zero0),
    Rule("accumulation", "grad_accum_dtype is fp32 or the weights' format",
         "a third format helps nobody", _accumulation),
    Rule("optimizer parameters", "Parameters belong to the optimizer's type",
         "an ignored setting misleads", _optimizer_parameters),
    Rule("torch_adam", "torch_adam is not false", "torch's optimizers are used", _torch_adam),
    Rule("betas", "betas are two numbers below 1", "they are decay rates", _betas),
    Rule("nesterov", "nesterov needs momentum", "it is a form of momentum", _nesterov),
    Rule("lr scaling", "lr_scaling needs rule and base_batch_size together",
         "the factor is train batch / base batch", _lr_scaling),
    Rule("schedule", "The schedule's parameters fit each other, the optimizer's rate and the run's length",
         "the rate is a function of the step", _derived("schedule")),
    Rule("SGD's rate", "SGD needs a learning rate of its own",
         "the models' usual rates are meant for AdamW", _sgd_rate),
    Rule("run length", "A model without a usual length needs train_steps or train_tokens",
         "the schedule depends on it", _derived("run length")),
    Rule("one run length", "train_steps and train_tokens exclude each other",
         "a length is said once", _one_length),
    Rule("evaluation", "Evaluation needs held-out documents", "training data is no test", _evaluation),
    Rule("sample", "A sample needs a prompt", "the model continues something", _prompt),
    Rule("output folder", "A folder that holds a run takes that model, data, sequence length and seed only; "
         "with checkpoints it is not started anew",
         "its checkpoints belong to that run", _derived("output folder")),
    Rule("data", "The data exists", "a missing path is never skipped", _data),
)  # fmt: skip
