"""Options + DeepSpeed JSON + world -> Job, or every reason why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.base.fields import AUTO, Undecided, shown
from pipeline.base.json_reader import read_json, with_values
from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.user_input import exists, parse_duration, unwritable
from pipeline.data.corpus import SourceSpec
from pipeline.data.split import USUAL_LIMIT
from pipeline.hugging_face.folder_files import is_hub_name
from pipeline.job.batch import MICRO, STEPS, TRAIN, BatchRequest, resolve_batch
from pipeline.job.data_sources import training_sources, validation_sets
from pipeline.job.deepspeed_dict import deepspeed_dict, reduce_bucket, resolved_monitors, training_of
from pipeline.job.facts import Facts, Settings, known
from pipeline.job.initial_weights import InitialWeights, initial_weights, model_folder, no_weights
from pipeline.job.job import (
    Batch,
    DataSpec,
    Job,
    OptimizerConfig,
    Precision,
    Reporting,
    Resolved,
    SaveRules,
    StopRules,
)
from pipeline.job.layout_rules import less_memory
from pipeline.job.learning import resolve_learning
from pipeline.job.model_source import (
    TokenizerChoice,
    choose_tokenizer,
    facts_of,
    from_hub,
    hub_output_folder,
    left_behind_notes,
    model_of,
    output_folder,
    starts_anew,
    weights_problems,
)
from pipeline.job.options import Options, option_problems
from pipeline.job.rules import check_rules
from pipeline.job.run_file import folder_problems, had_constant_rate, identity, restart_problems
from pipeline.job.schedules import LearningRate
from pipeline.job.schema import DEEPSPEED_DEFAULTS
from pipeline.job.stages import partition
from pipeline.job.training_rules import is_installed
from pipeline.job.world import World
from pipeline.model.config import ModelConfig
from pipeline.model.counts import layer_parameters
from pipeline.model.memory import RankMemory, Training, rank_memory
from pipeline.parallel.mesh import Mesh

__all__ = ["Batch", "Draft", "Job", "OptimizerConfig", "Precision", "Resolved", "examine", "resolve"]

T = TypeVar("T")
# Micro-batches per stage where the run decides: (p - 1) / (4 p + p - 1), below a fifth, of a step is idle.
BUSY = 4
PROJECT = Path(__file__).resolve().parents[2]


@dataclass
class Draft:
    """A job as far as it could be understood. Parts that could not are None, and `problems` says why.

    Attributes:
        sources: Those of ``data`` and of ``validation``, each where its description is right.
        failures: Problems met while deriving a part, by the part's name; its rule reports them.
        memory: Of the rank that holds most.
        resume: What it would resume from and what changes by it, in lines; none for a new start.
        outlook: Name and text of what is to be expected: tokens, passes, checkpoints, time.
        job: The whole, if there is no error.
    """

    options: Options
    world: World | None
    problems: list[Problem] = field(default_factory=list)
    failures: dict[str, Sequence[Problem]] = field(default_factory=dict)
    resolved: list[Resolved] = field(default_factory=list)
    model: ModelConfig | None = None
    sources: dict[str, tuple[SourceSpec, ...]] = field(default_factory=dict)
    tokenizer: TokenizerChoice | None = None
    initial_weights: InitialWeights | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None
    batch: Batch | None = None
    precision: Precision | None = None
    stages: tuple[int, ...] | None = None
    train_steps: int | None = None
    schedule: LearningRate | None = None
    optimizer: OptimizerConfig | None = None
    memory: RankMemory | None = None
    resume: Sequence[str] = ()
    outlook: Sequence[tuple[str, str]] = ()
    job: Job | None = None

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    def derive(self, part: str, find: Callable[..., T], *args: Any) -> T | None:
        """The result of find(*args), or None after keeping its problems for the rule of that part."""
        try:
            return find(*args)
        except JobError as error:
            self.failures[part] = error.problems
        except Undecided:
            pass  # what it needs has a problem of its own, which is reported
        return None

    def note(self, key: str, value: T, reason: str) -> T:
        """Record a value that was left open."""
        self.resolved.append(Resolved(key, value, reason))
        return value


def resolve(options: Options, world: World, batch: Sequence[int] = ()) -> Job:
    """The job; `batch` as in `examine`.

    Raises:
        JobError: with every problem of options, JSON, model, world and the rules between them.
    """
    draft = examine(options, world, batch=batch)
    if draft.job is None:
        raise JobError(draft.problems)
    return draft.job


def examine(
    options: Options, world: World | None, problems: Iterable[Problem] = (), batch: Sequence[int] = ()
) -> Draft:
    """Everything that can be said of a job, right or wrong.

    Args:
        world: None if it could not be found; `problems` then says why.
        batch: Train batch, micro-batch and accumulation steps in place of the JSON's: on fewer hosts than the
            job was meant for, a step must stay what it was.
    """
    draft = Draft(options, world, list(problems))
    settings = Settings(with_values(read_json(config_path(options.deepspeed_config)), options.set))
    draft.problems += [*option_problems(options), *settings.problems]
    options = _model_from_hub(options, draft)
    draft.model = draft.derive("model", _model, options, world)
    options = _tokenizer_from_hub(options, draft)
    _inputs(options, draft)
    tokenizer = known(draft.tokenizer).facts
    facts = Facts(options, settings, world, draft.model, _tokenizer=tokenizer, sources=draft.sources)
    draft.mesh = draft.derive("world", _mesh, facts)
    draft.precision = draft.derive("precision", _precision, facts, draft)
    draft.stages = draft.derive("partition", _stages, facts)
    draft.batch = draft.derive("batch", _batch, facts, draft, batch)
    draft.train_steps = draft.derive("run length", _train_steps, facts, draft)
    draft.derive("schedule", _learning, facts, draft)
    draft.derive("output folder", _check_folder, facts, draft)
    draft.derive("weights", _weights, facts, draft)
    training = draft.derive("memory", _training, facts, draft)
    if training is not None and draft.model is not None:
        draft.memory = rank_memory(draft.model, training)
    facts = replace(facts, _batch=draft.batch, _training=training, failures=draft.failures)
    draft.problems += check_rules(facts)
    if options.strict:
        draft.problems = [_as_error(problem) for problem in draft.problems]
    if not draft.errors:
        draft.job = _assemble(facts, draft)
    return draft


def _as_error(problem: Problem) -> Problem:
    """A note as an error, for --strict."""
    if problem.severity != "note":
        return problem
    return replace(problem, severity="error", remedy="Remove it, or leave --strict out")


def config_path(given: str) -> Path:
    """Where the JSON is: a relative path counts from the current folder, else from the project's."""
    path = Path(given)
    return path if path.is_absolute() or exists(path) or not exists(PROJECT / path) else PROJECT / path


def _model(options: Options, world: World | None) -> ModelConfig:
    if options.model == "auto" and world is None:
        raise Undecided
    return model_of(options, world.device if world else "cpu")


def _model_from_hub(options: Options, draft: Draft) -> Options:
    """The options with a folder in place of hub:NAME; the draft keeps the name, with the commit."""
    if not is_hub_name(options.model):
        return options
    output_dir = hub_output_folder(options)
    used, kept = from_hub(options, "model", output_dir)
    draft.options = replace(draft.options, model=kept)
    return replace(options, model=used, output_dir=output_dir)


def _tokenizer_from_hub(options: Options, draft: Draft) -> Options:
    """As `_model_from_hub`, for the tokenizer."""
    if not is_hub_name(options.tokenizer) or draft.model is None:
        return options
    used, kept = from_hub(options, "tokenizer", output_folder(options, draft.model.name))
    draft.options = replace(draft.options, tokenizer=kept)
    return replace(options, tokenizer=used)


def _inputs(options: Options, draft: Draft) -> None:
    """Read what is described in files of the user's: sources and the tokenizer, each once."""
    for key, find in (("data", training_sources), ("validation", validation_sets)):
        if (found := draft.derive(key, find, options)) is not None:
            draft.sources[key] = found
    paths = [path for sources in draft.sources.values() for source in sources for path in source.paths]
    choice = choose_tokenizer(options, paths)
    draft.tokenizer = replace(choice, facts=draft.derive("tokenizer", facts_of, choice, options))
    draft.problems += left_behind_notes(options, draft.tokenizer)


def _mesh(facts: Facts) -> Mesh:
    return Mesh(facts.stages, facts.data, facts.sequence, facts.tensor)


def _precision(facts: Facts, draft: Draft) -> Precision:
    device = facts.world.device_name or facts.world.device
    if facts.config.bf16.enabled == AUTO:
        reason = f"{device} {'computes' if facts.bf16 else 'does not compute'} bf16 natively"
        draft.note("bf16.enabled", facts.bf16, reason)
    else:
        reason = f"the JSON turns {facts.compute} on" if facts.compute != "fp32" else "no bf16, no fp16"
    if facts.config.fp16.enabled == AUTO:
        draft.note("fp16.enabled", facts.fp16, "on CUDA devices where bf16 is off")
    if facts.compute == "bf16" and facts.settings.absent("data_types.grad_accum_dtype"):
        draft.note("data_types.grad_accum_dtype", facts.accumulation, "default")
    if facts.config.zero_optimization.stage == AUTO:
        draft.note("zero_optimization.stage", facts.zero_stage, "it goes with every layout")
    return Precision(facts.compute, facts.accumulation, reason)


def _stages(facts: Facts) -> tuple[int, ...]:
    layers = layer_parameters(facts.model)
    where = facts.settings.where
    return partition(
        layers,
        facts.chunks,
        facts.config.pipeline.partition,
        key=where("pipeline.partition"),
        chunks_key=where("pipeline.stages"),
    )


def _batch(facts: Facts, draft: Draft, instead: Sequence[int]) -> Batch:
    keys = (TRAIN, MICRO, STEPS)
    given = (
        dict(zip(keys, instead, strict=True))
        if instead
        else {key: getattr(facts.config, key) for key in keys}
    )
    numbers = {key: None if value == AUTO else value for key, value in given.items()}
    request = BatchRequest(
        train=numbers[TRAIN],
        micro=numbers[MICRO],
        steps=numbers[STEPS],
        train_auto=given[TRAIN] == AUTO,
        data=facts.data,
        usual=facts.defaults.train_batch_size if facts.defaults else None,
        tokens=-(-facts.sequence_length // facts.sequence),
        sequence_length=facts.sequence_length,
        hidden_size=facts.model.hidden_size,
        least_steps=facts.least_micro_batches,
        wanted_steps=1 if facts.stages == 1 else BUSY * facts.stages,
    )
    batch, notes = resolve_batch(request, facts.settings.where)
    draft.resolved += notes
    return batch


def _train_steps(facts: Facts, draft: Draft) -> int:
    options = facts.options
    if options.train_steps is not None:
        return known(options.train_steps if options.train_steps > 0 else None)
    if options.train_tokens is not None:
        per_step = known(draft.batch).tokens_per_step
        steps = known(-(-options.train_tokens // per_step) if options.train_tokens > 0 else None)
        return draft.note("train_steps", steps, f"{options.train_tokens} tokens / {per_step} per step")
    if facts.defaults is None:
        rule = "a model read from a file has no usual length of training"
        raise job_error("train_steps", None, rule, "Give --train_steps or --train_tokens")
    return draft.note("train_steps", facts.defaults.train_steps, "usual for this model")


def _learning(facts: Facts, draft: Draft) -> None:
    """Schedule and optimizer, which depend on each other's rate.

    Raises:
        JobError: errors and warnings of the schedule; what could be built is in the draft.
    """
    was_constant = facts.settings.absent("scheduler") and had_constant_rate(
        facts.options, Path(output_folder(facts.options, facts.model.name))
    )
    learning = resolve_learning(facts, draft.train_steps, draft.batch, was_constant)
    draft.resolved += learning.resolved
    draft.schedule, draft.optimizer = learning.schedule, learning.optimizer
    if learning.problems:
        raise JobError(learning.problems)


def _training(facts: Facts, draft: Draft) -> Training:
    """What decides the memory of a rank."""
    mesh, boundaries, moments = known(draft.mesh), known(draft.stages), known(draft.optimizer).moments
    return training_of(facts, known(draft.batch), mesh, boundaries, moments)


def _weights(facts: Facts, draft: Draft) -> None:
    """Where the weights of step 0 come from, and the tokenizer, if it comes with them.

    Raises:
        JobError: they are not those of the model.
    """
    options, choice = facts.options, known(draft.tokenizer)
    weights = draft.initial_weights = initial_weights(options.model)
    if choice.is_own:
        draft.note("tokenizer", choice.name, "it comes with the model")
    if weights.reason and starts_anew(options, Path(output_folder(options, facts.model.name))):
        draft.note("weights", str(weights.folder or "random"), weights.reason)
        if problems := weights_problems(options, facts.model, weights.folder, choice):
            raise JobError(problems)
        if weights.folder is None and model_folder(options.model) is not None:
            raise JobError([no_weights(options.model)])


def _check_folder(facts: Facts, draft: Draft) -> None:
    """Raises JobError: the folder cannot take this run."""
    folder = Path(output_folder(facts.options, facts.model.name))
    draft.identity = identity(
        facts.options, facts.model, facts.sequence_length, known(draft.tokenizer).identity
    )
    problems = folder_problems(folder, draft.identity)
    problems += restart_problems(folder, facts.options.resume)
    if (cache := facts.options.cache_dir) and (rule := unwritable(cache)):
        problems.append(Problem("cache_dir", cache, rule, "Name a folder that you may write to"))
    if problems:
        raise JobError(problems)


def _assemble(facts: Facts, draft: Draft) -> Job:
    options, settings, steps = draft.options, facts.settings, known(draft.train_steps)
    output_dir, clipping = _output_dir(facts, draft), _clipping(facts, draft)
    batch, precision = known(draft.batch), known(draft.precision)
    bucket = _reduce_bucket(facts, draft)
    draft.resolved = _all_resolved(draft, settings)
    return Job(
        options=options,
        world=facts.world,
        model=known(draft.model),
        data=_data(facts, draft, output_dir),
        initial_weights=known(draft.initial_weights),
        identity=draft.identity,
        seed=options.seed,
        mesh=known(draft.mesh),
        batch=batch,
        precision=precision,
        zero_stage=facts.zero_stage,
        pipeline_schedule=facts.schedule,
        stages=known(draft.stages),
        activation_checkpointing=facts.config.activation_checkpointing.mode,
        train_steps=steps,
        eval_interval=_eval_interval(options, steps, draft),
        saves=_saves(options),
        stops=StopRules(_time_limit(options), options.started_at, options.stop_file, options.stop_stamp),
        reporting=Reporting(
            options.log_interval, options.log_samples, options.sample_tokens, options.sample_prompt
        ),
        resume=options.resume,
        allow_pickle=options.allow_pickle,
        schedule=known(draft.schedule),
        gradient_clipping=clipping,
        optimizer=known(draft.optimizer),
        output_dir=output_dir,
        deepspeed=deepspeed_dict(facts, batch, precision, clipping, bucket),
        monitors=_monitors(settings, output_dir, draft),
        json=settings.written,
        resolved=tuple(draft.resolved),
        less_memory=partial(less_memory, facts),
        problems=tuple(draft.problems),
    )


def _all_resolved(draft: Draft, settings: Settings) -> list[Resolved]:
    """What was decided, and what is "auto" and was not; with DeepSpeed's default where it is another."""
    decided = {note.key for note in draft.resolved}
    left_open = (note for note in settings.left_open if note.key not in decided)
    return [_beside_deepspeed(note, settings) for note in (*draft.resolved, *left_open)]


def _beside_deepspeed(note: Resolved, settings: Settings) -> Resolved:
    """The same, with DeepSpeed's default where an absent key means something else there."""
    other = DEEPSPEED_DEFAULTS.get(note.key)
    was_auto = any(note.key == each.key for each in settings.left_open)
    if other in (None, note.value) or was_auto or not settings.absent(note.key):
        return note
    return replace(note, reason=f"{note.reason}; DeepSpeed's default is {shown(other)}")


def _data(facts: Facts, draft: Draft, output_dir: str) -> DataSpec:
    options = facts.options
    return DataSpec(
        training=draft.sources["data"],
        validation=draft.sources["validation"],
        tokenizer=facts.tokenizer,
        model_has_tokenizer=known(draft.tokenizer).is_own,
        text_field=options.text_field,
        on_bad_record=options.on_bad_record,  # type: ignore[arg-type]
        document_separator=options.document_separator,
        on_lost_characters=options.on_lost_characters,  # type: ignore[arg-type]
        document_mask=options.document_mask,
        mask_document_end=options.mask_document_end,
        held_out_fraction=options.held_out_fraction,
        held_out_limit=USUAL_LIMIT if options.eval_fraction is None else None,
        eval_samples=options.eval_samples,
        cache_folder=options.cache_dir or str(Path(output_dir) / "data" / "remote"),
        cache_bytes=int(options.cache_size * 1e9),
    )


def _reduce_bucket(facts: Facts, draft: Draft) -> int | None:
    bucket = reduce_bucket(facts, known(draft.stages))
    if bucket is None:
        return None
    draft.resolved.append(bucket)
    return bucket.value


def _saves(options: Options) -> SaveRules:
    return SaveRules(
        interval=options.save_interval or 0,
        in_background=options.async_save,
        stop_on_failure=options.save_failure == "stop",
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        keep_best=options.keep_best,
    )


def _monitors(settings: Settings, output_dir: str, draft: Draft) -> dict[str, dict[str, object]]:
    """Those of the JSON; and TensorBoard where it says nothing of it, if the package is there."""
    blocks = resolved_monitors(settings, output_dir)
    if not settings.absent("tensorboard"):
        return blocks
    folder = str(Path(output_dir) / "tensorboard")
    there = is_installed("tensorboard")
    reason = f"the package is {'' if there else 'not '}installed"
    draft.resolved.append(Resolved("tensorboard", folder if there else "off", reason))
    usual: dict[str, object] = {"enabled": True, "output_path": folder, "job_name": ""}
    return {"tensorboard": usual, **blocks} if there else blocks


def _time_limit(options: Options) -> float | None:
    return None if options.time_limit is None else parse_duration(options.time_limit)


def _output_dir(facts: Facts, draft: Draft) -> str:
    folder = output_folder(facts.options, facts.model.name)
    given = draft.options.output_dir is not None
    return folder if given else draft.note("output_dir", folder, "the model's name")


def _clipping(facts: Facts, draft: Draft) -> float:
    clipping = float(facts.config.gradient_clipping)
    given = facts.settings.given("gradient_clipping")
    return clipping if given else draft.note("gradient_clipping", clipping, "default; 0 turns it off")


def _eval_interval(options: Options, steps: int, draft: Draft) -> int:
    if options.eval_interval is not None:
        return options.eval_interval
    return draft.note("eval_interval", max(25, steps // 10), "a tenth of the run, at least 25")
