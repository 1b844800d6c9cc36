"""The oracle of the layout tests: the same training in plain PyTorch, one process, no DeepSpeed.

It is meant to be checked by reading. Nothing here is shared with the code under test but the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ReferenceRun:
    """What training gave.

    Attributes:
        losses: By step, of the weights before the step.
        grad_norms: By step, L2 norm over all parameters, before clipping.
        gradients: Of the first step, before clipping, by parameter name.
        weights: After the last step, by parameter name.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train_reference(
    build_model: Callable[[], nn.Module],
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    *,
    learning_rate: float,
    gradient_clipping: float = 0.0,
    vocab_size: int | None = None,
    optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> ReferenceRun:
    """Train for ``len(tokens)`` SGD steps in fp32, each on one whole global batch.

    The update is ``w -= learning_rate * g * min(1, gradient_clipping / (|g| + 1e-6))``, the epsilon being
    that of `torch.nn.utils.clip_grad_norm_` and of DeepSpeed. `optimizer`, if given, takes its place.

    Args:
        build_model: Makes the module with its initial weights; ``module(tokens)`` gives logits
            ``[batch, sequence, vocabulary]``. A tied weight counts once, under its first name.
        tokens: int64 ``[steps, batch, sequence]``.
        labels: int64 ``[steps, batch, sequence]``, shifted already: what follows each token. Any value
            may stand where `mask` is False.
        mask: bool ``[steps, batch, sequence]``, True where the label counts.
        learning_rate: The same in every step.
        gradient_clipping: Largest norm; 0 is off.
        vocab_size: Logits from this column on are padding and left out of the softmax.
        optimizer: Makes another optimizer over the named parameters, with a learning rate of its own.

    Raises:
        ValueError: shapes or types differ from the above, or a step has no label that counts.
    """
    _check(tokens, labels, mask)
    model = build_model().float()
    parameters = dict(model.named_parameters())
    update = optimizer(parameters).step if optimizer else partial(_sgd, parameters, learning_rate)
    losses, grad_norms, gradients = [], [], {}
    for step_tokens, step_labels, step_mask in zip(tokens, labels, mask, strict=True):
        model.zero_grad(set_to_none=True)
        loss = token_loss(model(step_tokens), step_labels, step_mask, vocab_size)
        loss.backward()
        gradients = gradients or _gradients(parameters)
        losses.append(loss.item())
        grad_norms.append(_clip(parameters, gradient_clipping))
        update()
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return ReferenceRun(tuple(losses), tuple(grad_norms), gradients, weights)


@dataclass
class LossScale:
    """fp16's loss scale, by the rules that DeepSpeed documents for the keys of its ``fp16`` block.

    Attributes:
        value: The scale now; with `window` None it stays.
        window: After so many steps in a row without overflow, the next good step doubles the scale.
        hysteresis: So many overflows in all until one halves it, from when on each does; refilled when it
            doubles, or by every good step if `consecutive`.
    """

    value: float
    window: int | None = None
    hysteresis: int = 2
    consecutive: bool = False

    def __post_init__(self) -> None:
        self.good, self.left = 0, self.hysteresis

    def update(self, overflow: bool) -> None:
        if self.window is None:
            return
        if overflow:
            self.good = 0
            if self.left > 1:
                self.left -= 1
            else:
                self.value /= 2
            return
        doubles = self.good > 0 and self.good % self.window == 0
        if doubles or self.consecutive:
            self.left = self.hysteresis
        self.value *= 2 if doubles else 1
        self.good += 1


@dataclass(frozen=True)
class MixedRun(ReferenceRun):
    """What training in fp16 gave; gradients and their norms without the scale, infinite where skipped.

    Attributes:
        skipped: By step, whether the update was left out.
        scales: The loss scale after each step.
    """

    skipped: tuple[bool, ...]
    scales: tuple[float, ...]


def train_mixed_reference(
    build_model: Callable[[], nn.Module],
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    *,
    learning_rate: float,
    scale: LossScale,
    gradient_clipping: float = 0.0,
    vocab_size: int | None = None,
    optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer] | None = None,
    overflows: Collection[int] = (),
) -> MixedRun:
    """As `train_reference`, in fp16 with fp32 masters (Micikevicius et al., Mixed Precision Training, 2018).

    The loss is multiplied by the scale, the gradients of the fp16 weights, as fp32, are divided by it. They
    update the masters, of which the weights are rounded copies. Where a gradient is not finite, nothing is
    updated but the scale.

    Args:
        overflows: Steps whose gradient is taken to be infinite, whatever it is.
    """
    _check(tokens, labels, mask)
    model = build_model()
    weights = dict(model.named_parameters())
    for weight in weights.values():
        weight.data = weight.data.half()
    masters = {name: nn.Parameter(weight.detach().float()) for name, weight in weights.items()}
    update = optimizer(masters).step if optimizer else partial(_sgd, masters, learning_rate)
    losses, grad_norms, gradients, skipped, scales = [], [], {}, [], []
    for step, (step_tokens, step_labels, step_mask) in enumerate(zip(tokens, labels, mask, strict=True)):
        model.zero_grad(set_to_none=True)
        loss = token_loss(model(step_tokens), step_labels, step_mask, vocab_size)
        (loss * scale.value).backward()
        for name, master in masters.items():
            master.grad = weights[name].grad.float() / scale.value
        gradients = gradients or _gradients(masters)
        norm = _clip(masters, gradient_clipping)
        skipped.append(step in overflows or not math.isfinite(norm))
        losses.append(loss.item())
        grad_norms.append(math.inf if skipped[-1] else norm)
        if not skipped[-1]:
            update()
            for name, weight in weights.items():
                weight.data = masters[name].detach().half()
        scale.update(skipped[-1])
        scales.append(scale.value)
    final = {name: master.detach().clone() for name, master in masters.items()}
    return MixedRun(tuple(losses), tuple(grad_norms), gradients, final, tuple(skipped), tuple(scales))


def token_loss(logits: Tensor, labels: Tensor, mask: Tensor, vocab_size: int | None = None) -> Tensor:
    """Sum of the token losses where `mask` is True, over their number.

    Args:
        logits: ``[batch, sequence, vocabulary]``.
        labels: int64 ``[batch, sequence]``.
        mask: bool ``[batch, sequence]``.
        vocab_size: Columns of the logits that are tokens; default: all.
    """
    logits = logits[..., :vocab_size].float()
    return nn.functional.cross_entropy(logits[mask], labels[mask], reduction="sum") / mask.sum()


def _check(tokens: Tensor, labels: Tensor, mask: Tensor) -> None:
    if tokens.ndim != 3 or tokens.shape != labels.shape or tokens.shape != mask.shape:
        shapes = [tuple(tensor.shape) for tensor in (tokens, labels, mask)]
        raise ValueError(f"tokens, labels, mask are {shapes}: must all be the same [steps, batch, sequence]")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}: must be torch.bool, for it is used as an index")
    empty = [step for step, step_mask in enumerate(mask) if not step_mask.any()]
    if empty:
        raise ValueError(f"steps {empty} have no unmasked token: their loss is not defined")


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}


def _clip(parameters: dict[str, nn.Parameter], gradient_clipping: float) -> float:
    """Scale the gradients to at most the given norm, and return the norm they had."""
    norm = torch.stack([parameter.grad.norm() for parameter in parameters.values()]).norm().item()
    if gradient_clipping and norm > gradient_clipping:
        for parameter in parameters.values():
            parameter.grad.mul_(gradient_clipping / (norm + 1e-6))
    return norm


@torch.no_grad()
def _sgd(parameters: dict[str, nn.Parameter], learning_rate: float) -> None:
    for parameter in parameters.values():
        parameter.sub_(learning_rate * parameter.grad)
