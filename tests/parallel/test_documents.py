"""Document masks in one process: the logits of a document are those it has alone, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.model.config import ModelConfig
from pipeline.model.gpt import SequentialGPT, plan_layers
from pipeline.parallel.context import Parallel
from pipeline.parallel.documents import DocumentReader, PassDocuments, document_layout
from pipeline.parallel.dropout import DropoutClock
from pipeline.parallel.parameters import ParameterFactory
from tests.parity.cases import GPT, LLAMA

VOCABULARY = 257
LEARNED = replace(GPT, max_position_embeddings=256)
ROTARY = replace(LLAMA, max_position_embeddings=256)
BOTH = pytest.mark.parametrize("config", [LEARNED, ROTARY], ids=["learned", "rotary"])


class Model:
    """A model in one process, and its documents."""

    def __init__(self, config: ModelConfig, recompute: str = "none", rows: int = 1) -> None:
        self.pass_documents = PassDocuments()
        self.clock = DropoutClock(5, rows)
        factory = ParameterFactory(3, Parallel.single())
        self.gpt = SequentialGPT(plan_layers(config, factory, self.clock, recompute, self.pass_documents))

    def __call__(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """Logits; each call is a step of one micro-batch."""
        self.clock.step += 1
        self.pass_documents.set_documents([documents], "cpu")
        return self.gpt(tokens)

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad.clone() for name, parameter in self.gpt.named_parameters()}


def text(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A row of documents with these lengths: tokens and document numbers, [1, t]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (1, sum(lengths)), generator=generator)
    return tokens, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def test_layout_of_two_rows() -> None:
    layout = document_layout(torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 2, 2]]), "cpu")
    assert layout.positions.tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 0, 1]]
    assert layout.groups == ((1, 1), (3, 2), (1, 3))
    assert layout.order.tolist() == [5, 3, 4, 6, 7, 8, 9, 0, 1, 2]
    assert layout.order[layout.place].tolist() == list(range(10))
    expected = [[0, 0, 0, 1, 1]] * 3 + [[1, 1, 1, 0, 0]] * 2
    assert layout.cross_document_mask()[0, 0].int().tolist() == expected


def test_a_new_row_begins_a_new_document_even_with_the_same_number() -> None:
    assert document_layout(torch.zeros(3, 4, dtype=torch.int64), "cpu").groups == ((3, 4),)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_logits_do_not_depend_on_neighbours_to_the_bit(config: ModelConfig, dtype: torch.dtype) -> None:
    model = Model(config)
    model.gpt.to(dtype)
    document, _ = text(37, seed=1)
    alone = model(document, None)
    for before, after in [
        ((), (91,)),
        ((5,), (40, 37, 9)),
        ((60, 1, 30), ()),
        ((37,), (37, 17)),
        ((91,), ()),
    ]:
        tokens, numbers = text(*before, 37, *after, seed=len(before) + 2)
        begin = sum(before)
        tokens[:, begin : begin + 37] = document
        assert torch.equal(model(tokens, numbers)[:, begin : begin + 37], alone)


@BOTH
@torch.no_grad()
def test_logits_do_not_depend_on_other_rows(config: ModelConfig) -> None:
    model = Model(config)
    parts = [text(20, 12, seed=1), text(12, 12, 8, seed=2), text(32, seed=3), text(*[1] * 32, seed=4)]
    tokens, numbers = (torch.cat(each) for each in zip(*parts, strict=True))
    together = model(tokens, numbers)
    for row, part in enumerate(parts):
        assert torch.equal(together[row : row + 1], model(*part))


@BOTH
@torch.no_grad()
def test_without_the_mask_neighbours_matter(config: ModelConfig) -> None:
    model = Model(config)
    tokens, numbers = text(20, 12)
    assert not torch.allclose(model(tokens, None)[:, 20:], model(tokens, numbers)[:, 20:], atol=1e-3)


@BOTH
@torch.no_grad()
def test_one_document_is_plain_causal_attention(config: ModelConfig) -> None:
    model = Model(config)
    tokens, numbers = text(50)
    assert torch.equal(model(tokens, numbers), model(tokens, None))


@BOTH
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_are_the_sum_over_documents_alone(config: ModelConfig, recompute: str) -> None:
    lengths = (20, 7, 1, 20)
    tokens, numbers = text(*lengths)
    weights = torch.randn(48, VOCABULARY, generator=torch.Generator().manual_seed(9)) / 10
    packed, single = Model(config, recompute), Model(config)
    (packed(tokens, numbers)[0, :, :VOCABULARY] * weights).sum().backward()
    for part, weight in zip(tokens.split(lengths, 1), weights.split(lengths), strict=True):
        (single(part, None)[0, :, :VOCABULARY] * weight).sum().backward()
    for name, gradient in single.gradients().items():
        found = packed.gradients()[name]
        assert (found - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


@BOTH
def test_dropout_of_attention_keeps_the_mask(config: ModelConfig) -> None:
    """Dropout is the same for the same place: a document's logits still do not show what is before it."""
    tokens, numbers = text(20, 12)
    changed = tokens.clone()
    changed[:, :20] = (changed[:, :20] + 1) % VOCABULARY
    dropping = replace(config, attention_dropout=0.3, dropout=0.1)
    logits = [Model(dropping)(each, numbers) for each in (tokens, changed)]
    assert torch.equal(logits[0][:, 20:], logits[1][:, 20:])
    assert not torch.equal(logits[0][:, :20], logits[1][:, :20])


def test_dropout_path_equals_the_fused_one() -> None:
    """At a rate too low to drop anything here, explicit attention gives what each document alone gives."""
    tokens, numbers = text(20, 12, 9)
    for config in (LEARNED, ROTARY):
        explicit = Model(replace(config, attention_dropout=1e-9))(tokens, numbers)
        torch.testing.assert_close(explicit, Model(config)(tokens, numbers), rtol=1e-5, atol=1e-5)


def test_layers_read_micro_batches_in_order_and_anew_in_each_pass() -> None:
    pass_documents = PassDocuments()
    first, second = DocumentReader(pass_documents), DocumentReader(pass_documents)
    pass_documents.set_documents([torch.zeros(1, 4), torch.tensor([[0, 0, 1, 1]])], "cpu")
    assert [first.advance().groups for _ in range(2)] == [((1, 4),), ((2, 2),)]
    assert second.advance().groups == ((1, 4),)
    pass_documents.set_documents([torch.tensor([[0, 1, 2, 3]])], "cpu")
    assert [reader.advance().groups for reader in (first, second)] == [((4, 1),)] * 2
    with pytest.raises(IndexError):
        first.advance()
    pass_documents.set_documents([None, None], "cpu")
    assert first.advance() is None


def test_a_pass_has_documents_or_has_none() -> None:
    with pytest.raises(ValueError, match="1 of 2 micro-batches"):
        PassDocuments().set_documents([torch.zeros(1, 4), None], "cpu")
