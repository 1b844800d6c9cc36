"""The models that have a name, the settings they are usually trained with, and models from files.

Sizes come from the papers and published configuration files named in `Preset.source`. Dropout is 0
everywhere: pretraining sees each sample about once, so that there is little to overfit.

Hugging Face files of the kinds that `pipeline.hugging_face.config` knows are translated field by field. A
field that would change the computation in a way that is not built here is refused by name, and so is a field
nobody knows: training something else than the file says is worse than stopping.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.json_reader import read_json
from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.user_input import exists, is_file, is_folder
from pipeline.base.words import did_you_mean
from pipeline.hugging_face.config import KINDS, model_from_hugging_face
from pipeline.hugging_face.folder_files import local_folder
from pipeline.model.config import ModelConfig, model_from_json


@dataclass(frozen=True)
class TrainingDefaults:
    """What ``"auto"`` and absent settings become for a preset.

    Attributes:
        train_batch_size: Sequences of one optimizer step, over the whole job.
        sequence_length: Tokens per sequence.
        learning_rate: Peak of the schedule, for AdamW at `train_batch_size`.
        train_steps: Optimizer steps.
        warmup_steps: Steps of linear warm-up.
        source: Where the numbers come from, and which of them are ours.
        weight_decay: Decoupled, as AdamW's.
        betas: AdamW's decay rates of the two moments.
    """

    train_batch_size: int
    sequence_length: int
    learning_rate: float
    train_steps: int
    warmup_steps: int
    source: str
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)

    @property
    def tokens_per_step(self) -> int:
        return self.train_batch_size * self.sequence_length


@dataclass(frozen=True)
class Preset:
    """A named model.

    Attributes:
        model: Its sizes.
        training: Its usual training settings.
        published_parameters: The count its authors give, as printed there ("124M").
        source: Where sizes and count are published.
    """

    model: ModelConfig
    training: TrainingDefaults
    published_parameters: str
    source: str


def gpt(name: str, hidden_size: int, num_layers: int, num_heads: int, max_positions: int) -> ModelConfig:
    """A model of the GPT-2 and GPT-3 kind: learned positions, LayerNorm, GELU, biases, tied output."""
    return ModelConfig(
        name=name,
        vocab_size=50257,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        ffn_hidden_size=4 * hidden_size,
        max_position_embeddings=max_positions,
    )


# Llama and Qwen2: rotary positions, RMSNorm, SwiGLU, no biases but Qwen2's of q, k and v, untied.
LLAMA: dict[str, Any] = {
    "position": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "qkv_bias": False,
    "tied": False,
}

GPT2 = "Radford et al. 2019, table 2; counts as in the names of the released weights"
GPT3 = "Brown et al. 2020, table 2.1"
LLAMA3 = "Llama 3 report (Grattafiori et al. 2024), table 3, and the published config.json"
QWEN2 = "Qwen2 report (Yang et al. 2024), table 1, and the published config.json"


def _gpt2(
    name: str, shape: tuple[int, int, int], published: str, rate: float, batch: int, steps: int
) -> Preset:
    """A GPT-2 size. Its paper gives neither rate nor steps: those are GPT-3's for the nearest size, and
    about 20 tokens per parameter (Hoffmann et al. 2022), e.g. 124.4 M * 20 / (512 * 1024) = 4,747 steps.
    """
    training = TrainingDefaults(
        train_batch_size=batch,
        sequence_length=1024,
        learning_rate=rate,
        train_steps=steps,
        warmup_steps=round(375_000_000 / (batch * 1024)),
        source=f"batch, rate, 375 M tokens of warm-up: {GPT3}, nearest size; steps: 20 tokens per parameter",
    )
    return Preset(gpt(name, *shape, max_positions=1024), training, published, GPT2)


def _gpt3(name: str, shape: tuple[int, int, int], published: str, rate: float, batch: int) -> Preset:
    """A GPT-3 size: batch and rate of table 2.1, 300 B tokens, 375 M of them warm-up (appendix B).

    The paper's layers alternate dense and sparse attention; all are dense here, the count is the same.
    """
    tokens_per_step = batch * 2048
    training = TrainingDefaults(
        train_batch_size=batch,
        sequence_length=2048,
        learning_rate=rate,
        train_steps=round(300_000_000_000 / tokens_per_step),
        warmup_steps=round(375_000_000 / tokens_per_step),
        source=f"{GPT3} and appendix B",
    )
    return Preset(gpt(name, *shape, max_positions=2048), training, published, GPT3)


def _tiny() -> Preset:
    """The CPU default: a byte model that learns something in two minutes on two cores.

    4 heads, so that it can be cut in 4 by tensor and sequence parallelism. Chosen by validation loss in equal
    CPU time (18.5 s, one thread): rotary positions 1.84, learned 2.14; RMSNorm with SwiGLU learns more per
    step but its steps take longer on CPU, 1.93; LayerNorm with SwiGLU ties at 1.83.
    """
    model = ModelConfig(
        name="tiny",
        vocab_size=257,
        hidden_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=24,
        ffn_hidden_size=384,
        max_position_embeddings=1024,
        position="rotary",
    )
    training = TrainingDefaults(
        train_batch_size=16,
        sequence_length=64,
        learning_rate=5e-3,
        train_steps=1500,
        warmup_steps=100,
        source="chosen on Python source text, on CPU",
    )
    return Preset(model, training, "0.36M", "this project")


def _llama3(model: ModelConfig, published: str, rate: float) -> Preset:
    """A Llama 3 size: 15 T tokens at 8,192. The report gives peak rates by size, but batch and warm-up for
    405 B only; 4 M tokens and 2,000 steps are Llama 2's (Touvron et al. 2023, section 2.2).
    """
    training = TrainingDefaults(
        train_batch_size=512,
        sequence_length=8192,
        learning_rate=rate,
        train_steps=15_000_000_000_000 // (512 * 8192),
        warmup_steps=2000,
        source=f"rate: {LLAMA3}; 4 M tokens per step, warm-up, betas, decay: Llama 2 paper, section 2.2",
    )
    return Preset(model, training, published, LLAMA3)


def _qwen2_7b() -> Preset:
    """Qwen2 7B. Its report keeps the training settings to itself, apart from 7 T tokens at 4,096; Llama 3
    8B's are used, the nearest published ones. It was trained for 32,768 positions in the end.
    """
    model = ModelConfig(
        name="qwen2-7b",
        vocab_size=152064,
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        ffn_hidden_size=18944,
        max_position_embeddings=32768,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        head_dim=128,
        **LLAMA | {"qkv_bias": True},
    )
    training = TrainingDefaults(
        train_batch_size=1024,
        sequence_length=4096,
        learning_rate=3e-4,
        train_steps=7_000_000_000_000 // (1024 * 4096),
        warmup_steps=2000,
        source=f"7 T tokens at 4,096: {QWEN2}; the rest is unpublished and taken from llama3-8b",
    )
    return Preset(model, training, "7.6B", QWEN2)


_LLAMA3_8B = ModelConfig(
    name="llama3-8b",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
    max_position_embeddings=8192,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    head_dim=128,
    **LLAMA,
)
_LLAMA3_70B = ModelConfig(
    name="llama3-70b",
    vocab_size=128256,
    hidden_size=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    ffn_hidden_size=28672,
    max_position_embeddings=8192,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    head_dim=128,
    **LLAMA,
)

# The shape is (hidden size, layers, heads). Table 2.1 of the GPT-3 paper prints 5,140 as the 13B model's
# width, which 40 heads of 128 contradict: 40 * 128 = 5,120, hence 12.85 B parameters instead of 13.0 B.
PRESETS: dict[str, Preset] = {
    preset.model.name: preset
    for preset in (
        _tiny(),
        _gpt2("gpt2-124m", (768, 12, 12), "124M", 6e-4, batch=512, steps=4_747),
        _gpt2("gpt2-medium", (1024, 24, 16), "355M", 3e-4, batch=512, steps=13_536),
        _gpt2("gpt2-large", (1280, 36, 20), "774M", 2.5e-4, batch=512, steps=29_527),
        _gpt2("gpt2-xl", (1600, 48, 25), "1558M", 2e-4, batch=1024, steps=29_709),
        _gpt3("gpt3-6.7b", (4096, 32, 32), "6.7B", 1.2e-4, batch=1024),
        _gpt3("gpt3-13b", (5120, 40, 40), "13.0B", 1e-4, batch=1024),
        _gpt3("gpt3-175b", (12288, 96, 96), "175.0B", 6e-5, batch=1600),
        _llama3(_LLAMA3_8B, "8.0B", 3e-4),
        _llama3(_LLAMA3_70B, "70.6B", 1.5e-4),
        _qwen2_7b(),
    )
}


# Names by which others know them. Models with the same name that differ (Llama 3.1's positions) are not here.
USUAL_NAMES: dict[str, str] = {
    usual: preset
    for preset, names in {
        "gpt2-124m": ("gpt2", "gpt-2", "gpt2-small", "openai-community/gpt2"),
        "gpt2-medium": ("gpt2-355m", "gpt2-345m", "openai-community/gpt2-medium"),
        "gpt2-large": ("gpt2-774m", "openai-community/gpt2-large"),
        "gpt2-xl": ("gpt2-1.5b", "gpt2-1558m", "openai-community/gpt2-xl"),
        "gpt3-175b": ("gpt3", "gpt-3"),
        "llama3-8b": ("llama-3-8b", "meta-llama-3-8b", "meta-llama/meta-llama-3-8b"),
        "llama3-70b": ("llama-3-70b", "meta-llama-3-70b", "meta-llama/meta-llama-3-70b"),
        "qwen2-7b": ("qwen-2-7b", "qwen/qwen2-7b"),
    }.items()
    for usual in names
}


def preset_of(name: str) -> str | None:
    """The preset called `name`, by its own name or a usual one in any case; None where there is none, or a
    file or folder has the usual name."""
    if name in PRESETS:
        return name
    lower = name.lower()
    usual = lower if lower in PRESETS else USUAL_NAMES.get(lower)
    return None if usual is None or exists(name) else usual


def training_defaults(model: ModelConfig) -> TrainingDefaults | None:
    """The usual settings of a preset; None for a model that was read from a file."""
    preset = PRESETS.get(model.name)
    return preset.training if preset else None


AUTO = "auto"
CONFIG_FILE = "config.json"


def load_model(name: str, device: str) -> ModelConfig:
    """The model called `name`.

    Args:
        name: A preset, by its own name or a usual one; ``auto`` (``tiny`` on CPU, else
            ``gpt2-124m``); a JSON file, either a Hugging Face config.json or the fields of
            `ModelConfig`; a folder that holds a config.json; or hub:NAME.
        device: ``cpu`` or ``cuda``.

    Raises:
        JobError: as `local_folder`; no such preset, file or kind, or a file that describes a model that
            cannot be built; all reasons.
    """
    if name == AUTO:
        name = "tiny" if device == "cpu" else "gpt2-124m"
    if preset := preset_of(name):
        return PRESETS[preset].model
    path = Path(local_folder("model", name))
    if is_folder(path):
        path = path / CONFIG_FILE
    if not is_file(path):
        raise JobError([_unknown(name, path)])
    return _from_description(_read(path), str(path))


def _unknown(name: str, path: Path) -> Problem:
    if is_folder(path.parent) and path.name == CONFIG_FILE:
        return Problem("model", name, f"the folder has no {CONFIG_FILE}", "Give a model's folder or file")
    if path.suffix == ".json" or len(path.parts) > 1:
        hub = f"; of a model on the hub, give hub:{name}"
        remedy = f"Correct the path{hub if len(path.parts) == 2 and not path.suffix else ''}"
        return Problem("model", name, "there is no such file or folder", remedy)
    return Problem(
        "model",
        name,
        "no preset, file or folder has this name",
        did_you_mean(name, PRESETS),
    )


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    document = read_json(path, "model", f"a Hugging Face {CONFIG_FILE}")
    if document.problems:
        raise JobError(document.problems)
    return document.values


def _from_description(values: dict[str, Any], source: str) -> ModelConfig:
    if "model_type" in values:
        return model_from_hugging_face(values, source)
    if "num_kv_heads" in values:
        return model_from_json({**values, "name": source}, source)
    rule = f"has neither model_type (Hugging Face: {', '.join(KINDS)}) nor this project's own fields"
    raise job_error(f"{source}: model_type", None, rule, "Give the model_type")
