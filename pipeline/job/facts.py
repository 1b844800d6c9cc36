"""What is known of a job while its rules are checked. An unknown raises `Undecided` where it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pipeline.base.fields import AUTO, Undecided
from pipeline.base.problems import Problem
from pipeline.data.corpus import SourceSpec
from pipeline.data.tokenizer import TokenizerFacts
from pipeline.job.job import Batch, Dtype
from pipeline.job.model_presets import TrainingDefaults, training_defaults
from pipeline.job.options import Options
from pipeline.job.schema import DeepSpeedConfig
from pipeline.job.settings import Settings
from pipeline.job.world import World
from pipeline.model.config import ModelConfig

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
        """Below this, stages stand idle by design: p for 1F1B, 2 p for DualPipeV."""
        return self.chunks if self.stages > 1 else 1

    @property
    def batch(self) -> Batch:
        return known(self._batch)

    @property
    def zero_stage(self) -> int:
        return self.config.zero_optimization.stage

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
        return self.config.fp16.enabled

    @property
    def compute(self) -> Dtype:
        if self.fp16:
            return "fp16"
        return "bf16" if self.bf16 else "fp32"

    @property
    def accumulation(self) -> Dtype:
        """Format of the gradient sum: fp32, but fp16's own for fp16, as DeepSpeed's."""
        return self.config.data_types.grad_accum_dtype or ("fp16" if self.fp16 else "fp32")

    @property
    def optimizer(self) -> Literal["AdamW", "Adam", "SGD"]:
        return self.config.optimizer.type

    def offload_device(self, block: Literal["offload_optimizer", "offload_param"]) -> str:
        """Where ``offload_optimizer`` or ``offload_param`` goes: none, cpu or nvme."""
        return getattr(self.config.zero_optimization, block).device
