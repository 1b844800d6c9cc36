"""Whatever a command is given, it ends with a code of its contract and a reason, and writes nothing if it
refuses: cases drawn by seeds, and every one that was ever found to break this."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from transformers.utils import logging as transformers_logging

from tests.fuzz.cases import FOUR, JOB, KINDS
from tests.fuzz.commands import COMMANDS, nothing_is_started
from tests.fuzz.judge import FIFO, FOLDER, Case, Desk, Ending

SEED, FEW, MANY = 20, 10, 1500
PAPER = ("--world_size", "2")
STEPS = ("--train_steps", "3", "--deepspeed_config", "plain.json", "--output_dir", "out")
DEEP = b'{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}"
CHECKPOINT = "saved/checkpoints/global_step2/layer_00-model_00-model_states.pt"
DEEP_TOKENIZER = {"deep/tokenizer.json": DEEP, "deep/tokenizer_config.json": b'{"eos_token": "a"}'}
SLURM = {
    "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
     "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "a",
}  # fmt: skip


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    here = Path.cwd()
    with nothing_is_started():
        yield Desk(tmp_path_factory.mktemp("fuzz") / "desk")
    os.chdir(here)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What commands set for their whole process is put back."""
    verbosity = transformers_logging.get_verbosity()
    yield
    logging.disable(logging.NOTSET)
    logging.getLogger("pipeline").handlers.clear()
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()


def judged(desk: Desk, case: Case) -> Ending:
    return desk.judge(case, COMMANDS[case.command])


def drawn(desk: Desk, kind: Callable[[Random], Case], seeds: range) -> list[str]:
    """What is wrong with the cases of these seeds."""
    faults = []
    for seed in seeds:
        case = kind(Random(f"{kind.__name__} {seed}"))
        found = judged(desk, case).faults
        faults += [f"{kind.__name__} {seed}: {case.command} {case.arguments}\n{fault}" for fault in found]
    return faults


RIGHT = [
    Case("check", [*JOB, *PAPER, "--data", "text"]),
    Case("launch", [*JOB, "--hostfile", "hosts"]),
    Case("rank", [*JOB, "--data", "arrow", "rows.parquet", "lines.json"]),
    Case("rank", [*JOB, "--data", "tokens"]),
    Case("rank", [*JOB, "--data_blend", "blend.json"]),
    Case("rank", ["--model", "hf", *STEPS]),
    Case("check", ["--model", "model.json", *STEPS, *PAPER]),
    Case("rank", ["--config", "run.json", "--output_dir", "saved"], environ=FOUR),
    Case("prepare", ["text.txt", "--output", "made", "--tokenizer", "tokenizer", "--workers", "1",
     "--inspect"]),
    Case("export", ["saved", "made"]),
    Case("generate", ["saved", "--prompt", "ab", "--max_new_tokens", "2"]),
    Case("reshard", ["saved", "made", *PAPER, "--workers", "1", "--deepspeed_config", "plain.json"]),
    Case("deploy", ["kubernetes", "--hostfile", "hosts", "--image", "a/b:1", "--claim", "c"]),
]  # fmt: skip


def test_what_the_cases_start_from_is_right(desk: Desk) -> None:
    """Else they would all be refused for something else than what is drawn."""
    for case in RIGHT:
        ending = judged(desk, case)
        assert (ending.code, ending.faults) == (0, []), (case, ending)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_drawn_cases(desk: Desk, kind: Callable[[Random], Case]) -> None:
    faults = drawn(desk, kind, range(SEED, SEED + FEW))
    assert not faults, "\n".join(faults)


@pytest.mark.repeats
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_many_drawn_cases(desk: Desk, kind: Callable[[Random], Case]) -> None:
    faults = drawn(desk, kind, range(1000, 1000 + MANY))
    assert not faults, "\n".join(faults)


def changed(source: str, **values: object) -> bytes:
    """A file of the desk with other values."""
    return json.dumps({**json.loads(Path(source).read_text()), **values}).encode()


def saved_run() -> dict[str, bytes]:
    """The saved run, as the run in `out`."""
    return {f"out/{path.relative_to('saved')}": path.read_bytes() for path in Path("saved").rglob("*.*")}


def merges(one: object) -> dict[str, bytes]:
    """A tokenizer with a merge that is none."""
    files = {f"merges/{path.name}": path.read_bytes() for path in Path("tokenizer").iterdir()}
    content = json.loads(files["merges/tokenizer.json"])
    content["model"]["merges"] = [one] if one else []
    del content["model"]["type"]  # which the library takes for the same
    return {**files, "merges/tokenizer.json": json.dumps(content).encode()}


FOUND = [
    (lambda: Case("check", [*JOB, "--config", "fifo.txt"]), 2, "no regular file"),
    (lambda: Case("check", [*JOB, "--config", "/dev/zero"]), 2, "no regular file"),
    (lambda: Case("check", [*JOB, "--deepspeed_config", "fifo.txt"]), 2, "no regular file"),
    (lambda: Case("check", [*JOB, "--tokenizer", "deep"], DEEP_TOKENIZER), 2, "nested too deeply"),
    (lambda: Case("check", [*JOB, "--config", "deep"], {"deep": DEEP}), 2, "nested too deeply"),
    (lambda: Case("check", ["--model", "m.json", *STEPS], {"m.json": changed("model.json",
     num_layers=2**31)}),
     2, "must be at least 1 and at most 10000"),
    (lambda: Case("check", [*JOB, "--data", "x=1e400"]), 2, "a weight is above 0, and below 1e15"),
    (lambda: Case("check", [*JOB, "--data", f"x={'9' * 5000}"]), 2, "a weight is above 0, and below 1e15"),
    (lambda: Case("check", [*JOB, "--cache_size", "1e308"]), 2, "at most 1e+09"),
    (lambda: Case("check", [*JOB, "--output_dir", "s3://bucket/run"]), 2, "is an address"),
    (lambda: Case("check", [*JOB, "--cache_dir", "s3://bucket/run"]), 2, "is an address"),
    (lambda: Case("check", [*JOB, "--cache_dir", "text.txt/x"]), 2, "is a file"),
    (lambda: Case("prepare", ["text.txt", "--output", "s3://bucket/x"]), 2, "is an address"),
    (lambda: Case("prepare", ["text.txt", "--output", "empty.txt/x"]), 2, "empty.txt is a file"),
    (lambda: Case("prepare", ["text.txt", "--output", "x" * 250]), 2, "File name too long"),
    (lambda: Case("prepare", ["bad.jsonl", "--output", "new/folder/x"]), 2, "on_bad_record"),
    (lambda: Case("prepare", ["text.txt", "--output", "x", "--train_tokenizer", "4294967296"]), 2,
     "at most 4,194,304"),
    (lambda: Case("export", ["saved", "s3://bucket/x"]), 2, "is an address"),
    (lambda: Case("reshard", ["saved", "text.txt/x", *PAPER]), 2, "is a file"),
    (lambda: Case("reshard", ["saved", "made", *PAPER, "--deepspeed_config", "plain.json"],
     {CHECKPOINT: b"x" * 13_865}),
     2, "is damaged"),
    (lambda: Case("rank", JOB, environ={**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x99999999999)"}), 2,
     "no number of tasks"),
    (lambda: Case("rank", [*JOB, "--data", "text.txt"], environ={**SLURM, "SLURM_STEP_ID": "\udc80"}), 0, ""),
    (lambda: Case("check", [*JOB, *PAPER, "--data", "text.txt"], {"out/lock": FIFO,
     "out/lease.json": FOLDER}), 0, ""),
    (lambda: Case("rank", ["--config", "run.json", "--output_dir", "out"], {"out/metrics.jsonl": FIFO}, FOUR),
     2, "no regular file"),
    (lambda: Case("rank", ["--config", "run.json", "--output_dir", "out"],
     {"out/metrics.jsonl": DEEP + b"\n"}, FOUR),
     2, "nested too deeply"),
    (lambda: Case("check", [*JOB, *PAPER], {"out/run.json": FOLDER}), 2, "cannot be read"),
    (lambda: Case("check", [*JOB, *PAPER], environ={"LINES": "9" * 5000, "COLUMNS": "²"}), 0, ""),
    (lambda: Case("reshard", ["saved", "loop.txt", *PAPER]), 2, "symbolic links"),
    (lambda: Case("export", ["saved", "made", "--max_shard_size", "9" * 5000]), 2, "is no size above 0"),
    (lambda: Case("export", ["saved", "a/" * 3000]), 2, "File name too long"),
    (lambda: Case("export", ["saved", "new/made", "--allow_pickle", "no/such"]), 2, "there is no such thing"),
    (lambda: Case("prepare", ["text.txt", "--output", "made", "--workers", str(2**62)]), 2, "at most 1024"),
    (lambda: Case("rank", JOB, environ={**FOUR, "WORLD_SIZE": "9" * 30}), 2, "below 1e9"),
    (lambda: Case("rank", JOB, environ={**FOUR, "WORLD_SIZE": "9" * 9}), 2, "must be at most 1,048,576"),
    (lambda: Case("check", ["--config", "run.json", "--output_dir", "out", "--world_size", "4"],
     {**saved_run(), "out/checkpoints/latest": b"x" * 5000}), 0, "(5,000 characters)"),
    (lambda: Case("prepare", ["text.txt", "--output", "made", "--tokenizer", "merges"], merges(None)), 0, ""),
    (lambda: Case("prepare", ["text.txt", "--output", "made", "--tokenizer", "merges"], merges(7)), 2,
     "cannot be read"),
    (lambda: Case("prepare", ["text.txt", "--output", "made", "--tokenizer", "merges"], merges("a")), 2,
     "cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FOUND)))
def test_what_was_found(desk: Desk, number: int) -> None:
    make, code, text = FOUND[number]
    ending = judged(desk, make())
    assert not ending.faults, ending.faults
    assert ending.code == code and text in " ".join(ending.text.split()), ending.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be someone else for a moment")
@pytest.mark.parametrize(
    "arguments",
    [
        *([*JOB, f"--{name}", "locked"] for name in ("data", "resume", "tokenizer", "deepspeed_config")),
        *([*JOB, f"--{name}", "locked/x"] for name in ("config", "output_dir", "cache_dir", "data_blend")),
        ["--model", "locked", *STEPS],
    ],
    ids=lambda arguments: " ".join(arguments[-2:]),
)
def test_what_may_not_be_read(desk: Desk, arguments: list[str]) -> None:
    def as_nobody(given: Sequence[str]) -> int:
        before = Path("locked").stat().st_mode
        Path("locked").chmod(0o700)
        os.seteuid(65534)
        try:
            return COMMANDS["check"](given)
        finally:
            os.seteuid(0)
            Path("locked").chmod(before)

    ending = desk.judge(Case("check", arguments, {"locked/x": b"{}"}), as_nobody)
    assert (ending.code, ending.faults) == (2, []), ending
