"""``python -m pipeline.launch.network_test.host``: a host's part in the network test, reported line by line.

    1. says the port on which it listens, and how busy the host is: processes that want to run, per core
    2. receives all hosts' addresses and ports, and says which of them it does not reach
    3. is asked to continue, and starts a rank for each slot, which say what they measure

When its standard input ends - the one who asked is gone - it and its ranks end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeline.cluster.agent.connection import listen
from pipeline.cluster.host_probe import connect

MARK = "NETWORK-TEST:"


def main() -> int:
    """0 if every rank ended well."""
    request = _told()
    signal.alarm(request["seconds"])
    server = listen(0, everywhere=True)
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))  # before the ranks add to it
    _say({"at": "listening", "host": request["host"], "port": server.getsockname()[1], "load": load})
    hosts = _told()["hosts"]
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        reasons = list(pool.map(connect, hosts))
    unreached = {number: reason for number, reason in enumerate(reasons) if reason}
    _say({"at": "connected", "host": request["host"], "unreached": unreached})
    _told()
    server.close()
    return _run_ranks(request)


def _told() -> dict[str, Any]:
    """The next line of standard input; the end of the process without one."""
    line = next((line for line in sys.stdin if line.strip()), "")
    if not line:
        sys.exit(1)
    return json.loads(line)


def _say(event: dict[str, Any]) -> None:
    """One event, in one write: ranks share the pipe."""
    os.write(1, f"{MARK}{json.dumps(event)}\n".encode())


def _run_ranks(request: dict[str, Any]) -> int:
    os.environ.update(request["environment"])
    devices = request["devices"]
    if devices is not None:  # as the launcher does: a rank's GPU is then its slot
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    import pipeline.launch.network_test.rank  # noqa: F401 - once, before the forks: it takes seconds

    read_end, write_end = os.pipe()
    children: dict[int, int] = {}
    for slot in range(request["slots"][request["host"]]):
        child = os.fork()
        if child == 0:
            os.close(write_end)
            os._exit(_rank(request, slot, None if devices is None else slot, read_end))
        children[child] = request["first_rank"] + slot
    signal.signal(signal.SIGALRM, lambda *_: _end(children))
    threading.Thread(target=_end_with_input, args=(children,), daemon=True).start()
    worst = 0
    while children:
        child, status = os.wait()
        rank, code = children.pop(child), os.waitstatus_to_exitcode(status)
        worst = worst or abs(code)
        if code != 0:
            _say({"at": "ended", "rank": rank, "code": code})
    return 1 if worst else 0


def _end_with_input(children: dict[int, int]) -> None:
    sys.stdin.read()
    _end(children)


def _end(children: dict[int, int]) -> None:
    """Ends the ranks, a stopped or hanging one, too. Were this process killed, they would end with the pipe
    that they watch."""
    for child in list(children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    os._exit(1)


def _rank(request: dict[str, Any], slot: int, device: int | None, lifeline: int) -> int:
    from pipeline.launch.network_test.rank import Place, run_rank

    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(request["seconds"])
    rank = request["first_rank"] + slot
    place = Place(tuple(request["slots"]), rank, device)
    last = {"at": "started"}

    def say(event: dict[str, Any]) -> None:
        last.update(at=event["at"])
        _say({"rank": rank, **event})

    try:
        run_rank(place, request["address"], request["port"], request["seconds"], say)
    except (RuntimeError, OSError, ValueError) as error:
        _say({"rank": rank, "at": "failed", "after": last["at"], "error": str(error).strip()[:600]})
        return 1
    return 0


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
