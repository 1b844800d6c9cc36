"""Causal self-attention with grouped key/value heads.

Shapes: b batch, t sequence, n sequence-parallel size, g query heads per key/value head, d head size;
"groups" are this tensor rank's key/value heads.

The q, k, v projection's output rows are interleaved by group: for each key/value head its g query heads, then
its key, then its value. A tensor rank's slice of the weight is then contiguous, and a group can travel whole
through the sequence all-to-all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.model.config import ModelConfig
from pipeline.model.modules import RMSNorm
from pipeline.model.rotary import Rotary
from pipeline.parallel import ulysses
from pipeline.parallel.documents import DocumentLayout
from pipeline.parallel.dropout import keep_mask
from pipeline.parallel.parameters import ParameterFactory
from pipeline.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class Attention(nn.Module):
    """[b, t / n, hidden] -> [b, t / n, hidden]."""

    def __init__(
        self, config: ModelConfig, make: ParameterFactory, rotary: Rotary | None, recompute: bool
    ) -> None:
        super().__init__()
        self.config, self.parallel, self.rotary, self.recompute = config, make.parallel, rotary, recompute
        heads, kv_heads, d = config.num_heads, config.num_kv_heads, config.head_dim
        self.per_group = heads // kv_heads
        output_std = config.init_std / (2 * config.num_layers) ** 0.5
        rows = (heads + 2 * kv_heads) * d
        self.qkv = ColumnParallelLinear(
            make.under("qkv"), config.hidden_size, rows, config.bias or config.qkv_bias, config.init_std
        )
        self.out = RowParallelLinear(
            make.under("out"), heads * d, config.hidden_size, config.bias, output_std
        )
        if config.qk_norm:
            # Tensor ranks hold different heads; sequence ranks do, too, but DeepSpeed sums over those.
            tensor_group = make.parallel.tensor_group
            self.q_norm = RMSNorm(make.under("q_norm"), d, config.norm_eps, tensor_group)
            self.k_norm = RMSNorm(make.under("k_norm"), d, config.norm_eps, tensor_group)
        # Heads are numbered through tensor ranks, then sequence ranks, for dropout's sake.
        here = make.parallel.coordinates
        local = heads // make.parallel.mesh.tensor // make.parallel.mesh.sequence
        self.first_head = (here.tensor * make.parallel.mesh.sequence + here.sequence) * local

    def forward(
        self, x: Tensor, dropout_keys: Tensor | None = None, documents: DocumentLayout | None = None
    ) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.per_group + 2, self.config.head_dim))
        q, k, v = self._split(ulysses.gather_sequence(qkv, self.parallel))
        if self.recompute and torch.is_grad_enabled():
            context = checkpoint(
                self._attend, q, k, v, dropout_keys, documents, use_reentrant=False, preserve_rng_state=False
            )
        else:
            context = self._attend(q, k, v, dropout_keys, documents)
        return self.out(ulysses.scatter_sequence(context, self.parallel).flatten(2))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, t, groups, g + 2, d] -> q [b, groups * g, t, d]; k, v [b, groups, t, d]."""
        q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_keys: Tensor | None,
        documents: DocumentLayout | None,
    ) -> Tensor:
        """Whole sequences of this rank's heads -> [b, t, heads, d]."""
        if self.rotary is not None:
            positions = None if documents is None else documents.positions
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        if dropout_keys is not None:
            context = self._attend_with_dropout(q, k, v, dropout_keys, documents)
        elif documents is not None:
            context = documents.attend(q, k, v, _causal_attention)
        else:
            context = _causal_attention(q, k, v)
        return context.transpose(1, 2)

    def _attend_with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, documents: DocumentLayout | None
    ) -> Tensor:
        """Explicit attention: a fused kernel cannot drop the same probabilities in every layout."""
        b, heads, t, d = q.shape
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        forbidden = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
        if documents is not None:
            forbidden = forbidden | documents.cross_document_mask()
        scores = (q @ k.transpose(-1, -2) * d**-0.5).masked_fill(forbidden, float("-inf"))
        probabilities = scores.float().softmax(-1).to(q.dtype)
        # Rows of the mask are (head, query position) pairs, its channels the key positions.
        kept = keep_mask(
            torch.Size((b, heads * t, t)), self.config.attention_dropout, keys, self.first_head * t
        )
        kept = kept.view(b, heads, t, t).to(q.dtype).div_(1.0 - self.config.attention_dropout)
        return (probabilities * kept) @ v


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[b, heads, t, d], k and v of as many or fewer heads -> [b, heads, t, d]."""
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
