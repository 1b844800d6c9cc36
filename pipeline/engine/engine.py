"""One interface to DeepSpeed's engines: one pipeline stage (`DeepSpeedEngine`) or several."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from pipeline.data.loader import MicroBatch
from pipeline.engine.deepspeed_patches import (
    average_tied_gradients_first,
    clip_fp32_before_update,
    count_nothing_as_zero,
    evaluating,
    scale_loss,
    sum_norm_once,
    update_scale_last,
)
from pipeline.engine.loss import Labels, token_loss, weighted_labels
from pipeline.engine.optimizer import clip_global_norm
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from pipeline.parallel.documents import PassDocuments
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.ulysses import sequence_slice

Pair = tuple[Tensor, Labels]


class StepResult(NamedTuple):
    """What one optimizer step did; every field is the same on every rank.

    Attributes:
        loss: Mean loss per unmasked token of the step, before the update.
        grad_norm: Global gradient norm before clipping; infinite where an overflow was found.
        lr: Learning rate of this update.
        tokens: Unmasked tokens of the step in the whole job.
        skipped: The update was not applied because of an overflow.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool


class TrainEngine(ABC):
    """Trains one model in one layout.

    Args:
        job: The resolved job.
        parallel: This rank's place in the mesh.
        deepspeed: What `deepspeed.initialize` returned.
        clock: The dropout clock that the model was built with.
        pass_documents: Where the layers of the model look documents up.
    """

    def __init__(
        self, job: Job, parallel: Parallel, deepspeed: Any, clock: DropoutClock, pass_documents: PassDocuments
    ) -> None:
        self.job, self.parallel, self.deepspeed = job, parallel, deepspeed
        self.clock, self.pass_documents = clock, pass_documents
        self.step = 0  # optimizer steps taken, overflows included
        # Micro-batches that an evaluation computes in one go: it can be given up between two of these.
        self.eval_batches_at_once = 1
        self._own_norm: Tensor | None = None
        if job.precision.compute == "fp32" and job.zero_stage == 0:
            clip_fp32_before_update(deepspeed, self._clip)
        elif job.precision.compute == "fp16" and job.zero_stage == 0:
            scale_loss(deepspeed)
        elif job.precision.compute == "fp16":
            update_scale_last(deepspeed.optimizer)

    @property
    def module(self) -> nn.Module:
        """The assembly of layers on this rank."""
        return self.deepspeed.module  # type: ignore[no-any-return]

    def train_step(self, batches: Sequence[MicroBatch], tokens: int) -> StepResult:
        """Train on this data rank's micro-batches.

        Args:
            batches: As many as the job's accumulation steps, whole rows (not sliced over sequence ranks).
            tokens: Unmasked labels of this step in the whole job.
        """
        step = self.step + 1
        self.clock.step = step
        self._set_documents(batches)
        lr = self.job.schedule(step)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr
        loss = self._train(batches, tokens).item()
        self.step = step  # only now: what fails on the way has taken no step
        return StepResult(loss, self._grad_norm(), lr, tokens, not self.deepspeed.was_step_applied())

    @torch.no_grad()
    def eval_step(self, batches: Sequence[MicroBatch], tokens: int) -> float:
        """The mean loss of `tokens` unmasked labels that the whole job holds in these micro-batches."""
        self.module.eval()
        loss = self._evaluate(batches, tokens).item()
        self.module.train()
        return loss

    @torch.no_grad()
    def next_token_logits(self, tokens: Tensor, position: int, documents: Tensor | None = None) -> Tensor:
        """Logits after ``tokens[position]``, [vocabulary] fp32, on every rank.

        `tokens` is [micro batch, sequence] with the text in row 0; what comes after `position` cannot
        matter, because attention is causal. The rank that computed a slice of the vocabulary puts it into a
        zero vector, and a sum over the world gives everyone the whole.

        `documents`, [micro batch, sequence], numbers the documents of the text; None: it is one.
        """
        self.module.eval()
        logits = self._logits(tokens, documents)
        self.module.train()
        mesh, here = self.parallel.mesh, self.parallel.coordinates
        whole = torch.zeros(self.job.model.padded_vocab_size, device=self.deepspeed.device)
        length = tokens.shape[1] // mesh.sequence
        if logits is not None and here.data == 0 and here.sequence == position // length:
            row = logits[0, position % length].float()
            whole[here.tensor * len(row) : (here.tensor + 1) * len(row)] = row
        dist.all_reduce(whole)
        return whole[: self.job.model.vocab_size]

    @abstractmethod
    def _train(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        """Forward, backward and update; the step's loss, the same on every rank."""

    @abstractmethod
    def _evaluate(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        """Forward only; the loss, the same on every rank."""

    @abstractmethod
    def _logits(self, tokens: Tensor, documents: Tensor | None) -> Tensor | None:
        """Forward of one micro-batch; this rank's slice of the logits, None where there are none."""

    def _set_documents(self, batches: Sequence[MicroBatch]) -> None:
        """Tell the layers where documents lie in the pass that begins: these micro-batches, in this order."""
        documents = [batch.documents for batch in batches]
        if self.job.data.document_mask and any(each is None for each in documents):
            raise ValueError("document_mask is on, but there are micro-batches that come without documents")
        self.pass_documents.set_documents(documents, self.deepspeed.device)

    def _inputs(self, batch: MicroBatch) -> Tensor:
        return sequence_slice(batch.tokens, self.parallel).contiguous()

    def _grad_norm(self) -> float:
        norm = self._own_norm if self._own_norm is not None else self.deepspeed.get_global_grad_norm()
        value = float(norm)
        # ZeRO reports an overflow as -1.
        return value if value >= 0.0 else math.inf

    def _clip(self) -> None:
        """Clip the gradients that DeepSpeed has reduced, and keep their norm."""
        pairs = [(each, each.grad) for each in self.module.parameters() if each.grad is not None]
        group = self.deepspeed.mpu.get_model_parallel_group()
        self._own_norm = clip_global_norm(pairs, group, self.job.gradient_clipping)


class SequentialEngine(TrainEngine):
    """One pipeline stage, through `DeepSpeedEngine`."""

    def __init__(
        self, job: Job, parallel: Parallel, deepspeed: Any, clock: DropoutClock, pass_documents: PassDocuments
    ) -> None:
        super().__init__(job, parallel, deepspeed, clock, pass_documents)
        self.loss_fn = token_loss(job.model, parallel)

    def _train(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        total = torch.zeros((), device=self.deepspeed.device)
        for batch in batches:
            loss = self._forward(batch, tokens, len(batches))
            self.deepspeed.backward(loss)
            self.deepspeed.step()
            total += loss.detach()
        return self._average(total, len(batches))

    def _evaluate(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        self._set_documents(batches)
        total = torch.zeros((), device=self.deepspeed.device)
        for batch in batches:
            total += self._forward(batch, tokens, len(batches))
        return self._average(total, len(batches))

    def _forward(self, batch: MicroBatch, tokens: int, micro_batches: int) -> Tensor:
        batch = batch.to(self.deepspeed.device)
        labels = weighted_labels(batch, self.parallel, tokens, micro_batches)
        return self.loss_fn(self.deepspeed(self._inputs(batch)), labels)

    def _average(self, total: Tensor, micro_batches: int) -> Tensor:
        """The mean over micro-batches and replicas that the labels' weights are made for."""
        if self.parallel.replica_group is not None:
            dist.all_reduce(total, group=self.parallel.replica_group)
        return total / (self.parallel.mesh.replicas * micro_batches)

    def _logits(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        self.pass_documents.set_documents([documents], self.deepspeed.device)
        return self.deepspeed(sequence_slice(tokens, self.parallel).contiguous().to(self.deepspeed.device))


class PipelinedEngine(TrainEngine):
    """Several stages, through `PipelineEngine` or `DualPipeVEngine`."""

    def __init__(
        self, job: Job, parallel: Parallel, deepspeed: Any, clock: DropoutClock, pass_documents: PassDocuments
    ) -> None:
        super().__init__(job, parallel, deepspeed, clock, pass_documents)
        # Fewer micro-batches than this do not fill DualPipeV's schedule.
        self.least_micro_batches = 2 * job.mesh.pipeline if job.pipeline_schedule == "dualpipev" else 1
        # Filling and emptying the pipeline then costs a fifth at most.
        self.eval_batches_at_once = 4 * job.mesh.pipeline
        if hasattr(deepspeed.optimizer, "scaled_global_norm"):
            sum_norm_once(deepspeed.optimizer)
        if isinstance(deepspeed.optimizer, BF16_Optimizer):
            count_nothing_as_zero(deepspeed.optimizer, deepspeed.device)
        if parallel.mesh.replicas > 2:
            average_tied_gradients_first(deepspeed, parallel.replica_group)

    def _train(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        return self.deepspeed.train_batch(iter(self._pairs(batches, tokens)))

    def _evaluate(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        missing = self.least_micro_batches - len(batches)
        nothing = replace(batches[0], mask=torch.zeros_like(batches[0].mask))
        batches = [*batches, *[nothing] * missing]
        self._set_documents(batches)
        return self._forward_only(self._pairs(batches, tokens))

    def _logits(self, tokens: Tensor, documents: Tensor | None) -> Tensor | None:
        inputs = sequence_slice(tokens, self.parallel).contiguous()
        labels = (inputs, torch.zeros_like(inputs, dtype=torch.float32))
        self.pass_documents.set_documents([documents] * self.least_micro_batches, self.deepspeed.device)
        # Only the last micro-batch's logits are kept.
        _, logits = self._forward_only([(inputs, labels)] * self.least_micro_batches, return_logits=True)
        return logits

    def _forward_only(self, pairs: Sequence[Pair], **options: Any) -> Any:
        """`eval_batch` over as many micro-batches as there are pairs."""
        with evaluating(self.deepspeed, len(pairs)):
            return self.deepspeed.eval_batch(iter(pairs), num_micro_batches=len(pairs), **options)

    def _pairs(self, batches: Sequence[MicroBatch], tokens: int) -> list[Pair]:
        """(inputs, (labels, weights)) of each micro-batch, for the pipeline's first and last stage."""
        count = len(batches)
        return [(self._inputs(b), weighted_labels(b, self.parallel, tokens, count)) for b in batches]
