"""A coordinator in this process, and agents with stand-in ranks beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from pipeline.base.command import show_messages
from pipeline.cluster.agent.coordinator import Coordinator
from pipeline.cluster.agent.handshake import introduce
from pipeline.cluster.agent.host_inquiry import Inquiry
from pipeline.cluster.agent.launch_spec import CoordinatorSettings, LaunchSpec, encode
from pipeline.cluster.outcome import Outcome

STAND_IN = Path(__file__).with_name("stand_in.py")
TIMEOUT = 6.0
KEY = "a key that nobody guesses"


class Start:
    """A coordinator in this process, and agents beside it. `arguments`: of the job, from the coordinator;
    without any they are on the agents' command lines."""

    def __init__(
        self,
        folder: Path,
        step_timeout: float | None = None,
        world_size: int = 3,
        arguments: tuple[str, ...] = (),
        inquiry: Inquiry | None = None,
    ) -> None:
        self.folder = folder
        self.said: list[str] = []
        show_messages(self.said.append, "pipeline.cluster.agent")
        self.world_size = world_size
        self.arguments = arguments
        self.key_file = folder / "key"
        self.write_key(KEY)
        settings = CoordinatorSettings(
            world_size, KEY, TIMEOUT, step_timeout, arguments=arguments, inquiry=inquiry
        )
        self.coordinator = Coordinator(settings)
        self.agents: list[subprocess.Popen] = []

    def agent(
        self,
        rank: int,
        *job: str,
        before: tuple[str, ...] = (),
        elsewhere: Mapping[str, object] = MappingProxyType({}),
        **changes: object,
    ) -> None:
        """Start the agent of `rank`. `elsewhere`: another place, where None leaves a variable out; `changes`:
        other values in its spec."""
        values = {
            "hosts": (("here", self.world_size),),
            "address": "127.0.0.1",
            "port": self.coordinator.port,
            "key_file": str(self.key_file),
            "failure_timeout": TIMEOUT,
        }
        spec = LaunchSpec(**values | changes)  # type: ignore[arg-type]
        place = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank,
            "LOCAL_SIZE": self.world_size,
        }
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "CROSS_RANK": "0"}
        environment |= {name: str(value) for name, value in elsewhere.items()}
        environment = {name: value for name, value in environment.items() if value != "None"}
        line = () if self.arguments else (str(self.folder), *job)
        command = [*before, sys.executable, str(STAND_IN), "--local_rank=0", encode(spec), *line]
        with (self.folder / f"console{rank}").open("w") as out:
            self.agents.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))

    def write_key(self, key: str) -> None:
        self.key_file.touch(0o600)
        self.key_file.write_text(key)

    def hello(self, **changes: object) -> bytes:
        """What an agent says first. `changes`: other fields; None leaves one out."""
        values = {"rank": 0, "host_number": 0, "host": "x", "world_size": self.world_size, "port": 1}
        values |= introduce(KEY) | changes
        return (
            json.dumps({name: value for name, value in values.items() if value is not None}).encode() + b"\n"
        )

    def all(self, *job: str) -> None:
        for rank in range(self.world_size):
            self.agent(rank, *job)

    def ranks(self) -> list[dict]:
        """What each rank has written about itself; waits for all of them."""
        files = [self.folder / "ranks" / f"{rank}.json" for rank in range(self.world_size)]
        self.until(lambda: all(file.exists() for file in files))
        return [json.loads(file.read_text()) for file in files]

    def until(self, condition, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.said, self.coordinator.table)
            self.coordinator.poll(0.05)

    def outcome(self, seconds: float = 20) -> Outcome:
        self.until(lambda: self.coordinator.outcome is not None, seconds)
        self.coordinator.linger(3)
        return self.coordinator.outcome

    def codes(self) -> list[int]:
        return [agent.wait(5) for agent in self.agents]

    def console(self, rank: int) -> str:
        """What the agent of a rank has shown."""
        return (self.folder / f"console{rank}").read_text()

    def log(self, rank: int) -> str:
        (file,) = self.folder.glob(f"logs/*/rank_{rank:05}.log")
        return file.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made = Start(tmp_path)
    yield made
    made.coordinator.close()
    for agent in made.agents:
        agent.kill()
        agent.wait()
