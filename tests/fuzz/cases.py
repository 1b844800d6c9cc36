"""What commands are given, drawn by a seeded generator: one function for each kind of input."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random

from pipeline.base.fields import Field, fields_of
from pipeline.base.json_reader import read_json
from pipeline.cluster.launcher_options import LAUNCHERS, launcher_parser
from pipeline.job.foreign_keys import FOREIGN, OLD_NAMES
from pipeline.job.options import CheckOptions
from pipeline.job.resolve import PROJECT
from pipeline.job.schema import KEYS
from pipeline.prepare import PrepareOptions
from pipeline.reshard import ReshardOptions
from tests.fuzz import values
from tests.fuzz.files import BLEND, HOSTS
from tests.fuzz.judge import FIFO, FOLDER, LOOP, Case

JOB = ("--model", "tiny", "--output_dir", "out", "--eval_samples", "0")
PAPER = ("--world_size", "2")
# They look at other machines, or at all of this one.
# Processes take seconds to start.
_ELSEWHERE = {"hosts", "fabric", "environment", "workers"}
_REMOTE = ("hub:", "s3:", "gs:", "http")
_ENTRIES = ("check", "launch", "rank")
_CONFIG_KEYS = tuple(dict.fromkeys([*KEYS, *FOREIGN, *OLD_NAMES]))


def options(random: Random) -> Case:
    """Options of a run and of its launch, most with values that nobody gives."""
    command = random.choice(_ENTRIES)
    arguments = [*JOB, *(PAPER if command == "check" and random.random() < 0.6 else ())]
    for _ in range(random.choice((1, 1, 2, 3, 5))):
        if command != "rank" and random.random() < 0.25:
            arguments += _launcher_option(random)
        else:
            arguments += _option(random, CheckOptions if command == "check" else CheckOptions.__bases__[0])
    if random.random() < 0.05:
        arguments.insert(random.randrange(len(arguments)), values.word(random))
    return Case(command, arguments)


def deepspeed_json(random: Random) -> Case:
    """The DeepSpeed JSON: keys that are known with values of any kind, and damaged text."""
    recipe = json.loads(_recipe(random.choice(_recipes())))
    content = values.written(random, values.changed(random, recipe, _CONFIG_KEYS))
    command = random.choice(_ENTRIES)
    arguments = [*JOB, "--deepspeed_config", "changed.json", *(PAPER if command == "check" else ())]
    if command == "check" and random.random() < 0.4:
        arguments[-1] = random.choice(("1", "4", "8", "16", "7"))
        arguments += ["--device", random.choice(("cpu", "h100", "v100-32gb", "t4"))]
    return Case(command, arguments, {"changed.json": content})


def run_file(random: Random) -> Case:
    """A run.json, given back with --config or found in the output folder."""
    saved = json.loads(Path("run.json").read_text())
    keys = [f"options.{name}" for name in fields_of(CheckOptions)]
    keys += [*saved, *(f"{block}.{name}" for block in ("identity", "model") for name in saved[block])]
    content = values.written(random, values.changed(random, saved, keys))
    given, there = ["--config", "changed.json", "--output_dir", "out"], [*_SAVED, "--output_dir", "out"]
    if random.random() < 0.6:
        return _of_four(random.choice(_ENTRIES), given, {"changed.json": content})
    return _of_four(random.choice(_ENTRIES), there, {"out/run.json": content})


def model(random: Random) -> Case:
    """A model's description: this project's, or a Hugging Face folder's files."""
    arguments = ["--train_steps", "3", "--deepspeed_config", "plain.json", "--output_dir", "out", "--model"]
    if random.random() < 0.3:
        own = json.loads(Path("model.json").read_text())
        files: dict[str, bytes | str] = {
            "changed.json": values.written(random, values.changed(random, own, list(own)))
        }
        return Case(random.choice(_ENTRIES), [*arguments, "changed.json"], files)
    files = {f"changed/{path.name}": path.read_bytes() for path in Path("hf").iterdir()}
    name = random.choice(sorted(files))
    content = json.loads(files[name])
    keys = [*content, "rope_scaling.rope_type", "rope_scaling.factor"]
    files[name] = values.written(random, values.changed(random, content, keys))
    if random.random() < 0.1:
        files["changed/model.safetensors"] = values.damaged(random, b"\x08\0\0\0\0\0\0\0{}      " * 9)
    if random.random() < 0.1:
        files["changed/model.safetensors.index.json"] = values.written(random, values.tree(random))
    return Case(random.choice(_ENTRIES), [*arguments, "changed"], files)


def extreme(random: Random) -> Case:
    """One number or text at the end of what its type holds, in a description that is right otherwise."""
    value = random.choice(values.EXTREMES)
    source = random.choice(("plain.json", "model.json", "run.json", "hf/config.json"))
    content = json.loads(Path(source).read_text())
    key = {
        "plain.json": lambda: random.choice(_CONFIG_KEYS),
        "model.json": lambda: random.choice(list(content)),
        "run.json": lambda: f"options.{random.choice(list(fields_of(CheckOptions.__bases__[0])))}",
        "hf/config.json": lambda: random.choice([*content, "rope_scaling.factor", "head_dim", "n_embd"]),
    }[source]()
    written = {f"changed/{Path(source).name}": json.dumps(values.put(content, key, value)).encode()}
    if source == "run.json":
        return _of_four("check", ["--config", "changed/run.json", "--output_dir", "out"], written)
    arguments = ["--output_dir", "out", "--train_steps", "3", *PAPER]
    if source == "plain.json":
        return Case(
            "check", [*arguments, "--model", "tiny", "--deepspeed_config", "changed/plain.json"], written
        )
    named = "changed" if source.startswith("hf") else "changed/model.json"
    return Case("check", [*arguments, "--deepspeed_config", "plain.json", "--model", named], written)


def tokenizer(random: Random) -> Case:
    """A tokenizer's folder."""
    files = {f"changed/{path.name}": path.read_bytes() for path in Path("tokenizer").iterdir()}
    name = random.choice(sorted(files))
    content = json.loads(files[name])
    keys = [*content, *(f"model.{key}" for key in content.get("model", {}))]
    files[name] = values.written(random, values.changed(random, content, keys))
    command = random.choice(("check", "prepare", "rank"))
    if command == "prepare":
        return Case(command, ["text.txt", "--output", "made", "--tokenizer", "changed", *_ONE], files)
    return Case(command, [*JOB, "--data", "text.txt", "--tokenizer", "changed"], files)


def hostfile(random: Random) -> Case:
    """A hostfile and the launcher's options beside it."""
    lines = [_host_line(random) for _ in range(random.choice((0, 1, 2, 3, 40)))]
    content = (HOSTS if random.random() < 0.3 else "").encode()
    content += "\n".join(lines).encode("utf-8", "surrogatepass")
    if random.random() < 0.2:
        content = values.damaged(random, content)
    arguments = [*JOB, "--hostfile", "changed_hosts"]
    for _ in range(random.choice((0, 0, 1, 2))):
        arguments += _launcher_option(random)
    return Case(random.choice(("check", "launch")), arguments, {"changed_hosts": content})


def blend(random: Random) -> Case:
    """A description of sources."""
    keys = ["sources", "sources.0", "name", "weight", "data"]
    content = values.written(random, values.changed(random, BLEND, keys))
    arguments = [*JOB, "--data_blend", "changed.json"]
    return Case(random.choice(_ENTRIES), arguments, {"changed.json": content})


def data(random: Random) -> Case:
    """Data of every kind, damaged, and read to the end."""
    files: dict[str, bytes | str] = {}
    given = []
    for number in range(random.choice((1, 1, 2))):
        name = random.choice(values.OWN)
        path = Path(name)
        if path.is_file() and random.random() < 0.6:
            name = f"changed{number}{''.join(path.suffixes)}"
            files[name] = values.damaged(random, path.read_bytes()[:4000])
        given.append(name)
    if random.random() < 0.15:
        for suffix in (".idx", ".bin"):
            content = Path(f"tokens{suffix}").read_bytes()
            files[f"changed{suffix}"] = values.damaged(random, content) if random.random() < 0.6 else content
        if random.random() < 0.5:
            files["changed.json"] = values.written(random, values.tree(random))
        given.append("changed")
    command = random.choice(("check", "prepare", "rank", "rank"))
    if command == "prepare":
        more = _option(random, PrepareOptions) if random.random() < 0.4 else []
        return Case(command, [*given, "--output", "made", *_ONE, *more], files)
    arguments = [*JOB, "--data", *given]
    if random.random() < 0.3:
        arguments += ["--on_bad_record", "skip"]
    if random.random() < 0.3:
        arguments += ["--validation", f"v={random.choice(given)}"]
    return Case(command, arguments, files)


def prepare(random: Random) -> Case:
    """Options of `prepare`, and what it is told to inspect."""
    arguments = [random.choice(values.OWN), *_ONE]
    if random.random() < 0.7:
        arguments += ["--output", random.choice(("made", "made", "made", values.word(random)))]
    for _ in range(random.choice((0, 1, 2))):
        arguments += _option(random, PrepareOptions)
    if random.random() < 0.3:
        arguments.append("--inspect")
    return Case("prepare", _local(arguments))


def checkpoint(random: Random) -> Case:
    """A run's folder in which something is damaged, and every command that reads it."""
    below = [path for path in Path("saved").rglob("*") if path.is_file()]
    files: dict[str, bytes | str] = {f"out/{path.relative_to('saved')}": path.read_bytes() for path in below}
    read = [name for name in sorted(files) if not name.endswith(".pt")]
    for _ in range(random.choice((1, 1, 1, 2))):
        name = random.choice(read * 5 + sorted(files))
        chance = random.random()
        if chance < 0.1:
            files.pop(name, None)
        elif chance < 0.2:
            files[name] = random.choice((FIFO, FOLDER, LOOP))
        else:
            files[name] = _damaged_file(random, name, files.get(name))
    if random.random() < 0.3:
        name = random.choice(
            ("checkpoints/lineage.json", "lease.json", "lock", "outcome.json", "samples.jsonl", "STOP")
        )
        content = {"branches": [["a", -1]], "origin": None, "step": 1, "pid": 1, "x": values.tree(random)}
        files[f"out/{name}"] = random.choice((FIFO, FOLDER, LOOP, values.written(random, content)))
    command = random.choice(("check", "check", "launch", "rank", "export", "generate", "reshard", "reshard"))
    if command in _ENTRIES:
        return _of_four(command, [*_SAVED, "--output_dir", "out"], files)
    source = random.choice(("out", "out", "out/checkpoints", "out/checkpoints/global_step2"))
    if command == "export":
        return Case(command, [source, "made", *_some(random, _EXPORT)], files)
    if command == "reshard":
        return Case(command, [source, "made", *PAPER, *_ONE, "--deepspeed_config", "plain.json"], files)
    more = _some(random, _GENERATE)
    return Case(command, [source, "--prompt", "ab", "--max_new_tokens", "2", *more], files)


def _damaged_file(random: Random, name: str, before: bytes | str | None) -> bytes | str:
    if not isinstance(before, bytes):
        return b""
    if not name.endswith(".json"):
        return values.damaged(random, before)
    try:
        content = json.loads(before)
    except ValueError:  # damaged already
        return before
    blocks = (
        {key: of for key, of in content.items() if isinstance(of, dict)} if isinstance(content, dict) else {}
    )
    keys = [*blocks, *(f"{key}.{inner}" for key, of in blocks.items() for inner in of if "." not in inner)]
    return values.written(random, values.changed(random, content, keys))


def commands(random: Random) -> Case:
    """The other commands, given anything."""
    command = random.choice(("export", "generate", "reshard", "deploy"))
    if command == "deploy":
        return _deployment(random)
    arguments = [random.choice(("saved", "saved", "hf", values.word(random)))]
    arguments += ["--prompt", values.word(random)] if command == "generate" else [values.word(random)]
    if command == "reshard":
        arguments += _option(random, ReshardOptions)
    else:
        arguments += _some(random, (*(_EXPORT if command == "export" else _GENERATE), "--allow_pickle"))
    return Case(command, _local(arguments))


def _deployment(random: Random) -> Case:
    arguments = [random.choice(("kubernetes", "kubeflow", "slurm_hosts", values.word(random)))]
    if arguments[0] == "slurm_hosts":
        environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
        environ[random.choice(list(environ))] = _variable(random)
        return Case("deploy", arguments, environ=environ)
    arguments += ["--hostfile", "hosts", "--image", "a/b:1", "--claim", "c", "--output_dir", "/storage/x"]
    names = ("name", "image", "claim", "secret", "env", "max_restarts", "hostfile", "include", "num_nodes")
    for _ in range(random.choice((1, 2, 3))):
        if random.random() < 0.5:
            arguments += [f"--{random.choice(names)}", values.word(random)]
        else:
            arguments += _option(random, CheckOptions.__bases__[0])
    return Case("deploy", arguments)


def environment(random: Random) -> Case:
    """Variables that commands, launchers or libraries read."""
    if random.random() < 0.5:  # a rank's
        group = random.choice(_OF_RANKS)
        environ = {name: random.choice(("0", "1", "2")) for name in group}
        environ[random.choice(group)] = _variable(random)
        return Case("rank", [*JOB, "--data", "text.txt"], environ=environ)
    environ = {random.choice(_VARIABLES): _variable(random) for _ in range(random.choice((1, 1, 2, 3)))}
    return Case(random.choice(("check", "launch", "rank")), [*JOB, "--data", "text.txt"], environ=environ)


_OF_RANKS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MASTER_PORT"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID",
     "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
)  # fmt: skip
_VARIABLES = (
    "HOME", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "OMP_NUM_THREADS", "COLUMNS", "LINES", "TERM", "LANG",
    "NO_COLOR", "FORCE_COLOR", "TMPDIR", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "HF_HOME", "PATH", "USER",
    "DS_ENV_FILE", "PYTHONPATH", "GLOO_SOCKET_IFNAME", "WANDB_MODE", "HF_ENDPOINT", "SHELL", "LOGNAME",
    "NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "NVIDIA_VISIBLE_DEVICES", "MASTER_ADDR",
    "ACCELERATE_MIXED_PRECISION", "CROSS_RANK",
)  # fmt: skip
_COUNTS = (
    "2(x2)", "1(x99999999999)", "2(x", "2,,", "9" * 30, "a[1-", "[1]", "a[001-3,7],b", "0,0", "-1",
    "GPU-x", "0,1,",
)  # fmt: skip


def _variable(random: Random) -> str:
    return random.choice((values.word(random), random.choice(_COUNTS))).replace("\0", "")


@cache
def _recipes() -> tuple[Path, ...]:
    return tuple(sorted((PROJECT / "ds_configs").glob("*.json")))


@cache
def _recipe(path: Path) -> str:
    return json.dumps(read_json(path).values)


_SAVED = ("--config", "run.json")
_ONE = ("--workers", "1")
_EXPORT = ("--dtype", "--max_shard_size", "--tokenizer")
_GENERATE = ("--temperature", "--top_k", "--top_p", "--seed", "--dtype", "--tokenizer", "--max_new_tokens")
# A rank that takes part in the saved run.
FOUR = {
    "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "4", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}  # fmt: skip


def _of_four(command: str, arguments: list[str], files: dict[str, bytes | str]) -> Case:
    """A call for the four ranks of the saved run."""
    more = {"check": ("--world_size", "4"), "launch": ("--num_gpus", "4"), "rank": ()}[command]
    return Case(command, [*arguments, *more], files, FOUR if command == "rank" else {})


def _some(random: Random, names: Sequence[str]) -> list[str]:
    """Some of the options, each with any value."""
    chosen = random.sample(names, random.choice((0, 0, 1, 2)))
    return [word for name in chosen for word in (name, values.word(random))]


def _local(arguments: list[str]) -> list[str]:
    return [word if not word.startswith(_REMOTE) else "no/such" for word in arguments]


def _option(random: Random, kind: type) -> list[str]:
    known = fields_of(kind)
    name = random.choice([name for name in known if name not in _ELSEWHERE])
    given = [f"--{name}"]
    if known[name].forms[0].kind is bool:
        return given if random.random() < 0.9 else [*given, values.word(random)]
    count = random.choice((0, 1, 2, 3)) if known[name].forms[0].kind is list else 1
    given += _local([_value(random, known[name]) for _ in range(count)])
    return [f"{given[0]}={given[1]}"] if len(given) == 2 and random.random() < 0.2 else given


def _value(random: Random, field: Field) -> str:
    kinds = {form.kind for form in field.forms}
    if kinds & {int, float} and random.random() < 0.8:
        return random.choice(values.NUMBERS)
    if field.choices and random.random() < 0.5:
        return random.choice(field.choices)
    return values.word(random)


@cache
def _launcher_options() -> tuple[tuple[str, bool], ...]:
    return tuple((action.option_strings[-1], action.nargs != 0) for action in launcher_parser()._actions)


def _launcher_option(random: Random) -> list[str]:
    name, takes = random.choice(_launcher_options())
    if not takes:
        return [name]
    pool = (values.word(random), random.choice(values.NUMBERS), random.choice(LAUNCHERS), "localhost:0", "2")
    return [name, random.choice(pool)]


def _host_line(random: Random) -> str:
    name = random.choice(("node1", "localhost", "a@node2", values.word(random)))
    number = random.choice(values.NUMBERS)
    count = random.choice(("slots=2", "slots=2", f"slots={number}", values.word(random), ""))
    forms = (f"{name} {count}", f"{name}\t{count} {values.word(random)}", f"#{name}", f"{name}{count}")
    return random.choice(forms)


KINDS: tuple[Callable[[Random], Case], ...] = (
    options, deepspeed_json, run_file, model, extreme, tokenizer, hostfile, blend, data, prepare, checkpoint,
    commands, environment,
)  # fmt: skip
