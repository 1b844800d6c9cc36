"""Contenders as groups of processes that run some steps on command, and wait in between.

Every contender lives in processes of its own and keeps its own training loop. The loop reports each step to a
`Clock`, which lets a round of steps through and then holds the process until the next one. So contenders are
measured in turn, A B C A B C ..., by one parent, and a busy minute of the machine meets all of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from pipeline.cluster.rank_environment import RankEnvironment, free_port
from pipeline.job.world import LOOPBACK

# Seconds that building a model, or a round of steps, may take.
PATIENCE = 900.0


class WorkerFailed(RuntimeError):
    """A rank of a contender raised, died or hung."""


class Clock:
    """Lets a rank's training loop run round by round; times each round.

    Args:
        connection: To the parent.
        synchronize: Waits for the device's queued work, so that a round's time is that of its work.
    """

    def __init__(self, connection: Connection, synchronize: Callable[[], None]) -> None:
        self._connection, self._synchronize = connection, synchronize
        self._wanted, self._losses, self._begin = 0, [], 0.0

    def begin(self) -> None:
        """Call once the model is built, before the first step."""
        self._connection.send(("ready", None))
        self._wait()

    def step_done(self, loss: Any = None) -> None:
        """Call after each step, with its loss (a number or a tensor of one) or None."""
        self._losses.append(loss)
        if len(self._losses) < self._wanted:
            return
        self._synchronize()
        elapsed = time.perf_counter() - self._begin
        losses = [None if loss is None else float(loss) for loss in self._losses]
        self._connection.send(("round", (elapsed / self._wanted, losses)))
        self._wait()

    def _wait(self) -> None:
        try:
            self._wanted, self._losses = self._connection.recv(), []
        except (EOFError, ConnectionResetError):  # the parent was ended
            self._wanted = 0
        if self._wanted == 0:
            raise Finished
        self._begin = time.perf_counter()


class Finished(BaseException):
    """The parent wants no more steps: ends a training loop from inside."""


@dataclass(frozen=True)
class Round:
    """One contender's round: seconds per step (of its slowest rank), and rank 0's losses."""

    seconds: float
    losses: list[float | None]


class WorkerGroup:
    """The processes of one contender. Start it, run rounds, stop it; or `result` for work without rounds.

    Args:
        name: For messages.
        work: ``work(argument, environment, clock)``, a top-level function; it returns or never ends.
        argument: Pickled.
        world_size: Ranks.
        device: ``cpu`` or ``cuda``.
        threads: Of each rank, on CPU.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Any, RankEnvironment, Clock], Any],
        argument: Any,
        *,
        world_size: int,
        device: str,
        threads: int,
    ) -> None:
        self.name, self.world_size = name, world_size
        port = free_port()
        # A process that has touched CUDA cannot be forked; one that has only imported torch can.
        context = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
        if device == "cpu":
            context.set_forkserver_preload(["benchmarks.preload"])
        self._connections, self._processes = [], []
        with _environment(device, world_size, threads):
            for rank in range(world_size):
                environment = RankEnvironment(rank, world_size, rank, world_size, LOOPBACK, port)
                ours, theirs = context.Pipe()
                arguments = (work, argument, environment, theirs, device, threads)
                process = context.Process(
                    target=_rank_main, args=arguments, name=f"{name} rank {rank}", daemon=True
                )
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)

    def wait_until_ready(self) -> None:
        """Until every rank's model is built.

        Raises:
            WorkerFailed: with the rank's traceback.
        """
        self._gather("ready")

    def run(self, steps: int) -> Round:
        """Let every rank do `steps` steps.

        Raises:
            WorkerFailed: as above.
        """
        for connection in self._connections:
            connection.send(steps)
        rounds = self._gather("round")
        return Round(max(seconds for seconds, _ in rounds), rounds[0][1])

    def result(self) -> list[Any]:
        """What `work` returned, by rank.

        Raises:
            WorkerFailed: as above.
        """
        results = self._gather("result")
        self.stop()
        return results

    def stop(self) -> None:
        """End the processes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a rank that failed has closed its end
                connection.send(0)
        for process in self._processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()

    def _gather(self, kind: str) -> list[Any]:
        answers = []
        for rank, connection in enumerate(self._connections):
            try:
                answered = connection.poll(PATIENCE)
                got, value = connection.recv() if answered else ("silence", f"after {PATIENCE:g} s")
            except EOFError:
                self._processes[rank].join()
                got, value = "death", f"exit code {self._processes[rank].exitcode}"
            if got != kind:
                self._abandon()
                raise WorkerFailed(f"{self.name}, rank {rank}: {got} instead of {kind}: {value}")
            answers.append(value)
        return answers

    def _abandon(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def _environment(device: str, world_size: int, threads: int) -> Iterator[None]:
    """What must be in a rank's environment before torch and DeepSpeed are imported there."""
    saved = dict(os.environ)
    os.environ.update(_variables(device, world_size, threads, saved))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _variables(device: str, world_size: int, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    if device == "cpu":
        return {
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(threads),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
    # Else transformers' Trainer would spread one process over every GPU it sees.
    default = ",".join(str(number) for number in range(world_size))
    visible = given.get("CUDA_VISIBLE_DEVICES", default).split(",")[:world_size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible), "DS_ACCELERATOR": "cuda"}


def _rank_main(
    work: Callable,
    argument: Any,
    environment: RankEnvironment,
    connection: Connection,
    device: str,
    threads: int,
) -> None:
    """A rank's life: work, then say how it ended."""
    try:
        os.environ.update(environment.variables())
        _pin(environment.local_rank, environment.local_size, threads, device)
        import torch

        from pipeline.training.quiet import quiet_deepspeed

        quiet_deepspeed(1)
        torch.set_num_threads(threads)
        synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
        result = work(argument, environment, Clock(connection, synchronize))
        connection.send(("result", result))
    except Finished:
        pass
    except Exception:  # noqa: BLE001  (the parent raises it)
        connection.send(("failure", traceback.format_exc()))
    # Leaving a process group waits for peers; nothing here is worth that.
    os._exit(0)


def _pin(local_rank: int, local_size: int, threads: int, device: str) -> None:
    """Give each CPU rank cores of its own, if there are enough; all contenders get the same ones."""
    if device == "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if local_size * threads <= len(cores):
        os.sched_setaffinity(0, cores[local_rank * threads : (local_rank + 1) * threads])
