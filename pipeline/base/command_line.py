"""A command line becomes a record of options (`pipeline.base.fields`), read alike by every command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from pipeline.base.command import help_asked
from pipeline.base.fields import Field, fields_of, path_problem, remedy_for, with_paths
from pipeline.base.option_help import end_with_help
from pipeline.base.problems import JobError, Problem
from pipeline.base.words import near

R = TypeVar("R")
# Name and values of an option that does not exist -> rule and remedy, where it is known from elsewhere.
Foreign = Callable[[str, Sequence[str]], "tuple[str, str] | None"]
_NUMBERS = {int: "a whole number", float: "a number"}


def read_command_line(
    kind: type[R],
    args: Sequence[str] | None,
    prog: str | None,
    default: R | None = None,
    others: Iterable[str] = (),
    foreign: Foreign = lambda name, values: None,
) -> R:
    """A record of options, read as all commands read theirs.

    Args:
        args: The command line; None: this process's.
        prog: How the command is called; with {} where a launcher's options stand.
        default: What holds for options that are not given, instead of the record's defaults.
        others: Names of options that the same command takes and reads elsewhere.
        foreign: Asked for options that do not exist.

    Raises:
        SystemExit: with code 2 after a message for what is left of a command line when all options have their
            values; with code 0 after --help and --help_all.
        JobError: options that do not exist, numbers that are none; a path with a variable that is not set.
    """
    args = sys.argv[1:] if args is None else args
    known = fields_of(kind)
    if asked := help_asked(args):
        end_with_help(prog or Path(sys.argv[0]).name, [kind], asked)
    if problems := list(_problems(args, known, others, foreign)):
        raise JobError(problems)
    given = {} if default is None else {"default": default}
    read = tyro.cli(
        kind,
        args=_gathered(args, kind),
        prog=prog and prog.replace("{} ", ""),
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
        **given,
    )
    values = {name: getattr(read, name) for name in known}
    if found := list(filter(None, (path_problem(known[name], values[name], name) for name in known))):
        raise JobError(found)
    return kind(**{name: with_paths(known[name], values[name]) for name in known})


def given_options(args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
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
    """Options that do not exist, numbers that are none, and lists with nothing in them."""
    names = [*known, *others]
    for name, values in given_options(args):
        if name in known:
            yield from _value_problems(known[name], values)
        elif name and name not in names:
            rule, remedy = foreign(name, values) or _unknown(name, names)
            yield Problem(f"--{name}", " ".join(values), rule, remedy)


def _unknown(name: str, names: Sequence[str]) -> tuple[str, str]:
    if (switch := name.removeprefix("no_")) in names:
        return "there is no such option", f"Leave it out: --{switch} is off unless given"
    nearest = near(name, names)
    remedy = f"The nearest option is --{nearest}" if nearest else "--help lists the options"
    return "there is no such option", remedy


def _value_problems(field: Field, values: Sequence[str]) -> Iterator[Problem]:
    """A variable of the shell that is not set leaves a list without a value: that is not its default."""
    if field.forms[0].kind is list and not values:
        remedy = f"Give one or more, or leave --{field.name} out"
        yield Problem(field.name, "", "is given without a value", remedy)
    elif values:
        yield from _number_problems(field, values[0])


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
    last one's values, unless each has one."""
    known = fields_of(kind).values()
    lists = {
        f"--{field.name}"
        for field in known
        if field.forms[0].kind is list and tyro.conf.UseAppendAction not in field.forms[0].marks
    }
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


def without(arguments: Iterable[str], *names: str) -> list[str]:
    """A command line without these options, which have a value each."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in names:
            skip = True
        elif argument.partition("=")[0] not in names:
            kept.append(argument)
    return kept


def superseded(default: R, read: R, alternatives: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The options of `default` that say what the command line says in another way: none of it is meant any
    more, and each has its record's own default here.

    Args:
        alternatives: Pairs of options, either of which says the same.
    """
    changed = {name for name in vars(read) if getattr(read, name) != getattr(default, name)}
    pairs = ((one, other) for pair in alternatives for one, other in (pair, pair[::-1]))
    gone = [other for one, other in pairs if one in changed and other not in changed]
    return {name: getattr(type(read), name) for name in gone}
