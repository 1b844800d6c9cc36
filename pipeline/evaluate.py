"""``python -m pipeline.evaluate RUN|FOLDER [options]``: losses on whole validation sets, as JSON.

It starts ranks as ``./launch.sh`` does, in any layout, and writes the JSON (`pipeline.training.evaluation`
has its fields) to standard output, everything else to standard error. Nothing of a run is changed, which may
go on training meanwhile. Exit codes: 0 done, 2 with every problem if it cannot be done as asked, 3 stopped by
a signal, 1 anything else.

Started by itself, it is the command; with what a start hands to its processes, a rank's agent, and in the
process that this starts, the rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

if __name__ == "__main__":
    # A script's own folder comes first on sys.path, with -m the current one; the package is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from pipeline.base.command import leave_at_stop, take_stop_signals
    from pipeline.cluster.agent.launch_spec import OPTION

    if any(argument.startswith(("--agent=", OPTION)) for argument in sys.argv):
        from pipeline.cluster.agent.agent import own_rank

        own_rank(sys.argv)
    else:
        take_stop_signals(leave_at_stop)

from pipeline.base.command import run_command, say, show_messages, take_stop_signals
from pipeline.base.files import replaced_atomically
from pipeline.base.problems import EXIT_STOPPED, EXIT_WRONG_JOB, JobError, Problem, job_error
from pipeline.base.user_input import is_file, is_folder, unwritable
from pipeline.checkpoints.folder import tag_of
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.resume import checkpoint_at, is_checkpoint
from pipeline.cluster.agent.rank_link import Inherited, RankLink
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.cluster.outcome import Outcome
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.job.job import Job
from pipeline.job.models import CONFIG_FILE
from pipeline.job.options import RUN_FILE, EvaluateOptions, parse_options
from pipeline.job.report import console, print_problems
from pipeline.job.run_file import CHECKPOINTS, TOKENIZER_FOLDER
from pipeline.launch.host_check.host_check import NoAddress, hosts_line, hosts_table
from pipeline.launch.preflight import can_ask_hosts, check, check_with_hosts, exact_hosts, read_arguments
from pipeline.launch.start import start_once
from pipeline.training.rank import fail, live_owned, one_report_per_host, read_job, refuse
from pipeline.training.signals import StopRequest

PROGRAM = "python -m pipeline.evaluate"
# Of the launcher, for jobs that train.
_OF_TRAINING = ("no_ssh", "max_restarts", "allow_fewer_hosts")
# Steps of so many micro-batches fit every pipeline.
_OF_NO_PRESET = (
    "train_micro_batch_size_per_gpu=4",
    "gradient_accumulation_steps=16",
    "optimizer.params.lr=1e-4",
)


@dataclass(frozen=True)
class Request:
    """What is evaluated, as its options describe it.

    Attributes:
        options: Of the run as it was started, and what was given beside them.
        step: Of its checkpoint; None: a folder's weights.
        only_named: Without what is held out of the training data.
    """

    options: EvaluateOptions
    step: int | None
    only_named: bool


def read_request(arguments: Sequence[str]) -> Request:
    """The request of a command line, of which launcher options have been taken.

    Raises:
        JobError: with every problem of what it names.
    """
    given = parse_options(arguments, EvaluateOptions, PROGRAM)
    source, only_named = Path(given.source), bool(given.validation)
    if only_named and (given.data or given.data_blend):
        rule = "names the sets, and the training data is given beside it"
        raise job_error("validation", " ".join(given.validation), rule, "Give one of the two")
    if is_checkpoint(source):
        checkpoint = _checkpoint(source, given.step)
        options = _of_run(arguments, given, checkpoint)
        return Request(options, checkpoint.state.step, only_named)
    return Request(_of_folder(given), None, only_named)


def _checkpoint(source: Path, step: int | None) -> Checkpoint:
    if step is None:
        return checkpoint_at(source, "source").reported()
    folder = source / CHECKPOINTS if is_folder(source / CHECKPOINTS) else source
    named = folder / tag_of(step)
    found = checkpoint_at(named if is_folder(named) else folder, "source").reported()
    if found.state.step != step:
        raise job_error("step", step, f"{source} has no such checkpoint", "Give the step of another one")
    return found


def _of_run(arguments: Sequence[str], given: EvaluateOptions, checkpoint: Checkpoint) -> EvaluateOptions:
    """The run's options below those that are given, and the checkpoint's own tokenizer."""
    run = checkpoint.folder.parent
    config = given.config or str(run / RUN_FILE)
    if not is_file(Path(config)):
        rule = "a checkpoint is read with the options of its run, and there is no such file"
        raise job_error("config", config, rule, f"Give the {RUN_FILE} of the run with --config")
    options = parse_options([*arguments, "--config", config], EvaluateOptions, PROGRAM)
    tokenizer = checkpoint.path / TOKENIZER_FOLDER
    if given.tokenizer is None and is_folder(tokenizer):
        options = replace(options, tokenizer=str(tokenizer))
    if given.validation:
        # The data that the run trained on need not be here; its share belongs to the run's identity.
        share = checkpoint.identity["eval_fraction"]
        options = replace(options, data=(), data_blend=None, eval_fraction=share)
    return replace(options, resume=str(checkpoint.path), output_dir=given.output_dir or str(run))


def _of_folder(given: EvaluateOptions) -> EvaluateOptions:
    """The options of a job that would begin with the folder's weights."""
    folder, problems = Path(given.source), []
    if not is_file(folder / CONFIG_FILE):
        rule = f"is neither a run nor a checkpoint, nor a folder with a model's {CONFIG_FILE}"
        remedy = "Name a run's --output_dir, a checkpoint or a Hugging Face folder before all options"
        problems.append(Problem("source", given.source, rule, remedy))
    elif not (given.validation or given.data or given.data_blend):
        rule = "a folder brings no validation set"
        problems.append(Problem("validation", None, rule, "Give --validation NAME=PATH, or the run's --data"))
    if given.step is not None:
        rule = "is a checkpoint's, and a folder has none"
        problems.append(Problem("step", given.step, rule, "Leave it out"))
    if problems:
        raise JobError(problems)
    made = str(Path("runs") / f"evaluate_{folder.resolve().name}")
    # The recipe leaves to presets what no evaluation depends on; a file of the user's says it.
    usual = _OF_NO_PRESET if given.deepspeed_config == EvaluateOptions.deepspeed_config else ()
    return replace(
        given,
        set=(*usual, *given.set),
        model=given.source,
        resume="never",
        train_steps=given.train_steps or 1,
        output_dir=given.output_dir or made,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate; the exit code."""
    show_messages(say, "pipeline.cluster.agent")  # what the coordinator logs
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        launcher, given, job_arguments = read_arguments(arguments, EvaluateOptions, PROGRAM)
        request = read_request(job_arguments)
        if problems := [*_launcher_problems(launcher), *_output_problems(given)]:
            raise JobError(problems)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    if request.step is not None and given.step is None:
        # A run that goes on may have a newer one before every rank has looked.
        job_arguments = [*job_arguments, "--step", str(request.step)]
    with _errors_only():
        outcome = _start(request, launcher, job_arguments)
    if outcome.status == "finished":
        text = json.dumps(json.loads(outcome.message), indent=2) + "\n"
        if given.output is not None:
            with replaced_atomically(Path(given.output)) as file:
                file.write(text.encode())
        print(text, end="")
    return outcome.exit_code


def _launcher_problems(launcher: LauncherOptions) -> list[Problem]:
    problems = [
        Problem(name, value, "is for jobs that train", "Leave it out")
        for name in _OF_TRAINING
        if (value := getattr(launcher, name))
    ]
    if "LOCAL_RANK" in os.environ:
        rule = "this command starts the ranks itself, and was started as one"
        problems.append(Problem("LOCAL_RANK", os.environ["LOCAL_RANK"], rule, f"Call {PROGRAM} once"))
    return problems


def _output_problems(given: EvaluateOptions) -> list[Problem]:
    if given.output is None or not (rule := unwritable(Path(given.output).parent)):
        return []
    return [Problem("output", given.output, rule, "Name a file in a folder that you may write to")]


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """Inside, what is printed, by processes that are started, too, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _start(request: Request, launcher: LauncherOptions, arguments: Sequence[str]) -> Outcome:
    """Check the job, start its ranks, and wait for their end."""
    draft, out = check(request.options, launcher), console(stderr=True)
    if can_ask_hosts(draft, launcher):
        draft, found = check_with_hosts(draft, launcher)
        out.print(hosts_table(found) if found.problems else hosts_line(found))
    try:
        if draft.job is None:
            raise JobError(draft.problems)
        _require_weights(draft.job, request)
    except JobError as error:
        print_problems(out, error.problems)
        return Outcome("wrong_job", 0)
    print_problems(out, draft.problems)
    ready = exact_hosts(draft.job, launcher)
    try:
        with tempfile.TemporaryDirectory() as folder:  # of the outcome: that of the run stays what it is
            return start_once(ready.job.world, folder, ready.launcher, arguments, script=__file__)
    except NoAddress as error:
        say(f"error: {error}")
        return Outcome("failed", 0)


def _require_weights(job: Job, request: Request) -> None:
    """Raises JobError: a folder describes a model and has no weights."""
    if request.step is None and job.initial_weights.folder is None:
        rule = "the folder has no weights in safetensors"
        raise job_error("source", request.options.source, rule, "Name a folder with a trained model")


def evaluate_rank(
    arguments: Sequence[str],
    environment: RankEnvironment,
    stop: StopRequest,
    link: RankLink,
    inherited: Inherited | None,
) -> int:
    """One rank's part of the evaluation; the exit code."""
    stop.leave = partial(_leave_early, environment, link)
    try:
        with one_report_per_host(environment):
            request = read_request(arguments)
            job = read_job(request.options, environment, inherited)
            _require_weights(job, request)
        os.environ.update(environment.variables())
        from pipeline.training.quiet import quiet_deepspeed

        quiet_deepspeed(environment.rank, job.deepspeed_reports)
        from pipeline.training.evaluation import evaluate_job

        return evaluate_job(job, environment, stop, link, request.only_named).exit_code
    except JobError as error:
        return refuse(error, environment, link)
    except Exception as error:  # noqa: BLE001  (reported, and the exit code is 1)
        return fail(error, 0, environment, link)


def _leave_early(environment: RankEnvironment, link: RankLink, request: str) -> None:
    link.left_early(f"{request} on rank {environment.rank} before the evaluation")


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    if any(argument.startswith("--agent=") for argument in sys.argv):
        live_owned(evaluate_rank)
    take_stop_signals(_interrupt)
    try:
        run_command(main)
    except KeyboardInterrupt as interrupt:  # while ranks run, it is a request to them
        say(f"\nStopped by {interrupt} while no rank was running.")
        sys.exit(EXIT_STOPPED)
