"""Every option of a run, in one typed definition: command line, help, ranges and run.json come from it.

Batch sizes, precision, ZeRO, optimizer, schedule, parallel degrees and monitors are not options: they
belong to the DeepSpeed JSON, so that nothing is said twice.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from pipeline.base.fields import (
    Limits,
    fields_of,
    path_problem,
    range_problems,
    type_problem,
    with_paths,
)
from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.user_input import exists, parse_duration
from pipeline.base.words import did_you_mean
from pipeline.job.stop_file import STAMP

RUN_FILE = "run.json"

Count = Annotated[int, Limits(1)]
Amount = Annotated[int, Limits(0)]
Share = Annotated[float, Limits(0, 1, below=True)]
Gigabytes = Annotated[float, Limits(0, inf, above=True, below=True)]
Name = Annotated[str, Limits(filled=True)]
PathName = Annotated[str, Limits(filled=True, path=True)]
LostCharacters = Annotated[str, Limits(choices=("stop", "continue"))]
BadRecord = Annotated[str, Limits(choices=("stop", "skip"))]
LONGEST_DAYS = 36500  # of --time_limit
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass(frozen=True)
class Options:
    """Pretrain a GPT with DeepSpeed: pipeline, data (ZeRO), sequence and tensor parallelism in one job."""

    deepspeed_config: PathName = "ds_configs/zero1.json"
    """DeepSpeed JSON: batch sizes, precision, ZeRO, optimizer, schedule and the parallel sizes. A relative
    path is looked up in the current folder, then in the project's."""
    strict: bool = False
    """Refuse what is otherwise noted: keys of the JSON that change nothing in this job."""
    model: PathName = "auto"
    """Preset name, or a Hugging Face folder, whose weights and tokenizer are used where it has some, or a
    config.json, for random weights. auto: tiny on CPU, gpt2-124m on GPU."""
    data: tuple[PathName, ...] = ()
    """What to train on: text files, .jsonl, .ndjson and .json with an object on each line (also with .gz or
    .zst), .parquet, folders of them, saved datasets folders, the PREFIX of Megatron token files, hub:NAME;
    files, folders and PREFIX at s3://, gs:// and http(s):// addresses, too. PATH=WEIGHT for each: a blend of
    sources with these shares of the samples. None: the source text of Python's standard library."""
    data_blend: PathName | None = None
    """JSON of named sources and weights, instead of --data:
    {"sources": [{"name": "books", "data": "books.txt", "weight": 0.7}, ...]}."""
    validation: tuple[PathName, ...] = ()
    """Validation sets, NAME=PATH; a NAME may come several times. Each is evaluated and logged by its name."""
    tokenizer: Annotated[str, Limits(path=True)] | None = None
    """bytes, or a Hugging Face tokenizer folder. None: the one saved beside token files, else the one in the
    model's folder, else bytes."""
    text_field: str = "text"
    """The field of JSON lines, and the column of Parquet files and datasets, that holds the text."""
    on_bad_record: BadRecord = "stop"
    """stop: a record that cannot be used ends the run with a message; skip: it is left out and counted."""
    on_lost_characters: LostCharacters = "stop"
    """stop: texts of which the tokenizer does not keep a fifth of the characters, or which become its unknown
    token in a fifth of the ids, are refused; continue: they are used, with a warning."""
    document_separator: Name | None = None
    """What stands between two documents inside a text, "<|endoftext|>" say; with it goes the line break that
    follows. None: each file, line or row is one document."""
    cache_dir: PathName | None = None
    """Folder, on a disk of each host, for copies of data at s3://, gs://, http:// and https:// addresses.
    None: data/remote in output_dir."""
    cache_size: Gigabytes = 100.0
    """Gigabytes that the copies may take; the least recently used ones make room."""
    seq_length: Count | None = None
    """Tokens per sample. None: the model's usual training length."""
    document_mask: bool = False
    """Keep attention inside a document and begin its positions at 0, where a sample holds several."""
    mask_document_end: bool = False
    """Leave out of the loss what follows a document's last token: another document's beginning."""
    train_steps: Count | None = None
    """Optimizer steps of the whole run, resumed parts included. None: the model's default."""
    train_tokens: Count | None = None
    """The run's length in tokens instead of steps; rounded up to whole steps."""
    dropout: Share | None = None
    """Dropout rate (embedding, residual branches, attention), 0 to below 1. None: the model's."""
    eval_interval: Amount | None = None
    """Steps between validation losses; the last step always has one. 0: only the last. None: a tenth of the
    run."""
    eval_samples: Amount = 64
    """Held-out samples per evaluation (at most as many as there are); 0 turns evaluation off."""
    eval_fraction: Share | None = None
    """Share of each source's documents that is kept for validation, 0 to below 1. None: 0.05, or 0 beside
    --validation."""
    save_interval: Amount | None = None
    """Steps between checkpoints; the last step always saves. None or 0: only the last."""
    async_save: bool = False
    """Write checkpoints while training continues, from a copy in host memory: as many bytes as the files of a
    host's ranks take."""
    save_failure: Annotated[str, Limits(choices=("continue", "stop"))] = "continue"
    """continue: a checkpoint that could not be saved is reported; stop: it ends the run, with exit code 1.
    One that the run would end with always does."""
    time_limit: Name | None = None
    """Save and stop before this time is over: 3600, 90m, 3h30m, 1-12:00:00. Counted from the launch; what the
    saving takes is kept free."""
    stop_file: PathName | None = None
    """Save and stop when this file appears, or is touched again. None: STOP in output_dir, which is removed
    when the run has stopped."""
    log_interval: Count = 10
    """Steps between lines on the console; metrics.jsonl has every step."""
    log_samples: bool = False
    """Write samples.jsonl: the samples of every step, by source and number."""
    output_dir: PathName | None = None
    """Folder of the run. None: runs/<model name>, for a model folder runs/from_<its name>."""
    resume: PathName = "auto"
    """auto: from the newest checkpoint in output_dir if there is one; never: start at step 0, refusing a
    folder that holds checkpoints; or the path of a checkpoint."""
    allow_pickle: tuple[str, ...] = ()
    """MODULE.NAME of things that a checkpoint's files may call beyond those that DeepSpeed puts there. For
    files that you trust."""
    keep_last: Count | None = None
    """Checkpoints that are kept, the newest ones. None: all."""
    keep_every: Count | None = None
    """Beside those of keep_last: checkpoints whose step is a multiple of this."""
    seed: Amount = 1234
    """Seed of the initial weights, the sample order and dropout."""
    sample_tokens: Amount = 200
    """Tokens of text generated after the last step; 0: none."""
    sample_prompt: str = "def "
    """The text that the generated sample continues."""
    print_config: bool = False
    """Print the dict that DeepSpeed receives."""
    config: PathName | None = None
    """A run.json: its options become the defaults, options given beside it win."""
    started_at: Annotated[float, Limits(0, inf, below=True)] | None = None
    """When the job was launched, in seconds since 1970; ./launch.sh says so. None: when rank 0 started."""
    stop_stamp: str | None = None
    """What lay at the stop file's path when the job was launched; ./launch.sh says so. None: rank 0 looks
    when it is started."""
    deepspeed: bool = False
    """Accepted as DeepSpeed's users pass it; DeepSpeed is always on."""
    local_rank: int | None = None
    """Accepted as DeepSpeed's launcher passes it, beside the LOCAL_RANK that is used."""

    @property
    def held_out_fraction(self) -> float:
        """The share of the documents that is kept for validation; none without evaluation."""
        if not self.eval_samples:
            return 0.0
        if self.eval_fraction is not None:
            return self.eval_fraction
        return 0.0 if self.validation else 0.05

    def to_json(self) -> dict[str, Any]:
        """The options worth keeping with a run, as plain JSON values."""
        return {key: value for key, value in asdict(self).items() if key not in _OF_ONE_CALL}


# These describe one call, not the run: they are not saved.
_OF_ONE_CALL = frozenset(
    {
        "print_config",
        "config",
        "deepspeed",
        "local_rank",
        "world_size",
        "hosts",
        "started_at",
        "stop_stamp",
        "environment",
        "resume",
        "allow_pickle",
    }
)


@dataclass(frozen=True)
class CheckOptions(Options):
    """Check a job before any rank starts: its layout, sizes and every problem. Takes the options of the
    launcher and those of pretrain.py."""

    world_size: int | None = None
    """Check for this many ranks on one host, whatever this machine has."""
    hosts_like: str | None = None
    """Check for hosts that this machine does not know: HOSTSxSLOTS, such as 2048x8."""
    device: str | None = None
    """Check for ranks with this device, whatever this machine has: v100-32gb, a100-80gb, h100, t4, cpu."""
    hosts: bool = False
    """Go to every host of the hostfile as well, over ssh, and compare what is there."""
    fabric: bool = False
    """After that, start a process per slot for some seconds, try every link between them, and measure."""
    environment: bool = False
    """Look at this machine, at no job: driver, GPUs, torch and its speed, disks, and what is missing."""


O = TypeVar("O", bound=Options)  # noqa: E741
R = TypeVar("R")


def parse_options(args: Sequence[str], kind: type[O] = Options, prog: str | None = None) -> O:  # type: ignore[assignment]
    """Read the command line.

    Raises:
        SystemExit: with code 2 after a message for an unknown option or a value of the wrong type; with
            code 0 after --help.
        JobError: the file given with --config cannot be used, or --data has no path.
    """
    _refuse_empty_data(args)
    saved = _config_argument(with_expanded_paths(args, kind))
    default = kind() if saved is None else from_run_file(Path(saved), kind)
    return read_command_line(kind, args, prog, default)


def read_command_line(
    kind: type[R], args: Sequence[str] | None, prog: str | None, default: R | None = None
) -> R:
    """A record of options, read as all commands read theirs.

    Args:
        args: The command line; None: this process's.
        default: What holds for options that are not given, instead of the record's defaults.

    Raises:
        SystemExit: as `parse_options`.
        JobError: a path has a variable that is not set.
    """
    given = {} if default is None else {"default": default}
    read = tyro.cli(
        kind,
        args=_gathered(sys.argv[1:] if args is None else args, kind),
        prog=prog,
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
        **given,
    )
    known = fields_of(kind)
    values = {name: getattr(read, name) for name in known}
    if found := list(filter(None, (path_problem(known[name], values[name], name) for name in known))):
        raise JobError(found)
    return kind(**{name: with_paths(known[name], values[name]) for name in known})


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


def _config_argument(args: Sequence[str]) -> str | None:
    """The value of --config, found ahead of the full parse because it supplies that parse's defaults."""
    for position, argument in enumerate(args):
        if argument == "--config" and position + 1 < len(args):
            return args[position + 1]
        if argument.startswith("--config="):
            return argument.removeprefix("--config=")
    return None


def _refuse_empty_data(args: Sequence[str]) -> None:
    """``--data $FOLDER`` with the variable unset must not train on the default text instead."""
    for argument, following in zip(args, [*args[1:], "--"], strict=False):
        if argument == "--data" and following.startswith("--"):
            remedy = "Name files or folders, or leave --data out"
            raise job_error("data", "", "is given without a path", remedy)


def from_run_file(path: Path, kind: type[O] = Options) -> O:  # type: ignore[assignment]
    """The options that a run.json was started with.

    Raises:
        JobError: the file is missing, is no run.json, or has an option that does not exist.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))["options"]
        if not isinstance(saved, dict):
            raise TypeError("its options are no object")
    except FileNotFoundError as error:
        rule = "there is no such file"
        raise job_error("config", str(path), rule, f"Give the {RUN_FILE} of a run") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        rule = f"cannot be read as a {RUN_FILE} ({type(error).__name__}: {error})"
        raise job_error("config", str(path), rule, f"Give the {RUN_FILE} of a run") from error
    return from_json(saved, kind, str(path))


def from_json(saved: dict[str, Any], kind: type[O] = Options, source: str = RUN_FILE) -> O:  # type: ignore[assignment]
    """Options from what `Options.to_json` gave.

    Raises:
        JobError: unknown names and wrong types; all of them are listed.
    """
    known = fields_of(kind)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()
    }
    problems: list[Problem | None] = []
    for key, value in values.items():
        where = f"{source}: options.{key}"
        if key not in known:
            problems.append(Problem(where, value, "there is no such option", did_you_mean(key, known)))
        elif value is not None or not known[key].nullable:
            problems.append(type_problem(known[key], value, where))
    if found := [problem for problem in problems if problem is not None]:
        raise JobError(found)
    return kind(**values)


def option_problems(options: Options) -> list[Problem]:
    """Options out of range, each by itself."""
    problems = [*range_problems(options), *_time_problems(options)]
    for name in options.allow_pickle:
        if not _DOTTED.fullmatch(name):
            rule = "is not MODULE.NAME"
            problems.append(Problem("allow_pickle", name, rule, "Write it as the refusal did"))
    if options.resume not in ("", "auto", "never") and not exists(options.resume):
        rule = "is neither auto, never nor an existing checkpoint"
        problems.append(Problem("resume", options.resume, rule, "Correct the path"))
    return problems


def _time_problems(options: Options) -> list[Problem]:
    """Whether the time limit is a length of time, and the stamp of the stop file one."""
    problems = []
    if options.time_limit:
        try:
            legal = 0 < parse_duration(options.time_limit) <= LONGEST_DAYS * 86400
            rule = None if legal else f"must be above 0 and at most {LONGEST_DAYS}d"
        except ValueError as error:
            rule = str(error)
        if rule is not None:
            problems.append(Problem("time_limit", options.time_limit, rule, "Correct --time_limit"))
    if options.stop_stamp is not None and not STAMP.fullmatch(options.stop_stamp):
        rule = "must be SYSTEM:PROCESSES:INODE:NANOSECONDS:PATH, or none for inode and time"
        problems.append(Problem("stop_stamp", options.stop_stamp, rule, "Leave --stop_stamp out"))
    return problems
