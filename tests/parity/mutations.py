"""Ways to break the parallel training, each of which the comparison must notice.

A mutation patches the imported code of a rank and counts how often the patched part runs; the rank's
process, and the patch with it, ends after the case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from pipeline.data.loader import MicroBatch
from pipeline.engine import build, deepspeed_patches, engine, optimizer
from pipeline.model.modules import RMSNorm
from pipeline.parallel import collectives, tensor, ulysses
from pipeline.parallel.context import Group, Parallel
from pipeline.parallel.dropout import MicroBatchCounter
from pipeline.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabularyEmbedding
from tests.parity.ranks import Calls


def _without(owner: type, method: str, collective: str, calls: Calls) -> None:
    """While `method` of `owner` runs, `collective` does nothing; calls of that nothing are counted."""
    original, real = getattr(owner, method), getattr(collectives, collective)

    def nothing(value: Tensor, *_: Any) -> Tensor:
        calls()
        return value

    def run(*args: Any) -> Any:
        setattr(collectives, collective, nothing)
        try:
            return original(*args)
        finally:
            setattr(collectives, collective, real)

    setattr(owner, method, run)


def no_sum_after_row_parallel(calls: Calls) -> None:
    _without(RowParallelLinear, "forward", "reduce_from", calls)


def no_sum_after_embedding(calls: Calls) -> None:
    _without(VocabularyEmbedding, "_embed", "reduce_from", calls)


def no_gradient_sum_before_column_parallel(calls: Calls) -> None:
    _without(ColumnParallelLinear, "forward", "copy_to", calls)


def no_gradient_sum_before_output_layer(calls: Calls) -> None:
    _without(VocabularyEmbedding, "forward", "copy_to", calls)


def no_gradient_sum_of_query_key_norms(calls: Calls) -> None:
    _without(RMSNorm, "forward", "copy_to", calls)


def backward_of_copy_to_does_not_sum(calls: Calls) -> None:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        calls()
        return grad, None

    collectives._CopyTo.backward = staticmethod(backward)


def _without_reduction(index: int, calls: Calls) -> None:
    """Drop reduction number `index` of the three in the vocabulary-parallel loss: maximum, label, sum."""
    loss, real = tensor._VocabularyCrossEntropy, collectives.all_reduce
    original = loss.forward

    def forward(*args: Any) -> Tensor:
        seen = 0

        def all_reduce(value: Tensor, group: Group, *op: Any) -> Tensor:
            nonlocal seen
            seen += 1
            if seen - 1 != index:
                return real(value, group, *op)
            calls()
            return value

        collectives.all_reduce = all_reduce
        try:
            return original(*args)
        finally:
            collectives.all_reduce = real

    loss.forward = staticmethod(forward)


def no_maximum_of_logits(calls: Calls) -> None:
    _without_reduction(0, calls)


def no_sum_of_label_logits(calls: Calls) -> None:
    _without_reduction(1, calls)


def no_sum_of_exponentials(calls: Calls) -> None:
    _without_reduction(2, calls)


def all_to_all_stays_at_home(calls: Calls) -> None:
    """Shapes as after the exchange, but every part comes from this rank."""

    def all_to_all(value: Tensor, group: Group, split_dim: int, join_dim: int) -> Tensor:
        if group is None:
            return value
        calls()
        return torch.cat(value.chunk(torch.distributed.get_world_size(group), split_dim), join_dim)

    collectives.all_to_all = all_to_all


def positions_start_at_zero(calls: Calls) -> None:
    def first_position(length: int, parallel: Parallel) -> int:
        calls()
        return 0

    ulysses.first_position = first_position


def _relabel(change: Callable[[MicroBatch, Parallel, int, int], engine.Labels], calls: Calls) -> None:
    def weighted_labels(batch: MicroBatch, parallel: Parallel, tokens: int, count: int) -> engine.Labels:
        calls()
        return change(batch, parallel, tokens, count)

    engine.weighted_labels = weighted_labels


def labels_are_cut_before_the_shift(calls: Calls) -> None:
    """The last label of each slice is not the next slice's first token."""
    original = engine.weighted_labels

    def change(batch: MicroBatch, parallel: Parallel, tokens: int, count: int) -> engine.Labels:
        _, weights = original(batch, parallel, tokens, count)
        return ulysses.sequence_slice(batch.tokens, parallel).roll(-1, dims=1).contiguous(), weights

    _relabel(change, calls)


def loss_times_accumulation(calls: Calls) -> None:
    original = engine.weighted_labels

    def change(batch: MicroBatch, parallel: Parallel, tokens: int, count: int) -> engine.Labels:
        labels, weights = original(batch, parallel, tokens, count)
        return labels, weights * count

    _relabel(change, calls)


def mean_of_rank_means(calls: Calls) -> None:
    """Each micro-batch's slice is averaged by itself, as if all had the same number of tokens."""
    original = engine.weighted_labels

    def change(batch: MicroBatch, parallel: Parallel, tokens: int, count: int) -> engine.Labels:
        labels, weights = original(batch, parallel, tokens, count)
        return labels, (weights > 0).float() / max(int((weights > 0).sum()), 1)

    _relabel(change, calls)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def gradient_times_accumulation(calls: Calls) -> None:
    """The reported loss stays right: only a comparison of gradients, norms or SGD steps can tell."""
    original = engine.token_loss

    def token_loss(config: Any, parallel: Parallel) -> Callable[[Tensor, engine.Labels], Tensor]:
        loss = original(config, parallel)

        def scaled(logits: Tensor, labels: engine.Labels) -> Tensor:
            calls()
            return _Scaled.apply(loss(logits, labels), 4.0)

        return scaled

    engine.token_loss = build.token_loss = token_loss


def tied_gradient_stays_on_its_stage(calls: Calls) -> None:
    def nothing(module: PipelineModule) -> list[Any]:
        calls()
        return []

    PipelineModule.get_tied_weights_and_groups = nothing


def tied_gradients_are_added_before_they_are_averaged(calls: Calls) -> None:
    """DeepSpeed's own order: right but for rounding, in which the copies then differ."""

    def nothing(*_: Any) -> None:
        calls()

    engine.average_tied_gradients_first = nothing


def every_copy_counts_in_the_norm(calls: Calls) -> None:
    def mark_counted_once(module: nn.Module, parallel: Parallel) -> None:
        calls()
        for parameter in module.parameters():
            parameter.model_parallel, parameter.ds_pipe_replicated = True, False

    build.mark_counted_once = mark_counted_once


def gradients_are_not_averaged(calls: Calls) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        calls()

    deepspeed.DeepSpeedEngine.allreduce_gradients = nothing


def clipped_twice(calls: Calls) -> None:
    original = engine.clip_global_norm

    def twice(*args: Any) -> Tensor:
        calls()
        norm = original(*args)
        original(*args)
        return norm

    engine.clip_global_norm = twice


def loss_is_not_scaled(calls: Calls) -> None:
    """DeepSpeed's own: gradients are divided by a scale that is not in them."""
    engine.scale_loss = lambda _: calls()


def deepspeeds_own_16_bit_optimizer(calls: Calls) -> None:
    def nothing() -> contextlib.AbstractContextManager[None]:
        calls()
        return contextlib.nullcontext()

    build.with_own_16_bit_optimizer = nothing


def scale_changes_before_gradients_are_divided_by_it(calls: Calls) -> None:
    """DeepSpeed's own order."""
    engine.update_scale_last = lambda _: calls()


def scale_never_changes(calls: Calls) -> None:
    DynamicLossScaler.update_scale = lambda self, overflow: calls()


def norm_is_not_summed_over_stages_and_slices(calls: Calls) -> None:
    optimizer.dist = SimpleNamespace(all_reduce=lambda total, group: calls())


def gradients_that_do_not_count_may_overflow(calls: Calls) -> None:
    original = optimizer.clip_global_norm

    def clip(pairs: Sequence[tuple[nn.Parameter, Tensor]], *args: Any) -> Tensor:
        calls()
        return original([pair for pair in pairs if pair[0].model_parallel], *args)

    deepspeed_patches.clip_global_norm = clip


def dropout_ignores_the_micro_batch(calls: Calls) -> None:
    """Every micro-batch gets the masks of the first."""

    def advance(counter: MicroBatchCounter) -> int:
        calls()
        return 0

    MicroBatchCounter.advance = advance
