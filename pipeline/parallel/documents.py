"""Document masks: attention stays inside a document, and positions begin anew with each.

Where documents lie in a row cannot travel with the hidden states: one floating tensor is all that crosses a
stage's edge. But every rank reads its data rank's whole rows. So the engine sets the documents of a pass's
micro-batches in one object that its layers share, and each layer looks up the micro-batch whose forward
begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.parallel.dropout import MicroBatchCounter


@dataclass(frozen=True)
class DocumentLayout:
    """The documents of one micro-batch: for attention, sorted by length, so that equals run as one batch.

    Attributes:
        positions: Of each token in its document, [b, t] int64.
        order: The tokens (row * t + position in the row), document by document, shortest first, [b * t].
        place: Where each token is in `order`, [b, t] flat: its inverse.
        groups: (how many documents, their length), in `order`'s order.
    """

    positions: Tensor
    order: Tensor
    place: Tensor
    groups: tuple[tuple[int, int], ...]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Apply causal `attention` to each document by itself.

        What a document gets is computed from its own tokens, in an order of operations that its length
        decides: the same to the last bit whatever else is in the row. Costs the sum of squared lengths, and
        one call per distinct length.

        Args:
            q, k, v: [b, heads or key/value heads, t, d].
            attention: The same for whole rows: q, k, v -> the shape of q.

        Returns:
            [b, heads, t, d].
        """
        sizes = [count * length for count, length in self.groups]
        parts = [x.transpose(1, 2).flatten(0, 1).index_select(0, self.order).split(sizes) for x in (q, k, v)]
        pieces = []
        for (count, length), *qkv in zip(self.groups, *parts, strict=True):
            documents = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
            pieces.append(attention(*documents).transpose(1, 2).flatten(0, 1))
        return (
            torch.cat(pieces).index_select(0, self.place).unflatten(0, self.positions.shape).transpose(1, 2)
        )

    def cross_document_mask(self) -> Tensor:
        """True where query (row) and key (column) are in different documents, [b, 1, t, t]."""
        # Documents begin at position 0, so a token's first one is where it is minus its position.
        begins = torch.arange(self.positions.shape[1], device=self.positions.device) - self.positions
        return begins[:, None, :, None] != begins[:, None, None, :]


def document_layout(documents: Tensor, device: torch.device | str) -> DocumentLayout:
    """The layout of a micro-batch, on `device`, from the document number of each token, [b, t].

    Best called with `documents` on the host: the number of documents decides the shapes of what follows.
    """
    documents = documents.cpu()
    b, t = documents.shape
    edges = torch.ones_like(documents, dtype=torch.bool)
    edges[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = edges.flatten().nonzero().flatten()
    lengths = torch.diff(begins, append=torch.tensor([b * t]))
    positions = torch.arange(b * t) - begins.repeat_interleave(lengths)
    # Stable: documents of a length stay in their order, tokens of a document too.
    order = lengths.repeat_interleave(lengths).sort(stable=True).indices
    values, counts = lengths.unique(return_counts=True)
    return DocumentLayout(
        positions.view(b, t).to(device),
        order.to(device),
        order.argsort().to(device),
        tuple(zip(counts.tolist(), values.tolist(), strict=True)),
    )


@dataclass
class PassDocuments:
    """The documents of the pass that runs now; one per model, written by the engine, read by its layers.

    Attributes:
        step: Counts passes (training steps, evaluations, samples).
        layouts: One per micro-batch of the pass; empty where attention sees whole rows.
    """

    step: int = 0
    layouts: tuple[DocumentLayout, ...] = ()

    def set_documents(self, documents: Sequence[Tensor | None], device: torch.device | str) -> None:
        """Begin a pass over micro-batches with these documents, [b, t] each, or over whole rows: all None.

        Raises:
            ValueError: only some of them have documents.
        """
        given = [each for each in documents if each is not None]
        if given and len(given) != len(documents):
            raise ValueError(
                f"{len(given)} of {len(documents)} micro-batches have documents: all must, or none"
            )
        self.step += 1
        self.layouts = tuple(document_layout(each, device) for each in given)


@dataclass
class DocumentReader:
    """One layer's view of the documents of a pass."""

    pass_documents: PassDocuments
    counter: MicroBatchCounter = field(init=False)

    def __post_init__(self) -> None:
        self.counter = MicroBatchCounter(self.pass_documents)

    def advance(self) -> DocumentLayout | None:
        """The layout of the micro-batch whose forward begins now; None where attention sees whole rows.

        To be called once per forward pass, outside of what is recomputed.
        """
        return self.pass_documents.layouts[self.counter.advance()] if self.pass_documents.layouts else None
