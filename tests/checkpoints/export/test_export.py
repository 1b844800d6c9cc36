"""Exported folders: whole or not at all, as one asks for them, the same bytes again, in bounded memory."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.base.problems import JobError
from pipeline.checkpoints.export import tensors
from pipeline.checkpoints.export.export_folder import StagingFolder
from pipeline.checkpoints.export.tensors import verified_state, write_weights
from pipeline.checkpoints.manifest import TrainState
from pipeline.checkpoints.resume import checkpoint_at
from pipeline.export import bytes_of, main
from pipeline.generate import main as generate
from pipeline.job.job import Job
from pipeline.job.models import PRESETS
from pipeline.model.counts import block_parameters
from tests.checkpoints.layouts import find
from tests.checkpoints.small import save_checkpoint, start
from tests.harness import run_ranks
from tests.hugging_face.folders import TOKENS, job, logits_of_transformers, write_folder
from tests.hugging_face.test_layouts_both_ways import start_and_save
from tests.model.hugging_face import KINDS

MMAP_THRESHOLD = -3  # the number that mallopt knows it by
BYTES = ("--tokenizer", "bytes")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models, and a run from each."""
    base = tmp_path_factory.mktemp("exports")
    for kind in KINDS:
        write_folder(base / kind, kind)
    jobs = [job(base, base / kind, output_dir=str(base / f"{kind} run")) for kind in KINDS]
    run_ranks(start_and_save, 1, jobs)
    return base


def export(*arguments: object) -> int:
    return main([*map(str, arguments), *BYTES])


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_import_export_gives_the_same_bytes(dtype: str, base: Path, tmp_path: Path):
    shape = ("--dtype", dtype, "--max_shard_size", "50KB")
    jobs = []
    for kind in KINDS:
        assert export(base / f"{kind} run", tmp_path / kind, *shape) == 0
        jobs.append(job(tmp_path, tmp_path / kind, output_dir=str(tmp_path / f"{kind} run")))
    run_ranks(start_and_save, 1, jobs)
    for kind in KINDS:
        assert export(tmp_path / f"{kind} run", tmp_path / f"{kind} again", *shape) == 0
        first = digests(tmp_path / kind)
        assert first == digests(tmp_path / f"{kind} again"), kind
        assert len(first) > 6, "several files of weights, and an index"


def test_files_are_no_larger_than_asked_for(base: Path, tmp_path: Path):
    assert export(base / "llama run", tmp_path / "out", "--max_shard_size", "20KB") == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes: dict[str, list[int]] = {}
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes[file] = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
            assert {index["weight_map"][name] for name in opened.keys()} == {file}  # noqa: SIM118
    assert sum(map(sum, sizes.values())) == index["metadata"]["total_size"]
    assert all(sum(each) <= 20_000 or len(each) == 1 for each in sizes.values())
    assert len(sizes) > 10


def test_each_format_is_the_rounded_weights(base: Path, tmp_path: Path):
    assert export(base / "gpt2 run", tmp_path / "float32") == 0
    exact = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "float32").named_parameters())
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        assert export(base / "gpt2 run", tmp_path / name, "--dtype", name) == 0
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.dtype == dtype  # as config.json says
        rounded = dict(model.named_parameters())
        assert all(torch.equal(rounded[key], value.to(dtype)) for key, value in exact.items())


def test_what_float16_cannot_hold_is_an_error(tmp_path: Path):
    values = [("large", torch.tensor([1e5]))]
    with pytest.raises(ValueError, match="large has values up to 100000, and float16 ends at 65504"):
        write_weights(tmp_path, {"large": (1,)}, values, torch.float16, 100)


def test_a_writer_that_gets_other_tensors_says_so(tmp_path: Path):
    for values in ([], [("a", torch.ones(3))], [("b", torch.ones(2))]):
        with pytest.raises(ValueError, match=r"comes where a \[2\] belongs"):
            write_weights(tmp_path, {"a": (2,)}, values, torch.float32, 100)


@pytest.mark.parametrize("kind", ["gpt2", "untied gpt2"])
def test_output_layers_stay_as_they_were(kind: str, base: Path, tmp_path: Path):
    assert export(base / f"{kind} run", tmp_path / "out") == 0
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) == (kind == "untied gpt2")  # noqa: SIM118
        # 300 ids, and not the 384 rows of training.
        assert file.get_slice("transformer.wte.weight").get_shape() == [300, 48]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.lm_head.weight is model.transformer.wte.weight) == (kind == "gpt2")


def test_the_byte_tokenizer_goes_along(base: Path, tmp_path: Path):
    assert export(base / "gpt2 run", tmp_path / "out") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    text = "".join(map(chr, range(0x800))) + "日本語 🙂\r\n\0"  # with each byte that UTF-8 has
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == 256
    assert model.generation_config.pad_token_id == 256  # so that generate() needs not choose one


# Where from, where to ----------------------------------------------------------------------------------


def test_the_newest_complete_checkpoint_is_taken(base: Path, tmp_path: Path):
    run = base / "llama run"
    for number, source in enumerate((run, run / "checkpoints", run / "checkpoints" / "global_step0")):
        assert export(source, tmp_path / str(number)) == 0
    assert digests(tmp_path / "0") == digests(tmp_path / "1") == digests(tmp_path / "2")


@pytest.mark.parametrize("source", ["nothing", "empty", "unsaved"])
def test_no_checkpoint_is_said(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    (tmp_path / "unsaved" / "checkpoints").mkdir(parents=True)
    assert export(tmp_path / source, tmp_path / "out") == 2
    expected = {
        "nothing": "there is no such folder",
        "empty": "is no checkpoint, and no folder of a run",
        "unsaved": "the run has not saved yet",
    }
    assert expected[source] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_is_replaced_only_where_asked_for(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    run, out = base / "gpt2 run", tmp_path / "out"
    out.mkdir()  # an empty one is as good as none
    assert export(run, out) == 0
    before = digests(out)
    assert export(run, out) == 2
    assert "is there already and not empty" in capsys.readouterr().err
    assert export(base / "llama run", out, "--overwrite") == 0
    assert digests(out) != before
    assert logits_of_transformers(out, TOKENS).shape == (8, 17, 300)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_other_peoples_folders_are_left_alone(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "thesis.tex").touch()
    (tmp_path / "config.json").touch()
    assert export(base / "gpt2 run", tmp_path, "--overwrite") == 2
    assert "is no model's folder: it has thesis.tex" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert export(base / "gpt2 run", tmp_path / "file") == 2
    assert "is a file" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_a_failed_export_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    assert export(base / "gpt2 run", out) == 0
    before = digests(out)
    monkeypatch.setattr(tensors, "_bytes", full_disk)
    assert export(base / "llama run", out, "--overwrite") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert digests(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_that_is_ended_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(tensors, "_bytes", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert export(base / "gpt2 run", tmp_path / "out") == 1
    assert capsys.readouterr().err == f"\ninterrupted; {tmp_path / 'out'} was not written\n"
    assert [path.name for path in tmp_path.iterdir()] == []


def test_two_exports_do_not_make_one_folder(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    place = StagingFolder(tmp_path / "out")
    with place.held():
        place.content.mkdir()
        (place.content / "config.json").write_text("of the first")
        assert export(base / "gpt2 run", tmp_path / "out") == 2
        assert "another process is exporting into it" in capsys.readouterr().err
        assert [path.name for path in place.content.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_crash_in_a_replacement_takes_nothing_away(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    out = tmp_path / "out"
    assert export(base / "gpt2 run", out) == 0
    before = digests(out)
    out.rename(StagingFolder(out).replaced)  # where a kill between two renames leaves it
    assert export(base / "llama run", out) == 2
    assert "is there already and not empty" in capsys.readouterr().err
    assert digests(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_all_of_a_folder_is_on_the_disk_before_it_has_its_name(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced, sync, publish = set(), os.fsync, StagingFolder.publish

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def checked(place: StagingFolder) -> None:
        files = [place.content, *place.content.iterdir()]
        assert len(files) > 7
        assert [path.name for path in files if path.stat().st_ino not in synced] == []
        publish(place)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(StagingFolder, "publish", checked)
    assert export(base / "llama run", tmp_path / "out", "--max_shard_size", "50KB") == 0


def test_a_folder_among_the_checkpoints_of_a_run_is_refused(base: Path, capsys: pytest.CaptureFixture):
    checkpoints = base / "gpt2 run" / "checkpoints"
    before = sorted(checkpoints.iterdir())
    assert export(base / "gpt2 run", checkpoints / "global_step9") == 2
    assert "global_step9': is in " in capsys.readouterr().err
    assert sorted(checkpoints.iterdir()) == before


def damaged(base: Path, tmp_path: Path) -> Path:
    """A copy of a run, one bit of whose weights is another one."""
    shutil.copytree(base / "gpt2 run", tmp_path / "run")
    file = max((tmp_path / "run" / "checkpoints" / "global_step0").glob("*.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return tmp_path / "run"


def test_a_flipped_bit_is_seen(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    run = damaged(base, tmp_path)
    assert export(run, tmp_path / "out") == 2
    assert "has another digest than when it was saved" in capsys.readouterr().err
    assert generate([str(run), "--prompt", "a", *BYTES]) == 2
    assert "has another digest than when it was saved" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_of_other_hosts_must_be_here(base: Path, tmp_path: Path):
    checkpoint = checkpoint_at(base / "gpt2 run").checkpoint
    assert checkpoint is not None
    apart = replace(
        checkpoint, shared=False, files={n: replace(e, host=1) for n, e in checkpoint.files.items()}
    )
    assert verified_state(apart, ()).slicings  # copied together, all of it can be read
    missing = replace(apart, files={**apart.files, "more.pt": next(iter(apart.files.values()))})
    with pytest.raises(JobError, match=r"1 of its files are not here, more\.pt among them.*Copy"):
        verified_state(missing, ())


def test_all_problems_of_a_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    options = ("--dtype", "int8", "--max_shard_size", "big")
    assert export(tmp_path / "nothing", tmp_path / "out", *options) == 2
    said = capsys.readouterr().err
    for text in ("is not one of float32, bfloat16, float16", "is no size above 0", "no such folder"):
        assert text in said


def test_sizes():
    assert [bytes_of(text) for text in ("5GB", "500 mb", "1.5KB", "7", "0", "GB", "-1GB", "5GiB")] == [
        5_000_000_000, 500_000_000, 1500, 7, 0, None, None, None,
    ]  # fmt: skip


# Memory ------------------------------------------------------------------------------------------------


def save_deep_model(job: Job) -> None:
    save_checkpoint(start(job), job, TrainState())


def most_memory_of_an_export(run: Path, out: Path) -> int:
    """Bytes by which this process's own memory grew at most; pages of mapped files are not its own."""
    # Freed tensors go back to the system at once, so that what is in use is what is counted.
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)
    for _ in range(2):  # the first one also loads what it needs, and warms the allocator up
        shutil.rmtree(out, ignore_errors=True)
        before = own_memory()
        with Sampler() as sampler:
            assert export(run, out, "--dtype", "bfloat16") == 0
    return sampler.most - before


def own_memory() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


class Sampler:
    """Looks at this process's memory all the time."""

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(0.0005):
            self.most = max(self.most, own_memory())

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp2 zero3"])
def test_memory_is_bounded_by_a_layer(layout: str, tmp_path: Path):
    # Layers of 28 MB, so that the blocks in which files are verified do not decide.
    model = replace(PRESETS["gpt2-124m"].model, vocab_size=257, num_layers=8)
    (tmp_path / "model.json").write_text(json.dumps(model.to_json()))
    run_ranks(save_deep_model, find(layout).ranks, job(tmp_path, tmp_path / "model.json", layout))
    (grown,) = run_ranks(most_memory_of_an_export, 1, tmp_path / "run", tmp_path / "out")
    assert grown <= 4 * block_parameters(model), (grown, 4 * block_parameters(model))
