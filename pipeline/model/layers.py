"""The units that a pipeline is divided into: embedding, positions, blocks, final norm, output layer.

Each maps one tensor to one tensor: token ids [b, t / n] into the first, hidden states [b, t / n, hidden]
between all others, logits [b, t / n, padded vocabulary / tensor] out of the last. That is all that crosses a
stage's edge: one floating tensor that needs a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.model.attention import Attention
from pipeline.model.config import ModelConfig
from pipeline.model.modules import MLP, norm_class
from pipeline.model.rotary import Rotary
from pipeline.parallel import ulysses
from pipeline.parallel.documents import DocumentLayout, DocumentReader, PassDocuments
from pipeline.parallel.dropout import DropoutClock, MicroBatchCounter, dropout, dropout_keys
from pipeline.parallel.parameters import ParameterFactory


class Positions(nn.Module):
    """Adds the learned position of each token (none for rotary models); then the embedding dropout."""

    def __init__(
        self, config: ModelConfig, make: ParameterFactory, clock: DropoutClock, pass_documents: PassDocuments
    ) -> None:
        super().__init__()
        self.documents = DocumentReader(pass_documents)
        self.parallel, self.rate, self.clock = make.parallel, config.dropout, clock
        self.counter = MicroBatchCounter(clock)
        learned = config.position == "learned"
        shape = (config.max_position_embeddings, config.hidden_size)
        self.weight = make.normal("weight", shape, config.init_std) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        first = ulysses.first_position(x.shape[1], self.parallel)
        documents = self.documents.advance()
        if self.weight is not None:
            positions = (
                torch.arange(first, first + x.shape[1], device=x.device)
                if documents is None
                else ulysses.sequence_slice(documents.positions, self.parallel)
            )
            x = x + functional.embedding(positions, self.weight)
        if self.training and self.rate > 0.0:
            keys = dropout_keys(self.clock, self.parallel, self.counter.advance(), 0, x.shape[0], x.device)
            x = dropout(x, self.rate, keys, first)
        return x


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): a pre-norm transformer block.

    `recompute`: ``none`` keeps all activations for the backward pass, ``selective`` recomputes the attention
    itself (Korthikanti et al. 2022, section 5), ``full`` the whole block from its input.
    """

    def __init__(
        self,
        config: ModelConfig,
        make: ParameterFactory,
        clock: DropoutClock,
        pass_documents: PassDocuments,
        rotary: Rotary | None,
        index: int,
        recompute: str,
    ) -> None:
        super().__init__()
        self.documents = DocumentReader(pass_documents)
        self.config, self.parallel, self.clock, self.index = config, make.parallel, clock, index
        self.counter = MicroBatchCounter(clock)
        self.recompute = recompute == "full"
        norm = norm_class(config)
        self.norm1 = norm(make.under("norm1"), config.hidden_size, config.norm_eps)
        self.attention = Attention(config, make.under("attention"), rotary, recompute == "selective")
        self.norm2 = norm(make.under("norm2"), config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, make.under("mlp"))

    def forward(self, x: Tensor) -> Tensor:
        # Counted outside the recomputed part, which runs twice.
        dropping = self.training and max(self.config.dropout, self.config.attention_dropout) > 0.0
        micro_batch = self.counter.advance() if dropping else None
        documents = self.documents.advance()
        if self.recompute and torch.is_grad_enabled():
            # Shapes of saved tensors differ under ZeRO-3, whose weights are gathered for each use only.
            return checkpoint(
                self._run,
                x,
                micro_batch,
                documents,
                use_reentrant=False,
                preserve_rng_state=False,
                determinism_check="none",
            )
        return self._run(x, micro_batch, documents)

    def _run(self, x: Tensor, micro_batch: int | None, documents: DocumentLayout | None) -> Tensor:
        attention_keys = self._keys(micro_batch, 0, x) if self.config.attention_dropout > 0.0 else None
        x = x + self._drop(self.attention(self.norm1(x), attention_keys, documents), micro_batch, 1)
        return x + self._drop(self.mlp(self.norm2(x)), micro_batch, 2)

    def _drop(self, x: Tensor, micro_batch: int | None, place: int) -> Tensor:
        if micro_batch is None or self.config.dropout == 0.0:
            return x
        keys = self._keys(micro_batch, place, x)
        return dropout(x, self.config.dropout, keys, ulysses.first_position(x.shape[1], self.parallel))

    def _keys(self, micro_batch: int | None, place: int, x: Tensor) -> Tensor | None:
        """Keys of one of this block's three dropout sites; site 0 of the model is the embedding's."""
        if micro_batch is None:
            return None
        site = 1 + 3 * self.index + place
        return dropout_keys(self.clock, self.parallel, micro_batch, site, x.shape[0], x.device)
