"""From the sources of a run to its training samples and its evaluation sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.words import cut, size
from pipeline.data.blend import Blend, BlendSource, BlendState, ResumedBlend, resume_blend
from pipeline.data.corpus import Corpus, SourceSpec, find_corpus
from pipeline.data.folder_search import left_out_text
from pipeline.data.inputs import is_remote
from pipeline.data.order import Complement
from pipeline.data.packing import PackedDataset, Packing
from pipeline.data.preparation import DEFAULT_WAIT, Rules, cache_identity, cached_tokens, sample_text
from pipeline.data.split import Split, SplitRule, split_source
from pipeline.data.token_file import TokenFile, WatchedFile, count_tokens, is_quick_to_open
from pipeline.data.tokenizer import ByteTokenizer, Tokenizer, vocabulary_problems
from pipeline.hugging_face.folder_files import is_hub_name

# Bytes of a source's text that are encoded before a run starts, to know what ranks will find.
LOOKED_AT = 1 << 20


@dataclass(frozen=True)
class OpenSource:
    """A source with its files found and its tokens mapped.

    Attributes:
        spec: Name, paths and weight.
        corpus: The files, and those that are not used.
        token_file: The tokens, with the files that were skipped.
    """

    spec: SourceSpec
    corpus: Corpus
    token_file: TokenFile


@dataclass(frozen=True)
class EvalData:
    """Documents that are evaluated and never trained on, tail kept.

    Attributes:
        name: None for the validation documents of a single source, which have no name.
        token_file: Holds them.
        aside: Lines about the files of a validation set that are not used, or a source's unequal share.
    """

    name: str | None
    dataset: PackedDataset
    token_file: TokenFile
    aside: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingData:
    """What a run reads.

    Attributes:
        tokenizer: Made the tokens; decodes a model's samples.
        opened: The training sources, as found.
        order: The training samples, and where they are resumed.
        evaluation: In the order in which it is done.
        split: How it was chosen among the training sources.
    """

    tokenizer: Tokenizer
    opened: tuple[OpenSource, ...]
    order: ResumedBlend
    evaluation: tuple[EvalData, ...]
    split: SplitRule

    @property
    def train(self) -> Blend:
        """Endless shuffled samples; each source's tail is dropped in each of its epochs."""
        return self.order.blend

    @property
    def fingerprint(self) -> str:
        """Equal on all hosts that read the same tokens in the same order."""
        return self.train.fingerprint

    def state(self, position: int) -> dict[str, Any]:
        """What a checkpoint at `position` keeps.

        Raises:
            ValueError: `position` is before the one it resumed from.
        """
        split = self.split.to_json()
        return self.order.state(position) | ({} if split is None else {"split": split})

    def summary(self) -> tuple[str, ...]:
        """Lines for the console: all sets, what is not used, and what changed since the checkpoint."""
        lines = []
        for opened, source in zip(self.opened, self._in_order(), strict=True):
            share = f", weight {float(source.weight):.4g}" if len(self.opened) > 1 else ""
            lines.append(f"dataset: {cut(opened.spec.name)}{share}")
            lines.append(
                f"training: {_size(source.dataset)}, {source.dataset.samples_per_epoch:,} samples per epoch, "
                f"{source.dataset.dropped_tokens:,} tokens of an incomplete last sample left out"
            )
            lines += _aside(opened)
        for held_out in self.evaluation:
            lines.append(f"{held_out.name or 'validation'}: {_size(held_out.dataset)}")
            lines += held_out.aside
        if not self.evaluation:
            lines.append("validation: nothing")
        return (*lines, *self.order.changes)

    def _in_order(self) -> list[BlendSource]:
        """The blend's sources, which have the checkpoint's order, in the order of `opened`."""
        by_tokens = {source.fingerprint: source for source in self.train.sources}
        return [by_tokens[opened.token_file.fingerprint] for opened in self.opened]


@dataclass(frozen=True)
class DataSettings:
    """How tokens become samples.

    Attributes:
        sequence_length: Inputs per sample.
        seed: Chooses the validation documents and the sample order.
        eval_fraction: Share of each source's tokens for validation, 0 to below 1.
        vocab_size: The model's, unpadded; must hold every id of the tokenizer.
        cache_folder: Where token files and long indexes are kept.
        document_mask: Return the document of each token.
        mask_document_end: Do not count the label after a document's last token.
        rules: Where the text of a record is, and what happens to a bad one.
        time_limit: Seconds to wait for the process that tokenizes.
        written: Folders that the run writes to, which are never its data.
        eval_limit: Tokens of each source for validation at most; None: no limit.
    """

    sequence_length: int
    seed: int
    eval_fraction: float
    vocab_size: int
    cache_folder: Path
    document_mask: bool = False
    mask_document_end: bool = False
    rules: Rules = field(default_factory=Rules)
    time_limit: float = DEFAULT_WAIT
    written: tuple[str, ...] = ()
    eval_limit: int | None = None

    def split_rule(self, saved: dict[str, Any] | None) -> SplitRule:
        """How validation is chosen: as when the run began, where a checkpoint has `saved` its data."""
        if saved is None or "split" in saved:
            limit = self.eval_limit if saved is None else saved["split"]["limit"]
            return SplitRule(self.eval_fraction, limit)
        return SplitRule(self.eval_fraction, by_documents=True)


def load_data(
    sources: Sequence[SourceSpec],
    settings: DataSettings,
    *,
    validation: Sequence[SourceSpec] = (),
    tokenizer: Tokenizer | None = None,
    saved: dict[str, Any] | None = None,
    position: int = 0,
) -> TrainingData:
    """Tokenize what is new, split it, and pack it. Every rank calls it and gets the same.

    Args:
        sources: To train on; their weights add up to 1.
        validation: Named sets, evaluated whole.
        tokenizer: Of texts; None: bytes.
        saved: What `TrainingData.state` gave the checkpoint that the run resumes from.
        position: Samples consumed by then.

    Raises:
        JobError: paths, texts or sizes that cannot be used, or data that the checkpoint was not trained on.
        TimeoutError, OSError: see `cached_tokens`.
    """
    tokenizer = tokenizer or ByteTokenizer()
    if problems := vocabulary_problems(tokenizer, settings.vocab_size):
        raise JobError(problems)

    training, named = (
        [_opened(spec, settings, tokenizer) for spec in each] for each in (sources, validation)
    )
    if problems := _leaks(training, named):
        raise JobError(problems)
    split = settings.split_rule(saved or None)
    train, evaluation = _packed(training, named, settings, split, tokenizer)
    order = resume_blend(train, BlendState.from_json(saved) if saved else None, position)
    return TrainingData(tokenizer, tuple(training), order, tuple(evaluation), split)


def load_evaluation(
    sources: Sequence[SourceSpec],
    settings: DataSettings,
    *,
    validation: Sequence[SourceSpec] = (),
    tokenizer: Tokenizer | None = None,
    saved: dict[str, Any] | None = None,
) -> tuple[EvalData, ...]:
    """What `load_data` gives to evaluate, by itself.

    Args:
        sources: Of which a part is held out; () where named sets alone are evaluated.

    Raises:
        JobError, TimeoutError, OSError: as `load_data`.
    """
    tokenizer = tokenizer or ByteTokenizer()
    if problems := vocabulary_problems(tokenizer, settings.vocab_size):
        raise JobError(problems)
    training, named = (
        [_opened(spec, settings, tokenizer) for spec in each] for each in (sources, validation)
    )
    return tuple(_packed(training, named, settings, settings.split_rule(saved or None), tokenizer)[1])


def _opened(spec: SourceSpec, settings: DataSettings, tokenizer: Tokenizer) -> OpenSource:
    corpus = find_corpus(spec.paths, settings.written)
    file = cached_tokens(corpus, tokenizer, settings.cache_folder, settings.rules, settings.time_limit)
    return OpenSource(spec, corpus, file)


@dataclass(frozen=True)
class ForeseenSource:
    """What is known of a source before a rank reads it.

    Attributes:
        tokens: All of them, before the split; None where they cannot be known here.
        how: How `tokens` is known, or why it is not, in words.
        remarks: What else is to be said of its text.
        opened: The source as ranks will open it, while `foresee_data` runs; None where only a part of it was
            looked at.
    """

    spec: SourceSpec
    tokens: int | None
    how: str
    remarks: tuple[str, ...] = ()
    opened: OpenSource | None = None


def foresee_data(
    sources: Sequence[SourceSpec],
    settings: DataSettings,
    *,
    validation: Sequence[SourceSpec] = (),
    tokenizer: Tokenizer,
    begins: bool,
) -> tuple[ForeseenSource, ...]:
    """What can be known of the training sources and validation sets in a fraction of a second.

    Token files are opened, a text of up to `LOOKED_AT` bytes is encoded whole, and of a longer one the
    beginnings of some files. What lies at an address is not looked at.

    Args:
        begins: No checkpoint says how this data was split.

    Raises:
        JobError: what `load_data` will refuse, as far as it shows here, in the same words.
    """
    found, problems = [], []
    with TemporaryDirectory() as folder:
        for spec in (*sources, *validation):
            try:
                found.append(_foresee(spec, settings, tokenizer, Path(folder)))
            except JobError as error:
                problems += error.problems
        if problems:
            raise JobError(problems)
        opened = [each.opened for each in found if each.opened is not None]
        if len(opened) == len(found):
            training, named = opened[: len(sources)], opened[len(sources) :]
            if problems := _leaks(training, named):
                raise JobError(problems)
            if begins:
                _packed(training, named, settings, settings.split_rule(None), tokenizer)
    return tuple(found)


def _foresee(spec: SourceSpec, settings: DataSettings, tokenizer: Tokenizer, folder: Path) -> ForeseenSource:
    if any(is_remote(path) or is_hub_name(path) for path in spec.paths):
        return ForeseenSource(spec, None, "at an address, from which ranks read it when they start")
    if not spec.paths:  # listing it costs a tenth of a second, and nothing in it is a user's
        return ForeseenSource(spec, None, "the source text of Python's standard library, about 9 MB")
    corpus = find_corpus(spec.paths, settings.written)
    cached = settings.cache_folder / cache_identity(corpus, tokenizer, settings.rules)
    num_bytes = sum(file.size for file in corpus.files)
    if all(map(is_quick_to_open, corpus.token_files)) and (num_bytes <= LOOKED_AT or cached.is_dir()):
        place = cached.parent if cached.is_dir() else folder
        opened = _opened(spec, replace(settings, cache_folder=place), tokenizer)
        offsets, remarks = opened.token_file.offsets, opened.token_file.remarks if corpus.files else ()
        return ForeseenSource(spec, int(offsets[-1] - offsets[0]), "counted", remarks, opened)
    counted = sum(map(count_tokens, corpus.token_files))
    if not corpus.files:
        return ForeseenSource(spec, counted, "counted by its index")
    sampled = sample_text(corpus, tokenizer, settings.rules)
    how = f"estimated from {size(num_bytes)} of text by a sample"
    return ForeseenSource(spec, counted + sampled.tokens, how, sampled.remarks)


def _packed(
    training: Sequence[OpenSource],
    named: Sequence[OpenSource],
    settings: DataSettings,
    rule: SplitRule,
    tokenizer: Tokenizer,
) -> tuple[list[BlendSource], list[EvalData]]:
    """The training samples of each source; the validation documents of the sources, then the named sets.

    Raises:
        JobError: there is not one sample.
    """
    sources, evaluation = [], []
    for each in training:
        file, name = each.token_file, each.spec.name
        split = split_source(file, rule, settings.seed, tokenizer)
        paths = [path for part in file.parts if (path := getattr(part, "filename", None)) is not None]
        dataset = _dataset(each, split, settings, rule)
        watched = tuple(WatchedFile.of(Path(path)) for path in paths)
        sources.append(BlendSource(name, each.spec.weight, dataset, file.fingerprint, watched))
        if len(split.held_out):
            shown = name if len(training) > 1 else None
            held = _dataset(each, split, settings, rule, evaluated=True)
            share = held.num_tokens / max(held.num_tokens + dataset.num_tokens, 1)
            far = _far_share(share, rule.fraction) if rule.by_documents else []
            evaluation.append(EvalData(shown, held, file, (*split.said, *far)))
    for each in named:
        count = each.token_file.num_documents
        everything = Complement(count, np.arange(0))
        whole = Split(each.token_file.offsets, everything, everything)
        dataset = _dataset(each, whole, settings, rule, evaluated=True)
        evaluation.append(EvalData(each.spec.name, dataset, each.token_file, tuple(_aside(each))))
    return sources, evaluation


def _far_share(share: float, asked: float) -> list[str]:
    """A line where whole documents hold out more than twice or less than half the tokens asked for."""
    if asked / 2 <= share <= asked * 2:
        return []
    return [
        f"WARNING: that is {share:.1%} of the tokens, where --eval_fraction asks for {asked:.1%}: this run "
        "began when documents were held out whole; one in another --output_dir holds out tokens"
    ]


def _dataset(
    opened: OpenSource, split: Split, settings: DataSettings, rule: SplitRule, evaluated: bool = False
) -> PackedDataset:
    """One side of the split; an evaluated one keeps its tail."""
    file, documents = opened.token_file, split.held_out if evaluated else split.train
    side = f"{rule.name}-{'tail' if evaluated else 'train'}-{len(documents)}"
    stem = settings.cache_folder / f"order-{file.fingerprint}-{settings.seed}-{side}"
    packing = Packing(
        settings.sequence_length,
        settings.seed,
        evaluated,
        find_documents=settings.document_mask,
        mask_document_end=settings.mask_document_end,
        vocab_size=settings.vocab_size,
    )
    try:
        return PackedDataset(file.tokens, split.offsets, documents, packing, index_stem=stem)
    except ValueError as error:
        rule_text = f"{len(documents)} {'evaluation' if evaluated else 'training'} documents: {error}"
        remedy = "Give more text, or a smaller --seq_length"
        raise job_error("data", opened.spec.name, rule_text, remedy) from error


def _leaks(training: Sequence[OpenSource], named: Sequence[OpenSource]) -> list[Problem]:
    """Validation sets that are trained on."""
    sources = {opened.token_file.fingerprint: opened.spec.name for opened in training}
    return [
        Problem(
            "validation",
            opened.spec.name,
            f"holds the same tokens as the training source {sources[opened.token_file.fingerprint]}",
            "Evaluate other data, or leave it out and hold documents out with --eval_fraction",
        )
        for opened in named
        if opened.token_file.fingerprint in sources
    ]


def _aside(opened: OpenSource) -> list[str]:
    lines = list(opened.token_file.remarks)
    skipped, count = opened.token_file.skipped, opened.token_file.num_skipped
    if skipped:
        shown = "; ".join(f"{entry.path} ({entry.reason})" for entry in skipped[:5])
        lines.append(f"skipped {count:,} documents: {shown}{'; ...' if count > 5 else ''}")
    if opened.corpus.left_out:
        lines.append(left_out_text(opened.corpus.left_out))
    return lines


def _size(dataset: PackedDataset) -> str:
    return f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens"
