"""What lies beside weights goes through a run's tokenizer folder and into exports whole."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.data.tokenizer import load_tokenizer
from pipeline.data.tokenizer_folder import byte_tokenizer_json
from pipeline.hugging_face.config import model_from_hugging_face
from pipeline.hugging_face.families import config_json, generation_config_json
from pipeline.hugging_face.folder_files import left_behind
from tests.model.hugging_face import build

TEMPLATE = "{% for m in messages %}<|begin|>{{ m['content'] }}<|turn|>{% endfor %}"


def write_folder(folder: Path) -> None:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    library = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|endoftext|>",
        bos_token="<|begin|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|turn|>"],
        padding_side="left",
        model_max_length=64,
    )
    library.chat_template = TEMPLATE
    library.save_pretrained(folder)
    ids = {"bos_token_id": 257, "eos_token_id": [259], "pad_token_id": 258}
    config = build("llama").config.to_dict() | ids
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"eos_token_id": [256, 259], "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "preprocessor_config.json").write_text("{}")


def test_a_folder_goes_through_whole(tmp_path: Path) -> None:
    folder, copy = tmp_path / "model", tmp_path / "run" / "tokenizer"
    write_folder(folder)
    load_tokenizer(str(folder)).save(copy)
    facts = load_tokenizer(str(copy)).facts  # a run that goes on without the folder
    names = {path.name for path in copy.iterdir()}
    assert names == {path.name for path in folder.iterdir()} - {"preprocessor_config.json"}
    assert all((copy / name).read_bytes() == (folder / name).read_bytes() for name in names)
    assert left_behind(folder, facts.files) == ["preprocessor_config.json"]
    ours, theirs = AutoTokenizer.from_pretrained(copy), AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(talk, tokenize=False) == "<|begin|>hello<|turn|>"
    for name in ("special_tokens_map", "padding_side", "model_max_length"):
        assert getattr(ours, name) == getattr(theirs, name)

    model = model_from_hugging_face(facts.model_config, "file")
    written = config_json(model, "bfloat16", facts.end_of_document, facts.model_config)
    # The id that ended documents in training always ends a text.
    assert [written[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == [257, [259, 256], 258]
    assert written["torch_dtype"] == "bfloat16" and "dtype" not in written
    generation = generation_config_json(256, facts.generation_config, facts.model_config)
    assert generation["eos_token_id"] == [256, 259] and generation["temperature"] == 0.6
    assert (generation["bos_token_id"], generation["pad_token_id"]) == (257, 258)


def test_code_of_a_tokenizer_stays_behind(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    content = json.loads(path.read_text()) | {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": "own.Own"},
    }
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.facts.runs_code
    tokenizer.save(tmp_path / "copy")
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").padding_side == "left"
