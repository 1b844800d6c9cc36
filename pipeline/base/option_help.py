"""What --help and --help_all print: the options of a command in groups, from the records that hold them.

The text under a field of a record is its help. Its first sentence stands in --help, all of it in --help_all;
a sentence "None: ..." or "auto: ..." says what this default means.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NoReturn

import tyro

from pipeline.base.command import HELP, HELP_ALL, reader_may_leave
from pipeline.base.fields import Field, fields_of
from pipeline.base.problems import EXIT_FINISHED

_WIDEST, _NARROWEST, _COLUMN = 80, 40, 27
_OTHERS, _ASKING = "options", "help"
_DEFAULT = re.compile(r"(?:None|None or 0|auto): (.*)\.")
_VALUES = {bool: "", int: "N", float: "X", str: "TEXT"}


@dataclass(frozen=True)
class Group:
    """Options that belong together.

    Attributes:
        frequent: Names of those that --help has.
        rest: Names of those that only --help_all has.
        note: A line on what there is to choose from.
    """

    title: str
    frequent: str = ""
    rest: str = ""
    note: str = ""


@dataclass(frozen=True)
class Help:
    """What a record says of its options, as its attribute HELP. A record without one shows all it has.

    Attributes:
        groups: Those of several records that have one title are shown as one.
        examples: A launcher's options, the others, and what the command does with them.
    """

    groups: tuple[Group, ...] = ()
    examples: tuple[tuple[str, str, str], ...] = ()


def end_with_help(command: str, records: Sequence[type], asked: str) -> NoReturn:
    """Print the help of a command, as wide as the terminal, at most 80 columns; and end this process.

    Args:
        command: How it is called; with {} where a launcher's options stand.
        records: What it reads its options into; the first one says what it does.
        asked: HELP, or HELP_ALL for all options with their whole text.
    """
    width = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))
    with reader_may_leave():
        print("\n".join(_lines(command, records, asked == HELP_ALL, width)))
    sys.exit(EXIT_FINISHED)


def _lines(command: str, records: Sequence[type], everything: bool, width: int) -> Iterator[str]:
    texts = {name: text for record in records for name, text in meanings(record).items()}
    known = {name: field for record in records for name, field in fields_of(record).items()}
    first = [name for name, field in known.items() if is_positional(field)]
    words = [command.replace("{} ", ""), *(_value(known[name]) for name in first), "[options]"]
    yield f"usage: {' '.join(words)}"
    yield ""
    yield from textwrap.wrap(inspect.getdoc(records[0]) or "", width)
    if examples := getattr(records[0], "HELP", Help()).examples:
        yield "\nexamples:"
        for launcher, options, meaning in examples:
            yield from _command(example_command(command, launcher, options), width)
            yield from textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    groups = groups_of(records)
    for group in groups:
        names = [*group.frequent.split(), *(group.rest.split() if everything else ())]
        if names or group.title == _ASKING:
            yield f"\n{group.title}:"
        for name in names:
            yield from _option(known[name], texts.get(name, ""), everything or len(groups) == 2, width)
        if names and group.note:
            yield from textwrap.wrap(group.note, width, initial_indent="  ", subsequent_indent="    ")
    yield from _entry(f"-h, {HELP}", "This page", width)
    if len(groups) > 2:
        yield from _entry(HELP_ALL, "All options, with their full texts", width)


def example_command(command: str, launcher: str, options: str) -> str:
    """An example for one command, with a launcher's options where it takes them."""
    start = command if "{}" in command else f"{command} {{}}"
    return " ".join(f"{start.format(launcher)} {options}".split())


def _command(line: str, width: int) -> Iterator[str]:
    """A command as a shell takes it, with an option and its value on one line."""
    kept = re.sub(r"(--\w+) (?!-)", "\\1\0", line)
    indents = {"initial_indent": "  ", "subsequent_indent": " " * 6}
    lines = textwrap.wrap(kept, width - 2, **indents, break_long_words=False, break_on_hyphens=False)
    yield from (each.replace("\0", " ") + (" \\" if each is not lines[-1] else "") for each in lines)


def groups_of(records: Sequence[type]) -> list[Group]:
    """The groups of several records, those of one title put together, and one for all that is in none."""
    found: dict[str, Group] = {}
    for record in records:
        for group in getattr(record, "HELP", Help()).groups:
            before = found.get(group.title, Group(group.title))
            frequent, rest = f"{before.frequent} {group.frequent}", f"{before.rest} {group.rest}"
            found[group.title] = Group(group.title, frequent, rest, before.note or group.note)
    grouped = {name for group in found.values() for name in f"{group.frequent} {group.rest}".split()}
    names = [name for record in records for name in fields_of(record) if name not in grouped]
    asking = found.pop(_ASKING, Group(_ASKING))
    others = [Group(_OTHERS, " ".join(dict.fromkeys(names)))] if names else []
    return [*others, *found.values(), asking]


@cache
def meanings(record: type) -> Mapping[str, str]:
    """The text that stands under each field of a record and of those it is made from."""
    found = {}
    for kind in reversed(record.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def _option(field: Field, text: str, everything: bool, width: int) -> Iterator[str]:
    value = _value(field)
    sentences = re.split(r"(?<=\.)\s+(?=[A-Z<]|auto: |None)", text)
    defaults = [match[1] for each in sentences if (match := _DEFAULT.fullmatch(each))]
    sentences = [each for each in sentences if not _DEFAULT.fullmatch(each)]
    said = " ".join(sentences if everything else sentences[:1])
    default = defaults[0] if defaults else _shown(field.default)
    text = f"{said.removesuffix('.')} (default: {default})" if default else said.removesuffix(".")
    names = sorted([f"--{field.name}", *other_names(field)], key=len)
    if not everything:
        names = [name for name in names if name == f"--{field.name}" or len(name) == 2]
    said = value if is_positional(field) else f"{', '.join(names)} {value}"
    yield from _entry(said.strip(), text, width)


def _entry(names: str, text: str, width: int) -> Iterator[str]:
    """Names on the left, text on the right, from the next line on where the names are long."""
    column = _COLUMN if width == _WIDEST else 8
    lines = textwrap.wrap(text, width - column, break_on_hyphens=False)
    head = f"  {names}"
    if len(head) + 2 > column:
        yield from textwrap.wrap(names, width, initial_indent="  ", subsequent_indent="    ")
    else:
        yield f"{head:<{column}}{lines.pop(0)}"
    yield from (f"{' ' * column}{line}" for line in lines)


def _marks(field: Field) -> list[Any]:
    """What the annotation of a field, or of its items, says beside the type."""
    forms = [each for form in field.forms for each in (form, form.item) if each is not None]
    return [mark for form in forms for mark in form.marks]


def other_names(field: Field) -> list[str]:
    """Under which an option is known, too: the annotation says them."""
    return [mark for mark in _marks(field) if isinstance(mark, str) and mark.startswith("-")]


def is_positional(field: Field) -> bool:
    return tyro.conf.Positional in _marks(field)


def _value(field: Field) -> str:
    """What stands for the value of an option: FILE, N, {stop,skip}; the annotation can say it."""
    said = [mark if isinstance(mark, str) else getattr(mark, "metavar", None) for mark in _marks(field)]
    said = [each for each in said if each and not each.startswith("-")]
    form = field.forms[0]
    word = "PATH" if field.is_path else _VALUES[(form.item or form).kind]
    if said or field.choices:
        word = said[0] if said else "{" + ",".join(map(str, field.choices)) + "}"
    is_list = form.item and tyro.conf.UseAppendAction not in form.marks
    return f"{word} ..." if is_list and "..." not in word else word


def _shown(value: object) -> str:
    """A default as it is typed; nothing for what is off or absent."""
    if value is MISSING or isinstance(value, bool) or value in (None, "", ()):
        return ""
    return (
        f"{value:g}"
        if isinstance(value, float)
        else f"'{value}'"
        if str(value) != str(value).strip()
        else str(value)
    )
