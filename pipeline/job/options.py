"""Every option of a run, in one typed definition: the command line, its help and run.json come from it.

Batch sizes, precision, ZeRO, optimizer, schedule, parallel degrees and monitors are not options: they
belong to the DeepSpeed JSON, so that nothing is said twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from pipeline.base.problems import JobError, Problem
from pipeline.base.words import did_you_mean

RUN_FILE = "run.json"


@dataclass(frozen=True)
class Options:
    """Pretrain a GPT with DeepSpeed: pipeline, data (ZeRO), sequence and tensor parallelism in one job."""

    deepspeed_config: str = "ds_configs/zero1.json"
    """DeepSpeed JSON: batch sizes, precision, ZeRO, optimizer, schedule and the parallel sizes. A relative
    path is looked up in the current folder, then in the project's."""
    model: str = "auto"
    """Preset name, or a Hugging Face folder, whose weights and tokenizer are used where it has some, or a
    config.json, for random weights. auto: tiny on CPU, gpt2-124m on GPU."""
    data: tuple[str, ...] = ()
    """What to train on: text, .jsonl[.gz|.zst] and .parquet files, folders of them, saved datasets folders,
    the PREFIX of Megatron token files, hub:NAME; files, folders and PREFIX at s3://, gs:// and http(s)://
    addresses, too. PATH=WEIGHT for each: a blend of sources with these shares of the samples. None: the
    source text of Python's standard library."""
    data_blend: str | None = None
    """JSON of named sources and weights, instead of --data:
    {"sources": [{"name": "books", "data": "books.txt", "weight": 0.7}, ...]}."""
    validation: tuple[str, ...] = ()
    """Validation sets, NAME=PATH; a NAME may come several times. Each is evaluated and logged by its name."""
    tokenizer: str | None = None
    """bytes, or a Hugging Face tokenizer folder. None: the one saved beside token files, else the one in the
    model's folder, else bytes."""
    text_field: str = "text"
    """The field of JSON lines, and the column of Parquet files and datasets, that holds the text."""
    on_bad_record: str = "stop"
    """stop: a record that cannot be used ends the run with a message; skip: it is left out and counted."""
    cache_dir: str | None = None
    """Folder, on a disk of each host, for copies of data at s3://, gs://, http:// and https:// addresses.
    None: data/remote in output_dir."""
    cache_size: float = 100.0
    """Gigabytes that the copies may take; the least recently used ones make room."""
    seq_length: int | None = None
    """Tokens per sample. None: the model's usual training length."""
    document_mask: bool = False
    """Keep attention inside a document and begin its positions at 0, where a sample holds several."""
    mask_document_end: bool = False
    """Leave out of the loss what follows a document's last token: another document's beginning."""
    train_steps: int | None = None
    """Optimizer steps of the whole run, resumed parts included. None: the model's default."""
    train_tokens: int | None = None
    """The run's length in tokens instead of steps; rounded up to whole steps."""
    dropout: float | None = None
    """Dropout rate (embedding, residual branches, attention), 0 to below 1. None: the model's."""
    eval_interval: int | None = None
    """Steps between held-out losses; the last step always has one. 0: only the last. None: a tenth of the
    run."""
    eval_samples: int = 64
    """Held-out samples per evaluation (at most as many as there are); 0 turns evaluation off."""
    eval_fraction: float | None = None
    """Share of each source's documents that is held out of training, 0 to below 1. None: 0.05, or 0 beside
    --validation."""
    save_interval: int | None = None
    """Steps between checkpoints; the last step always saves. None or 0: only the last."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in host memory: as many bytes as the files of a
    host's ranks take."""
    save_failure: str = "continue"
    """continue: a checkpoint that could not be saved is reported, and the run goes on; stop: it ends the run.
    One that the run would end with always does."""
    time_limit: str | None = None
    """Save and stop before this time is over: 3600, 90m, 3h30m, 1-12:00:00. Counted from the launch; what the
    saving takes is kept free."""
    stop_file: str | None = None
    """Save and stop when this file appears, or is touched again. None: STOP in output_dir, which is removed
    when the run has stopped."""
    log_interval: int = 10
    """Steps between lines on the console; metrics.jsonl has every step."""
    log_samples: bool = False
    """Write samples.jsonl: the samples of every step, by source and number."""
    output_dir: str | None = None
    """Folder of the run. None: runs/<model name>, for a model folder runs/from_<its name>."""
    resume: str = "auto"
    """auto: from the newest checkpoint in output_dir if there is one; never: start at step 0, refusing a
    folder that holds checkpoints; or the path of a checkpoint."""
    allow_pickle: tuple[str, ...] = ()
    """MODULE.NAME of things that a checkpoint's files may call beyond those that DeepSpeed puts there. For
    files that you trust."""
    keep_last: int | None = None
    """Checkpoints that are kept, the newest ones. None: all."""
    keep_every: int | None = None
    """Beside those of keep_last: checkpoints whose step is a multiple of this."""
    seed: int = 1234
    """Seed of the initial weights, the sample order and dropout."""
    sample_tokens: int = 200
    """Tokens of text generated after the last step; 0: none."""
    sample_prompt: str = "def "
    """The text that the generated sample continues."""
    print_config: bool = False
    """Print the dict that DeepSpeed receives."""
    config: str | None = None
    """A run.json: its options become the defaults, options given beside it win."""
    started_at: float | None = None
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
        """The share of the documents that is held out; without evaluation nothing is."""
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
    hosts: bool = False
    """Go to every host of the hostfile as well, over ssh, and compare what is there."""
    fabric: bool = False
    """After that, start a process per slot for some seconds, try every link between them, and measure."""
    environment: bool = False
    """Look at this machine, at no job: driver, GPUs, torch and its speed, disks, and what is missing."""


O = TypeVar("O", bound=Options)  # noqa: E741


def parse_options(args: Sequence[str], kind: type[O] = Options, prog: str | None = None) -> O:  # type: ignore[assignment]
    """Read the command line.

    Raises:
        SystemExit: with code 2 after a message for an unknown option or a value of the wrong type; with
            code 0 after --help.
        JobError: the file given with --config cannot be used, or --data has no path.
    """
    _refuse_empty_data(args)
    saved = _config_argument(args)
    default = kind() if saved is None else from_run_file(Path(saved), kind)
    return tyro.cli(
        kind,
        args=list(args),
        prog=prog,
        default=default,
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


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
            raise JobError([Problem("data", "", "is given without a path", remedy)])


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
        raise JobError([Problem("config", str(path), rule, f"Give the {RUN_FILE} of a run")]) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        rule = f"cannot be read as a {RUN_FILE} ({type(error).__name__}: {error})"
        raise JobError([Problem("config", str(path), rule, f"Give the {RUN_FILE} of a run")]) from error
    return from_json(saved, kind, str(path))


def from_json(saved: dict[str, Any], kind: type[O] = Options, source: str = RUN_FILE) -> O:  # type: ignore[assignment]
    """Options from what `Options.to_json` gave.

    Raises:
        JobError: unknown names and wrong types; all of them are listed.
    """
    kinds = get_type_hints(kind)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()
    }
    problems = []
    for key, value in values.items():
        if key not in kinds:
            rule, remedy = "there is no such option", did_you_mean(key, kinds)
        elif not _fits(kinds[key], value):
            rule, remedy = f"must be {_expected(kinds[key])}", "Correct the file"
        else:
            continue
        problems.append(Problem(f"{source}: options.{key}", value, rule, remedy))
    if problems:
        raise JobError(problems)
    return kind(**values)


def _expected(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is tuple:
        return "a list of strings"
    if get_args(kind):  # a union
        return " or ".join(_expected(part) for part in get_args(kind))
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return words.get(kind, "null")


def _fits(kind: Any, value: object) -> bool:
    """Whether a value read from JSON has the type of an option."""
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if get_args(kind):  # a union
        return any(_fits(part, value) for part in get_args(kind))
    return isinstance(value, kind)
