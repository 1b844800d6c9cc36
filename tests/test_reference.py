"""The oracle, checked by hand-derived gradients and against torch's own optimizer."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from tests.reference import LossScale, token_loss, train_mixed_reference, train_reference

VOCAB, STEPS, BATCH, SEQUENCE = 7, 3, 2, 5


class Bigram(nn.Module):
    """Logits of the next token from the present one, through a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(VOCAB, 4, generator=generator))
        self.bias = nn.Parameter(torch.randn(VOCAB, generator=generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens] @ self.weight.T + self.bias


def batches() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (STEPS, BATCH, SEQUENCE)
    tokens = torch.randint(VOCAB, shape, generator=generator)
    labels = torch.randint(VOCAB, shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[:, 0, 0] = True
    mask[1, 1] = False  # a sample without a single label that counts
    return tokens, labels, mask


@pytest.mark.parametrize(("clipping", "momentum"), [(0.0, 0.0), (0.05, 0.0), (100.0, 0.0), (0.05, 0.9)])
def test_training_equals_torch_sgd_and_clip_grad_norm(clipping: float, momentum: float):
    tokens, labels, mask = batches()
    run = train_reference(
        Bigram,
        tokens,
        labels,
        mask,
        learning_rate=0.3,
        gradient_clipping=clipping,
        optimizer=(lambda named: torch.optim.SGD(named.values(), 0.3, momentum)) if momentum else None,
    )
    model = Bigram()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum)
    for step in range(STEPS):
        optimizer.zero_grad()
        ignored = labels[step].masked_fill(~mask[step], -100)
        loss = nn.functional.cross_entropy(model(tokens[step]).flatten(0, 1), ignored.flatten())
        loss.backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(run.gradients[name], parameter.grad)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clipping or math.inf)
        optimizer.step()
        assert run.losses[step] == pytest.approx(loss.item(), rel=1e-6)
        assert run.grad_norms[step] == pytest.approx(norm.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.weights[name], parameter.detach())


def test_the_bias_gradient_is_the_softmax_minus_one_at_the_label():
    tokens, labels, mask = (tensor[:1] for tensor in batches())
    run = train_reference(Bigram, tokens, labels, mask, learning_rate=0.0)
    probabilities = Bigram()(tokens).softmax(-1)
    errors = (probabilities - nn.functional.one_hot(labels, VOCAB))[mask]
    torch.testing.assert_close(run.gradients["bias"], (errors.sum(0) / mask.sum()).detach())
    assert torch.equal(run.weights["bias"], Bigram().bias)


def test_the_loss_of_uniform_logits_is_ln_vocabulary_without_the_padding():
    labels, mask = torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[True, False, True, True]])
    logits = torch.zeros(1, 4, 128)
    assert token_loss(logits, labels, mask).item() == pytest.approx(math.log(128))
    assert token_loss(logits, labels, mask, vocab_size=100).item() == pytest.approx(math.log(100))


def test_labels_under_the_mask_do_not_matter():
    tokens, labels, mask = batches()
    run = train_reference(Bigram, tokens, labels, mask, learning_rate=0.3)
    other = train_reference(Bigram, tokens, labels.masked_fill(~mask, -100), mask, learning_rate=0.3)
    assert run.losses == other.losses


def test_a_step_without_labels_is_refused():
    tokens, labels, mask = batches()
    mask[2] = False
    with pytest.raises(ValueError, match=r"steps \[2\] have no unmasked token"):
        train_reference(Bigram, tokens, labels, mask, learning_rate=0.3)
    with pytest.raises(ValueError, match="same"):
        train_reference(Bigram, tokens, labels[:, :1], mask, learning_rate=0.3)


@pytest.mark.parametrize(
    ("scale", "overflows", "values"),
    [
        (LossScale(8.0), (0, 1), [8, 8, 8]),
        # the third good step is the first after two of them
        (LossScale(8.0, window=2, hysteresis=1), (), [8, 8, 16, 16, 32]),
        (LossScale(8.0, window=2, hysteresis=1), (0, 2), [4, 4, 2, 2, 2, 4]),
        (LossScale(8.0, window=9, hysteresis=3), (0, 2, 3, 5), [8, 8, 8, 4, 4, 2]),
        (LossScale(8.0, window=9, hysteresis=2, consecutive=True), (0, 2, 3), [8, 8, 8, 4]),
        (LossScale(8.0, window=1, hysteresis=2), (0, 3, 4), [8, 8, 16, 16, 8]),  # refilled by doubling
    ],
)
def test_a_loss_scale_by_hand(scale: LossScale, overflows: tuple[int, ...], values: list[float]):
    seen = []
    for step in range(len(values)):
        scale.update(step in overflows)
        seen.append(scale.value)
    assert seen == values


def test_mixed_precision_is_the_same_training_whatever_the_scale():
    tokens, labels, mask = batches()
    exact, *mixed = (
        train(Bigram, tokens, labels, mask, learning_rate=0.3, gradient_clipping=0.05, vocab_size=VOCAB)
        for train in (
            train_reference,
            *(partial(train_mixed_reference, scale=LossScale(value)) for value in (1.0, 1000.0)),
        )
    )
    for run in mixed:
        assert run.losses == pytest.approx(exact.losses, rel=2**-9)
        assert run.grad_norms == pytest.approx(exact.grad_norms, rel=2**-9)
        assert run.skipped == (False,) * STEPS
    # The masters have learned more than their weights show.
    assert not torch.equal(mixed[0].weights["weight"], mixed[0].weights["weight"].half().float())


def test_a_skipped_step_changes_nothing_but_the_scale():
    run = train_mixed_reference(
        Bigram,
        *batches(),
        learning_rate=0.3,
        scale=LossScale(2.0, window=9, hysteresis=1),
        overflows=range(STEPS),
    )
    assert run.scales == (1.0, 0.5, 0.25)
    assert run.skipped == (True,) * STEPS
    assert run.grad_norms == (math.inf,) * STEPS
    assert all(
        torch.equal(run.weights[name], each.half().float()) for name, each in Bigram().named_parameters()
    )
