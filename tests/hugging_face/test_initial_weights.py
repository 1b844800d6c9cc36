"""What `--model` means for weights and tokenizer, and what is wrong with a folder before ranks start."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file, save_file

from pipeline.base.problems import JobError
from pipeline.data.tokenizer import ByteTokenizer
from pipeline.data.tokenizer_folder import tokenizer_facts
from pipeline.engine.agreement import WeightsMismatch, agree_on_weights
from pipeline.engine.folder_weights import FolderWeights
from pipeline.hugging_face.folder_files import hub_folder
from pipeline.hugging_face.tensor_map import tensor_map
from pipeline.job.initial_weights import folder_weights_problems, initial_weights
from pipeline.job.models import load_model
from pipeline.job.options import from_run_file
from pipeline.job.resolve import Draft, examine
from pipeline.job.run_file import TOKENIZER_FOLDER, run_json, write_run_file
from pipeline.job.world import Host, World
from pipeline.model.config import ModelConfig
from pipeline.parallel.context import Parallel
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parameters import Slicing
from tests.harness import init_deepspeed_distributed, run_ranks
from tests.hugging_face.folders import only_config, options, write_folder

WORLD = World((Host("localhost", 1),), "cpu")
COMMIT = "1f2e3d4c" * 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """GPT-2, in one file."""
    return write_folder(tmp_path / "model", "gpt2", "1GB")


def problems(folder: Path) -> str:
    return "\n".join(map(str, folder_weights_problems(str(folder), load_model(str(folder), "cpu"))))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a folder that has one file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_weights_of_a_sound_folder(folder: Path, tmp_path: Path):
    assert problems(folder) == ""
    assert problems(write_folder(tmp_path / "several", "llama")) == ""
    assert initial_weights(str(folder)).folder == folder


def test_what_model_names(folder: Path, tmp_path: Path):
    bare = only_config(folder, tmp_path / "bare")
    assert initial_weights(str(bare)) == (None, f"no weights in {bare}")
    file, reason = initial_weights(str(folder / "config.json"))
    assert file is None and f"--model {folder} loads the weights beside it" in reason
    assert initial_weights(str(bare / "config.json"))[1] == f"{bare / 'config.json'} is a description"
    assert initial_weights("tiny") == initial_weights("auto") == (None, "")


@pytest.mark.parametrize(
    ("usual", "preset"),
    [
        ("gpt2", "gpt2-124m"),
        ("GPT2-medium", "gpt2-medium"),
        ("openai-community/gpt2-large", "gpt2-large"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("llama-3-8b", "llama3-8b"),
    ],
)
def test_a_usual_name_leads_to_the_preset_unless_a_folder_has_it(
    usual: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert load_model(usual, "cpu").name == preset
    assert initial_weights(usual).folder is None
    assert f"{usual} is the preset {preset}" in initial_weights(usual).reason
    Path(usual).mkdir(parents=True)
    with pytest.raises(JobError, match=r"the folder has no config\.json"):
        load_model(usual, "cpu")


def notes(draft: Draft) -> dict[str, str]:
    return {note.key: str(note) for note in draft.resolved}


def test_the_check_says_where_weights_come_from(folder: Path, tmp_path: Path):
    bare = only_config(folder, tmp_path / "bare")
    assert notes(examine(options(tmp_path, folder), WORLD))["weights"] == (
        f"weights = {folder} (the folder has weights)"
    )
    draft = examine(options(tmp_path, bare), WORLD)
    assert notes(draft)["weights"] == f"weights = random (no weights in {bare})"
    (warning,) = [problem for problem in draft.problems if problem.severity == "warning"]
    assert draft.job is not None and "begins with RANDOM weights" in warning.rule
    assert "weights" not in notes(examine(options(tmp_path, "tiny"), WORLD))


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


def no_json(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"nope")


def strange_offsets(folder: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0000")


def overlapping(folder: Path) -> None:
    _two_vectors(folder, [0, 8], [0, 8])


def with_a_gap(folder: Path) -> None:
    _two_vectors(folder, [0, 8], [16, 24])


def before_the_beginning(folder: Path) -> None:
    _two_vectors(folder, [-8, 0], [0, 8])


def _two_vectors(folder: Path, *places: list[int]) -> None:
    entries = ({"dtype": "F32", "shape": [2], "data_offsets": place} for place in places)
    header = json.dumps(dict(enumerate(entries))).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))


def without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        rewrite(folder, lambda tensors: [tensors.pop(name) for name in names] and None)

    return remove


def more(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(2)}))


def other_shape(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"transformer.wpe.weight": torch.zeros(63, 48)}))


def other_format(folder: Path) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].to(torch.float8_e4m3fn)

    rewrite(folder, quantize)


def index_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"transformer.wte.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_to_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a"}}))


def wrong_index(folder: Path) -> None:
    index = {"weight_map": {"no.such.tensor": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[")


def untied_in_truth(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(300, 48)}))


def output_layer_of_another_size(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(299, 48)}))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


WHOLE = "model.safetensors is not a complete safetensors file: Error while deserializing header: "
FAULTS = {
    cut_off: WHOLE + "incomplete metadata, file not fully covered",
    empty: WHOLE + "header too small",
    huge_header: WHOLE + "header too large",
    no_json: WHOLE + "invalid JSON in header",
    strange_offsets: WHOLE + "invalid shape, data type, or offset for tensor",
    overlapping: WHOLE + "invalid offset for tensor",
    with_a_gap: WHOLE + "invalid offset for tensor",
    before_the_beginning: WHOLE + "invalid JSON in header",
    without("transformer.wpe.weight"): "lack 1 tensors: transformer.wpe.weight",
    without("transformer.h.0.attn.c_attn.weight", "transformer.ln_f.bias"): "lack 2 tensors",
    more: "1 tensors that its model does not: score.weight",
    other_shape: "transformer.wpe.weight has the shape [63, 48], and config.json makes it [64, 48]",
    other_format: "are stored as F8_E4M3, and are read as F64, F32, F16, BF16",
    index_only: "model.safetensors.index.json names model-00001-of-00002.safetensors, which is missing",
    index_to_elsewhere: "weight_map does not say which file of the folder has which tensor",
    wrong_index: "names model.safetensors for no.such.tensor, which the file does not hold",
    broken_index: "model.safetensors.index.json cannot be read",
    untied_in_truth: "lm_head.weight is not the embedding, and its config.json ties them",
    output_layer_of_another_size: "lm_head.weight is not the embedding, and its config.json ties them",
    pickled: "has weights as pickles only (pytorch_model.bin), which may run code when they are opened",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_folder_is_refused_with_the_reason(
    fault: Callable[[Path], None], folder: Path, tmp_path: Path
):
    fault(folder)
    assert FAULTS[fault] in problems(folder)
    draft = examine(options(tmp_path, folder), WORLD)
    assert draft.job is None
    assert any(FAULTS[fault] in str(problem) for problem in draft.problems)


def test_the_check_reads_headers_without_torch(folder: Path, tmp_path: Path):
    without("transformer.wpe.weight")(folder)
    config = options(tmp_path, folder).deepspeed_config
    program = "import sys; from pipeline.check import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    line = [sys.executable, "-c", program, "--model", str(folder), "--deepspeed_config", config]
    line += ["--train_steps", "1", "--output_dir", str(tmp_path / "run"), "--world_size", "1"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "lack 1 tensors: transformer.wpe.weight" in done.stdout
    assert done.stdout.endswith("2 False\n")


def read(folder: Path) -> FolderWeights:
    return FolderWeights(folder, load_model(str(folder), "cpu"))


def embedding(weights: FolderWeights, config: ModelConfig) -> torch.Tensor:
    shape = (config.padded_vocab_size, config.hidden_size)
    return weights.part("tied_modules.embed.weight", Slicing(shape, None), 1, 0)


def test_tensors_that_say_nothing_are_no_problem(folder: Path):
    """A copy of the embedding, masks, and names without their first word: what older files have."""

    def as_once(tensors: dict[str, torch.Tensor]) -> None:
        old = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        tensors.clear()
        tensors.update(old, **{"h.0.attn.bias": torch.ones(1, 1, 64, 64)})
        tensors["lm_head.weight"] = old["wte.weight"].clone()

    config, before = load_model(str(folder), "cpu"), read(folder)
    expected = embedding(before, config)
    rewrite(folder, as_once)
    assert problems(folder) == ""
    assert torch.equal(embedding(read(folder), config), expected)


def test_a_tied_output_layer_must_be_a_copy(folder: Path):
    """Two formats are not compared beforehand; who reads both does."""

    def round_one(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].half()

    rewrite(folder, round_one)
    assert problems(folder) == ""
    with pytest.raises(JobError) as caught:
        embedding(read(folder), load_model(str(folder), "cpu"))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("model", str(folder / "model.safetensors"))
    assert "lm_head.weight is not the embedding" in problem.rule


# Tokenizers --------------------------------------------------------------------------------------------


def other_tokenizer(folder: Path, highest: int) -> None:
    """The byte tokenizer with one more token."""
    ByteTokenizer().save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": highest, "content": "<|more|>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))


def tokenizer_problems(draft: Draft) -> list[str]:
    return [str(problem) for problem in draft.problems if problem.key == "tokenizer"]


def test_weights_need_their_tokenizer(folder: Path, tmp_path: Path):
    (folder / "tokenizer.json").unlink()
    (said,) = tokenizer_problems(examine(options(tmp_path, folder), WORLD))
    assert f"{folder} has weights but no tokenizer.json" in said
    assert examine(options(tmp_path, folder, tokenizer="bytes"), WORLD).job is not None
    assert examine(options(tmp_path, only_config(folder, tmp_path / "bare")), WORLD).job is not None


def test_tokens_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path):
    prefix = tmp_path / "tokens"
    for suffix in (".bin", ".idx"):
        (tmp_path / f"tokens{suffix}").touch()
    other_tokenizer(tmp_path / "tokens.tokenizer", 257)
    more = {"data": (str(prefix),)}
    (said,) = tokenizer_problems(examine(options(tmp_path, folder, **more), WORLD))
    assert "belong to the tokenizer there, which is another one" in said
    more["tokenizer"] = "bytes"
    assert tokenizer_problems(examine(options(tmp_path, folder, **more), WORLD)) == []


def test_a_vocabulary_too_small_is_refused(folder: Path, tmp_path: Path):
    other_tokenizer(folder, 300)
    said = [str(problem) for problem in examine(options(tmp_path, folder), WORLD).problems]
    assert any(f"has 300 token ids, and the tokenizer {folder} needs 301" in each for each in said)


def test_older_folders_name_the_end_of_a_document_in_config_json_only(folder: Path, tmp_path: Path):
    (folder / "tokenizer_config.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "eos_token_id": 256}))
    assert tokenizer_facts(str(folder)).eos_token == "<|endoftext|>"
    (folder / "config.json").write_text(json.dumps({**values, "eos_token_id": 10}))
    assert tokenizer_facts(str(folder)).end_of_document == 10
    (folder / "config.json").write_text(json.dumps({**values, "eos_token_id": 50256}))
    (said,) = tokenizer_problems(examine(options(tmp_path, folder), WORLD))
    assert "names no eos_token in tokenizer_config.json" in said


def test_the_check_says_which_tokenizer_comes_along(folder: Path, tmp_path: Path):
    said = notes(examine(options(tmp_path, folder), WORLD))["tokenizer"]
    assert said == f"tokenizer = {folder} (it comes with the model)"
    assert "tokenizer" not in notes(examine(options(tmp_path, folder, tokenizer="bytes"), WORLD))


# Several hosts -----------------------------------------------------------------------------------------


def test_fingerprints_tell_weights_apart(folder: Path, tmp_path: Path):
    before = read(folder).fingerprint
    (tmp_path / "copy").mkdir()
    for path in folder.iterdir():
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    assert read(tmp_path / "copy").fingerprint == before
    rewrite(folder, lambda tensors: [each.mul_(1.001) for each in tensors.values()] and None)
    assert read(folder).fingerprint != before


def agree(fingerprints: list[str]) -> str:
    init_deepspeed_distributed()
    parallel = Parallel.create(Mesh(data=2), timedelta(seconds=30))
    try:
        agree_on_weights(parallel, fingerprints[parallel.rank])
    except WeightsMismatch as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_hosts_with_other_weights_are_refused_on_all_ranks():
    assert run_ranks(agree, 2, ["ab" * 32, "ab" * 32]) == ["", ""]
    said = "ranks [1] see other files of weights than rank 0: give every host the same folder"
    assert run_ranks(agree, 2, ["ab" * 32, "cd" * 32]) == [said, said]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused_by_name(folder: Path, value: float):
    """Only reading tells: the one who reads them does."""
    name = "transformer.h.1.mlp.c_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3] = value

    rewrite(folder, spoil)
    model = load_model(str(folder), "cpu")
    shapes = {entry.name: entry.shape for entry in tensor_map(model)}
    weights, refused = FolderWeights(folder, model), []
    for parameter, shape in shapes.items():
        try:
            weights.part(parameter, Slicing(shape, None), 1, 0)
        except JobError as error:
            (problem,) = error.problems
            assert (problem.key, problem.value) == ("model", str(folder / "model.safetensors"))
            assert f"holds values in {name}" in problem.rule
            refused.append(parameter)
    assert refused == ["3.mlp.down.weight"]


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The hub's cache with one model, and what was asked of it; "error" is raised instead."""
    snapshot = folder.rename(tmp_path / COMMIT)
    ByteTokenizer().save(snapshot)
    seen: dict[str, object] = {"asked": [], "folder": snapshot}

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        seen["asked"].append((name, revision, "model.safetensors" in allow_patterns))
        unwanted = ("pytorch_model.bin", "modeling.py", "original/consolidated.00.pth")
        assert not any(fnmatch(file, each) for file in unwanted for each in allow_patterns)
        if "error" in seen:
            raise seen["error"]
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub_folder.cache_clear()
    yield seen
    hub_folder.cache_clear()


def test_a_model_of_the_hub_is_a_folder_with_a_precise_name(hub: dict[str, object], tmp_path: Path):
    given = options(tmp_path, "hub:org/gpt", tokenizer="hub:org/gpt@v1", output_dir=None)
    found = examine(given, WORLD).job
    assert found is not None and found.initial_weights.folder == hub["folder"]
    assert found.output_dir == "runs/from_gpt"
    assert hub["asked"] == [("org/gpt", None, True), ("org/gpt", "v1", False)]
    kept = run_json(found)["options"]
    assert (kept["model"], kept["tokenizer"]) == (f"hub:org/gpt@{COMMIT}",) * 2
    assert kept["output_dir"] is None


def test_a_run_that_resumes_needs_no_hub(hub: dict[str, object], tmp_path: Path):
    given = options(tmp_path, "hub:org/gpt", tokenizer="hub:org/gpt")
    first = examine(given, WORLD).job
    run = write_run_file(first).parent
    ByteTokenizer().save(run / TOKENIZER_FOLDER)
    (run / "checkpoints" / "global_step1").mkdir(parents=True)
    hub_folder.cache_clear()
    hub["asked"].clear()
    for again in (given, from_run_file(run / "run.json")):
        second = examine(again, WORLD)
        assert second.errors == [] and second.job.identity == first.identity
        assert second.job.options.model == second.job.options.tokenizer == f"hub:org/gpt@{COMMIT}"
    assert hub["asked"] == []


ANSWER = {"response": SimpleNamespace(headers={}, request=None, status_code=403)}


@pytest.mark.parametrize(
    ("error", "rule", "remedy"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached", "hf download org/gpt --local-dir FOLDER"),
        (ConnectionError("no route"), "cannot be reached", "--{key} FOLDER"),
        (
            RepositoryNotFoundError("No such", **ANSWER),
            "RepositoryNotFoundError: No such",
            "Correct the name",
        ),
        (GatedRepoError("401\n\nrestricted", **ANSWER), "401 restricted", "hf auth login"),
        (HFValidationError("Repo id must be"), "Repo id must be", "Correct the name"),
    ],
)
def test_what_the_hub_does_not_give(hub: dict[str, object], tmp_path: Path, error, rule: str, remedy: str):
    hub["error"] = error
    for key, name in (("model", "hub:org/gpt"), ("tokenizer", "hub:org/gpt")):
        given = options(tmp_path, **{"model": "tiny", key: name})
        (said,) = examine(given, WORLD).errors
        assert said.key == key and rule in said.rule and remedy.format(key=key) in said.remedy
    assert len(hub["asked"]) == 2  # once for each, not with every reader


def test_a_model_of_the_hub_without_safetensors(hub: dict[str, object], tmp_path: Path):
    (hub["folder"] / "model.safetensors").unlink()
    (said,) = examine(options(tmp_path, "hub:org/gpt"), WORLD).errors
    assert "no weights as safetensors" in said.rule and str(hub["folder"] / "config.json") in said.remedy
