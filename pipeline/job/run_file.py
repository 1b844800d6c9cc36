"""The folder of a run: what lies where, and run.json, so that no other description continues the run; and
what may change from one start to the next, as a checkpoint keeps it, and how that is shown."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.base.files import replaced_atomically
from pipeline.base.json_reader import saved_json
from pipeline.base.problems import Problem
from pipeline.base.user_input import is_folder, unwritable
from pipeline.job.job import Job
from pipeline.job.options import RUN_FILE, Options
from pipeline.job.schema import DYNAMIC_LOSS_SCALE, KEYS
from pipeline.model.config import ModelConfig

LOSS_SCALE = "fp16.loss_scale"
# In the folder of a run, beside run.json.
CHECKPOINTS = "checkpoints"
# The checkpoint after so many steps, and what `pipeline.checkpoints.folder.publish` has moved aside for one.
REPLACED, LEFT_BEHIND = ".partial.replaced", ".left_behind"
MOVED_ASIDE = rf"({re.escape(REPLACED)}|{re.escape(LEFT_BEHIND)}\d*)?"
CHECKPOINT_NAME = re.compile(rf"global_step(0|[1-9]\d*){MOVED_ASIDE}")
TOKENIZER_FOLDER = "tokenizer"
PACKAGES = {"pipeline": "gpt-pretraining-pipeline", "torch": "torch", "deepspeed": "deepspeed"}
# On a file system that is away, all ranks would wait for it.
_GIT_SECONDS = 10
# Of a checkpoint: written last, it has what it holds and the settings it was trained with.
MANIFEST = "manifest.json"


def identity(options: Options, model: ModelConfig, sequence_length: int, tokenizer: str) -> dict[str, Any]:
    """What makes two runs the same one: model, tokenizer, validation share, sequence length and seed, flat.

    Layout, batch, precision, optimizer, schedule, length and the blend of the data may change from one start
    to the next; the checkpoint knows each source by its tokens.

    Args:
        tokenizer: Its own identity, so that the same one may lie in another folder.
    """
    sizes = {f"model.{key}": value for key, value in model.to_json().items() if key != "name"}
    # Of runs that use it, so that those started before there was such an option go on.
    separator = options.document_separator
    return {
        **sizes,
        **({} if separator is None else {"document_separator": separator}),
        "tokenizer": tokenizer,
        "text_field": options.text_field,
        "on_bad_record": options.on_bad_record,
        "document_mask": options.document_mask,
        "mask_document_end": options.mask_document_end,
        "eval_fraction": options.held_out_fraction,
        "seq_length": sequence_length,
        "seed": options.seed,
    }


def folder_problems(folder: Path, wanted: dict[str, Any]) -> list[Problem]:
    """Why this folder cannot take a run of that identity: it cannot be written, or holds another run."""
    for place in (folder, folder / CHECKPOINTS):  # the second may be a link to another disk
        if rule := unwritable(place):
            return [Problem("output_dir", str(place), rule, "Name a folder that you may write to")]
    path = folder / RUN_FILE
    if not path.exists():
        return []
    try:
        saved = saved_json(path)["identity"]
        differing = _differences(saved, wanted)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"holds a {RUN_FILE} that cannot be read ({type(error).__name__}: {error})"
        return [Problem("output_dir", str(folder), rule, "Use another folder, or remove that file")]
    if not differing:
        return []
    rule = f"holds another run: {'; '.join(differing)}"
    return [
        Problem(
            "output_dir",
            str(folder),
            rule,
            f"Use another --output_dir, or that run's settings: --config {path}",
        )
    ]


def restart_problems(folder: Path, resume: str) -> list[Problem]:
    """Why ``--resume never`` cannot start here: checkpoints of an earlier start would be overwritten."""
    checkpoints = folder / CHECKPOINTS
    if resume != "never" or not is_folder(checkpoints):
        return []
    try:
        if not any(checkpoints.iterdir()):
            return []
    except OSError as error:
        rule = f"cannot be listed ({error.strerror}), and may hold checkpoints"
        return [Problem("output_dir", str(checkpoints), rule, "See to its permissions")]
    rule = f"{checkpoints} holds checkpoints, and a new start would overwrite them"
    return [Problem("resume", resume, rule, "Use --resume auto, or another --output_dir")]


def had_constant_rate(options: Options, folder: Path) -> bool:
    """Whether the checkpoint that a run in `folder` resumes from was trained at a constant rate, as far as
    names tell. Each host has its manifest, also where only one has run.json."""
    if options.resume == "never":
        return False
    paths = [Path(options.resume)]
    if options.resume == "auto":
        found = [
            (CHECKPOINT_NAME.fullmatch(path.name), path)
            for path in (folder / CHECKPOINTS).glob("global_step*")
        ]
        paths = [path for _, path in sorted(((int(m[1]), p) for m, p in found if m), reverse=True)]
    for path in paths:
        with suppress(OSError, ValueError, KeyError, TypeError):  # another one may be resumed from
            return saved_json(path / MANIFEST)["settings"]["scheduler.type"] is None
    return False


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    names = sorted(saved.keys() | wanted.keys())
    return [
        f"{name} {saved.get(name)!r} there, {wanted.get(name)!r} here"
        for name in names
        if saved.get(name) != wanted.get(name)
    ]


def run_json(job: Job) -> dict[str, Any]:
    """The content of run.json."""
    world = job.world
    return {
        "command": list(job.command),
        "arguments": list(job.arguments),
        "folder": str(Path.cwd()),  # from which relative paths count
        "hosts": [
            {"name": host.name, "slots": host.slots, "devices": list(host.devices)} for host in world.hosts
        ],
        "device": {"kind": world.device, "name": world.device_name, "memory": world.known_memory},
        "versions": versions(),
        "code": code_state(),
        "options": job.options.to_json(),
        "identity": job.identity,
        "deepspeed_json": job.json,
        "deepspeed": job.deepspeed,
        "resolved": {note.key: note.value for note in job.resolved},
        "notes": [str(problem) for problem in job.problems],
        "model": job.model.to_json(),
        "layout": {**asdict(job.mesh), "zero_stage": job.zero_stage, "stages": list(job.stages)},
        "batch": asdict(job.batch),
        "precision": asdict(job.precision),
        "optimizer": asdict(job.optimizer),
        "scheduler": job.schedule.to_json(),
        "train_steps": job.train_steps,
    }


def versions() -> dict[str, str | None]:
    """Of this pipeline, torch, DeepSpeed and Python; None for what is not installed as a package."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name, package in PACKAGES.items():
        with suppress(PackageNotFoundError):  # run from a folder into which nothing was installed
            found[name] = version(package)
    return found | {"python": platform.python_version()}


def code_state(project: Path = Path(__file__).parents[2]) -> dict[str, Any] | None:
    """The git commit of the code that runs, and whether files of it were changed since; None where git does
    not know."""
    commit = _git(project, "rev-parse", "HEAD")
    changed = _git(project, "status", "--porcelain", "--", "pipeline")
    if commit is None or changed is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(changed)}


def _git(folder: Path, *words: str) -> str | None:
    """What git says of a folder; None where it fails."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def write_run_file(job: Job) -> Path:
    """Write run.json into the job's output folder, which is made if needed. For one rank only."""
    folder = Path(job.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_FILE
    with replaced_atomically(path) as file:
        file.write((json.dumps(run_json(job), indent=2) + "\n").encode())
    return path


def settings_of(job: Job) -> dict[str, Any]:
    """Each setting by its dotted name, as plain JSON values. The layout (parallel sizes, ZeRO stage, number
    formats) is kept beside it."""
    optimizer = asdict(job.optimizer)
    optimizer.pop("type")  # of the layout
    nested = {
        "batch": {key: value for key, value in asdict(job.batch).items() if key != "sequence_length"},
        "train_steps": job.train_steps,
        "gradient_clipping": job.gradient_clipping,
        "optimizer": optimizer,
        "scheduler": job.schedule.to_json(),
        "data": {source.name: float(source.weight) for source in job.data.training},
        "activation_checkpointing": job.activation_checkpointing,
    }
    return {**dict(_flat(nested)), **_loss_scale(job)}


def common_facts(job: Job) -> dict[str, Any]:
    """What every rank must have resolved alike: what the job is, and what decides the order of collectives.

    Flat, as plain JSON values. Paths of data may differ from host to host: its tokens are compared when read.
    """
    settings = {key: value for key, value in settings_of(job).items() if not key.startswith("data.")}
    shape = {
        "layout": asdict(job.mesh),
        "stages": list(job.stages),
        "pipeline_schedule": job.pipeline_schedule,
        "precision": {"compute": job.precision.compute, "accumulation": job.precision.accumulation},
        "deepspeed": job.deepspeed,
        "eval_interval": job.eval_interval,
        "eval_samples": job.data.eval_samples,
        "validation": [each.name for each in job.data.validation],
        "save_interval": job.saves.interval,
        "keep_best": job.saves.keep_best,
        "async_save": job.saves.in_background,
        "sample_tokens": job.reporting.sample_tokens,
    }
    return {**job.identity, **settings, **dict(_flat(shape))}


def _loss_scale(job: Job) -> dict[str, Any]:
    """What acts on the loss scale of an fp16 job, with the defaults of what is left out."""
    if job.precision.compute != "fp16":
        return {}
    given = job.deepspeed["fp16"]
    values = {
        name: given.get(name.removeprefix("fp16."), KEYS[name].default)
        for name in (LOSS_SCALE, *DYNAMIC_LOSS_SCALE)
    }
    return {LOSS_SCALE: values[LOSS_SCALE]} if values[LOSS_SCALE] else values


def setting_changes(saved: Mapping[str, Any], job: Job) -> list[str]:
    """What is another value now, as ``optimizer.lr: 0.001 -> 0.0003``; a setting that only one side has is
    `none` on the other. Nothing for a checkpoint that kept no settings, and nothing of fp16 where one side is
    in another format: that is a change of the layout."""
    if not saved:
        return []
    here = settings_of(job)
    names = [*saved, *(name for name in here if name not in saved)]
    if LOSS_SCALE not in saved or LOSS_SCALE not in here:
        names = [name for name in names if not name.startswith("fp16.")]
    return [
        f"{name}: {_shown(saved.get(name))} -> {_shown(here.get(name))}{_remark(name, saved, here)}"
        for name in names
        if saved.get(name) != here.get(name)
    ]


def _remark(name: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    if name == "fp16.initial_scale_power" and name in saved and name in here:
        return " (a saved dynamic scale continues from where it was)"
    return ""


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
