"""The folder that fuzz cases run in: inputs of every kind that is read, right and wrong ones."""

from __future__ import annotations

import gzip
import json
import os
import struct
import tarfile
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet

from pipeline.data.tokenizer import ByteTokenizer
from tests.data.megatron_files import write_documents

RUN = Path(__file__).parents[1] / "checkpoints" / "fixtures" / "pp2_tp2_zero1.tar.xz"
HF_CONFIG = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "hidden_act": "silu",
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "bos_token_id": None,
    "eos_token_id": 256,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip
BLEND = {
    "sources": [
        {"name": "a", "data": "text.txt", "weight": 0.5},
        {"name": "b", "data": ["folder"], "weight": 0.5},
    ]
}
# What a model without usual settings needs.
PLAIN = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
HOSTS = "# hosts\nlocalhost slots=2\n"
TEXT = "def f(x):\n    return x + 1\n" * 200


def make_files(folder: Path) -> None:
    """Everything, in `folder`, which is empty."""
    with tarfile.open(RUN) as archive:
        archive.extractall(folder, filter="data")
    (folder / "run").rename(folder / "saved")
    (folder / "run.json").write_bytes((folder / "saved" / "run.json").read_bytes())
    (folder / "plain.json").write_text(json.dumps(PLAIN))
    (folder / "blend.json").write_text(json.dumps(BLEND))
    (folder / "hosts").write_text(HOSTS)
    _texts(folder)
    _lines(folder)
    _tokens(folder)
    ByteTokenizer().save(folder / "tokenizer")
    ByteTokenizer().save(folder / "hf")
    (folder / "hf" / "config.json").write_text(json.dumps(HF_CONFIG))


def _texts(folder: Path) -> None:
    texts = {
        "text.txt": TEXT.encode(), "empty.txt": b"", "binary.txt": bytes(range(256)) * 9,
        "half.txt": "é".encode()[:1],
        "utf16.txt": TEXT.encode("utf-16"), "folder/text.txt": TEXT.upper().encode(),
        "folder/.hidden.txt": b"x",
        "folder/table.csv": b"a,b\n", "zero.idx": b"", "zero.bin": b"",
    }  # fmt: skip
    for name in ("folder", "empty"):
        (folder / name).mkdir()
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "fifo.txt")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "dangling.txt").symlink_to("no/such/file")
    (folder / "linkfolder").symlink_to("folder")
    (folder / "circle").mkdir()
    (folder / "circle" / "again").symlink_to("..")
    (folder / "circle" / "self").symlink_to("self")
    (folder / "circle" / "a.txt").write_text("abc\n")


def _lines(folder: Path) -> None:
    lines = b"".join(json.dumps({"text": f"line {n}", "n": n}).encode() + b"\n" for n in range(300))
    deep = b'{"text": ' + b"[" * 3000 + b"]" * 3000 + b"}\n"
    files = {
        "lines.jsonl": lines, "bad.jsonl": lines + b'{"text": 3}\n{"other": "x"}\n[1]\nnot json\n',
        "lines.json": lines,
        "list.json": json.dumps([{"text": "a"}] * 3).encode(), "cut.jsonl.gz": gzip.compress(lines)[:-40],
        "not.jsonl.gz": lines, "not.parquet": lines, "long.jsonl": b'{"text": "' + b"x" * 3_000_000 + b'"}\n',
        "deep.jsonl": deep,
        "nul.jsonl": b'{"text": "a\\u0000b"}\n{"text": "\\ud800"}\n{"text": "a", "text": "b"}\n\n',
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_bytes(content)
    table = arrow.table({"text": ["one", "two", "three"], "number": [1, 2, 3], "list": [["a"], [], None]})
    parquet.write_table(table, folder / "rows.parquet")
    (folder / "cut.parquet").write_bytes((folder / "rows.parquet").read_bytes()[:-20])
    (folder / "arrow").mkdir()
    (folder / "arrow" / "dataset_info.json").write_text("{}")
    (folder / "arrow" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with (
        arrow.OSFile(str(folder / "arrow" / "data.arrow"), "wb") as sink,
        arrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)


def _tokens(folder: Path) -> None:
    documents = [[[number % 256 for number in range(n, n + 70)] + [256]] for n in range(40)]
    write_documents(folder / "tokens", documents)
    for name, index in {
        "halfidx": (folder / "tokens.idx").read_bytes()[:-30],
        "badidx": b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**62, 2**62),
        "badjson": (folder / "tokens.idx").read_bytes(),
    }.items():
        (folder / f"{name}.idx").write_bytes(index)
        (folder / f"{name}.bin").write_bytes((folder / "tokens.bin").read_bytes())
    (folder / "badjson.json").write_text("[1, 2")
