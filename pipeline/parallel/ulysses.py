"""DeepSpeed-Ulysses sequence parallelism (Jacobs et al. 2023): attention sees whole sequences of fewer heads.

Everywhere else a rank holds positions [r t / n, (r + 1) t / n) of its samples. Around attention two
all-to-alls trade that slice of the sequence for a slice of the heads:

    [b, t / n, groups, g + 2, d]  -->  [b, t, groups / n, g + 2, d]   q, k, v of a group travel together
    [b, t, heads / n, d]          -->  [b, t / n, heads, d]           the attention output comes back
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.parallel import collectives
from pipeline.parallel.context import Parallel


def sequence_slice(tensor: Tensor, parallel: Parallel) -> Tensor:
    """This rank's positions of [b, t, ...]."""
    return tensor.chunk(parallel.mesh.sequence, dim=1)[parallel.coordinates.sequence]


def first_position(length: int, parallel: Parallel) -> int:
    """Global position of a slice's first token; `length` is the slice's own length, t / sequence size."""
    return parallel.coordinates.sequence * length


def gather_sequence(qkv: Tensor, parallel: Parallel) -> Tensor:
    """[b, t / n, groups, g + 2, d] -> [b, t, groups', g' + 2, d] with groups' * g' = groups * g / n.

    With fewer groups than sequence ranks, a group's queries are first divided among n / groups copies of
    its key and value; autograd sums the copies' gradients.
    """
    size, groups = parallel.mesh.sequence, qkv.shape[2]
    if size == 1:
        return qkv
    if groups < size:
        qkv = _divide_groups(qkv, size // groups)
    return collectives.all_to_all(qkv, parallel.sequence_group, split_dim=2, join_dim=1)


def scatter_sequence(context: Tensor, parallel: Parallel) -> Tensor:
    """[b, t, heads / n, d] -> [b, t / n, heads, d]."""
    return collectives.all_to_all(context, parallel.sequence_group, split_dim=1, join_dim=2)


def _divide_groups(qkv: Tensor, copies: int) -> Tensor:
    """[b, t, groups, g + 2, d] -> [b, t, groups * copies, g / copies + 2, d]."""
    b, t, groups, width, d = qkv.shape
    queries = qkv[..., :-2, :].reshape(b, t, groups * copies, (width - 2) // copies, d)
    keys_values = qkv[..., -2:, :].repeat_interleave(copies, dim=2)
    return torch.cat([queries, keys_values], dim=3)
