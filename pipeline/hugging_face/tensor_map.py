"""Our parameters and the tensors of a Hugging Face model: names, shapes and the order of rows. No torch.

Each of our parameters consists of rows of their tensors, concatenated and put into our order:

    theirs                 ours
    q | k | v              for each key/value head its query heads, its key, its value
    gate | up              gate 0, up 0, gate 1, up 1, ...
    vocabulary             the same, and rows of zeros up to a multiple of 128

GPT-2 has q, k, v in one tensor, and stores the weights of its linear layers transposed, [in, out].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeline.hugging_face.families import family_of
from pipeline.model.config import ModelConfig

TIED = "tied_modules.embed.weight"
OUTPUT = "lm_head.weight"


class Block(NamedTuple):
    """Rows ``first .. first + rows - 1`` of a tensor of theirs; of a transposed one, columns."""

    tensor: str
    first: int
    rows: int


@dataclass(frozen=True, eq=False)
class Entry:
    """One of our parameters.

    Attributes:
        name: Ours.
        blocks: Of their tensors, concatenated.
        columns: None for a vector.
        transposed: They store a matrix as [columns, rows].
        order: For each of our rows its number among those of the blocks, -1 for padding, [rows].
    """

    name: str
    blocks: tuple[Block, ...]
    columns: int | None
    transposed: bool = False
    order: np.ndarray = field(kw_only=True, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Ours."""
        return (len(self.order),) if self.columns is None else (len(self.order), self.columns)

    @property
    def theirs(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of theirs."""
        rows: dict[str, int] = {}
        for block in self.blocks:
            rows[block.tensor] = block.first + block.rows
        return {name: self._their_shape(count) for name, count in rows.items()}

    def _their_shape(self, rows: int) -> tuple[int, ...]:
        if self.columns is None:
            return (rows,)
        return (self.columns, rows) if self.transposed else (rows, self.columns)

    @cached_property
    def places(self) -> np.ndarray:
        """For each row of the blocks its number among ours: the inverse of `order`."""
        places = np.empty(sum(block.rows for block in self.blocks), dtype=np.int64)
        real = np.flatnonzero(self.order >= 0)
        places[self.order[real]] = real
        return places

    def rows_of(self, tensor: str) -> np.ndarray:
        """Where the rows of a tensor of theirs are among ours, in their order."""
        parts, begin = [], 0
        for block in self.blocks:
            if block.tensor == tensor:
                parts.append(self.places[begin : begin + block.rows])
            begin += block.rows
        return np.concatenate(parts)


def tensor_map(model: ModelConfig) -> tuple[Entry, ...]:
    """Every parameter of `model`, in the order of its layers.

    Raises:
        JobError: no class of transformers computes what the model does.
    """
    family = family_of(model)
    maker = _GPT2(model) if family.model_type == "gpt2" else _Llama(model)
    return tuple(maker.entries())


@dataclass(frozen=True)
class _Maker:
    """What the families have in common."""

    model: ModelConfig

    @cached_property
    def grouped(self) -> np.ndarray:
        """Order of the rows of q, k, v."""
        model, d = self.model, self.model.head_dim
        q = np.arange(model.num_heads * d)
        k = len(q) + np.arange(model.num_kv_heads * d)
        parts = [part.reshape(model.num_kv_heads, -1) for part in (q, k, k + len(k))]
        return np.concatenate(parts, axis=1).ravel()

    @cached_property
    def paired(self) -> np.ndarray:
        """Order of the rows of gate and up."""
        return np.arange(2 * self.model.ffn_hidden_size).reshape(2, -1).T.ravel()

    @cached_property
    def padded(self) -> np.ndarray:
        """Order of the rows of a table over the vocabulary."""
        rows = np.arange(self.model.padded_vocab_size)
        return np.where(rows < self.model.vocab_size, rows, -1)

    def table(self, name: str, theirs: str) -> Entry:
        block = Block(theirs, 0, self.model.vocab_size)
        return Entry(name, (block,), self.model.hidden_size, order=self.padded)

    def norm(self, name: str, theirs: str, size: int, *, rms: bool) -> Iterator[Entry]:
        for kind in ("weight",) if rms else ("weight", "bias"):
            block = Block(f"{theirs}.{kind}", 0, size)
            yield Entry(f"{name}.{kind}", (block,), None, order=np.arange(size))

    def linear(
        self,
        name: str,
        blocks: tuple[tuple[str, int, int], ...],
        columns: int,
        *,
        bias: bool,
        order: np.ndarray | None = None,
        transposed: bool = False,
    ) -> Iterator[Entry]:
        """Weight and bias, whose rows are laid out alike; each block is (module, first row, rows)."""
        if order is None:
            order = np.arange(sum(rows for _, _, rows in blocks))
        for kind in ("weight", "bias") if bias else ("weight",):
            named = tuple(Block(f"{module}.{kind}", first, rows) for module, first, rows in blocks)
            matrix = kind == "weight"
            width = columns if matrix else None
            yield Entry(f"{name}.{kind}", named, width, transposed and matrix, order=order)

    def around(
        self, embedding: str, blocks: Iterator[Entry], positions: str | None, norm: str
    ) -> Iterator[Entry]:
        """The whole list: what is before the blocks, the blocks, what is behind them."""
        model = self.model
        yield self.table(TIED if model.tied else "0.weight", embedding)
        if positions is not None:
            block = Block(positions, 0, model.max_position_embeddings)
            yield Entry("1.weight", (block,), model.hidden_size, order=np.arange(block.rows))
        yield from blocks
        last = model.num_layers + 2
        yield from self.norm(str(last), norm, model.hidden_size, rms=model.norm == "rmsnorm")
        if not model.tied:
            yield self.table(f"{last + 1}.weight", OUTPUT)


class _GPT2(_Maker):
    def entries(self) -> Iterator[Entry]:
        blocks = (entry for layer in range(self.model.num_layers) for entry in self._block(layer))
        return self.around("transformer.wte.weight", blocks, "transformer.wpe.weight", "transformer.ln_f")

    def _block(self, layer: int) -> Iterator[Entry]:
        ours, theirs = str(2 + layer), f"transformer.h.{layer}"
        h, inner = self.model.hidden_size, self.model.ffn_hidden_size
        yield from self.norm(f"{ours}.norm1", f"{theirs}.ln_1", h, rms=False)
        qkv = tuple((f"{theirs}.attn.c_attn", part * h, h) for part in range(3))
        name = f"{ours}.attention.qkv"
        yield from self.linear(name, qkv, h, bias=True, order=self.grouped, transposed=True)
        yield from self._linear(f"{ours}.attention.out", f"{theirs}.attn.c_proj", h, h)
        yield from self.norm(f"{ours}.norm2", f"{theirs}.ln_2", h, rms=False)
        yield from self._linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", inner, h)
        yield from self._linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", h, inner)

    def _linear(self, name: str, theirs: str, rows: int, columns: int) -> Iterator[Entry]:
        return self.linear(name, ((theirs, 0, rows),), columns, bias=True, transposed=True)


class _Llama(_Maker):
    """Llama and those that name their tensors as it does."""

    def entries(self) -> Iterator[Entry]:
        blocks = (entry for layer in range(self.model.num_layers) for entry in self._block(layer))
        return self.around("model.embed_tokens.weight", blocks, None, "model.norm")

    def _block(self, layer: int) -> Iterator[Entry]:
        ours, theirs = str(2 + layer), f"model.layers.{layer}"
        model, rms = self.model, self.model.norm == "rmsnorm"
        yield from self.norm(f"{ours}.norm1", f"{theirs}.input_layernorm", model.hidden_size, rms=rms)
        yield from self._attention(f"{ours}.attention", f"{theirs}.self_attn")
        yield from self.norm(
            f"{ours}.norm2", f"{theirs}.post_attention_layernorm", model.hidden_size, rms=rms
        )
        yield from self._mlp(f"{ours}.mlp", f"{theirs}.mlp")

    def _attention(self, ours: str, theirs: str) -> Iterator[Entry]:
        model = self.model
        q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        parts = tuple((f"{theirs}.{x}_proj", 0, rows) for x, rows in (("q", q), ("k", kv), ("v", kv)))
        bias = model.bias or model.qkv_bias
        yield from self.linear(f"{ours}.qkv", parts, model.hidden_size, bias=bias, order=self.grouped)
        out = ((f"{theirs}.o_proj", 0, model.hidden_size),)
        yield from self.linear(f"{ours}.out", out, q, bias=model.bias)
        if model.qk_norm:
            for x in ("q_norm", "k_norm"):
                yield from self.norm(f"{ours}.{x}", f"{theirs}.{x}", model.head_dim, rms=True)

    def _mlp(self, ours: str, theirs: str) -> Iterator[Entry]:
        model = self.model
        hidden, inner = model.hidden_size, model.ffn_hidden_size
        if model.activation == "swiglu":
            up = tuple((f"{theirs}.{x}_proj", 0, inner) for x in ("gate", "up"))
            yield from self.linear(f"{ours}.up", up, hidden, bias=model.bias, order=self.paired)
            down = "down_proj"
        else:
            yield from self.linear(f"{ours}.up", ((f"{theirs}.c_fc", 0, inner),), hidden, bias=model.bias)
            down = "c_proj"
        yield from self.linear(f"{ours}.down", ((f"{theirs}.{down}", 0, hidden),), inner, bias=model.bias)
