"""A command line becomes a record of options (`pipeline.base.fields`), read alike by every command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import tyro

from pipeline.base.fields import Field, fields_of, path_problem, remedy_for, with_paths
from pipeline.base.problems import JobError, Problem
from pipeline.base.words import near

R = TypeVar("R")
# Name and value of an option that does not exist -> rule and remedy, where it is known from elsewhere.
Foreign = Callable[[str, "str | None"], "tuple[str, str] | None"]
_NUMBERS = {int: "a whole number", float: "a number"}


def read_command_line(
    kind: type[R],
    args: Sequence[str] | None,
    prog: str | None,
    default: R | None = None,
    others: Iterable[str] = (),
    foreign: Foreign = lambda name, value: None,
) -> R:
    """A record of options, read as all commands read theirs.

    Args:
        args: The command line; None: this process's.
        default: What holds for options that are not given, instead of the record's defaults.
        others: Names of options that the same command takes and reads elsewhere.
        foreign: Asked for options that do not exist.

    Raises:
        SystemExit: with code 2 after a message for what is left of a command line when all options have their
            values; with code 0 after --help.
        JobError: options that do not exist, numbers that are none; a path with a variable that is not set.
    """
    args = sys.argv[1:] if args is None else args
    known = fields_of(kind)
    asks = {"-h", "--help"} & set(args)
    if not asks and (problems := list(_problems(args, known, others, foreign))):
        raise JobError(problems)
    given = {} if default is None else {"default": default}
    read = tyro.cli(
        kind,
        args=_gathered(args, kind),
        prog=prog,
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
        **given,
    )
    values = {name: getattr(read, name) for name in known}
    if found := list(filter(None, (path_problem(known[name], values[name], name) for name in known))):
        raise JobError(found)
    return kind(**{name: with_paths(known[name], values[name]) for name in known})


def _options(args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option's name and values; what stands before the first one has none."""
    name, values = "", []
    for argument in args:
        if argument.startswith("--"):
            yield name, values
            option, equals, value = argument[2:].partition("=")
            name, values = option.replace("-", "_"), [value] if equals else []
        else:
            values.append(argument)
    yield name, values


def _problems(
    args: Sequence[str], known: dict[str, Field], others: Iterable[str], foreign: Foreign
) -> Iterator[Problem]:
    """Options that do not exist, and numbers that are none."""
    names = [*known, *others]
    for name, values in _options(args):
        first = values[0] if values else None
        if name in known and first is not None:
            yield from _number_problems(known[name], first)
        if name and name not in names:
            rule, remedy = "there is no such option", "--help lists the options"
            if nearest := near(name, names):
                remedy = f"The nearest option is --{nearest}"
            rule, remedy = foreign(name, first) or (rule, remedy)
            yield Problem(f"--{name}", first or "", rule, remedy)


def _number_problems(field: Field, text: str) -> Iterator[Problem]:
    """Whether a text is no number where only numbers are taken."""
    kinds = [form.kind for form in field.forms]
    if not set(kinds) <= set(_NUMBERS) or (field.nullable and text == "None"):
        return
    try:
        kinds[0](text)
    except ValueError:
        yield Problem(field.name, text, f"must be {_NUMBERS[kinds[0]]}", remedy_for(field))


def with_expanded_paths(args: Sequence[str], kind: type) -> list[str]:
    """The command line with ~ and variables in its paths read here, for ranks on other hosts. A path that
    cannot be read stays, and `read_command_line` says why."""
    known, result, field = fields_of(kind), [], None
    for argument in args:
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if option:
            field = known.get(option[2:].replace("-", "_"))
        if field is not None and (equals or not option) and path_problem(field, value, "") is None:
            value = with_paths(field, value)
        result.append(f"{option}{equals}{value}")
    return result


def _gathered(args: Sequence[str], kind: type) -> list[str]:
    """The same with all values of a list option at its first place: of an option given twice, tyro takes the
    last one's values."""
    lists = {f"--{name}" for name, field in fields_of(kind).items() if field.forms[0].kind is list}
    group: list[str] = []
    groups: dict[str | int, list[str]] = {-1: group}
    for place, argument in enumerate(args):
        option, equals, value = argument.partition("=")
        option = option.replace("-", "_").replace("__", "--", 1)
        if not argument.startswith("--"):
            group.append(argument)
        elif option in lists:
            group = groups.setdefault(option, [option])
            group += [value] if equals else []
        else:
            group = groups[place] = [argument]
    return [argument for group in groups.values() for argument in group]
