"""What the engine receives: micro-batches, and the step they belong to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.data.packing import Samples

PADDING_SAMPLE = -1


@dataclass(frozen=True)
class MicroBatch:
    """Whole rows, before any slicing over sequence ranks.

    Attributes:
        tokens: [micro batch, sequence] int64.
        labels: [micro batch, sequence] int64, shifted already: labels[:, t] is the token after tokens[:, t].
        mask: [micro batch, sequence] bool; False where the label does not count in the loss.
        samples: Sample index of each row in its source: epoch * samples per epoch + number in the epoch; -1
            is a row of padding.
        documents: [micro batch, sequence] int64 document number of each token, counted from 0 in its row;
            None where attention sees whole rows. Stays on the host, where layouts are made from it.
        sources: Number of each row's source in the blend; empty where there is one source.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    samples: tuple[int, ...]
    documents: Tensor | None = None
    sources: tuple[int, ...] = ()

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same with tokens, labels and mask on `device`."""
        moved = (each.to(device, non_blocking=True) for each in (self.tokens, self.labels, self.mask))
        return MicroBatch(*moved, self.samples, self.documents, self.sources)


@dataclass(frozen=True)
class StepBatch:
    """One data rank's share of a global batch.

    Attributes:
        micro_batches: One per gradient accumulation step.
        first_sample: Samples that the whole job had consumed before this step.
        num_samples: Samples of the whole job in this step; the next step starts at their sum.
        num_tokens: Input tokens of the whole job in this step, each counted once.
    """

    micro_batches: tuple[MicroBatch, ...]
    first_sample: int
    num_samples: int
    num_tokens: int


def micro_batch(samples: Samples) -> MicroBatch:
    """Shift and mask rows of packed tokens. Masks are made from positions, never from token ids."""
    rows = torch.from_numpy(samples.tokens)
    labels = rows[:, 1:].contiguous()
    mask = torch.arange(labels.shape[1]) < torch.from_numpy(samples.num_labels)[:, None]
    if samples.counted is not None:
        mask &= torch.from_numpy(samples.counted)
    documents = None
    if samples.documents is not None:
        documents = torch.from_numpy(samples.documents)[:, :-1].contiguous()
    sources = () if samples.sources is None else tuple(samples.sources.tolist())
    indices = tuple(samples.indices.tolist())
    return MicroBatch(rows[:, :-1].contiguous(), labels, mask, indices, documents, sources)


def digest(step: StepBatch) -> int:
    """A 63-bit hash of what the step holds, equal on every rank that must see the same samples.

    It covers tokens, labels, masks, documents, sample indices and the position in the order; it fits an int64
    tensor, and does not depend on the machine's byte order.
    """
    state = hashlib.blake2b(digest_size=8)
    state.update(np.array([step.first_sample, step.num_samples], dtype="<i8").tobytes())
    for batch in step.micro_batches:
        state.update(np.array([*batch.tokens.shape, *batch.samples, *batch.sources], dtype="<i8").tobytes())
        tensors = (batch.tokens, batch.labels, batch.mask, batch.documents)
        for tensor in (each for each in tensors if each is not None):
            state.update(tensor.cpu().numpy().astype("<i8", copy=False).tobytes())
    return int.from_bytes(state.digest(), "little") >> 1
