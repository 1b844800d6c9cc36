"""What the documentation says is run: commands as they are written, JSON, printed output, links, numbers.

Every command of README.md is one of four kinds, told by what it is, so that none can be left out:

    here      starts a job that this machine can do, the check or the preparation: run as it is written, jobs
              shortened by options
    elsewhere needs GPUs or other hosts: its options go through the check, for the world it asks for
    setup     activates .venv; the tests' interpreter takes its place
    tests     the test script itself, which must exist and be executable
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeline.cluster.launcher_options import split_arguments
from pipeline.cluster.world import world_from_hostfile
from pipeline.job.models import PRESETS
from pipeline.job.options import Options
from pipeline.job.resolve import resolve
from pipeline.model.counts import layer_parameters, total_parameters
from tests.job.drafts import world

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("[!.]*/*.md")))
# A job is as short as it can be; the steps follow, so that a second start has something to do.
SHORT = "--sample_tokens 4 --eval_samples 4 --train_steps"
GPUS_OF_ONE_HOST = ("--hostfile", "hostfiles/a100x1")


# Commands of the pipeline that are run as they are.
COMMANDS_HERE = ("check", "evaluate", "prepare", "export", "generate")


class Block(NamedTuple):
    """A fenced block: its language and text, and the line where it begins."""

    language: str
    text: str
    line: int


def blocks(language: str) -> list[Block]:
    text = README.read_text(encoding="utf-8")
    found = [
        Block(match[1], match[2], text[: match.start()].count("\n") + 1)
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    assert {block.language for block in found} <= {"bash", "json", "text"}
    return [block for block in found if block.language == language]


def commands(block: Block) -> list[str]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


COMMANDS = [(block, command) for block in blocks("bash") for command in commands(block)]


# Whose printed commands are tried.
STARTS_OF_EACH_KIND = ("./launch.sh --num_gpus 4 --deepspeed_config my_job", "deepspeed pipeline", "torchrun")


def starts_a_job(command: str) -> bool:
    return command.startswith(("./launch.sh", "deepspeed ", "torchrun "))


def arguments_of(command: str) -> list[str]:
    """What follows the program: for the launchers, their options and the job's, without the script."""
    words = shlex.split(command)
    assert "torchrun" not in words or words[1] == "--nproc_per_node", "only the number of ranks is translated"
    translated = ["--num_gpus" if word == "--nproc_per_node" else word for word in words[1:]]
    return [word for word in translated if word != "pipeline/pretrain.py"]


def kind(command: str) -> str:
    """Which of the module's four kinds a command is; "" for none."""
    if starts_a_job(command):
        launcher, job = split_arguments(arguments_of(command))
        large = "--model" in job and job[job.index("--model") + 1] != "tiny"
        remote = launcher.hostfile not in (None, "hostfiles/localhost")
        return "elsewhere" if large or remote else "here"
    if command.startswith(tuple(f"python -m pipeline.{name} " for name in COMMANDS_HERE)):
        return "here"
    if command == "source .venv/bin/activate":
        return "setup"
    return "tests" if shlex.split(command)[0] == "tests/run.sh" else ""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The interpreter's commands first on the PATH, on CPU, one thread per rank."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return inherited | {"PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the project with the files that the README tells its reader to have.

    Its launch.sh is without the set-up, which would install everything again: the rest of it, one line.
    """
    copy = tmp_path / "clone"
    for name in ("pipeline", "ds_configs", "hostfiles"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "activate").touch()
    last_line = (ROOT / "launch.sh").read_text(encoding="utf-8").splitlines()[-1]
    assert last_line == 'exec "$root/.venv/bin/python" "$root/pipeline/launch/launch.py" "$@"'
    last_line = last_line.replace('"$root/.venv/bin/python"', "python")
    (copy / "launch.sh").write_text(f"#!/bin/sh\nroot={copy}\n{last_line}\n")
    (copy / "launch.sh").chmod(0o755)
    for folder in ("my_corpus", "more_text"):
        (copy / folder).mkdir()
        for number in range(2):
            (copy / folder / f"{number}.txt").write_text(f"a document of {folder}\n" * 1000)
    (copy / "my_job.json").write_text(blocks("json")[0].text)
    return copy


def run(script: str, folder: Path, environment: dict[str, str]) -> str:
    """Standard output of a shell script in which every command must succeed."""
    line = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_every_command_is_of_a_known_kind() -> None:
    assert [command for _, command in COMMANDS if not kind(command)] == []
    kinds = [kind(command) for _, command in COMMANDS]
    assert {"here", "elsewhere", "setup", "tests"} == set(kinds)


RUN_HERE = [block for block in blocks("bash") if any(kind(command) == "here" for command in commands(block))]


def shortened(block: Block) -> Iterator[str]:
    """The block's commands; its first job trains 2 steps, the next 4, and so on."""
    steps = 0
    for command in commands(block):
        assert kind(command) in ("here", "setup"), "a block is run as a whole or not at all"
        if starts_a_job(command):
            assert "--train_steps" not in command
            steps += 2
            yield f"{command} {SHORT} {steps}"
        else:
            yield command


# Its first run, without an option; how it is shown is compared below.
FIRST_RUN = next(block for block in RUN_HERE if commands(block) == ["./launch.sh"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "block", [block for block in RUN_HERE if block != FIRST_RUN], ids=lambda block: f"line {block.line}"
)
def test_commands_run_as_written(block: Block, clone: Path, environment: dict[str, str]) -> None:
    outputs = [(command, run(command, clone, environment)) for command in shortened(block)]
    jobs = [(command, output) for command, output in outputs if starts_a_job(command)]
    folders = []
    for command, output in jobs:
        assert "finished" in output
        # Starts into one folder are the README's way to resume; in other folders they begin anew.
        folder = re.findall(r"--output_dir (\S+)", command)
        assert ("resumed from" in output) == (folder in folders), command
        folders.append(folder)
        if command.startswith(STARTS_OF_EACH_KIND):
            assert_printed_command_continues(command, output, clone, environment)
    if not jobs:
        assert all("This job can start." in output for _, output in outputs[-1:])


def assert_printed_command_continues(
    command: str, output: str, clone: Path, environment: dict[str, str]
) -> None:
    """On as many ranks as before: it begins as the command did."""
    (printed,) = re.findall(r"to continue training: (.*)", output)
    start = re.split(" --(deepspeed_config|output_dir|sample_tokens) ", command)[0]
    assert printed.startswith(f"{start} --config ")
    again = run(printed, clone, environment)
    assert "resumed from" in again and f"finished {printed.split()[-1]} steps" in again
    assert "layout changed" not in again


@pytest.mark.parametrize("command", [command for _, command in COMMANDS if kind(command) == "elsewhere"])
def test_jobs_for_other_machines_are_checked(command: str, clone: Path, environment: dict[str, str]) -> None:
    arguments = arguments_of(command)
    where = () if "--hostfile" in arguments else GPUS_OF_ONE_HOST
    output = run(shlex.join(["python", "-m", "pipeline.check", *where, *arguments]), clone, environment)
    assert "This job can start." in output
    assert "cuda" in output


def test_the_test_script_can_be_run() -> None:
    named = {shlex.split(command)[0] for _, command in COMMANDS if kind(command) == "tests"}
    assert named == {"tests/run.sh"}
    assert os.access(ROOT / "tests" / "run.sh", os.X_OK)


# What is printed ---------------------------------------------------------------------------------------


def missing_lines(excerpt: str, output: str) -> list[str]:
    """Lines of an excerpt that do not follow each other in the output; ``...`` stands for any lines."""
    printed = iter([line.rstrip() for line in output.splitlines()])
    shown = [line.rstrip() for line in excerpt.splitlines()]
    return [line for line in shown if line not in ("", "...") and line not in printed]


def shape(text: str) -> str:
    """Text with every number replaced by #, and spaces made one."""
    return re.sub(r" +", " ", re.sub(r"\d[\d,.]*(e[+-]?\d+)?(?!\w)", "#", text))


def test_the_shown_check_is_what_is_printed(clone: Path, environment: dict[str, str]) -> None:
    output = run("python -m pipeline.check --world_size 2", clone, environment)
    assert missing_lines(blocks("text")[0].text, output) == []


@pytest.mark.slow
def test_the_shown_run_has_the_form_of_a_run(clone: Path, environment: dict[str, str]) -> None:
    (command,) = commands(FIRST_RUN)
    output = run(f"{command} {SHORT} 2 --log_interval 1 2>&1", clone, environment)
    output = output.replace(f"is on {socket.gethostname()};", "is on laptop;")
    output = output.replace(f"{sys.prefix}/bin/", ".venv/bin/")
    excerpt = blocks("text")[1].text.partition("sample:\n")
    shown = excerpt[0] + excerpt[2][excerpt[2].rindex("\nfinished") :]
    # Printed only where it takes more than two seconds.
    phases = ("importing torch and DeepSpeed", "building model and optimizer")
    slow = {f"{phase}{rest}" for phase in phases for rest in (" ...", ": # s")}
    assert set(shape(shown).splitlines()) - {"", "...", *slow} <= set(shape(output).splitlines())


# JSON --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: f"line {block.line}")
@pytest.mark.parametrize("alone", [True, False])
def test_json_is_a_job_by_itself_and_beside_a_recipe(block: Block, alone: bool, tmp_path: Path) -> None:
    keys = json.loads(block.text)
    recipe = {} if alone else {"gradient_clipping": 1.0, "data_types": {"grad_accum_dtype": "fp32"}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(recipe | keys))
    options = Options(deepspeed_config=str(path), model="tiny", output_dir=str(tmp_path / "run"))
    job = resolve(options, world(8))
    assert job.problems == ()
    if "pipeline" in keys:
        assert job.mesh.shape == (2, 2, 1, 2)
        assert resolve(options, world(4)).mesh.shape == (2, 1, 1, 2)
    if "lr_scaling" in keys:
        assert job.schedule.peak == pytest.approx(0.01)


# Numbers and names -------------------------------------------------------------------------------------


def loss_rows() -> list[list[str]]:
    text = README.read_text(encoding="utf-8")
    table = text[text.index("| model | vocabulary |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


@pytest.mark.parametrize("row", loss_rows(), ids=lambda row: row[1])
def test_first_losses_are_the_logarithm_of_the_vocabulary(row: list[str]) -> None:
    size = int(row[1].replace(",", ""))
    assert row[2] == f"{math.log(size):.2f}"
    for name in re.findall(r"`([\w.-]+\*?)`", row[0]):
        models = [
            preset.model for key, preset in PRESETS.items() if re.fullmatch(name.replace("*", ".*"), key)
        ]
        assert models
        assert {model.vocab_size for model in models} == {size}


def test_every_preset_has_a_first_loss() -> None:
    sizes = {int(row[1].replace(",", "")) for row in loss_rows()}
    assert sizes == {preset.model.vocab_size for preset in PRESETS.values()}


def test_the_default_model_is_as_large_and_trains_as_long_as_stated(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    job = resolve(Options(model="tiny", output_dir=str(tmp_path)), world(2))
    assert f"its {job.train_steps:,} steps" in text
    assert f"{total_parameters(job.model):,} parameters" in text
    large = PRESETS["gpt2-124m"].training
    assert f"{large.train_steps:,} steps of {large.tokens_per_step:,} tokens" in text


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("gpt2-124m", "2.5 billion"), ("gpt2-xl", "31 billion"), ("llama3-8b", "15 trillion")],
)
def test_the_losses_to_expect_are_those_of_the_fit(model: str, tokens: str) -> None:
    """Hoffmann et al. 2022, equation 10."""
    training, parameters = PRESETS[model].training, total_parameters(PRESETS[model].model)
    number, unit = tokens.split()
    trained = training.train_steps * training.tokens_per_step
    assert trained == pytest.approx(float(number) * {"billion": 1e9, "trillion": 1e12}[unit], rel=0.01)
    row = next(
        line for line in README.read_text(encoding="utf-8").splitlines() if f"| `{model}`, {tokens} |" in line
    )
    assert row.endswith(f"| {1.69 + 406.4 / parameters**0.34 + 410.7 / trained**0.28:.2f} |")


def test_the_numbers_of_the_page_on_parallelism(tmp_path: Path) -> None:
    text = " ".join((ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8").split())
    options = Options(deepspeed_config="ds_configs/four_way.json", output_dir=str(tmp_path))
    job = resolve(options, world_from_hostfile(str(ROOT / "hostfiles" / "a100x4")))
    mesh, batch, model = job.mesh, job.batch, job.model
    rows, tokens = batch.micro_batch_size, batch.sequence_length // mesh.sequence
    activation = rows * tokens * model.hidden_size
    assert f"A = {rows} * {tokens} * {model.hidden_size} = {activation:,} elements" in text
    assert f"{activation * 2 // 2**20} MiB. A tensor all-reduce" in text
    assert f"= {3 * activation // mesh.tensor * 2 // 2**20} MiB into the all-to-all" in text
    stage = sum(layer.parameters for layer in layer_parameters(model)[: job.stages[1]])
    assert f"the stage's {stage:,} parameters" in text
    assert f"= {mesh.pipeline - 1} / {batch.accumulation_steps + mesh.pipeline - 1}, if" in text


def test_every_recipe_is_in_the_table_of_layouts() -> None:
    text = README.read_text(encoding="utf-8")
    for path in (ROOT / "ds_configs").glob("*.json"):
        assert f"| [`{path.name}`](ds_configs/{path.name}) |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    files = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [target for target in files if not (page.parent / target).exists()] == []


def test_the_readme_links_the_other_pages() -> None:
    text = README.read_text(encoding="utf-8")
    for page in PAGES:
        if page != README:
            assert f"({page.relative_to(ROOT).as_posix()})" in text, page
