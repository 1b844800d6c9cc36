"""Offline conversion: what is written, that nothing spoils it, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import Tensor

from pipeline import reshard
from pipeline.base.files import file_lock
from pipeline.base.problems import JobError
from pipeline.checkpoints import conversion, stored, universal
from pipeline.checkpoints.conversion import convert
from pipeline.checkpoints.files import digest_of
from pipeline.checkpoints.manifest import MANIFEST, FileEntry, TrainState, read_checkpoint, write_manifest
from pipeline.checkpoints.stored import StoredState
from pipeline.job.job import Job
from pipeline.job.options import parse_options
from pipeline.job.resolve import resolve
from pipeline.job.world import Host, World
from pipeline.model.gpt import parameter_slicings
from pipeline.parallel.parameters import Slicing
from tests.checkpoints.kills import kill_at_call
from tests.checkpoints.layouts import arguments, find
from tests.checkpoints.runs import BEFORE, Runs, differing_state, saved
from tests.checkpoints.small import save_checkpoint, start
from tests.harness import run_ranks

SOURCE = "dp2 zero1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("reshard"))


@pytest.fixture(scope="module")
def source(runs: Runs) -> Path:
    """The folder of a run."""
    return runs.trained(SOURCE, BEFORE)


def job_of(folder: Path, layout: str, **options: str) -> Job:
    command = arguments(folder, "run", layout, steps=BEFORE, **options)
    return resolve(parse_options(command), World((Host("localhost", find(layout).ranks),), "cpu"))


def target(folder: Path, layout: str, **options: str) -> list[str]:
    """Options of the job that is to resume."""
    command = arguments(folder, "run", layout, steps=BEFORE, **options)
    return ["--world_size", str(find(layout).ranks), *command]


@pytest.mark.slow
def test_the_result_is_a_complete_checkpoint_of_the_target_layout(source: Path, tmp_path: Path):
    made = tmp_path / "made"
    assert run_ranks(reshard.main, 1, [str(source), str(made), *target(tmp_path, "pp2 tp2")]) == [0]
    before, after = read_checkpoint(saved(source, BEFORE)), read_checkpoint(made)
    assert after.layout == {**before.layout, "pipeline": 2, "tensor": 2, "data": 1, "zero_stage": 0} | {
        "stages": after.layout["stages"]
    }
    assert (after.state, after.identity, after.settings) == (before.state, before.identity, before.settings)
    assert {path.name for path in tmp_path.iterdir()} >= {"made"}
    assert not (tmp_path / "made.partial").exists()
    # Everything that lies there is in the manifest, as it is.
    there = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert there == {*after.files, MANIFEST}
    assert {name: digest_of(made / name) for name in after.files} == {
        name: entry.digest for name, entry in after.files.items()
    }
    assert run_ranks(differing_state, 1, saved(source, BEFORE), made, 0.0) == [[]]


def test_the_options_of_the_run_are_those_of_its_run_file(source: Path, tmp_path: Path):
    """Only what changes is given."""
    shutil.copytree(source, tmp_path / "run")
    made = tmp_path / "made"
    assert run_ranks(reshard.main, 1, [str(tmp_path / "run"), str(made), "--world_size", "4"]) == [0]
    assert read_checkpoint(made).layout["data"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "tp2", "dp2 zero3", "bf16 dp2 zero2"])
def test_a_result_is_converted_again(layout: str, source: Path, tmp_path: Path):
    for first, second in ((saved(source, BEFORE), tmp_path / "a"), (tmp_path / "a", tmp_path / "b")):
        call = [str(first), str(second), *target(tmp_path, layout)]
        assert run_ranks(reshard.main, 1, call) == [0]
    assert run_ranks(differing_state, 1, saved(source, BEFORE), tmp_path / "b", 0.0) == [[]]


# What DeepSpeed does with its own universal format. At ZeRO 3 it reads whole weights only.
UNIVERSAL = ("dp2 zero1", "pp2 zero1", "tp2 zero1", "dp2 zero2", "tp2 zero2", "bf16 dp2 zero1", "dp2 zero3")


@pytest.mark.slow
@pytest.mark.parametrize("layout", UNIVERSAL)
def test_deepspeed_loads_it_by_itself(layout: str, runs: Runs, tmp_path: Path):
    first = saved(runs.trained("tp2 zero3", BEFORE), BEFORE)
    job, made = job_of(tmp_path, layout), tmp_path / "made"
    assert run_ranks(convert, 1, read_checkpoint(first), job, made, 2) == [True]
    run_ranks(load_universal, job.mesh.world_size, job, made)
    assert run_ranks(differing_state, 1, first, saved(tmp_path / "run", BEFORE), 0.0) == [[]]


def load_universal(job: Job, made: Path) -> None:
    """Load by DeepSpeed's own means, and save."""
    universal_job = replace(job, deepspeed={**job.deepspeed, "checkpoint": {"load_universal": True}})
    engine = start(universal_job)
    loaded, _ = engine.deepspeed.load_checkpoint(
        str(made.parent), tag=made.name, load_lr_scheduler_states=False
    )
    assert loaded
    save_checkpoint(engine, job, read_checkpoint(made).state)


class Invented:
    """Stands in for a `StoredState`: values that follow from the name."""

    skipped_steps = 3

    def __init__(self, slicings: dict[str, Slicing]) -> None:
        self.slicings = slicings

    def state_names(self, name: str) -> list[str]:
        return ["exp_avg", "exp_avg_sq"]

    def scalars(self, name: str) -> dict[str, Any]:
        return {"step": torch.tensor(2.0)}

    def read(self, name: str, key: str) -> Tensor:
        return torch.arange(self.slicings[name].numel, dtype=torch.float32) + len(name) + len(key)


def invent(job: Job, path: Path, scaler: Any = None) -> None:
    """A checkpoint of the job's model at `path` that nobody trained."""
    path.mkdir(parents=True)
    state = TrainState(step=2, consumed_samples=16, tokens=256)
    slicings = parameter_slicings(job.model)
    source = universal.WholeParameters(Invented(slicings), slicings, scaler)  # type: ignore[arg-type]
    files = [file for name in source.slicings for file in universal.write_parameter(source, name, path)]
    files += universal.write_common(source, job, state, {}, path)
    write_manifest(job, state, path, {file.name: FileEntry(file.bytes, file.digest) for file in files})


def invented_job(folder: Path, **changes: Any) -> Job:
    """A job of one rank with a model of one layer, and `changes` to it."""
    job = job_of(folder, "one")
    return replace(job, model=replace(job.model, **{"num_layers": 1, **changes}))


@pytest.mark.slow
def test_killed_anywhere_the_next_call_continues(tmp_path: Path):
    job = invented_job(tmp_path)
    kills, wrong = run_ranks(convert_killed, 1, job, tmp_path, timeout=120)[0]
    assert wrong == []
    assert kills > 10


STRIDE = 17  # no multiple of the four or five calls that a file takes, so that each of them is hit


def convert_killed(job: Job, folder: Path) -> tuple[int, list[str]]:
    """Convert in children that are killed at the n-th call that changes the disk, n growing until one gets to
    its end; after each, one that is killed a little later, and one that is not.

    Returns:
        How often there was a kill, and what was wrong.
    """
    torch.set_num_threads(1)
    invent(job, folder / "first")
    made, wrong = folder / "made", []
    for number in range(1, 10_000, STRIDE):
        ends = [run_child(job, folder / "first", made, at) for at in (number, number // 2 + 5, None)]
        wrong += [f"{number}: {end}" for end in ends if end not in ("killed", "made", "was made")]
        if ends[0] == "killed" and made.with_name("made.partial").exists():
            wrong.append(f"{number}: something is left")
        read_checkpoint(made)
        wrong += differing_state(folder / "first", made, 0.0)
        shutil.rmtree(made)
        if ends[0] != "killed":
            return number // STRIDE, wrong
    raise AssertionError("it never came to its end")


def run_child(job: Job, first: Path, made: Path, kill_at: int | None) -> str:
    """How a conversion in a child process ended; what it left must be nothing or whole."""
    child = os.fork()
    if child == 0:
        try:
            if kill_at is not None:
                kill_at_call(kill_at)
            os._exit(10 if convert(read_checkpoint(first), job, made, 1) else 11)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        complete = not made.exists() or read_checkpoint(made)
        return "killed" if complete else "half"
    return {10: "made", 11: "was made"}.get(os.WEXITSTATUS(status), "failed")


def test_another_task_throws_away_what_was_begun(tmp_path: Path):
    """Half of a conversion of one checkpoint must not become half of another's."""
    job = invented_job(tmp_path)
    assert run_ranks(convert_another, 1, job, tmp_path) == [[]]


def convert_another(job: Job, folder: Path) -> list[str]:
    invent(job, folder / "first")
    end = run_child(job, folder / "first", folder / "made", 60)
    left = list((folder / "made.partial" / "written").iterdir())
    Invented.read = lambda self, name, key: torch.full((self.slicings[name].numel,), 5.0)  # type: ignore[assignment]
    invent(job, folder / "second")
    convert(read_checkpoint(folder / "second"), job, folder / "made", 1)
    wrong = differing_state(folder / "second", folder / "made", 0.0)
    return wrong if end == "killed" and left else [f"{end}, {left}"]


def test_what_is_on_the_disk_is_not_written_again(tmp_path: Path):
    job = invented_job(tmp_path)
    before, written = run_ranks(convert_the_rest, 1, job, tmp_path)[0]
    assert 0 < before < len(parameter_slicings(job.model))
    assert written == len(parameter_slicings(job.model)) - before


def convert_the_rest(job: Job, folder: Path) -> tuple[int, int]:
    """Parameters that a killed call had written, and that the next one wrote."""
    invent(job, folder / "first")
    run_child(job, folder / "first", folder / "made", 100)
    before = len(list((folder / "made.partial" / "written").iterdir()))
    counts = []
    convert(read_checkpoint(folder / "first"), job, folder / "made", 1, lambda p: counts.append(p.parameters))
    return before, len(counts)


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_parameter(tmp_path: Path):
    job = invented_job(tmp_path, num_layers=4, hidden_size=512, ffn_hidden_size=2048, head_dim=128)
    sizes = {name: slicing.numel * 4 for name, slicing in parameter_slicings(job.model).items()}
    largest, total = max(sizes.values()), 3 * sum(sizes.values())
    assert total > 30 * largest
    for workers in (1, 3):
        growth = run_ranks(memory_of_conversion, 1, job, tmp_path, workers)[0]
        # Beside them there are Python's own objects and the blocks that torch writes through.
        assert growth < workers * (1.05 * largest + 2e6) + 6e6


def memory_of_conversion(job: Job, folder: Path, workers: int) -> float:
    """Bytes by which the process grew, without pages of mapped files, which the system takes back."""
    first = folder / "first"
    if not first.exists():
        invent(job, first)
    checkpoint, peak, done = read_checkpoint(first), 0, threading.Event()
    conversion.verify_files = lambda *_: None  # what it needs is the same for parameters of any size
    begin = anonymous_bytes()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    convert(checkpoint, job, folder / f"made by {workers}", workers)
    done.set()
    watcher.join()
    return peak - begin


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024


def test_the_loss_scale_goes_along(tmp_path: Path):
    job = invented_job(tmp_path)
    assert run_ranks(scale_of_conversion, 1, job, tmp_path) == [[512.0, None]]


def scale_of_conversion(job: Job, folder: Path) -> list[float | None]:
    """The loss scale after the conversion of an fp16 checkpoint, and of another one."""
    fp16 = replace(job, precision=replace(job.precision, compute="fp16"))
    scales = []
    for name, made_by in (("fp16", fp16), ("fp32", job)):
        invent(made_by, folder / name, DynamicLossScaler(512.0, 1000, 1.0, 2, False))
        convert(read_checkpoint(folder / name), job, folder / f"{name} made", 1)
        scaler = StoredState(folder / f"{name} made").loss_scaler()
        scales.append(None if scaler is None else scaler.cur_scale)
    return scales


def test_a_full_disk_is_known_beforehand(tmp_path: Path):
    job = invented_job(tmp_path)
    message, left = run_ranks(convert_without_space, 1, job, tmp_path)[0]
    assert "has 1 kB free, what is left to write takes" in message
    assert left == []


def convert_without_space(job: Job, folder: Path) -> tuple[str, list[str]]:
    """What it says, and the files of parameters that it wrote."""
    invent(job, folder / "first")
    usage = shutil.disk_usage(folder)
    conversion.shutil.disk_usage = lambda _: usage._replace(free=1000)
    try:
        convert(read_checkpoint(folder / "first"), job, folder / "made", 1)
    except JobError as error:
        return str(error), [str(path) for path in folder.rglob("made*/**/*.pt")]
    return "", []


def test_two_processes_do_not_convert_into_one_folder(tmp_path: Path):
    job = invented_job(tmp_path)
    message = run_ranks(convert_beside_another, 1, job, tmp_path)[0]
    assert "another process is converting into it" in message


def convert_beside_another(job: Job, folder: Path) -> str:
    invent(job, folder / "first")
    (folder / "made.partial").mkdir()
    with file_lock(folder / "made.partial" / "lock"):
        try:
            convert(read_checkpoint(folder / "first"), job, folder / "made", 1)
        except JobError as error:
            return str(error)
    return ""


def test_damage_is_found_before_anything_is_read(tmp_path: Path):
    job = invented_job(tmp_path)
    assert (
        "is damaged: not as they were saved are zero/1.weight/fp32.pt"
        in run_ranks(convert_damaged, 1, job, tmp_path)[0]
    )
    assert not (tmp_path / "made").exists()


def convert_damaged(job: Job, folder: Path) -> str:
    invent(job, folder / "first")
    file = folder / "first" / "zero" / "1.weight" / "fp32.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    stored.load_torch_file = None  # type: ignore[assignment]  # nothing may be unpickled
    try:
        convert(read_checkpoint(folder / "first"), job, folder / "made", 1)
    except JobError as error:
        return str(error)
    return ""


def refused(capsys: pytest.CaptureFixture[str], *call: str) -> str:
    """What is said of a call that ends with exit code 2."""
    assert reshard.main(list(call)) == 2
    return " ".join(capsys.readouterr().err.split())


def test_everything_wrong_is_said_at_once(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments(tmp_path, "run", "dp2", steps=2, model="untied", optimizer="SGD")
    said = refused(
        capsys,
        *(str(source), str(tmp_path / "made"), "--world_size", "2"),
        *("--model", str(tmp_path / "untied.json"), "--deepspeed_config", str(tmp_path / "dp2, SGD.json")),
    )
    assert "SGD cannot use the optimizer state of AdamW" in said
    assert "is not the checkpoint's: model.tied True there, False here" in said
    assert not list(tmp_path.glob("made*"))


def test_an_illegal_target_is_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments(tmp_path, "run", "pp2 zero2", steps=2)
    config = str(tmp_path / "pp2 zero2, AdamW.json")
    call = (str(source), str(tmp_path / "made"), "--deepspeed_config", config, "--world_size", "3")
    said = refused(capsys, *call)
    assert "world size = 3: must be a multiple of 2" in said
    assert not list(tmp_path.glob("made*"))


def test_nvme_is_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = tmp_path / "nvme.json"
    values = json.loads(Path(job_of(tmp_path, "dp2 zero3").options.deepspeed_config).read_text())
    values["zero_optimization"]["offload_optimizer"] = nvme
    config.write_text(json.dumps(values))
    call = (str(source), str(tmp_path / "made"), "--deepspeed_config", str(config), "--world_size", "2")
    assert "state on NVMe drives is not converted" in refused(capsys, *call)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        ((), "CHECKPOINT = '': is missing"),
        (("nowhere", "made"), "there is no such folder"),
        (("nowhere", "made", "--workers", "0"), "workers = 0: must be at least 1"),
        (("nowhere", "."), "FOLDER = '.': is not the name of a folder to make"),
        (("nowhere", "made/.."), "FOLDER = 'made/..': is not the name of a folder to make"),
    ],
)
def test_a_wrong_call_is_refused(call: tuple[str, ...], rule: str, capsys: pytest.CaptureFixture[str]):
    assert rule in refused(capsys, *call)


def test_a_folder_among_the_checkpoints_of_a_run_is_refused(source: Path, capsys: pytest.CaptureFixture[str]):
    before = sorted((source / "checkpoints").iterdir())
    said = refused(capsys, str(source), str(source / "checkpoints" / "global_step9"), "--world_size", "2")
    assert "global_step9': is in " in said
    assert sorted((source / "checkpoints").iterdir()) == before


def test_newer_checkpoints_that_are_passed_over_are_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(source, tmp_path / "run")
    shutil.copytree(saved(source, BEFORE), saved(tmp_path / "run", 9))
    taken = []
    monkeypatch.setattr(reshard, "_convert", lambda checkpoint, *_: taken.append(checkpoint.state.step))
    assert reshard.main([str(tmp_path / "run"), str(tmp_path / "made"), "--world_size", "2"]) == 0
    assert taken == [BEFORE]
    said = capsys.readouterr().err
    assert f"skipped {saved(tmp_path / 'run', 9)}: it is no complete checkpoint" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no such slice"), "error: no such slice\n"),
        (ValueError("no number"), "error: no number\n"),
        (TimeoutError(110, "timed out"), "error: timed out; the same command continues\n"),
        (None, "\ninterrupted; the same command continues\n"),
    ],
)
def test_every_end_has_its_words(
    error: Exception | None,
    said: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fail(*_: object) -> None:
        if error is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise error

    monkeypatch.setattr(conversion, "_write", fail)
    call = [str(saved(source, BEFORE)), str(tmp_path / "made"), *target(tmp_path, "dp2 zero1")]
    assert reshard.main(call) == 1
    assert capsys.readouterr().err == said
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_folder_with_something_in_it_is_refused(source: Path, tmp_path: Path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "thesis.txt").write_text("mine")
    call = [str(source), str(tmp_path / "made"), *target(tmp_path, "one")]
    assert run_ranks(reshard.main, 1, call) == [2]
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "made.partial").exists()


def test_a_folder_in_the_place_of_its_own_work_is_refused(source: Path, tmp_path: Path):
    (tmp_path / "made.partial").mkdir()
    (tmp_path / "made.partial" / "thesis.txt").write_text("mine")
    call = [str(source), str(tmp_path / "made"), *target(tmp_path, "one")]
    assert run_ranks(reshard.main, 1, call) == [2]
    assert [path.name for path in tmp_path.joinpath("made.partial").iterdir()] == ["thesis.txt"]


def test_an_incomplete_checkpoint_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(saved(source, BEFORE), tmp_path / "copy")
    next((tmp_path / "copy").glob("*optim_states.pt")).unlink()
    said = refused(capsys, str(tmp_path / "copy"), str(tmp_path / "made"), *target(tmp_path, "one"))
    assert "CHECKPOINT = " in said
    assert "is no complete checkpoint: files missing or of another size" in said


def test_a_wrong_call_is_refused_without_torch(tmp_path: Path):
    code = "import sys, pipeline.reshard; pipeline.reshard.main(['a', 'b']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
