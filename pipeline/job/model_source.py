"""What ``--model`` brings along: the model, the tokenizer in its folder, the weights of step 0. No torch.

A run that has started keeps its model and tokenizer in its own folder. It resumes from there when the folder
that ``--model`` names is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.base.json_reader import saved_json
from pipeline.base.problems import JobError, Problem
from pipeline.base.user_input import exists, is_file, is_folder
from pipeline.base.words import few
from pipeline.data.tokenizer_folder import TOKENIZER, TokenizerFacts, chosen_tokenizer, tokenizer_facts
from pipeline.hugging_face.folder_files import hub_folder, is_hub_name, left_behind, plain_hub_name
from pipeline.job.initial_weights import folder_weights_problems, model_folder
from pipeline.job.models import AUTO, CONFIG_FILE, PRESETS, load_model
from pipeline.job.options import Options
from pipeline.job.run_file import CHECKPOINT_NAME, CHECKPOINTS, RUN_FILE, TOKENIZER_FOLDER
from pipeline.model.config import ModelConfig, model_from_json


def model_of(options: Options, device: str) -> ModelConfig:
    """The model of a run, with its dropout.

    Raises:
        JobError: as `load_model`.
    """
    saved = _saved_run(options)
    model = load_model(options.model, device) if saved is None else _saved_model(saved)
    if options.dropout is None or not 0 <= options.dropout < 1:
        return model
    return replace(model, dropout=options.dropout, attention_dropout=options.dropout)


def _model_tokenizer(options: Options) -> str | None:
    """The tokenizer that comes with the model; None where none does."""
    saved = _saved_run(options)
    folder = model_folder(options.model) if saved is None else saved / TOKENIZER_FOLDER
    return str(folder) if folder is not None and is_file(folder / TOKENIZER) else None


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer a run has.

    Attributes:
        name: bytes, or a folder; None, too, means bytes.
        own: The one that comes with the model; None where none does.
        is_own: The run has the model's because nothing else is named or lies beside its token files.
        facts: What it says; None where it cannot be read.
    """

    name: str | None
    own: str | None
    is_own: bool
    facts: TokenizerFacts | None = None

    @property
    def identity(self) -> str:
        """The same wherever the tokenizer lies; its name where it cannot be read."""
        return str(self.name) if self.facts is None else self.facts.identity


def choose_tokenizer(options: Options, paths: Sequence[str]) -> TokenizerChoice:
    """The tokenizer of a run on `paths`: the one it names, else the one saved beside token files among them,
    else the model's, else bytes."""
    own = _model_tokenizer(options)
    name = chosen_tokenizer(options.tokenizer, paths, own)
    return TokenizerChoice(name, own, options.tokenizer is None and own is not None and name == own)


def facts_of(choice: TokenizerChoice, options: Options) -> TokenizerFacts:
    """What the chosen tokenizer says: of token files, from the model's folder where it is the same
    there, whose chat template and ids that end a text are those of the weights.

    Raises:
        JobError: as `tokenizer_facts`.
    """
    facts = tokenizer_facts(choice.name)
    if options.tokenizer is None and choice.own not in (None, choice.name):
        with contextlib.suppress(JobError):  # nobody reads it in this run
            own = tokenizer_facts(choice.own)
            return own if own.identity == facts.identity else facts
    return facts


def left_behind_notes(options: Options, choice: TokenizerChoice) -> list[Problem]:
    """What of the folder that ``--model`` names neither the run keeps nor its exports get."""
    folder = model_folder(options.model)
    if folder is None or choice.facts is None:
        return []
    notes = []
    try:
        names = left_behind(folder, choice.facts.files if Path(choice.facts.name) == folder else ())
    except OSError as error:
        rule = f"cannot be listed ({error.strerror})"
        return [Problem("model", options.model, rule, "See to its permissions")]
    if names:
        rule = f"neither the run nor its exports take along {few(names)}"
        notes.append(Problem("model", options.model, rule, "", "note"))
    if choice.facts.runs_code:
        rule = "its tokenizer_config.json names code of its own (auto_map); tokenizer.json is used without it"
        notes.append(Problem("tokenizer", choice.name, rule, "", "note"))
    return notes


def hub_output_folder(options: Options) -> str:
    """The folder of a run whose ``--model`` is hub:NAME, as of one with a folder called NAME."""
    return output_folder(options, str(Path(plain_hub_name(options.model)) / CONFIG_FILE))


def from_hub(options: Options, key: str, output_dir: str) -> tuple[str, str]:
    """What a run in `output_dir` reads for hub:NAME, and the precise name hub:NAME@COMMIT, to be kept.

    A run that resumes has both in its own folder. The name stays as it is where the hub has no folder for it:
    whoever reads that reports it.

    Args:
        key: ``model`` or ``tokenizer``.
    """
    name, run = getattr(options, key), Path(output_dir)
    if not starts_anew(options, run):
        run = run if options.resume == "auto" else Path(options.resume).absolute().parent.parent
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # as if there were no run
            saved = saved_json(run / RUN_FILE)["options"][key]
            if is_hub_name(saved) and plain_hub_name(saved) == plain_hub_name(name):
                return (saved if key == "model" else str(run / TOKENIZER_FOLDER)), saved
    found = hub_folder(key, name)
    if isinstance(found, Problem):
        return name, name
    return str(found), f"hub:{plain_hub_name(name)}@{found.name}"


def output_folder(options: Options, model_name: str) -> str:
    """The run's folder: as given, or runs/<name of the model>, for a model folder runs/from_<its name>.

    What was exported from runs/mine to exported/mine would else be trained in runs/mine: that run would go
    on, and the folder's weights would not be read.
    """
    if options.output_dir is not None:
        return options.output_dir
    path = Path(model_name)
    return str(Path("runs") / (f"from_{path.parent.name}" if path.name == CONFIG_FILE else path.stem))


def starts_anew(options: Options, folder: Path) -> bool:
    """Whether a run in `folder` begins at step 0, as far as names tell."""
    if options.resume == "auto":
        checkpoints = folder / CHECKPOINTS
        try:
            names = [path.name for path in checkpoints.iterdir()] if is_folder(checkpoints) else []
        except OSError:
            return False  # the choice of the checkpoint says that they cannot be listed
        return not any(CHECKPOINT_NAME.fullmatch(name) for name in names)
    return options.resume == "never"


def weights_problems(
    options: Options, model: ModelConfig, folder: Path | None, tokenizer: TokenizerChoice
) -> list[Problem]:
    """Why a start at step 0 cannot begin with the weights in the model's folder.

    Args:
        folder: With the weights; None where they are drawn.
    """
    problems = folder_weights_problems(options.model, model)
    if folder is None or options.tokenizer is not None:
        return problems
    return problems + _tokenizer_problems(tokenizer, str(folder))


def _tokenizer_problems(choice: TokenizerChoice, folder: str) -> list[Problem]:
    """Token ids that mean something else to the weights."""
    if choice.name is None:
        rule = f"{folder} has weights but no {TOKENIZER}, without which their tokens are unknown"
        remedy = "Save the model's tokenizer there with AutoTokenizer's save_pretrained, or give --tokenizer"
        return [Problem("tokenizer", None, rule, remedy)]
    if choice.facts is None or choice.own in (None, choice.name):
        return []
    try:
        if choice.identity == tokenizer_facts(choice.own).identity:
            return []
    except JobError:  # not read in this run
        return []
    rule = f"made the tokens, and the weights in {folder} belong to the tokenizer there, which is another one"
    remedy = "Prepare the data with the model's tokenizer, or insist with --tokenizer"
    return [Problem("tokenizer", choice.name, rule, remedy)]


def _saved_run(options: Options) -> Path | None:
    """The folder of the run that continues without what ``--model`` names; None where that is there, or no
    run was started with it."""
    name = options.model
    if name in (AUTO, *PRESETS) or exists(name) or options.resume == "never":
        return None
    path = Path(name) if name.endswith(".json") else Path(name) / CONFIG_FILE
    folder = Path(output_folder(options, str(path)))
    if options.resume != "auto":
        folder = Path(options.resume).absolute().parent.parent
    try:
        saved = saved_json(folder / RUN_FILE)
        return folder if saved["options"]["model"] == name else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the missing model is what is reported


def _saved_model(folder: Path) -> ModelConfig:
    path = folder / RUN_FILE
    return model_from_json(saved_json(path)["model"], str(path))
