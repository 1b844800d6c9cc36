"""The loss of a step: the sum of token losses over the step's unmasked tokens, whoever holds them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pipeline.data.loader import MicroBatch
from pipeline.model.config import ModelConfig
from pipeline.parallel.context import Parallel
from pipeline.parallel.tensor import vocabulary_cross_entropy
from pipeline.parallel.ulysses import sequence_slice

Labels = tuple[Tensor, Tensor]


def weighted_labels(batch: MicroBatch, parallel: Parallel, step_tokens: int, micro_batches: int) -> Labels:
    """This sequence rank's labels [b, t / n] and the weight of each one's loss, fp32 [b, t / n].

    DeepSpeed averages gradients (and its pipeline the loss) over replicas = data x sequence ranks and over
    the step's micro-batches. A weight of replicas * micro_batches / step_tokens turns that mean of sums
    into the sum over the step divided by its `step_tokens` unmasked tokens: with 4 replicas, 2 micro-batches
    and 1,000 tokens, 4 * 2 / 1000. A rank without unmasked tokens contributes 0; nothing is divided by it.
    """
    scale = parallel.mesh.replicas * micro_batches / max(step_tokens, 1)
    weights = sequence_slice(batch.mask, parallel).float() * scale
    return sequence_slice(batch.labels, parallel).contiguous(), weights


def token_loss(config: ModelConfig, parallel: Parallel) -> Callable[[Tensor, Labels], Tensor]:
    """The function (logits [b, t / n, vocabulary / tensor], labels) -> weighted sum of losses, fp32."""
    first = parallel.coordinates.tensor * (config.padded_vocab_size // parallel.mesh.tensor)

    def loss(logits: Tensor, labels: Labels) -> Tensor:
        targets, weights = labels
        losses = vocabulary_cross_entropy(logits, targets, config.vocab_size, first, parallel.tensor_group)
        return (losses * weights).sum()

    return loss
