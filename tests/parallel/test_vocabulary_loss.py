"""The vocabulary-parallel cross-entropy against torch's on the whole logits, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.engine.distributed import start_distributed
from pipeline.parallel.context import Parallel
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.tensor import vocabulary_cross_entropy
from tests.harness import run_ranks
from tests.parity.ranks import TIMEOUT

PADDED = 384
# 257: of four ranks' 96 columns the third has 65 that are tokens, the fourth none. 384: no padding at all.
VOCABULARIES = (257, 384, 100)


def inputs(vocabulary: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [2, 5, padded], labels that meet every rank's range, and the gradient of each token's loss."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(2, 5, PADDED, generator=generator) * scale
    labels = torch.linspace(0, vocabulary - 1, 10).long().view(2, 5)
    return logits, labels, torch.randn(2, 5, generator=generator)


def loss_rank(vocabulary: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    start_distributed("cpu", 0, TIMEOUT)
    ranks = torch.distributed.get_world_size()
    parallel = Parallel.create(Mesh(tensor=ranks), TIMEOUT)
    logits, labels, gradient = inputs(vocabulary, scale)
    here = parallel.coordinates.tensor
    part = logits.to(dtype).chunk(ranks, -1)[here].clone().requires_grad_()
    losses = vocabulary_cross_entropy(
        part, labels, vocabulary, here * (PADDED // ranks), parallel.tensor_group
    )
    losses.backward(gradient)
    return losses.detach(), part.grad


def expected(vocabulary: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits, labels, gradient = inputs(vocabulary, scale)
    logits = logits.to(dtype).requires_grad_()
    real = logits[..., :vocabulary].float()
    losses = functional.cross_entropy(real.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    losses.backward(gradient)
    return losses.detach(), logits.grad


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("ranks", "scale", "dtype"), [
    (2, 1.0, torch.float32),
    (4, 1.0, torch.float32),
    (4, 100.0, torch.float32),  # exp() overflows unless the maximum of all ranks is subtracted
    (4, 3.0, torch.bfloat16),
], ids=str)  # fmt: skip
def test_equals_cross_entropy_on_whole_logits(vocabulary: int, ranks: int, scale: float, dtype: torch.dtype):
    results = run_ranks(loss_rank, ranks, vocabulary, scale, dtype)
    losses, gradient = expected(vocabulary, scale, dtype)
    for found, _ in results:
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=1e-5)
    whole = torch.cat([part for _, part in results], -1)
    assert whole.dtype == dtype
    torch.testing.assert_close(whole, gradient, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert not whole[..., vocabulary:].any()  # padding is never pushed anywhere


def test_one_rank_leaves_padding_out():
    logits, labels, _ = inputs(257, 1.0)
    losses = vocabulary_cross_entropy(logits, labels, 257, 0, None)
    torch.testing.assert_close(losses, expected(257, 1.0, torch.float32)[0])
    logits[..., 257:] = 1e6
    assert torch.equal(vocabulary_cross_entropy(logits, labels, 257, 0, None), losses)
