"""Text from checkpoints and folders: the model's own tokens, the same with the same seed."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationMixin

from pipeline.checkpoints.export import load_model
from pipeline.export import main as export
from pipeline.generate import main
from tests.covering import first_fast
from tests.harness import run_job
from tests.hugging_face.folders import logits_of_transformers

PROMPT = "def "


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny model on two ranks, and its export."""
    base = tmp_path_factory.mktemp("generate")
    (base / "ds.json").write_text(
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3},'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}}}'
    )
    length = ("--seq_length", "32", "--train_steps", "12", "--eval_samples", "0", "--sample_tokens", "0")
    config = ("--deepspeed_config", str(base / "ds.json"), "--model", "tiny")
    run_job([*config, *length, "--output_dir", str(base / "run")], 2).check()
    assert export([str(base / "run"), str(base / "out")]) == 0
    return base


def text(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_greedy_text_is_that_of_whole_forward_passes(base: Path, capsys: pytest.CaptureFixture[str]):
    """The cache changes nothing: each token is the likeliest after all before it."""
    tokens = list(PROMPT.encode())
    for _ in range(24):
        tokens.append(int(logits_of_transformers(base / "out", torch.tensor([tokens]))[0, -1].argmax()))
    expected = AutoTokenizer.from_pretrained(base / "out").decode(tokens, skip_special_tokens=True)
    options = ("--prompt", PROMPT, "--greedy", "--max_new_tokens", 24)
    assert text(capsys, base / "out", *options) == f"{expected}\n"
    assert text(capsys, base / "run", *options) == f"{expected}\n"


@pytest.mark.parametrize(
    "options",
    first_fast(["", "--top_k 5", "--top_p 0.9", "--temperature 1.5", "--dtype bfloat16"], 1),
)
def test_the_seed_decides(options: str, base: Path, capsys: pytest.CaptureFixture[str]):
    def drawn(source: str, seed: int) -> str:
        common = ("--prompt", PROMPT, "--max_new_tokens", 40, "--seed", seed, *options.split())
        return text(capsys, base / source, *common)

    first = drawn("out", 1)
    assert first.startswith(PROMPT)
    assert drawn("out", 1) == first == drawn("run", 1)
    assert drawn("out", 2) != first


@pytest.mark.slow
def test_narrow_draws_are_greedy(base: Path, capsys: pytest.CaptureFixture[str]):
    common = (base / "out", "--prompt", PROMPT, "--max_new_tokens", 30)
    greedy = text(capsys, *common, "--greedy")
    for narrow in (("--top_k", 1), ("--top_p", 1e-6), ("--temperature", 1e-4)):
        assert text(capsys, *common, *narrow, "--seed", 3) == greedy
    assert text(capsys, *common, "--temperature", 2.0, "--seed", 3) != greedy


def test_each_prompt_has_its_samples_and_its_seed(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The first of each is what it is alone; where prompts come from changes nothing."""
    common = (base / "out", "--max_new_tokens", 12, "--seed", 3)
    alone = [text(capsys, *common, "--prompt", prompt) for prompt in (PROMPT, "import ")]
    said = text(capsys, *common, "--prompt", PROMPT, "--prompt", "import ", "--samples", 2)
    one, two, three, _ = said.split("--- prompt ")[1:]
    assert [one, three] == [f"1 of 2, sample 1 of 2\n{alone[0]}", f"2 of 2, sample 1 of 2\n{alone[1]}"]
    assert two.startswith(f"1 of 2, sample 2 of 2\n{PROMPT}") and two[20:] != one[20:]
    (tmp_path / "p.jsonl").write_text(json.dumps(PROMPT) + '\n\n{"prompt": "import "}\n')
    assert text(capsys, *common, "--prompt_file", tmp_path / "p.jsonl", "--samples", 2) == said
    (tmp_path / "p.txt").write_text(f"{PROMPT}\n")
    assert text(capsys, *common, "--prompt_file", tmp_path / "p.txt") == alone[0]
    assert text(capsys, f"--prompt={PROMPT}", *common) == alone[0]


def test_a_penalty_against_repetition(base: Path, capsys: pytest.CaptureFixture[str]):
    common = (base / "out", "--prompt", PROMPT, "--greedy", "--max_new_tokens", 24)
    plain, varied = text(capsys, *common), text(capsys, *common, "--repetition_penalty", 1000)
    assert text(capsys, *common, "--repetition_penalty", 1) == plain
    assert len(set(varied)) > len(set(plain))


TEMPLATE = (
    "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}model: {% endif %}"
)


def test_a_chat_is_a_text_by_the_template(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(base / "out", tmp_path / "out")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    common = ("--greedy", "--max_new_tokens", 8)

    def chat(typed: str, *options: object) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        return text(capsys, folder, "--chat", *common, *options)

    first = "user: Hello\nmodel: "
    one = text(capsys, folder, "--prompt", first, *common).removeprefix(first)
    second = f"user: Hello\nassistant: {one}user: Again\nmodel: "
    two = text(capsys, folder, "--prompt", second, *common).removeprefix(second)
    assert chat("Hello\n\nAgain\n") == one + two == chat("Again\n", "--prompt", "Hello")
    # What no longer fits is left out from the front; what fits by itself in no way is said.
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'a' * 900}\n{'b' * 1024}\n{'c' * 200}\nHello\n"))
    assert main([str(each) for each in (folder, "--chat", *common)]) == 0
    said = capsys.readouterr()
    assert said.err.count("more than the model's 1024 positions") == 1
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main([str(folder), "--chat"]) == 2
    assert "cannot be used (TemplateError: no system)" in capsys.readouterr().err


@pytest.mark.slow
def test_settings_that_lie_in_a_folder_do_nothing(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(base / "out", tmp_path / "out")
    hidden = json.loads((folder / "generation_config.json").read_text())
    hidden |= {"do_sample": True, "min_p": 0.9, "no_repeat_ngram_size": 1, "num_return_sequences": 2}
    hidden |= {"suppress_tokens": list(range(97, 123)), "min_new_tokens": 20, "repetition_penalty": 3.0}
    (folder / "generation_config.json").write_text(json.dumps(hidden))
    for options in (("--greedy",), ("--temperature", 1.5, "--seed", 4)):
        common = ("--prompt", PROMPT, "--max_new_tokens", 20, *options)
        assert text(capsys, folder, *common) == text(capsys, base / "out", *common)


def test_a_folder_says_what_ends_a_text(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = shutil.copytree(base / "out", tmp_path / "out")
    common = ("--prompt", PROMPT, "--greedy", "--max_new_tokens", 10)
    first = text(capsys, folder, *common)[len(PROMPT)]
    ids = {"eos_token_id": [256, ord(first)], "pad_token_id": 256}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    assert text(capsys, folder, *common) == f"{PROMPT}{first}\n"


def test_what_float16_cannot_hold_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    call = ("--prompt", "a", "--max_new_tokens", "2", "--greedy", "--dtype")
    folder = shutil.copytree(base / "out", tmp_path / "out")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("c_fc.weight"))
    weights[name][0, 0] = 1e6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert main([str(folder), *call, "float16"]) == 2
    assert f"'float16': 1 tensors hold values that it cannot, {name}" in capsys.readouterr().err
    assert main([str(folder), *call, "bfloat16"]) == 0

    def large(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((each, values * 1e6 if each == name else values) for each, values in own(*arguments))

    own = load_model.tensors
    monkeypatch.setattr(load_model, "tensors", large)
    assert main([str(base / "run"), *call, "float16"]) == 2
    assert f"'float16': {name} has values up to" in capsys.readouterr().err


def test_what_transformers_refuses_is_no_traceback(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("not so")

    monkeypatch.setattr(GenerationMixin, "generate", refuse)
    assert main([str(base / "out"), "--prompt", "a"]) == 1
    assert capsys.readouterr().err == "error: not so\n"


WRONG = {
    "prompt": (("--prompt", ""), "is a text of at least one character"),
    "max_new_tokens": (("--prompt", "a", "--max_new_tokens", "0"), "must be at least 1"),
    "positions": (("--prompt", "a", "--max_new_tokens", "1024"), "more than the model's 1024 positions"),
    "no prompt": ((), "Give --prompt, --prompt_file or --chat"),
    "prompt_file": (("--prompt_file", "/nowhere"), "cannot be read (No such file or directory)"),
    "samples": (("--prompt", "a", "--samples", "2", "--greedy"), "does nothing beside --greedy"),
    "chat samples": (("--chat", "--samples", "2"), "does nothing beside --chat"),
    "chat": (("--chat",), "has no chat template"),
    "penalty": (("--prompt", "a", "--repetition_penalty", "0"), "must be above 0"),
    "temperature": (("--prompt", "a", "--temperature", "0"), "must be a number of at least 1e-06"),
    "top_k": (("--prompt", "a", "--top_k", "0"), "must be at least 1"),
    "top_p": (("--prompt", "a", "--top_p", "1.1"), "must be above 0 and at most 1"),
    "seed": (("--prompt", "a", "--seed", "-1"), "must be at least 0"),
    "large seed": (("--prompt", "a", "--seed", str(2**32)), "fit 32 bits"),
    "greedy": (("--prompt", "a", "--greedy", "--top_k", "3"), "does nothing beside --greedy"),
    "dtype": (("--prompt", "a", "--dtype", "int8"), "is not one of float32"),
    "tokenizer": (("--prompt", "a", "--tokenizer", "/nowhere"), "is neither bytes nor a folder"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("source", ["out", "run"])
def test_wrong_options_are_refused(case: str, source: str, base: Path, capsys: pytest.CaptureFixture[str]):
    options, rule = WRONG[case]
    assert main([str(base / source), *options]) == 2
    said = capsys.readouterr()
    assert rule in said.err
    assert said.out == ""


def test_weights_in_one_file_and_in_several(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """transformers takes the one file, a reader of the index the others."""
    folder = shutil.copytree(base / "out", tmp_path / "both")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    assert main([str(folder), "--prompt", "a"]) == 2
    assert "both describe weights" in capsys.readouterr().err


def test_a_source_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path), "--prompt", "a"]) == 2
    assert (
        "is neither a checkpoint, nor a folder of a run, nor a Hugging Face folder" in capsys.readouterr().err
    )


def test_a_folder_without_its_weights_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((base / "out" / name).read_bytes())
    assert main([str(tmp_path), "--prompt", "a"]) == 2
    assert "cannot be opened (" in capsys.readouterr().err


def test_code_in_a_folder_is_neither_run_nor_asked_for(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    foreign = {"model_type": "foreign", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (tmp_path / "config.json").write_text(json.dumps(foreign))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert main([str(tmp_path), "--prompt", "a"]) == 2
    said = capsys.readouterr()
    assert "cannot be opened (" in said.err and "[y/N]" not in said.out
    assert not (tmp_path / "ran").exists()


def test_weights_that_the_library_refuses_are_no_traceback(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(base / "out", tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1))
    assert main([str(tmp_path / "out"), "--prompt", "a"]) == 2
    assert (
        "cannot be opened (ValueError: model.safetensors is not a complete safetensors file"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_nothing_else_is_said(base: Path):
    """No warnings of libraries around the text, in a process of its own."""
    line = [sys.executable, "-m", "pipeline.generate", str(base / "run"), "--prompt", PROMPT, "--greedy"]
    done = subprocess.run(
        [*line, "--max_new_tokens", "8"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.startswith(PROMPT)
    assert done.stderr == ""
