"""Every rule between two settings, as one table. Each is checked alone, so that all problems appear.

A rule reads what it needs from `Facts`; where that is unknown because it has a problem of its own, the
rule says nothing. docs/rules.md is made from this table by ``python -m pipeline.job.pages``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.base.fields import Undecided
from pipeline.base.problems import Problem
from pipeline.job import layout_rules as layout
from pipeline.job import training_rules as training
from pipeline.job import zero_rules as zero
from pipeline.job.facts import Facts


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
    """The problems of all rules, with warnings and notes."""
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


RULES: tuple[Rule, ...] = (
    Rule("model", "The model is a preset or a readable file of a known kind",
         "nothing is guessed", _derived("model")),
    Rule("world", "pipeline * sequence * tensor divides the world; data is the quotient",
         "every rank has one place in the grid", layout.world),
    Rule("tensor in host", "A tensor group stays inside a host (warning)",
         "tensor peers exchange activations in every layer", layout.tensor_in_host),
    Rule("tensor divides", "The tensor size divides heads, kv heads, feed-forward size and vocabulary",
         "each rank holds equal slices", layout.tensor_divides),
    Rule("sequence divides", "The sequence size divides the sequence length",
         "each rank holds an equal slice of each sequence", layout.sequence_divides),
    Rule("sequence and heads", "The sequence size divides attention heads / tensor size",
         "the all-to-all gives each rank whole heads", layout.sequence_heads),
    Rule("sequence and kv heads", "The sequence size divides kv heads / tensor size, or is a multiple of it",
         "k and v heads are distributed or repeated whole", layout.sequence_kv_heads),
    Rule("positions", "The sequence is no longer than the model's positions",
         "there is no row, or no trained rotation, beyond", layout.positions),
    Rule("vocabulary", "The model has an id for each of the tokenizer's",
         "every token has a row", layout.vocabulary),
    Rule("initial weights", "The weights in the model's folder are those that its config.json describes, as "
         "safetensors, and the tokens are those of its tokenizer",
         "a run begins with the weights it names or not at all", _derived("weights")),
    Rule("dualpipev", "DualPipeV needs at least two stages",
         "it runs two directions through a pipeline", layout.dualpipev),
    Rule("partition", "Every chunk of layers holds a layer with weights; a list fits stages and layers",
         "a chunk without weights has nothing to train", _derived("partition")),
    Rule("partition method", "A partition method needs at least two stages",
         "there is nothing to divide", layout.partition_without_stages),
    Rule("batch", "train_batch_size = micro-batch * accumulation steps * data parallel size, all whole",
         "every micro-batch has the same size", _derived("batch")),
    Rule("memory", "Weights, gradients and optimizer state of a rank fit its GPU, with activations and "
         "buffers (warning), and host memory what is there (warning)",
         "a job that cannot fit dies in its first step", layout.memory),
    Rule("micro-batches", "DualPipeV needs 2 * stages micro-batches; 1F1B should have as many as stages "
         "(warning)", "stages are idle until the pipeline is full", layout.micro_batches),
    Rule("ZeRO and pipeline", "ZeRO stages 2 and 3 need one pipeline stage",
         "their gradient shards are reduced per micro-batch, which a pipeline cannot", zero.zero_pipeline),
    Rule("ZeRO keys", "An optimizer's offload is asked for only at a stage that has it; one of parameters "
         "(warning) and other keys of other stages (note) are taken",
         "without it memory is missed; people edit the stage in files that they have",
         zero.zero_keys),
    Rule("NVMe", "NVMe offload needs ZeRO stage 3 and a path; its keys do not act without it (note)",
         "only stage 3 swaps", zero.nvme),
    Rule("aio", "aio does not act without offload to NVMe (note)", "it serves nothing else", zero.aio),
    Rule("overlap and pipeline", "overlap_comm is off with pipeline stages (note)",
         "DeepSpeed turns it off there", zero.overlap_pipeline),
    Rule("second shard", "zero_hpz_partition_size divides data * sequence, and excludes tensor parallelism",
         "each second shard is whole, and DeepSpeed groups consecutive ranks", zero.second_shard),
    Rule("bf16 at stage 1", "Bucket settings do not act at stage 1 with bf16 and fp32 sums (note)",
         "DeepSpeed uses another optimizer wrapper there", zero.bf16_optimizer_keys),
    Rule("overflow check", "check_grad_overflow acts at ZeRO 2, and at ZeRO 1 without fp32 sums or with "
         "offload (note)", "DeepSpeed's other optimizer wrappers do not ask for it", zero.overflow_check),
    Rule("loss scale", "Settings of the dynamic loss scale do not act with a fixed one (note)",
         "fp16.loss_scale = 0 makes it dynamic", zero.loss_scale),
    Rule("one precision", "fp16 and bf16 exclude each other", "weights have one format", zero.one_precision),
    Rule("fp16 and CUDA", "fp16 needs CUDA", "DeepSpeed refuses it on CPUs", zero.fp16_cuda),
    Rule("native bf16", "bf16 = true on a device without it is slow (warning)",
         "it is emulated", zero.bf16_native),
    Rule("sums at stage 0", "16-bit weights at ZeRO stage 0 have grad_accum_dtype in their format; bf16 "
         "that does not say it gets a warning", "DeepSpeed cannot sum in fp32 there", zero.sums_at_zero0),
    Rule("tied gradients", "With pipeline stages, fp16 weights or offloaded optimizer state need sums in the "
         "weights' format", "else DeepSpeed does not add the tied embedding's gradients of two stages",
         zero.tied_gradients),
    Rule("accumulation", "grad_accum_dtype is fp32 or the weights' format",
         "a third format has no use", zero.accumulation),
    Rule("switches", "A block that is turned on by enabled or device does nothing without that key (note)",
         "off is its default", training.switches),
    Rule("monitors", "The package of an enabled monitor is installed, and its files have a folder to go to",
         "a monitor that fails would end the run, or record nothing", training.monitors),
    Rule("logged collectives", "comms_logger.prof_ops does not act with prof_all (note)",
         "all collectives are logged then", training.logged_collectives),
    Rule("optimizer parameters", "Parameters belong to the optimizer's type",
         "an ignored setting misleads", training.optimizer_parameters),
    Rule("betas", "betas are two numbers below 1", "they are decay rates", training.betas),
    Rule("nesterov", "nesterov needs momentum", "it is a form of momentum", training.nesterov),
    Rule("lr scaling", "lr_scaling needs rule and base_batch_size together",
         "the factor is train batch / base batch", training.lr_scaling),
    Rule("schedule", "The schedule's parameters fit each other, the optimizer's rate and the run's length",
         "the rate is a function of the step", _derived("schedule")),
    Rule("SGD's rate", "SGD needs a learning rate of its own",
         "the models' usual rates are meant for AdamW", training.sgd_rate),
    Rule("run length", "A model without a usual length needs train_steps or train_tokens",
         "the schedule depends on it", _derived("run length")),
    Rule("one run length", "train_steps and train_tokens exclude each other",
         "a length is said once", training.one_length),
    Rule("evaluation", "Evaluation needs validation sets, or a held-out share of the data",
         "training data is no test", training.evaluation),
    Rule("retention", "keep_every and keep_best need keep_last; keep_best needs evaluations",
         "they say what is kept beside the newest checkpoints, and losses say which is best",
         training.retention),
    Rule("async save", "async_save needs the optimizer's state in memory, not on NVMe drives",
         "it writes a copy of this moment's values", zero.async_save),
    Rule("sample", "A sample needs a prompt", "the model continues something", training.prompt),
    Rule("output folder", "A folder that holds a run takes that model, data, sequence length and seed only; "
         "with checkpoints it is not started anew",
         "its checkpoints belong to that run", _derived("output folder")),
    Rule("data", "Each path of the data is plain text, or a folder that holds some",
         "a path is never skipped", training.data),
)  # fmt: skip
