"""The harness itself: what it returns, and above all how it fails."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import harness
from tests.harness import RankFailure, init_deepspeed_distributed, run_job, run_ranks
from tests.harness.processes import reserved_port
from tests.harness.rank import STACKS_SIGNAL


def all_reduce_rank() -> tuple[float, dict[str, str]]:
    import torch
    import torch.distributed as dist

    init_deepspeed_distributed()
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return value.item(), {name: os.environ[name] for name in names}


def test_all_reduce_over_four_ranks():
    results = run_ranks(all_reduce_rank, 4)
    assert [value for value, _ in results] == [10.0] * 4
    for rank, (_, environment) in enumerate(results):
        assert environment == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "127.0.0.1",
        }


def echo_rank(value):
    import torch

    return {"value": value, "threads": torch.get_num_threads(), "marker": os.environ["MARKER"]}


def test_arguments_results_and_environment_pass_through():
    import torch

    tensor = torch.arange(6.0).reshape(2, 3).to(torch.bfloat16)
    for result in run_ranks(echo_rank, 2, {"tensor": tensor}, env={"MARKER": "here"}):
        assert torch.equal(result["value"]["tensor"], tensor)
        assert result["value"]["tensor"].dtype == torch.bfloat16
        assert (result["threads"], result["marker"]) == (1, "here")


def raise_on_rank(failing: int) -> None:
    import torch
    import torch.distributed as dist

    init_deepspeed_distributed()
    print("printed by rank", dist.get_rank())
    if dist.get_rank() == failing:
        raise ValueError("told to fail")
    dist.all_reduce(torch.ones(1))


def test_an_exception_ends_the_other_ranks_and_shows_where_it_was():
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(raise_on_rank, 3, 1)
    message = str(failure.value)
    assert "rank 1 raised" in message
    assert "ValueError: told to fail" in message and "in raise_on_rank" in message
    assert "printed by rank 1" in message and "printed by rank 2" in message
    assert [outcome.state for outcome in failure.value.outcomes] == ["ended", "raised", "ended"]
    assert time.monotonic() - started < 30


def hang_on_rank(hanging: int) -> None:
    import torch
    import torch.distributed as dist

    init_deepspeed_distributed(timeout=100)
    if dist.get_rank() == hanging:
        wait_for_godot()
    dist.all_reduce(torch.ones(1))


def wait_for_godot() -> None:
    time.sleep(1000)


def hang_without_stacks_signal() -> None:
    signal.signal(STACKS_SIGNAL, lambda *_: None)
    while True:  # PEP 475: the signal does not end a sleep
        wait_for_godot()


@pytest.mark.alone
@pytest.mark.slow
def test_a_hang_ends_in_time_with_every_stack():
    run_ranks(all_reduce_rank, 1)  # the server's own start is not what is timed
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(hang_on_rank, 2, 0, timeout=6)
    assert 6 <= time.monotonic() - started < 12
    first, second = failure.value.outcomes
    assert (first.state, second.state) == ("hung", "hung")
    assert "in wait_for_godot" in first.stacks and "in wait_for_godot" not in second.stacks
    assert "in all_reduce" in second.stacks and "in hang_on_rank" in second.stacks
    assert "in wait_for_godot" in str(failure.value)


@pytest.mark.slow
def test_stacks_are_shown_though_the_signal_is_taken():
    with pytest.raises(RankFailure, match="in wait_for_godot"):
        run_ranks(hang_without_stacks_signal, 1, timeout=1)


def die_on_rank(dying: int, how: str) -> None:
    import torch
    import torch.distributed as dist

    init_deepspeed_distributed()
    if dist.get_rank() == dying:
        os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(0)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    "how, story",
    [("killed", "rank 1 died by signal 9"), ("left", "rank 1 died with exit code 0, leaving no result")],
)
def test_a_death_is_told_apart_from_its_echo_in_the_peers(how: str, story: str):
    with pytest.raises(RankFailure, match=story):
        run_ranks(die_on_rank, 2, 1, how)


def test_a_result_that_cannot_be_sent_is_a_failure():
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(unpicklable_rank, 1)


def unpicklable_rank():
    return lambda: None


def test_a_function_inside_another_is_refused():
    def local() -> None: ...

    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        run_ranks(local, 1)


FRAGILE = """
import os, threading, time
if os.environ.get("FRAGILE") == "raise":
    raise ImportError("told to fail")
if os.environ.get("FRAGILE") == "thread":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def answer():
    return 42
"""


def test_a_module_that_cannot_be_imported_or_starts_threads_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "fragile_module.py").write_text(FRAGILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = importlib.import_module("fragile_module").answer
    assert run_ranks(answer, 1) == [42]
    with pytest.raises(RankFailure, match="ImportError: told to fail"):
        run_ranks(answer, 1, env={"FRAGILE": "raise"})
    with pytest.raises(RankFailure, match="2 threads after importing fragile_module"):
        run_ranks(answer, 1, env={"FRAGILE": "thread"})


def test_a_reserved_port_serves_listeners_and_nobody_else():
    with reserved_port() as port, socket.socket() as stranger, socket.socket() as store:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("", port))
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", port))
        store.listen()


@pytest.mark.slow
def test_collectives_without_a_time_limit_of_their_own_get_the_group_timeout():
    with pytest.raises(RankFailure, match=r"(?i)timed out"):
        run_ranks(wait_in_subgroup, 2, group_timeout=2)


def wait_in_subgroup() -> None:
    import torch
    import torch.distributed as dist

    init_deepspeed_distributed(timeout=100)
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        wait_for_godot()
    dist.all_reduce(torch.ones(1), group=group)


def leave_children(how: str) -> list[int]:
    """Start a child in this process group and one in a session of its own; then return, or hang."""
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    children = [subprocess.Popen(command), subprocess.Popen(command, start_new_session=True)]
    pids = [os.getpid(), os.getppid(), *(child.pid for child in children)]
    if how == "hang":
        print("pids", *pids)
        wait_for_godot()
    return pids


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid)]


def test_nothing_is_left_after_a_return():
    assert alive(run_ranks(leave_children, 1, "return")[0]) == []


@pytest.mark.slow
def test_nothing_is_left_after_a_hang():
    with pytest.raises(RankFailure) as failure:
        run_ranks(leave_children, 1, "hang", timeout=2)
    pids = [int(word) for word in failure.value.outcomes[0].stdout.split()[1:]]
    assert len(pids) == 4 and alive(pids) == []


OUTLIVED = """
import sys
sys.path.insert(0, {root!r})
from tests.harness import run_ranks
from tests.test_harness import announce_and_hang
run_ranks(announce_and_hang, 2, {folder!r}, timeout=100)
"""


def announce_and_hang(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(" ".join(map(str, [os.getpid(), os.getppid()])))
    wait_for_godot()


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_test_process(tmp_path: Path, signal_number: int):
    script = OUTLIVED.format(root=str(Path(__file__).parents[1]), folder=str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen(
        [sys.executable, "-c", script],
        stderr=subprocess.DEVNULL,
        env=environment,
        # A shell starts its background jobs with Ctrl-C ignored, and Python then leaves it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"), 60)
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    server = psutil.Process(pids[1]).ppid()
    assert alive([*pids, server]) == [*pids, server]
    assert list(tmp_path.glob("ranks-*"))
    caller.send_signal(signal_number)
    caller.wait(timeout=30)
    wait_until(lambda: not alive([*pids, server]), 20)
    assert not list(tmp_path.glob("ranks-*"))


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.slow
def test_the_harness_goes_on_after_its_server_is_lost():
    run_ranks(all_reduce_rank, 1)
    harness.stop_server()
    assert run_ranks(all_reduce_rank, 1)[0][0] == 1.0


def train_linear(steps: int) -> list[float]:
    """ZeRO 1 over the ranks; every rank has half of the same four rows."""
    import deepspeed
    import torch

    init_deepspeed_distributed()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, inputs, targets = linear_problem()
    config = {
        "train_micro_batch_size_per_gpu": len(inputs) // world_size,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed's own default clips at 1
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(
            engine(inputs.chunk(world_size)[rank]), targets.chunk(world_size)[rank]
        )
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def linear_problem():
    import torch

    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


def test_deepspeed_zero1_on_two_ranks_equals_plain_training():
    import torch

    model, inputs, targets = linear_problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    by_rank = run_ranks(train_linear, 2, 3)
    means = [sum(losses) / 2 for losses in zip(*by_rank, strict=True)]
    assert means == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]


@pytest.mark.slow
def test_sixteen_ranks_start_within_a_minute():
    started = time.monotonic()
    results = run_ranks(all_reduce_rank, 16)
    seconds = time.monotonic() - started
    print(f"16 ranks: {seconds:.1f} s")
    assert [value for value, _ in results] == [136.0] * 16
    assert seconds < 60


PRETRAIN = """
import os, sys, time
import torch.distributed as dist

def main(argv):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    print("rank", rank, "has", *argv, "and", *sys.argv[1:], "in", os.getcwd())
    print("a warning", file=sys.stderr)
    if "--refuse" in argv:
        return 2
    if "--raise" in argv and rank == 1:
        raise ValueError("told to fail")
    if "--hang" in argv and rank == 1:
        time.sleep(1000)
    dist.barrier()
    return 0
"""


@pytest.fixture
def fake_pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `pipeline.pretrain` that does as it is told, first on the import path of the ranks."""
    package = tmp_path / "pipeline"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pretrain.py").write_text(PRETRAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_job_gets_its_command_line_and_gives_exit_codes_and_output(fake_pretrain: Path):
    result = run_job(["--seed", "7"], 2, cwd=fake_pretrain)
    assert result.check().exit_codes == (0, 0)
    for rank in range(2):
        options = f"--local_rank={rank} --seed 7"
        assert result.stdout[rank] == f"rank {rank} has {options} and {options} in {fake_pretrain}\n"
        assert result.stderr[rank] == "a warning\n"


def test_a_job_that_is_refused_is_refused_on_every_rank(fake_pretrain: Path):
    result = run_job(["--refuse"], 2)
    assert result.exit_codes == (2, 2)
    with pytest.raises(AssertionError, match=r"exit codes \(2, 2\)"):
        result.check()


def test_a_job_that_raises_fails_on_every_rank(fake_pretrain: Path):
    result = run_job(["--raise"], 2)
    assert result.exit_codes == (1, 1)
    assert "ValueError: told to fail" in result.stderr[1]


@pytest.mark.slow
def test_a_job_that_hangs_is_a_failure_with_stacks(fake_pretrain: Path):
    with pytest.raises(RankFailure, match="in barrier"):
        run_job(["--hang"], 2, timeout=3)
