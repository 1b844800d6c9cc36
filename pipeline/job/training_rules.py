"""Checks of optimizer, schedule and options. Listed in `pipeline.job.rules`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from pipeline.base.fields import AUTO, Undecided
from pipeline.base.problems import Problem
from pipeline.base.user_input import exists, is_file, is_folder
from pipeline.job.data_sources import path_problems
from pipeline.job.facts import Facts
from pipeline.job.model_source import output_folder
from pipeline.job.options import RUN_FILE
from pipeline.job.schema import MONITORS

_PARAMETERS_OF = {
    "AdamW": frozenset({"lr", "weight_decay", "fused", "betas", "eps"}),
    "Adam": frozenset({"lr", "weight_decay", "fused", "betas", "eps", "adam_w_mode"}),
    "SGD": frozenset({"lr", "weight_decay", "fused", "momentum", "nesterov"}),
}


# Key that turns each block on.
_SWITCHES = {
    "bf16": "enabled",
    "fp16": "enabled",
    "zero_optimization.offload_optimizer": "device",
    "zero_optimization.offload_param": "device",
    "comms_logger": "enabled",
    **dict.fromkeys(MONITORS, "enabled"),
}


def switches(f: Facts) -> Iterable[Problem]:
    for block, switch in _SWITCHES.items():
        if f.settings.given(block) and f.settings.absent(f"{block}.{switch}"):
            yield f.settings.note(block, f"does nothing without {switch}, in DeepSpeed as here")


def monitors(f: Facts) -> Iterable[Problem]:
    """What keeps the enabled monitors from working. None is imported."""
    for key, module in MONITORS.items():
        if f.settings.value(f"{key}.enabled") is not True:
            continue
        if module is not None and not is_installed(module):
            rule = f"the monitor needs the Python package {module}, which is not installed"
            remedy = f'pip install {module}, or set "{key}": {{"enabled": false}}'
            yield f.settings.problem(f"{key}.enabled", rule, remedy)
        path = f.settings.value(f"{key}.output_path") or ""
        places = (Path(path), *Path(path).parents)
        if blocking := next((p for p in places if exists(p) and not is_folder(p)), None):
            rule = f"must be a folder, and {blocking} is a file"
            yield f.settings.problem(f"{key}.output_path", rule, "Name a folder that exists or can be made")
        elif path and _holds_another_run(f, Path(path) / getattr(f.config, key).job_name):
            rule = "holds the record of another run, which would be cut where this one begins"
            yield f.settings.problem(f"{key}.job_name", rule, "Give this run a job_name of its own")


def _holds_another_run(f: Facts, folder: Path) -> bool:
    """Whether a monitor has written there, and not for the run that goes on here."""
    if not is_folder(folder) or not any((*folder.glob("*.csv"), *folder.glob("events.out.tfevents.*"))):
        return False
    return not is_file(Path(output_folder(f.options, f.model.name)) / RUN_FILE)


def is_installed(module: str) -> bool:
    """Whether a package is here, without importing it. A folder ``wandb/`` that an earlier run left looks
    like a package, but has no origin."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def logged_collectives(f: Facts) -> Iterable[Problem]:
    if f.settings.given("comms_logger.prof_ops") and f.config.comms_logger.prof_all:
        rule = "chooses nothing while prof_all is true, which is its default"
        yield f.settings.note("comms_logger.prof_ops", rule)


def optimizer_parameters(f: Facts) -> Iterable[Problem]:
    for name in f.settings.names("optimizer.params"):
        key = f"optimizer.params.{name}"
        if name == "adam_w_mode" and f.optimizer == "AdamW":
            yield f.settings.note(key, "AdamW decouples weight decay whatever it says, in DeepSpeed as here")
        elif name not in _PARAMETERS_OF[f.optimizer]:
            owners = [kind for kind, names in _PARAMETERS_OF.items() if name in names]
            remedy = f"Remove it, or use {' or '.join(owners)}"
            yield f.settings.problem(key, f"is not a parameter of {f.optimizer}", remedy)


def sgd_rate(f: Facts) -> Iterable[Problem]:
    key = "optimizer.params.lr"
    if f.optimizer == "SGD" and f.config.optimizer.params.lr == AUTO:
        yield f.settings.problem(
            key, "the model's usual rate is meant for AdamW", "Give a number for SGD", AUTO
        )


def betas(f: Facts) -> Iterable[Problem]:
    betas = f.config.optimizer.params.betas
    if isinstance(betas, list) and (len(betas) != 2 or max(betas, default=0) >= 1):
        yield f.settings.problem("optimizer.params.betas", "must be two numbers below 1", "Use [0.9, 0.95]")


def nesterov(f: Facts) -> Iterable[Problem]:
    if f.config.optimizer.params.nesterov and not f.config.optimizer.params.momentum:
        yield f.settings.problem("optimizer.params.nesterov", "needs momentum above 0", "Set momentum")


def lr_scaling(f: Facts) -> Iterable[Problem]:
    rule, base = f.config.lr_scaling.rule, f.config.lr_scaling.base_batch_size
    if rule != "none" and base is None:
        remedy = "Set it to the batch for which lr was chosen"
        yield f.settings.problem("lr_scaling.base_batch_size", f"is needed by rule {rule}", remedy)
    if rule == "none" and base is not None:
        remedy = "Set lr_scaling.rule to linear or sqrt, or remove it"
        yield f.settings.problem("lr_scaling.base_batch_size", "does nothing with rule none", remedy)


def one_length(f: Facts) -> Iterable[Problem]:
    if f.options.train_steps is not None and f.options.train_tokens is not None:
        rule = f"says the run's length a second time, beside train_steps = {f.options.train_steps}"
        yield Problem("train_tokens", f.options.train_tokens, rule, "Give one of the two")


def evaluation(f: Facts) -> Iterable[Problem]:
    fraction = f.options.held_out_fraction
    if f.options.eval_samples > 0 and fraction == 0 and not f.options.validation:
        rule = "nothing is kept for validation, so there is nothing to evaluate"
        yield Problem("eval_fraction", 0, rule, "Raise it, give --validation, or --eval_samples 0")
    elif f.options.eval_samples == 0 and f.options.validation:
        rule = "does nothing with eval_samples 0"
        yield Problem(
            "validation", " ".join(f.options.validation), rule, "Raise --eval_samples, or leave it out"
        )


def retention(f: Facts) -> Iterable[Problem]:
    for key in ("keep_every", "keep_best"):
        value = getattr(f.options, key)
        if value is not None and f.options.keep_last is None:
            rule = "says what is kept beside the newest checkpoints, and not how many of these are"
            yield Problem(key, value, rule, "Give --keep_last, too")
    if f.options.keep_best is not None and f.options.eval_samples == 0:
        rule = "goes by validation losses, and there are none with eval_samples 0"
        yield Problem(
            "keep_best", f.options.keep_best, rule, "Raise --eval_samples, or leave --keep_best out"
        )


def prompt(f: Facts) -> Iterable[Problem]:
    if f.options.sample_tokens > 0 and not f.options.sample_prompt:
        rule = "a sample continues a text of at least one character"
        yield Problem("sample_prompt", "", rule, "Give a prompt, or --sample_tokens 0")


def data(f: Facts) -> Iterable[Problem]:
    for key in ("data", "validation"):
        yield from f.failures.get(key, ())
        yield from path_problems(key, f.sources.get(key, ()), _written(f))


def _written(f: Facts) -> list[str]:
    """Folders that the run writes to, as far as they are known."""
    folders = [f.options.cache_dir] if f.options.cache_dir else []
    with suppress(Undecided):  # the model's problem is reported
        folders.append(output_folder(f.options, f.model.name))
    return folders
