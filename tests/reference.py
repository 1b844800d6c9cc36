"""The oracle of the layout tests: the same training in plain PyTorch, one process, no DeepSpeed.

It is meant to be checked by reading. Nothing here is shared with the code under test but the model.
"""

from __future__ import annotations

from collections.abc import Callable
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
