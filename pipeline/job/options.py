"""Every option of a run, in one typed definition: command line, help, ranges and run.json come from it.

Batch sizes, precision, ZeRO, optimizer, schedule, parallel degrees and monitors are not options: they
belong to the DeepSpeed JSON, so that nothing is said twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import tyro

from pipeline.base.command_line import given_options, read_command_line, superseded, with_expanded_paths
from pipeline.base.fields import Limits, fields_of, range_problems, type_problem
from pipeline.base.json_reader import saved_json
from pipeline.base.option_help import Group, Help
from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.user_input import exists, parse_duration
from pipeline.base.words import did_you_mean
from pipeline.job.foreign_options import option_of_others
from pipeline.job.models import PRESETS
from pipeline.job.stop_file import STAMP

RUN_FILE = "run.json"

Count = Annotated[int, Limits(1)]
# More than any machine has cores.
MOST_WORKERS = 1024
Workers = Annotated[int, Limits(1, MOST_WORKERS)]
Amount = Annotated[int, Limits(0)]
Share = Annotated[float, Limits(0, 1, below=True)]
Gigabytes = Annotated[float, Limits(0, 1e9, above=True)]
Name = Annotated[str, Limits(filled=True)]
PathName = Annotated[str, Limits(filled=True, path=True)]
FileName = Annotated[PathName, "FILE"]
FolderName = Annotated[PathName, "FOLDER"]
LostCharacters = Annotated[str, Limits(choices=("stop", "continue"))]
BadRecord = Annotated[str, Limits(choices=("stop", "skip"))]
LONGEST_DAYS = 36500  # of --time_limit
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


RECIPES = tuple(sorted((Path(__file__).resolve().parents[2] / "ds_configs").glob("*.json")))
# Each option is in one of these; `tests/job/test_options.py` says so.
JOB_GROUPS = (
    Group(
        "run",
        "deepspeed_config set config output_dir train_steps train_tokens time_limit seed",
        "strict print_config log_interval log_samples sample_tokens sample_prompt stop_file",
        f"recipes, as ds_configs/NAME.json: {', '.join(path.stem for path in RECIPES)}",
    ),
    Group("model", "model seq_length", "dropout", f"presets: {', '.join(PRESETS)}"),
    Group(
        "data",
        "data validation tokenizer",
        "data_blend text_field document_separator document_mask mask_document_end on_bad_record "
        "on_lost_characters cache_dir cache_size",
    ),
    Group(
        "schedule of saves and evaluations",
        "save_interval keep_last eval_interval eval_samples",
        "keep_best keep_every async_save save_failure eval_fraction",
    ),
    Group("resume", "resume", "allow_pickle"),
    Group("hosts"),
    Group("launcher"),
    Group("set by launchers", "", "deepspeed local_rank started_at stop_stamp"),
)
JOB_EXAMPLES = (
    ("", "", "A tiny model, on all GPUs or on two CPU ranks: nothing to prepare."),
    ("", "--data corpus.txt --output_dir runs/mine", "A text of your own."),
    (
        "--num_gpus 4",
        "--model gpt2 --deepspeed_config ds_configs/zero2.json --set optimizer.params.lr=3e-4",
        "Another model and recipe, and a value over it.",
    ),
    (
        "--hostfile hostfiles/a100x4",
        "--model llama3-8b --deepspeed_config ds_configs/four_way.json",
        "Over the hosts of a file, in all four kinds of parallelism.",
    ),
    ("", "--config runs/mine/run.json --train_steps 20000", "A run with its own options, longer."),
)


@dataclass(frozen=True)
class Options:
    """Pretrain a GPT with DeepSpeed: pipeline, data (ZeRO), sequence and tensor parallelism in one job. Batch
    sizes, precision, ZeRO, optimizer and parallel sizes are keys of the DeepSpeed JSON."""

    HELP: ClassVar[Help] = Help(JOB_GROUPS, JOB_EXAMPLES)

    deepspeed_config: FileName = "ds_configs/zero1.json"
    """DeepSpeed JSON: batch sizes, precision, ZeRO, optimizer, schedule and the parallel sizes. A relative
    path is looked up in the current folder, then in the project's."""
    set: tuple[Annotated[str, "KEY=VALUE"], ...] = ()
    """Values over the DeepSpeed JSON: --set optimizer.params.lr=3e-4 zero_optimization.stage=2. VALUE as JSON
    has it; what is no JSON is a text. The last of a KEY counts. Beside --config they are added to those of
    the run.json, unless --deepspeed_config names another file."""
    strict: bool = False
    """Refuse what is otherwise noted: keys of the JSON that change nothing in this job."""
    model: PathName = "auto"
    """Preset or a usual name of one (gpt2, llama-3-8b), config.json, Hugging Face folder or hub:NAME. Presets
    and a config.json get random weights; a folder's weights and tokenizer are used where it has some. auto:
    tiny on CPU, gpt2-124m on GPU."""
    data: tuple[PathName, ...] = ()
    """Text files, .jsonl, .parquet, folders of them, datasets, the PREFIX of Megatron token files, hub:NAME;
    PATH=WEIGHT for a blend. Also .ndjson and .json with an object on each line, .gz and .zst of these, saved
    datasets folders; and files, folders and PREFIX at s3://, gs:// and http(s):// addresses. WEIGHT is a
    source's share of the samples. None: the source text of Python's standard library."""
    data_blend: FileName | None = None
    """JSON of named sources and weights, instead of --data:
    {"sources": [{"name": "books", "data": "books.txt", "weight": 0.7}, ...]}."""
    validation: tuple[Annotated[PathName, "NAME=PATH"], ...] = ()
    """Validation sets, each evaluated and logged by its name. A NAME may come several times. None: a share of
    --data."""
    tokenizer: Annotated[str, Limits(path=True), "FOLDER"] | None = None
    """bytes, a Hugging Face tokenizer folder or hub:NAME. None: the one beside token files, else the model's,
    else bytes."""
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
    cache_dir: FolderName | None = None
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
    """Optimizer steps of the whole run, resumed parts included. None: the model's."""
    train_tokens: Count | None = None
    """The run's length in tokens instead of steps; rounded up to whole steps."""
    dropout: Share | None = None
    """Dropout rate (embedding, residual branches, attention), 0 to below 1. None: the model's."""
    eval_interval: Amount | None = None
    """Steps between validation losses. The last step always has one; 0: only that. None: a tenth of the run,
    at least 25."""
    eval_samples: Amount = 64
    """Held-out samples per evaluation; 0 turns evaluation off. At most as many as there are."""
    eval_fraction: Share | None = None
    """Share of each source's tokens that is kept for validation, 0 to below 1. None: 0.05, at most 10 million
    tokens of each, or 0 beside --validation."""
    save_interval: Amount | None = None
    """Steps between checkpoints. The last step always saves; 0: only that. None: only the last."""
    async_save: bool = False
    """Write checkpoints while training continues, from a copy in host memory: as many bytes as the files of a
    host's ranks take."""
    save_failure: Annotated[str, Limits(choices=("continue", "stop"))] = "continue"
    """continue: a checkpoint that could not be saved is reported; stop: it ends the run, with exit code 1.
    One that the run would end with always does."""
    time_limit: Annotated[Name, "TIME"] | None = None
    """Save and stop before this time is over: 3600, 90m, 3h30m, 1-12:00:00. Counted from the launch; what the
    saving takes is kept free."""
    stop_file: FileName | None = None
    """Save and stop when this file appears, or is touched again. None: STOP in output_dir, which is removed
    when the run has stopped."""
    log_interval: Count = 10
    """Steps between lines on the console; metrics.jsonl has every step."""
    log_samples: bool = False
    """Write samples.jsonl: the samples of every step, by source and number."""
    output_dir: FolderName | None = None
    """Folder of the run. None: runs/<model name>, for a model folder runs/from_<its name>."""
    resume: PathName = "auto"
    """auto, never, or the checkpoint to continue from. With never, a folder that holds checkpoints is
    refused, and the run starts at step 0. auto: the newest in output_dir, if any."""
    allow_pickle: tuple[Annotated[str, "MODULE.NAME"], ...] = ()
    """What a checkpoint's files may call beyond those things that DeepSpeed puts there. For files that you
    trust."""
    keep_last: Count | None = None
    """Newest checkpoints that are kept. None: all."""
    keep_every: Count | None = None
    """Beside those of keep_last: checkpoints whose step is a multiple of this."""
    keep_best: Count | None = None
    """Beside those of keep_last: checkpoints of so many lowest validation losses (the mean over the tokens of
    all sets). A step that has one is saved, whatever save_interval says."""
    seed: Amount = 1234
    """Seed of the initial weights, the sample order and dropout."""
    sample_tokens: Amount = 200
    """Tokens of text generated after the last step; 0: none."""
    sample_prompt: str = "def "
    """The text that the generated sample continues."""
    print_config: bool = False
    """Print the dict that DeepSpeed receives."""
    config: FileName | None = None
    """A run.json: its options become the defaults, options given beside it win."""
    started_at: Annotated[float, Limits(0, inf, below=True)] | None = None
    """When the job was launched, in seconds since 1970; ./launch.sh says so. None: when rank 0 started."""
    stop_stamp: str | None = None
    """What lay at the stop file's path when the job was launched; ./launch.sh says so. None: rank 0 looks
    when it is started."""
    deepspeed: bool = False
    """Accepted as DeepSpeed's users pass it; DeepSpeed is always on. With a FILE: --deepspeed_config."""
    local_rank: int | None = None
    """Accepted as DeepSpeed's launcher passes it, beside the LOCAL_RANK that is used."""

    @property
    def saves(self) -> bool:
        """Whether the command writes checkpoints."""
        return True

    @property
    def held_out_fraction(self) -> float:
        """The share of the tokens that is kept for validation; none without evaluation."""
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
    """Check a job before any rank starts: its layout, sizes and every problem. Takes all options of
    ./launch.sh."""

    HELP: ClassVar[Help] = Help(
        (Group("check", "world_size device hosts environment", "hosts_like fabric"), *JOB_GROUPS),
        JOB_EXAMPLES,
    )

    world_size: int | None = None
    """Ranks on one host, whatever this machine has."""
    hosts_like: Annotated[str, "HOSTSxSLOTS"] | None = None
    """Check for hosts that this machine does not know, such as 2048x8."""
    device: Annotated[str, "DEVICE"] | None = None
    """Of the ranks: v100-32gb, a100-80gb, h100, t4, cpu, whatever this machine has."""
    hosts: bool = False
    """Go to every host of the hostfile, too, and compare what is there."""
    fabric: bool = False
    """As --hosts; then start a process per slot for some seconds, try every link, and measure."""
    environment: bool = False
    """Look at this machine, at no job. Driver, GPUs, torch and its speed, disks, and what is missing."""


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """Validation losses of a checkpoint, or of a Hugging Face folder, on whole sets, as JSON. Takes the
    options of the launcher and those of pretrain.py, which need not be given again for a run."""

    HELP: ClassVar[Help] = Help(
        (Group("evaluation", "source step output"), *JOB_GROUPS),
        (
            ("", "runs/tiny", "The newest checkpoint of a run, on its held-out data."),
            ("--num_gpus 4", "exported/tiny --validation books=books.txt", "A folder's weights, on 4 ranks."),
        ),
    )

    source: Annotated[PathName, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FOLDER")] = "."
    """A run's --output_dir (the newest complete checkpoint is taken), one checkpoint, or a Hugging Face
    folder. It stands before all options."""
    step: Annotated[int, Limits(0)] | None = None
    """The checkpoint after so many steps, instead of the newest."""
    output: PathName | None = None
    """A file for the JSON, which is written to standard output as well."""

    @property
    def saves(self) -> bool:
        """It writes no checkpoint."""
        return False


O = TypeVar("O", bound=Options)  # noqa: E741


def parse_options(
    args: Sequence[str],
    kind: type[O] = Options,  # type: ignore[assignment]
    prog: str | None = None,
    others: Iterable[str] = (),
) -> O:
    """Read the command line.

    Args:
        others: Names of options that the same command takes and reads elsewhere.

    Raises:
        SystemExit: as `read_command_line`.
        JobError: as `read_command_line`; or the file given with --config cannot be used.
    """
    args = spelled_out(args, kind)
    # Ahead of the full parse, because it supplies that parse's defaults.
    saved = [values[0] for name, values in given_options(args) if name == "config" and values]
    default = from_run_file(Path(saved[-1]), kind) if saved else kind()
    # What is given replaces a default, and these add to it.
    read = read_command_line(kind, args, prog, replace(default, set=()), others, option_of_others)
    kept = default.set if read.deepspeed_config == default.deepspeed_config else ()
    last = {text.partition("=")[0]: text for text in (*kept, *read.set)}
    gone = superseded(default, read, (("train_steps", "train_tokens"), ("data", "data_blend")))
    return replace(read, set=tuple(last.values()), **gone)


def spelled_out(args: Sequence[str], kind: type[Options]) -> list[str]:
    """The command line with ``--deepspeed FILE`` under its name here, and paths as `with_expanded_paths`."""
    result: list[str] = []
    for argument, following in pairwise([*args, "--"]):
        with_file = argument.startswith("--deepspeed=") or (
            argument == "--deepspeed" and not following.startswith("-")
        )
        result.append(argument.replace("--deepspeed", "--deepspeed_config", 1) if with_file else argument)
    return with_expanded_paths(result, kind)


def from_run_file(path: Path, kind: type[O] = Options) -> O:  # type: ignore[assignment]
    """The options that a run.json was started with.

    Raises:
        JobError: the file is missing, is no run.json, or has an option that does not exist.
    """
    try:
        saved = saved_json(path)["options"]
        if not isinstance(saved, dict):
            raise TypeError("its options are no object")
    except FileNotFoundError as error:
        rule = "there is no such file"
        raise job_error("config", str(path), rule, f"Give the {RUN_FILE} of a run") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
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
