"""A rank without torch, for tests of what owns ranks: it counts steps, and goes wrong where it is told to.

    stand_in.py FOLDER STEPS SECONDS [RANK:STEP:FAULT ...]

FAULT: exit=N, signal=NAME (to itself), raise, hang, refuse, peer (an error of a lost peer), eat=N (MiB),
rant=N (many lines, then exit N, or `raise` with another line behind it). Without one the
rank counts to the end and says that it has finished, or stopped after a signal. It does not wait for the
others, so that nothing but their agents ends ranks that have lost a peer. At STEP `end` a fault comes after
that last word.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    from pipeline.cluster.agent.agent import own_rank

    own_rank(sys.argv)

import psutil

from pipeline.cluster.agent.rank_link import connect, split_inherited
from pipeline.cluster.outcome import Outcome, write_outcome
from pipeline.cluster.rank_environment import read_rank_environment

inherited, arguments = split_inherited(sys.argv[1:])
link = connect(inherited)
place = read_rank_environment()
folder, steps, seconds, *faults = [word for word in arguments if not word.startswith("--local_rank")]
folder, steps, seconds = Path(folder), int(steps), float(seconds)
stops: list[str] = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: stops.append(signal.Signals(number).name))
signal.signal(signal.SIGHUP, signal.SIG_IGN)


def misbehave(fault: str, step: int) -> None:
    what, _, value = fault.partition("=")
    if what == "exit":
        os._exit(int(value))
    if what == "signal":
        os.kill(os.getpid(), signal.Signals[value])
    if what == "hang":
        time.sleep(3600)
    if what == "eat":
        eaten = [b"x" * 2**20 for _ in range(int(value))]
        raise AssertionError(f"it has eaten {len(eaten)} MiB")
    if what == "rant":
        print("\n".join(f"line {number} of its last words" for number in range(100)), file=sys.stderr)
        if value != "raise":
            os._exit(int(value))
    if what == "refuse":
        link.refused(f"error: rank {place.rank} lacks a file")
        os._exit(2)
    try:
        if what == "peer":
            raise RuntimeError(f"Connection closed by peer [h1] on rank {place.rank}")
        raise OSError(f"no space left on rank {place.rank}")
    except (OSError, RuntimeError) as error:
        link.failed(error, step, traceback.format_exc())
        if what == "rant":
            time.sleep(0.3)  # its agent has heard it
            print("a line after its failure", file=sys.stderr, flush=True)
        os._exit(1)


def misbehave_at(where: str, step: int) -> None:
    for fault in (word for word in faults if word.count(":") == 2):
        rank, at, what = fault.split(":")
        if (int(rank), at) == (place.rank, where):
            misbehave(what, step)


link.folder(str(folder))
link.memory_advice("Eat less")
(folder / "ranks").mkdir(exist_ok=True, parents=True)
here = {
    "pid": os.getpid(),
    "agent": os.getppid(),
    "launcher": psutil.Process(os.getppid()).ppid(),
    "environment": dict(os.environ),
    "arguments": arguments,
}
draft = folder / "ranks" / f".{place.rank}"
draft.write_text(json.dumps(here))
draft.rename(folder / "ranks" / f"{place.rank}.json")
print(f"rank {place.rank} writes on its standard error", file=sys.stderr, flush=True)
status, step = "finished", 0
for step in range(1, steps + 1):
    link.progress("training", step - 1)
    misbehave_at(str(step), step - 1)
    time.sleep(seconds)
    if place.rank == 0:
        print(f"step {step}", flush=True)
    if stops:
        status = "stopped"
        break
outcome = Outcome(status, step, place.master_port, message=" ".join(stops))
if place.rank == 0:
    write_outcome(folder, outcome)
link.ended(outcome)
misbehave_at("end", step)
sys.exit(3 if status == "stopped" else 0)
