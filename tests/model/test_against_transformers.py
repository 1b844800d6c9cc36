"""An independent check of the model: transformers' implementation with the same weights, value for value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from pipeline.job.models import load_model
from pipeline.model.gpt import SequentialGPT, plan_layers
from pipeline.parallel.context import Parallel
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import ParameterFactory
from tests.model.hugging_face import KINDS, build, in_our_layout


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_those_of_transformers(kind: str, tmp_path: Path):
    theirs = build(kind)
    theirs.config.save_pretrained(tmp_path)
    config = load_model(str(tmp_path), "cpu")  # the model is built from the file that transformers wrote
    plans = plan_layers(config, ParameterFactory(0, Parallel.single()), DropoutClock(0, 2), "none")
    ours = SequentialGPT(plans).eval()
    # Rows of padding hold something, to show that nothing depends on them.
    weights = in_our_layout(dict(theirs.named_parameters()), config, padding=7.0)
    ours.load_state_dict(weights, strict=True)

    tokens = torch.randint(config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(5))
    expected = theirs(tokens).logits
    found = ours(tokens)[..., : config.vocab_size]
    assert expected.std() > 0.5  # not a comparison of zeros
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())

    for logits in (expected, found):
        functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    named = dict(ours.named_parameters())
    for name, gradient in in_our_layout(gradients, config, padding=0.0).items():
        assert (named[name].grad - gradient).norm() <= 1e-5 * gradient.norm(), name
