"""A job, or the part of it that was understood, as text for a person. rich; no torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOWrapper
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.base.problems import Problem
from pipeline.base.words import counted, cut, size, wrapped
from pipeline.job.job import Batch, Job, OptimizerConfig
from pipeline.job.models import PRESETS
from pipeline.job.options import RECIPES
from pipeline.job.resolve import Draft
from pipeline.job.world import World
from pipeline.model.config import ModelConfig
from pipeline.model.counts import LayerSize, layer_parameters, stage_parameters, total_parameters
from pipeline.model.memory import RankMemory
from pipeline.parallel.mesh import Mesh

# Longest rank grid and table of stages shown in full, in lines, and ranks of a line; of longer ones the ends.
GRID_LINES, _LINE_CHARACTERS = 24, 300
# Problems of one kind that are shown.
_OF_A_KIND = 10
_FILLING = re.compile(r" +$", re.MULTILINE)
_WORD = re.compile(r"[^\W_]+")
PIPED_WIDTH = 110
# By severity, the worst first.
_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "dim"}


def console(stderr: bool = False) -> Console:
    """Colours on a terminal; in a pipe or file plain text of a fixed width, without what would fill it up."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):
        # A file name that the terminal's encoding lacks must not end the program.
        stream.reconfigure(errors="backslashreplace")
    made = Console(stderr=stderr, highlight=False)
    if made.is_terminal:
        return made
    return Console(file=_Unfilled(stream), highlight=False, width=PIPED_WIDTH)


class _Unfilled:
    """A stream without the spaces at the ends of a table's lines."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_FILLING.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def describe(draft: Draft) -> RenderableType:
    """Everything that is known of a job, section by section."""
    return Group(*_sections(draft))


def model_table() -> RenderableType:
    """The presets: what --model may be beside a file or folder."""
    table = Table("--model", "parameters", "layers", "hidden size", "tokens", "batch", "peak rate", box=None)
    for name, preset in PRESETS.items():
        model, usual = preset.model, preset.training
        numbers = f"{total_parameters(model):,}", f"{model.num_layers}", f"{model.hidden_size:,}"
        sizes = f"{usual.sequence_length:,}", f"{usual.train_batch_size:,}", f"{usual.learning_rate:g}"
        table.add_row(name, *numbers, *sizes)
    return Group(table, Text("tokens of a sample, samples of a batch and rate: as it is usually trained"))


def recipe_table() -> RenderableType:
    """The project's DeepSpeed files, each with what its first sentence says."""
    table = Table("--deepspeed_config", "", box=None)
    for path in RECIPES:
        comment = re.findall(r"^ *// ?(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        table.add_row(f"ds_configs/{path.name}", " ".join(comment).partition(". ")[0])
    return table


def print_problems(out: Console, problems: Sequence[Problem]) -> None:
    """Errors first, each with its remedy on a line of its own; of many of one kind the first and the last.
    Lines are broken on a terminal only, so that a search in other output finds whole sentences."""
    for line in _lines(problems):
        shown = wrapped(line.plain, out.width) if out.is_terminal else line.plain
        out.print(Text(shown, spans=line.spans[:1]), soft_wrap=True)


def print_interruption(error: OSError | KeyboardInterrupt) -> None:
    """Why a command stopped that continues where it was when it is given again; on standard error."""
    if isinstance(error, KeyboardInterrupt):
        said = "\ninterrupted"
    else:
        where = f"{error.filename}: " if error.filename else ""
        said = f"error: {where}{error.strerror or error}"
    print(f"{said}; the same command continues", file=sys.stderr)


def problems_text(problems: Sequence[Problem]) -> str:
    """The same without colours."""
    return "\n".join(line.plain for line in _lines(problems))


def _lines(problems: Sequence[Problem]) -> Iterator[Text]:
    """By severity; the kinds in the order in which each begins."""
    kinds: dict[tuple[str, str], list[Problem]] = {}
    for problem in sorted(problems, key=lambda problem: list(_STYLES).index(problem.severity)):
        kinds.setdefault((problem.severity, _kind(problem)), []).append(problem)
    for (severity, _), group in kinds.items():
        more = len(group) - _OF_A_KIND if len(group) > _OF_A_KIND else 0
        yield from map(_problem, group[: _OF_A_KIND - 1] if more else group)
        if more:
            yield Text(f"... and {counted(more, severity)} more like it, then:", _STYLES[severity])
            yield _problem(group[-1])


def _kind(problem: Problem) -> str:
    """The rule without what is this problem's own: numbers, and words of its key and value."""
    own = set(_WORD.findall(f"{problem.key} {cut(str(problem.value))}"))
    return " ".join(word for word in _WORD.findall(problem.rule) if word not in own and word.isalpha())


def verdict(draft: Draft) -> Text:
    """The last line: whether the job can start."""
    if draft.job is not None:
        return Text("This job can start.", "bold green")
    count = len(draft.errors)
    return Text(f"This job cannot start: {count} {'error' if count == 1 else 'errors'}.", "bold red")


def _sections(draft: Draft) -> Iterator[RenderableType]:
    if draft.world is not None:
        yield _pairs("World", [("ranks", world_line(draft.world))])
    if draft.mesh is not None and draft.world is not None:
        yield _pairs("Layout", [("world", mesh_line(draft.mesh)), *_grid_rows(draft.mesh, draft.world)])
    if draft.model is not None:
        yield _pairs("Model", [(draft.model.name, model_line(draft.model))])
    if draft.model is not None and draft.stages is not None:
        yield stage_table(draft.model, draft.stages, draft.mesh.pipeline if draft.mesh else None)
    if draft.batch is not None:
        yield _pairs("Batch", [("per step", batch_line(draft.batch))])
    if draft.memory is not None and draft.world is not None:
        yield _pairs("Memory", _memory_rows(draft.memory, draft.world))
    rows = list(_training_rows(draft))
    if rows:
        yield _pairs("Training", rows)
    if draft.outlook:
        yield _pairs("Expected", draft.outlook)
    if draft.resume:
        yield Group(Text("Resume", "bold"), *(Text(line) for line in draft.resume))
    if draft.resolved:
        yield _pairs(
            "Chosen automatically", [(note.key, f"{note.value} ({note.reason})") for note in draft.resolved]
        )


def world_line(world: World) -> str:
    """``32 on 4 hosts (node1 .. node4), cuda, bf16 native``."""
    names = [f"{host.name} x {host.slots}" for host in world.hosts]
    shown = ", ".join(names) if len(names) <= 8 else f"{names[0]}, ... {names[-1]}"
    device = world.device_name or world.device
    native = "native" if world.bf16_native else "not native"
    assumed = f" (assumed: {world.assumed})" if world.assumed else ""
    return f"{world.size} on {shown}; {device}, bf16 {native}{assumed}"


def mesh_line(mesh: Mesh) -> str:
    """The factorisation in words."""
    sizes = zip(("pipeline", "data", "sequence", "tensor"), mesh.shape, strict=True)
    return f"{mesh.world_size} = {' x '.join(f'{size} {axis}' for axis, size in sizes)}"


def grid_lines(mesh: Mesh, world: World) -> list[tuple[str, str]]:
    """(host and stage, ranks) for each host and stage. ``[0 1 | 2 3]`` is one data rank: sequence ranks
    are separated by bars, tensor ranks by spaces. Ranks are in order, because the grid is."""
    lines: list[tuple[str, str]] = []
    rank = 0
    for host in world.hosts:
        by_stage: dict[int, str] = {}
        for _ in range(host.slots):
            stage = mesh.coordinates(rank).pipeline
            by_stage[stage] = by_stage.get(stage, "") + _rank_text(mesh, rank)
            rank += 1
        lines += [
            (f"{host.name}, stage {stage}", _ends_of(text.strip(" "))) for stage, text in by_stage.items()
        ]
    return lines


def _ends_of(text: str) -> str:
    """A line of ranks; of a long one whole ranks at both ends."""
    if len(text) <= _LINE_CHARACTERS:
        return text
    end = _LINE_CHARACTERS // 4
    return f"{text[: 3 * end].rpartition(' ')[0]} ... {text[-end:].partition(' ')[2]}"


def _rank_text(mesh: Mesh, rank: int) -> str:
    """A rank with the brackets and bars that stand around it."""
    where = mesh.coordinates(rank)
    before = " " if where.tensor > 0 else " | " if where.sequence > 0 else " ["
    last = where.sequence == mesh.sequence - 1 and where.tensor == mesh.tensor - 1
    return f"{before}{rank}{']' if last else ''}"


def _grid_rows(mesh: Mesh, world: World) -> list[tuple[str, str]]:
    lines = grid_lines(mesh, world)
    if len(lines) <= GRID_LINES:
        return lines
    half = GRID_LINES // 2
    return [*lines[:half], ("...", f"{len(lines) - 2 * half} more lines"), *lines[-half:]]


def model_line(model: ModelConfig) -> str:
    """Sizes and parameter count."""
    count, padded = total_parameters(model), total_parameters(model, padded=True)
    padding = f", {padded:,} with the vocabulary padded to {model.padded_vocab_size:,}"
    heads = f"{model.num_heads} heads"
    if model.num_kv_heads != model.num_heads:
        heads += f", {model.num_kv_heads} kv heads"
    return (
        f"{count:,} parameters{padding if padded != count else ''}; {model.num_layers} layers, hidden size "
        f"{model.hidden_size}, {heads}, feed-forward {model.ffn_hidden_size}, {model.position} positions"
        f"{f', dropout {model.dropout:g}' if model.dropout else ''}"
        f"{f', rescaled ({model.rope_scaling.rope_type})' if model.rope_scaling else ''}"
    )


def stage_table(model: ModelConfig, boundaries: Sequence[int], stages: int | None) -> Table:
    """One line per chunk of layers: its stage, layers and parameters (whole, before tensor slicing)."""
    table = Table(box=None, title="Stages", title_justify="left", title_style="bold", pad_edge=False)
    for heading in ("  stage", "layers", "parameters"):
        table.add_column(heading, justify="right" if heading == "parameters" else "left")
    layers = layer_parameters(model)
    chunks = len(boundaries) - 1
    for chunk in range(chunks):
        if chunks > GRID_LINES and GRID_LINES // 2 <= chunk < chunks - GRID_LINES // 2:
            if chunk == GRID_LINES // 2:
                table.add_row("  ...", f"{chunks - GRID_LINES} more lines", "")
            continue
        part = layers[boundaries[chunk] : boundaries[chunk + 1]]
        table.add_row(
            f"  {stage_of(chunk, chunks, stages)}", layer_names(part), f"{stage_parameters(part):,}"
        )
    return table


def stage_of(chunk: int, chunks: int, stages: int | None) -> int:
    """The stage that holds a chunk. DualPipeV's second half runs back from the last stage to the first."""
    return chunk if stages is None or chunk < stages else chunks - 1 - chunk


def layer_names(layers: Sequence[LayerSize]) -> str:
    """``embedding, positions, blocks 0-5``."""
    blocks = [layer.name.removeprefix("block ") for layer in layers if layer.name.startswith("block ")]
    names: list[str] = []
    for layer in layers:
        if not layer.name.startswith("block "):
            names.append(layer.name)
        elif layer.name == f"block {blocks[0]}":
            names.append(layer.name if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}")
    return ", ".join(names)


def batch_line(batch: Batch) -> str:
    """The arithmetic down to tokens."""
    data = batch.train_batch_size // (batch.micro_batch_size * batch.accumulation_steps)
    return (
        f"{batch.train_batch_size} sequences = {batch.micro_batch_size} micro-batch x "
        f"{batch.accumulation_steps} accumulation x {data} data; x {batch.sequence_length} tokens = "
        f"{batch.tokens_per_step:,} tokens"
    )


def _training_rows(draft: Draft) -> Iterator[tuple[str, str]]:
    if draft.precision is not None:
        precision = draft.precision
        yield (
            "weights",
            f"{precision.compute} ({precision.reason}), gradients summed in {precision.accumulation}",
        )
    if draft.optimizer is not None:
        yield "optimizer", _optimizer_line(draft.optimizer)
    if draft.schedule is not None:
        yield "learning rate", str(draft.schedule)
    if draft.train_steps is not None:
        tokens = f", {draft.train_steps * draft.batch.tokens_per_step:,} tokens" if draft.batch else ""
        yield "length", f"{draft.train_steps:,} steps{tokens}"
    if draft.job is not None:
        yield from _job_rows(draft.job)


def _memory_rows(memory: RankMemory, world: World) -> Iterator[tuple[str, str]]:
    """What the rank that holds most holds, from a formula."""
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "fp32 masters": memory.masters,
        "optimizer moments": memory.moments,
    }
    terms = " + ".join(f"{size(part)} {name}" for name, part in parts.items() if part)
    yield f"a rank of stage {memory.stage}", f"{size(memory.state)} = {terms}"
    yield (
        "and in a step",
        f"about {size(memory.activations)} activations, {size(memory.logits)} logits, {size(memory.buffers)} "
        f"buffers: {size(memory.total)}",
    )
    if memory.host:
        yield "in host memory", f"{size(memory.host)} for each rank"
    if world.device == "cuda":
        known = world.known_memory
        yield "a GPU has", size(known) if known else "unknown (--device or --hosts tells)"


def _optimizer_line(optimizer: OptimizerConfig) -> str:
    own = f"momentum {optimizer.momentum:g}"
    if optimizer.type != "SGD":
        own = f"betas {optimizer.betas[0]:g}, {optimizer.betas[1]:g}, eps {optimizer.eps:g}"
    return f"{optimizer.type}, peak lr {optimizer.lr:g}, {own}, weight decay {optimizer.weight_decay:g}"


def _job_rows(job: Job) -> Iterator[tuple[str, str]]:
    clip = f"{job.gradient_clipping:g}" if job.gradient_clipping else "off"
    schedule = f", schedule {job.pipeline_schedule}" if job.mesh.pipeline > 1 else ""
    yield "ZeRO", f"stage {job.zero_stage}{schedule}, clipping {clip}"
    yield "activations", f"checkpointing: {job.activation_checkpointing}"
    yield "output", job.output_dir


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name, "dim"), Text(text))
    return table


def _problem(problem: Problem) -> Text:
    remedy = f"\n       {problem.advice}" if problem.remedy else ""
    return Text.assemble((f"{problem.severity}: ", _STYLES[problem.severity]), f"{problem.said}{remedy}")
