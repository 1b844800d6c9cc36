"""Tensor-sliced layers (Megatron-LM, Shoeybi et al. 2019): linears, embedding and loss.

A pair of linears costs one all-reduce in each direction (Y = f(X A) B):

            A by columns             B by rows
          [ A0 | A1 ]                [ B0 ]      rank r computes f(X A_r) B_r,
                                     [ B1 ]      the sum over r is the result

`nn.Linear` stores the transpose, so that columns lie along dimension 0 of the weight, rows along 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pipeline.parallel import collectives
from pipeline.parallel.context import Group
from pipeline.parallel.parameters import ParameterFactory


class ColumnParallelLinear(nn.Module):
    """[..., in] replicated over tensor ranks -> [..., out / tensor]."""

    def __init__(self, make: ParameterFactory, size_in: int, size_out: int, bias: bool, std: float) -> None:
        super().__init__()
        self.group = make.parallel.tensor_group
        self.weight = make.normal("weight", (size_out, size_in), std, dim=0)
        self.bias = make.constant("bias", (size_out,), 0.0, dim=0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(collectives.copy_to(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """[..., in / tensor] -> [..., out] replicated over tensor ranks."""

    def __init__(self, make: ParameterFactory, size_in: int, size_out: int, bias: bool, std: float) -> None:
        super().__init__()
        self.group = make.parallel.tensor_group
        self.weight = make.normal("weight", (size_out, size_in), std, dim=1)
        self.bias = make.constant("bias", (size_out,), 0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return functional.linear(x, self.weight, self.bias)
        partial = collectives.reduce_from(functional.linear(x, self.weight), self.group)
        # The bias is added after the sum: adding it on each rank would count it tensor-size times.
        return partial if self.bias is None else partial + self.bias


class VocabularyEmbedding(nn.Module):
    """One table [vocabulary / tensor, hidden], read at the input and, when tied, again as output layer.

    The direction follows the input's type, so that both uses go through ``__call__``, where ZeRO-3
    gathers the weight: token ids [b, t] give hidden states [b, t, hidden]; hidden states give logits
    [b, t, vocabulary / tensor].
    """

    def __init__(self, make: ParameterFactory, vocabulary: int, hidden: int, std: float) -> None:
        super().__init__()
        self.group = make.parallel.tensor_group
        self.first = make.parallel.coordinates.tensor * (vocabulary // make.parallel.mesh.tensor)
        self.weight = make.normal("weight", (vocabulary, hidden), std, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        return (
            functional.linear(collectives.copy_to(x, self.group), self.weight)
            if x.is_floating_point()
            else self._embed(x)
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.group is None:
            return functional.embedding(tokens, self.weight)
        local = tokens - self.first
        out_of_shard = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(out_of_shard, 0), self.weight)
        return collectives.reduce_from(rows.masked_fill(out_of_shard.unsqueeze(-1), 0.0), self.group)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Cross-entropy over logits whose last dimension is sliced over tensor ranks; never gathers them.

    With m the global maximum and s = sum_j exp(z_j - m), the loss of label y is log s - (z_y - m). Three
    all-reduces of one number per token: m, s, and z_y (nonzero on the rank that holds y).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: Group) -> Tensor:
        shifted = logits.float()
        maximum = collectives.all_reduce(shifted.amax(-1), group, dist.ReduceOp.MAX)
        shifted = shifted - maximum.unsqueeze(-1)
        local = labels - first
        out_of_shard = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(out_of_shard, 0).unsqueeze(-1)
        target = shifted.gather(-1, local).squeeze(-1).masked_fill(out_of_shard, 0.0)
        target = collectives.all_reduce(target, group)
        exponentials = shifted.exp_()
        total = collectives.all_reduce(exponentials.sum(-1), group)
        probabilities = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, out_of_shard)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, out_of_shard = ctx.saved_tensors
        here = (~out_of_shard).to(probabilities.dtype).unsqueeze(-1)
        grad_logits = probabilities.scatter_add(-1, local, -here).mul_(grad.unsqueeze(-1))
        return grad_logits.to(ctx.dtype), None, None, None


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: int, first: int, group: Group
) -> Tensor:
    """Loss per token in fp32, [b, t], from logits [b, t, padded vocabulary / tensor] and labels [b, t].

    Columns from `vocabulary` on are padding and take no part. `first` is the global id of this rank's
    first column.
    """
    if group is None:
        real = logits[..., :vocabulary].float().flatten(0, -2)
        return functional.cross_entropy(real, labels.flatten(), reduction="none").view(labels.shape)
    padding = first + logits.shape[-1] - vocabulary
    if padding > 0:
        columns = torch.arange(first, first + logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(columns >= vocabulary, torch.finfo(logits.dtype).min)
    return _VocabularyCrossEntropy.apply(logits, labels, first, group)
