"""Which layout resumes in which other one, as tables.

All pairs of layouts would be some ten thousand runs. The tables are pruned by rules that
`test_matrices` checks:

- `RESHAPE`, in fp32: for any two axes (or one twice) and any value of each, some row is saved with the one
  and resumed with the other: saved with ZeRO 3, resumed on 4 stages; saved on 2 tensor ranks, resumed with
  DualPipeV. And each value of each axis occurs on either side with tied and with untied weights.
- `FORMATS`: for bf16 to bf16, bf16 to fp32 and fp32 to bf16, each value of each axis occurs on either side.
- `OFFLINE` and `BITS`: each value of each axis, and each format, occurs on either side.

`FAST` runs with every change. `OTHER` has what is no axis: settings that move things inside the files, the
boundaries of stages, all four kinds at once, and a model with other parameters. Of the other tables some rows
run by default, the rest with ``--repeats``: of `RESHAPE` those that, with `FAST` and `OTHER`, show all that
`values` lists, of the others all that `special` (`OTHER`) and `offline` (`FORMATS`, `OFFLINE`) list.
"""

from __future__ import annotations

from collections.abc import Hashable

from tests.checkpoints.layouts import SPECIAL, find

Row = tuple[str, str, str]  # weights, saved in, resumed in

FAST: tuple[Row, ...] = (
    ("tied", "dp2 zero1", "pp2"),
    ("tied", "tp2", "dp2 zero3"),
    ("tied", "dp2 zero3", "one"),
)
RESHAPE: tuple[Row, ...] = (
    ("tied", "dp2 sp2 zero2", "tp4 zero3"),
    ("tied", "dp4 zero3", "dp2 zero2"),
    ("tied", "dp4 zero3", "dp4 zero3 offload"),
    ("tied", "dp4 zero3", "dualpipev2 tp2"),
    ("tied", "dp4 zero3", "one"),
    ("tied", "dp4 zero3", "pp4 zero1"),
    ("tied", "dp4 zero3", "sp2 zero1 offload"),
    ("tied", "dualpipev2 zero1 offload", "zero2"),
    ("tied", "pp2", "dp4 zero2 offload"),
    ("tied", "pp2", "sp2 zero3"),
    ("tied", "pp4 zero1", "dp4 zero2"),
    ("tied", "tp2 zero3 offload", "dp2 zero2"),
    ("tied", "tp2 zero3 offload", "dualpipev2 zero1"),
    ("tied", "tp2 zero3 offload", "pp4 zero1 offload"),
    ("tied", "tp2 zero3 offload", "tp4"),
    ("tied", "tp2 zero3 offload", "zero3"),
    ("tied", "tp4 zero2 offload", "tp4 zero3"),
    ("tied", "zero1", "dualpipev2 dp2"),
    ("tied", "zero1", "pp4 zero1"),
    ("tied", "zero1", "sp2 zero3 offload"),
    ("tied", "zero1", "tp2 zero1 offload"),
    ("tied", "zero1", "zero2"),
    ("untied", "dp2 sp2 zero2 offload", "dp2 zero1 offload"),
    ("untied", "dp2 sp2 zero2 offload", "dp4 zero1"),
    ("untied", "dp2 sp2 zero2 offload", "dualpipev2"),
    ("untied", "dp2 sp2 zero2 offload", "pp4 zero1"),
    ("untied", "dp2 sp2 zero2 offload", "sp2 tp2 zero3"),
    ("untied", "dp2 sp2 zero2 offload", "zero2"),
    ("untied", "dp4 zero3 offload", "tp4 zero2"),
    ("untied", "dualpipev2", "dp2 tp2"),
    ("untied", "dualpipev2", "dualpipev2 zero1"),
    ("untied", "dualpipev2", "pp4"),
    ("untied", "dualpipev2", "tp4 zero3"),
    ("untied", "dualpipev2", "zero2 offload"),
    ("untied", "dualpipev2 tp2 zero1 offload", "dp4 zero1"),
    ("untied", "dualpipev2 tp2 zero1 offload", "sp2 tp2 zero3"),
    ("untied", "pp4 zero1", "dp2"),
    ("untied", "pp4 zero1", "dualpipev2"),
    ("untied", "pp4 zero1", "pp4 zero1 offload"),
    ("untied", "pp4 zero1", "sp2"),
    ("untied", "pp4 zero1", "tp2 zero2 offload"),
    ("untied", "pp4 zero1", "tp4 zero2 offload"),
    ("untied", "pp4 zero1", "zero3 offload"),
    ("untied", "tp4 zero3 offload", "dp2 sp2 zero2 offload"),
    ("untied", "tp4 zero3 offload", "dp4 zero2 offload"),
    ("untied", "tp4 zero3 offload", "dualpipev2 zero1 offload"),
    ("untied", "tp4 zero3 offload", "pp4"),
    ("untied", "tp4 zero3 offload", "tp2 zero3"),
    ("untied", "tp4 zero3 offload", "zero1 offload"),
    ("untied", "zero1", "dp4 zero2"),
    ("untied", "zero1", "tp4 zero3 offload"),
)
OTHER: tuple[Row, ...] = (
    ("tied", "dp2 zero1", "dp4 zero3 second shard"),
    ("tied", "dp4 zero3 second shard", "dp2 zero3"),
    ("tied", "dp2 zero2 round robin", "dp2 zero2"),
    ("tied", "dp2 zero2", "dp2 zero2 round robin"),
    ("tied", "pp2", "pp2 other boundaries"),
    ("tied", "pp2 dp2 sp2 tp2 zero1", "dp2 zero3"),
    ("tied", "dp2 zero3", "pp2 dp2 sp2 tp2 zero1"),
    # fewer key and value heads, gates, and norms that tensor ranks share
    ("llama", "one", "tp2 zero3"),
    ("llama", "pp2 tp2 zero1", "tp2 zero3"),
    ("llama", "sp2 tp2 zero2", "pp2 tp2"),
)
# Weights of 16 bits are rounded masters: what is kept is the master.
FORMATS: tuple[Row, ...] = (
    ("tied", "bf16", "bf16 zero2 offload"),
    ("tied", "bf16", "zero1 offload"),
    ("tied", "bf16 dp4 zero3 offload", "bf16 tp4 zero1 offload"),
    ("tied", "bf16 dp4 zero3 offload", "pp4"),
    ("tied", "bf16 tp2 zero3 offload", "bf16 tp2 zero1"),
    ("tied", "bf16 tp2 zero3 offload", "tp2 zero3"),
    ("tied", "bf16 tp4 zero3", "bf16 dp4 zero3 offload"),
    ("tied", "bf16 tp4 zero3", "bf16 zero1"),
    ("tied", "bf16 tp4 zero3", "tp4 zero1"),
    ("tied", "dp4 zero2", "bf16"),
    ("tied", "dualpipev2", "bf16 dp2 zero2 offload"),
    ("tied", "tp4 zero2 offload", "bf16 dp4 zero1 offload"),
    ("tied", "tp4 zero2 offload", "bf16 pp4"),
    ("untied", "bf16 dp2 sp2 zero2", "bf16 dp2 sp2 zero3 offload"),
    ("untied", "bf16 dp2 sp2 zero2", "bf16 pp4 zero1"),
    ("untied", "bf16 dp2 sp2 zero2", "pp2 dp2 zero1"),
    ("untied", "bf16 dp2 sp2 zero2", "zero2 offload"),
    ("untied", "bf16 dualpipev2 zero1", "bf16 dualpipev2"),
    ("untied", "bf16 dualpipev2 zero1", "dualpipev2"),
    ("untied", "bf16 pp4", "bf16 zero2"),
    ("untied", "bf16 pp4", "dp4 zero3 offload"),
    ("untied", "bf16 pp4", "sp2 zero1"),
    ("untied", "dp2 zero3 offload", "bf16 dualpipev2"),
    ("untied", "pp4 zero1 offload", "bf16 tp4 zero2 offload"),
    ("untied", "sp2 tp2 zero2", "bf16 pp2"),
    ("untied", "zero1", "bf16 sp2 tp2 zero3"),
    ("untied", "zero1", "bf16 zero1"),
)
OFFLINE: tuple[Row, ...] = (
    ("tied", "bf16 tp2 zero3 offload", "tp2 zero3"),
    ("tied", "dp4 zero3", "dp4 zero3 offload"),
    ("tied", "dualpipev2", "bf16 dp2 zero2 offload"),
    ("tied", "tp4 zero2 offload", "tp4 zero3"),
    ("untied", "bf16 pp4", "sp2 zero1"),
    ("untied", "dp2 sp2 zero2 offload", "dualpipev2"),
    ("untied", "dp2 sp2 zero2 offload", "pp4 zero1"),
    ("untied", "zero1", "bf16 zero1"),
)
BITS: tuple[Row, ...] = (*OFFLINE, *OTHER)


def values(row: Row) -> set[tuple[Hashable, ...]]:
    """On which side, 0 where it is saved and 1 where it is resumed, a row has which value of an axis."""
    return {(side, *value) for side, name in enumerate(row[1:]) for value in find(name).values().items()}


def special(row: Row) -> set[Hashable]:
    """The weights, each layout of `SPECIAL`, and all four kinds at once on either side."""
    names = [name for name in row[1:] if name in SPECIAL]
    return {row[0], *names, *((name, row.index(name)) for name in names if find(name).ranks == 16)}


def offline(row: Row) -> set[tuple[Hashable, ...]]:
    """The change of format, and what divides the state on either side, where the comparison is exact: what is
    converted offline is read as in every other table."""
    layouts = [find(name) for name in row[1:]]
    change = tuple(layout.compute for layout in layouts)
    facts: set[tuple[Hashable, ...]] = {change}
    for side, layout in enumerate(layouts):
        divided = (layout.pipeline > 1, layout.tensor > 1, layout.zero == 3)
        facts |= {(change == ("fp32", "fp32"), side, *each) for each in enumerate(divided)}
    return facts
