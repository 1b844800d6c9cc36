"""What is known of a job while its rules are checked: the DeepSpeed JSON with its lines, and what follows.

An unknown raises `Undecided` where it is read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from pipeline.base.fields import AUTO, MISSING, Undecided, build, check
from pipeline.base.json_reader import Document
from pipeline.base.problems import Problem, Severity
from pipeline.base.words import did_you_mean, near
from pipeline.data.corpus import SourceSpec
from pipeline.data.tokenizer_folder import TokenizerFacts
from pipeline.job.foreign_keys import FOREIGN, MISNAMED, OLD_NAMES, is_comment, of_megatron
from pipeline.job.job import Batch, Dtype, Resolved
from pipeline.job.models import TrainingDefaults, training_defaults
from pipeline.job.options import Options
from pipeline.job.schema import KEYS, OPTIMIZERS, DeepSpeedConfig, children
from pipeline.job.world import World
from pipeline.model.config import ModelConfig
from pipeline.model.memory import Training

_ZERO = "zero_optimization"
# Blocks that may be null in DeepSpeed.
NULLABLE = (f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param")
# Names of a block that a remedy still lists.
SHORT_LIST = 8


class Settings:
    """A file that was read, key by key.

    Attributes:
        config: Typed values, with the defaults of what is absent. A value that was refused raises `Undecided`
            where it is read; so does every value of a file that is no JSON.
        values: The usable part of what was written, under the names that DeepSpeed has now.
        problems: Why the rest is not, and notes on what changes nothing.
        left_open: Keys that are "auto" and then as if they were absent, and their defaults.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self.values: dict[str, Any] = copy.deepcopy(document.values)
        self.problems: list[Problem] = list(document.problems)
        self.left_open: list[Resolved] = []
        self._old_names: dict[str, str] = {}
        self._take_old_names()
        self._take_block("", self.values)
        # What the rules and the records see of what was written; wrong values are removed from `values` only.
        self._taken: dict[str, Any] = copy.deepcopy(self.values)
        self.problems += check(DeepSpeedConfig, self.values, self.where, self._refuse)
        unread = bool(document.problems) and not document.values
        written = dict.fromkeys(children("")) if unread else self._taken
        self.config: DeepSpeedConfig = build(DeepSpeedConfig, self.values, written)

    @property
    def written(self) -> dict[str, Any]:
        """The JSON as read, before anything was checked or resolved."""
        return self._document.values

    def changed(self, keys: Mapping[str, Any]) -> Settings:
        """These settings with other values of some dotted keys."""
        values = copy.deepcopy(self.values)
        for key, value in keys.items():
            _set(values, key, value)
        return Settings(replace(self._document, values=values))

    def given(self, key: str) -> bool:
        """Whether the JSON has the key with a usable value of its own, "auto" not counted."""
        return _at(self.values, key) not in (None, AUTO)

    def value(self, key: str) -> Any:
        """The usable value that was written for a key; None where there is none."""
        return _at(self.values, key)

    def names(self, block: str) -> tuple[str, ...]:
        """The keys with usable values that a block was given."""
        return tuple(_at(self.values, block) or ())

    def absent(self, key: str) -> bool:
        """Whether the JSON does not have the key, not even with a value that was refused."""
        written: Any = self._taken
        for name in key.split("."):
            if not isinstance(written, dict) or name not in written:
                return True
            written = written[name]
        return False

    def where(self, key: str) -> str:
        """The key as it was written, with its file and line."""
        for new, old in self._old_names.items():
            if key == new or key.startswith(f"{new}."):
                key = old + key.removeprefix(new)
        return self._document.where(key)

    def problem(
        self, key: str, rule: str, remedy: str, value: object = None, severity: Severity = "error"
    ) -> Problem:
        """A problem of one key, at its line. `value` stands in for a key that is absent."""
        shown = _at(self.values, key) if value is None else value
        return Problem(self.where(key), shown, rule, remedy, severity)

    def note(self, key: str, rule: str) -> Problem:
        """That a key changes nothing."""
        return self.problem(key, rule, "", severity="note")

    def _take_old_names(self) -> None:
        """Put what DeepSpeed still reads under an old name where it belongs."""
        if isinstance(self.values.get(_ZERO), bool):
            self._note(_ZERO, self.values[_ZERO], "is DeepSpeed's old form of stage 1 or 0")
            self.values[_ZERO] = {"stage": int(self.values[_ZERO])}
        for old, (new, convert) in OLD_NAMES.items():
            if (value := _at(self.values, old)) is None:  # null has the type of no key
                continue
            _remove(self.values, old)
            became, there = convert(value), _at(self.values, new)
            block = _at(self.values, new.rpartition(".")[0]) if "." in new else {}
            if there not in (None, became) or not isinstance(block, dict | None):
                rule = f"is the old name of {new}, which has another value"
                self.problems.append(Problem(self.where(old), value, rule, "Remove it"))
                continue
            self._note(old, value, f"is an old name of {new}, and taken as {json.dumps(became)} there")
            self._old_names[new] = old
            _set(self.values, new, became)
        kind = _at(self.values, "optimizer.type")
        if isinstance(kind, str):  # as DeepSpeed reads it
            names = {name.lower(): name for name in KEYS["optimizer.type"].choices}
            self.values["optimizer"]["type"] = names.get(kind.lower(), kind)

    def _take_block(self, block: str, values: dict[str, Any]) -> None:
        """Remove what changes nothing, with a note, what is not taken, with the reason, and what is "auto"
        where it is then as if it were absent."""
        for name, value in list(values.items()):
            path = f"{block}.{name}" if block else name
            key, foreign = KEYS.get(path), FOREIGN.get(path)
            if is_comment(name):
                del values[name]
                self._note(path, value, "is taken for a comment")
            elif block == "optimizer.params" and not self._has_own_optimizer():
                if key is None:  # a parameter of the optimizer that is refused
                    del values[name]
            elif foreign is not None:
                del values[name]
                self.problems.append(foreign.problem(self.where(path), value))
            elif isinstance(value, dict) and (key.block if key else _has_foreign_keys(path)):
                was_empty = not value
                self._take_block(path, value)
                if key is None:  # a block of foreign keys: what is left has no place
                    for unknown, left in value.items():
                        reason = _unknown(path, unknown, left, self.written)
                        assert reason, "no key of the schema is in such a block"
                        self.problems.append(Problem(self.where(f"{path}.{unknown}"), left, *reason))
                    value.clear()
                if not value and not was_empty:
                    del values[name]
            elif value is None and path in NULLABLE:
                del values[name]
                self._note(path, value, "is absent, to DeepSpeed as here")
            elif value == AUTO and key and not key.auto and key.default is not MISSING and not key.block:
                del values[name]
                self.left_open.append(Resolved(path, key.default_text, '"auto", as if it were absent'))

    def _has_own_optimizer(self) -> bool:
        kind = _at(self.values, "optimizer.type")
        return not isinstance(kind, str) or kind.lower() not in OPTIMIZERS

    def _note(self, path: str, value: object, rule: str) -> None:
        self.problems.append(Problem(self.where(path), value, rule, "", "note"))

    def _refuse(self, block: str, name: str, value: object) -> Problem | None:
        """Why an unknown key is not taken, or "auto" where nothing decides the value."""
        path = f"{block}.{name}" if block else name
        reason = _unknown(block, name, value, self.written)
        if path == "optimizer.type" and isinstance(value, str):
            reason = OPTIMIZERS.get(value.lower())
        if reason is None and value == AUTO and not KEYS[path].auto:
            reason = "is required, and nothing decides it", f"Give {KEYS[path].words}"
        return reason and Problem(self.where(path), value, *reason)


def _unknown(block: str, name: str, value: object, file: Mapping[str, Any]) -> tuple[str, str] | None:
    """Rule and remedy for a key that is none of DeepSpeed's. `file`: all that was written."""
    path = f"{block}.{name}" if block else name
    if "." in name and (path in KEYS or path in FOREIGN):
        outer, inner = path.rsplit(".", 1)
        return "a key with a dot in it is no key of a block", f'Write "{inner}" inside the block {outer}'
    if path in KEYS:
        return None
    if not block and (reason := of_megatron(name, value, file)):
        return reason
    rule = f"there is no such key{block and f' in {block}'}"
    if path in MISNAMED:
        return rule, MISNAMED[path].format(value)
    siblings = children(block) if block in KEYS or not block else ()
    owners = [each for each, key in KEYS.items() if each.rpartition(".")[2] == name and not key.block]
    if owners and not (block and near(name, siblings)):
        remedy = f"It belongs at {' or '.join(owners)}"
    else:
        remedy = did_you_mean(name, siblings)
        if len(siblings) > SHORT_LIST or not siblings:
            remedy = remedy if remedy.startswith("The nearest") else "Remove it"
    return rule, remedy


def _has_foreign_keys(block: str) -> bool:
    return any(path.startswith(f"{block}.") for path in FOREIGN)


def _remove(values: dict[str, Any], key: str) -> None:
    """Take a dotted key out."""
    outer, _, name = key.rpartition(".")
    del (_at(values, outer) if outer else values)[name]


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, making the blocks around it."""
    *blocks, name = key.split(".")
    for block in blocks:
        values = values.setdefault(block, {})
    values[name] = value


def _at(values: Any, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            return None
        values = values[name]
    return values


T = TypeVar("T")


def known(value: T | None) -> T:
    """The value.

    Raises:
        Undecided: there is none.
    """
    if value is None:
        raise Undecided
    return value


@dataclass(frozen=True)
class Facts:
    """Inputs of the rules. None in an underscored field: finding it gave problems already.

    Attributes:
        sources: Those of ``data`` and of ``validation``, each where its description is right.
        failures: Problems met while a part of the job was derived, by the name of the part.
    """

    options: Options
    settings: Settings
    _world: World | None
    _model: ModelConfig | None
    _batch: Batch | None = None
    _training: Training | None = None
    _tokenizer: TokenizerFacts | None = None
    sources: Mapping[str, tuple[SourceSpec, ...]] = field(default_factory=dict)
    failures: Mapping[str, Sequence[Problem]] = field(default_factory=dict)

    @property
    def config(self) -> DeepSpeedConfig:
        return self.settings.config

    @property
    def world(self) -> World:
        return known(self._world)

    @property
    def model(self) -> ModelConfig:
        return known(self._model)

    @property
    def tokenizer(self) -> TokenizerFacts:
        return known(self._tokenizer)

    @property
    def defaults(self) -> TrainingDefaults | None:
        """The model's usual settings; None for a model that was read from a file."""
        return training_defaults(self.model)

    @property
    def stages(self) -> int:
        return self.config.pipeline.stages

    @property
    def tensor(self) -> int:
        return self.config.tensor_parallel.autotp_size

    @property
    def sequence(self) -> int:
        return self.config.sequence_parallel_size

    @property
    def model_parallel(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.stages * self.sequence * self.tensor

    @property
    def data(self) -> int:
        """Data parallel size: what is left of the world."""
        size, rest = divmod(self.world.size, self.model_parallel)
        return known(size if rest == 0 and size > 0 else None)

    @property
    def schedule(self) -> Literal["1f1b", "dualpipev"]:
        return self.config.pipeline.schedule

    @property
    def chunks(self) -> int:
        """Runs of layers: two per stage in DualPipeV."""
        return self.stages * (2 if self.schedule == "dualpipev" else 1)

    @property
    def least_micro_batches(self) -> int:
        """Below this, stages are idle by design: p for 1F1B, 2 p for DualPipeV."""
        return self.chunks if self.stages > 1 else 1

    @property
    def batch(self) -> Batch:
        return known(self._batch)

    @property
    def training(self) -> Training:
        """What decides the memory of a rank."""
        return known(self._training)

    def with_keys(self, keys: Mapping[str, Any]) -> Facts:
        """The facts of a JSON with other values of some dotted keys; what was derived stays."""
        return replace(self, settings=self.settings.changed(keys))

    @property
    def zero_stage(self) -> int:
        stage = self.config.zero_optimization.stage
        return 1 if stage == AUTO else stage

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed wraps the optimizer in its BF16_Optimizer instead of one of ZeRO's."""
        if self.zero_stage != 1 or self.offload_device("offload_optimizer") != "none":
            return False
        return self.compute == "bf16" and self.accumulation == "fp32"

    @property
    def sequence_length(self) -> int:
        if self.options.seq_length is None:
            defaults = self.defaults
            return defaults.sequence_length if defaults else self.model.max_position_embeddings
        return known(self.options.seq_length if self.options.seq_length > 0 else None)

    @property
    def bf16(self) -> bool:
        enabled = self.config.bf16.enabled
        return self.world.bf16_native if enabled == AUTO else enabled

    @property
    def fp16(self) -> bool:
        enabled = self.config.fp16.enabled
        return self.world.device == "cuda" and not self.bf16 if enabled == AUTO else enabled

    @property
    def compute(self) -> Dtype:
        if self.fp16:
            return "fp16"
        return "bf16" if self.bf16 else "fp32"

    @property
    def accumulation(self) -> Dtype:
        """Format of the gradient sum: fp32; the weights' own for fp16 and where DeepSpeed has no other."""
        if (given := self.config.data_types.grad_accum_dtype) is not None:
            return given
        return self.compute if self.fp16 or self.sums_in_own_format else "fp32"

    @property
    def sums_in_own_format(self) -> bool:
        """Whether DeepSpeed sums 16-bit gradients in their own format only: without ZeRO, and with offloaded
        optimizer state under pipelines."""
        offloaded = self.offload_device("offload_optimizer") != "none"
        return self.zero_stage == 0 or (self.stages > 1 and offloaded)

    @property
    def optimizer(self) -> Literal["AdamW", "Adam", "SGD"]:
        return self.config.optimizer.type

    def offload_device(self, block: Literal["offload_optimizer", "offload_param"]) -> str:
        """Where ``offload_optimizer`` or ``offload_param`` goes: none, also at a stage that does not offload
        it, cpu or nvme."""
        acts = self.zero_stage in KEYS[f"zero_optimization.{block}.device"].details["zero_stages"]
        return getattr(self.config.zero_optimization, block).device if acts else "none"
