"""The ``.deepspeed_env`` files, from which the launcher sets variables on every host. No torch.

DeepSpeed splits every line at its first ``=``, comments and blank lines included, and pastes the value into
a shell command: a line ``# NCCL_X=1`` comments the whole start out, and the launcher returns 0. Values may be
secrets and are never shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.base.problems import Problem
from pipeline.base.user_input import is_file, lines_of, read_text, unusual_space

NAME = ".deepspeed_env"
# The launcher puts a value with other characters between double quotes.
_PLAIN = re.compile(r"[\w@%+=:,./-]*")
# These have a meaning inside double quotes.
_READ_BY_SHELLS = re.compile(r'["$`\\]')
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def deepspeed_env(
    home: Path, cwd: Path, environ: Mapping[str, str], launcher: str | None = None
) -> tuple[dict[str, str], list[Problem]]:
    """The variables that the launcher would set on the hosts, and what is wrong with its files.

    The file in `home` is read first, the one in `cwd` wins. DS_ENV_FILE is another name for them.
    """
    name = environ.get("DS_ENV_FILE", NAME)
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    for path in dict.fromkeys((home / name, cwd / name)):
        if not is_file(path):
            continue
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            problems.append(Problem(str(path), NAME, f"cannot be read ({error})", "Correct or remove it"))
            continue
        for number, line in enumerate(lines_of(text), start=1):
            key, _, value = line.partition("=")
            if rule := _wrong(line, launcher):
                problems.append(Problem(f"{path} line {number}", _without_value(line), *rule))
            else:
                variables[key.strip()] = value.strip()
    return variables, problems


def _wrong(line: str, launcher: str | None) -> tuple[str, str] | None:
    """(rule, remedy) of the first thing wrong with a line."""
    key, equals, value = (part.strip() for part in line.partition("="))
    if not line.strip():
        return "the launcher stops at an empty line", "Remove it"
    if line.lstrip().startswith("#"):
        return "a comment makes the launcher start nothing, and call that success", "Remove it"
    if not equals:
        return "a line is NAME=VALUE", "Write NAME=VALUE, or remove it"
    if not _VARIABLE.fullmatch(key):
        return f"'{key}' is not a variable's name", "Write NAME=VALUE, without export"
    if space := unusual_space(line.strip()):
        return f"the character {space} does not arrive everywhere", "Use blanks or tabs, and ends of lines"
    if _READ_BY_SHELLS.search(value):
        rule = "the value passes through a shell, which takes quotes, $, ` and \\ out of it"
        return rule, "Write the value without them; quotes around it are not needed"
    if launcher not in (None, "pdsh") and not _PLAIN.fullmatch(value):
        rule = f"with {launcher} no shell takes off the quotes that the launcher puts around such a value"
        return rule, f"Use only letters, digits and @%+=:,./- in it, or set it by {launcher}'s own means"
    return None


def _without_value(line: str) -> str:
    key, equals, _ = line.partition("=")
    return f"{key}{equals}..." if equals else key
