"""An agent's connection to the coordinator."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from typing import Any

from pipeline.cluster.agent.connection import Connection, Message, is_order, leads_to_another_user
from pipeline.cluster.agent.handshake import introduce, is_proven
from pipeline.cluster.agent.launch_spec import LaunchSpec, Limits, direct_ports
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.job.world import LOOPBACK

_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 1.0
# A first message is short.
_LONGEST_REFUSAL = 10_000


class Unreachable(Exception):
    """There is no coordinator."""


def tell_refusal(spec: LaunchSpec, key: str, text: str) -> bool:
    """Tell the launch why this process can be none of its ranks, which a launcher's exit code does not; False
    where it does not hear it."""
    try:
        address = (spec.address, spec.port)
        with socket.create_connection(address, timeout=_CONNECT_SECONDS) as stream:
            Connection(stream).send(**introduce(key), wrong_world=text[:_LONGEST_REFUSAL])
    except OSError:
        return False
    return True


class CoordinatorClient:
    """Signs of life in both directions, and messages.

    With a launch the coordinator must be there from the beginning. Without one it is in the agent of rank 0,
    which may be started later: until it answers, the rank runs, and torch's rendezvous has its own time
    limit.

    Attributes:
        connection: None while there is none.
        lost: Why there is no connection any more; empty while there is.
        is_wrong_job: It is that this rank is none of the coordinator's job.

    Args:
        hello: What the coordinator must know of this rank; the proof that it holds `key` goes with it.

    Raises:
        Unreachable: the launch does not answer.
    """

    def __init__(
        self, spec: LaunchSpec, key: str, place: RankEnvironment, hello: Message, limits: Limits
    ) -> None:
        self._place = place
        self._limits = limits
        self._key = key
        self._hello = hello
        self._nonce = ""
        self._is_direct = not spec.port
        self._unsent: list[Message] = []
        self._accepted = False
        self._next_try = self._last_beat = 0.0
        self._ports = itertools.cycle(direct_ports(place.master_port))
        self._port = 0
        self._orders: list[Message] = []
        self.connection: Connection | None = None
        self.lost = ""
        self.is_wrong_job = False
        if self._is_direct:
            self._orders.append({"do": "start", "environment": {}, "arguments": [], "logs": None, "mark": ""})
            self._address = LOOPBACK if place.world_size == place.local_size else place.master_addr
        else:
            self._address = spec.address
            self._port = spec.port
            self._reach_launch()

    def _reach_launch(self) -> None:
        deadline = time.monotonic() + self._limits.silence
        while self.connection is None:
            try:
                self._connect(self._port)
            except OSError as error:
                if time.monotonic() > deadline:
                    where = f"{self._address}:{self._port}"
                    raise Unreachable(
                        f"rank {self._place.rank} on {socket.gethostname()} cannot reach the launch at "
                        f"{where}: {error.strerror or error}. Open the firewall, or give --launch_addr"
                    ) from error
                time.sleep(_RETRY_SECONDS)

    def _connect(self, port: int) -> None:
        # Where the rank runs already, its output and its signals are not to wait for long.
        seconds = _LOOK_SECONDS if self._is_direct else _CONNECT_SECONDS
        stream = socket.create_connection((self._address, port), timeout=seconds)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._is_direct and leads_to_another_user(stream, os.geteuid()):
            stream.close()
            return
        self.connection = Connection(stream)
        proven = introduce(self._key)
        self._nonce = proven["nonce"]
        self.connection.send(**self._hello, **proven)

    def send(self, **message: Any) -> None:
        """Send now, or when there is a coordinator."""
        if self.connection is None or not self._accepted:
            if message.get("is") == "progress":  # one a second, for as long as there is no coordinator
                self._unsent = [each for each in self._unsent if each.get("is") != "progress"]
            self._unsent.append(message)
        else:
            self.connection.send(**message)

    def receive(self) -> list[Message]:
        """What the coordinator has ordered since the last call."""
        orders, self._orders = self._orders, []
        if self.connection is None:
            return orders
        for order in self.connection.receive():
            if not is_order(order) or not (self._accepted or self._is_first_word(order)):
                self.connection.closed = True
                break
            if order["do"] == "refuse":
                self._take_refusal(order)
                break
            if order["do"] == "accept":
                self._send_kept()
            elif not (self._is_direct and order["do"] == "start"):  # it was started at once
                orders.append(order)
            elif order["logs"]:
                orders.append(order | {"do": "log"})
        self._check()
        return orders

    def _is_first_word(self, order: Message) -> bool:
        """Whether it comes from this start's coordinator, or turns this rank away."""
        return order["do"] == "refuse" or (
            order["do"] == "accept" and is_proven(order, self._key, "coordinator", self._nonce)
        )

    def _take_refusal(self, order: Message) -> None:
        """Without a launch, who refuses before it has accepted is another job's coordinator."""
        assert self.connection is not None
        if self._accepted or not self._is_direct:
            self.lost, self.is_wrong_job = order["reason"], self._accepted and order["wrong_job"]
        self.connection.closed = True

    def _send_kept(self) -> None:
        assert self.connection is not None
        self._accepted = True
        for message in self._unsent:
            self.connection.send(**message)
        self._unsent.clear()

    def beat(self, now: float) -> None:
        """Give a sign of life when it is time; look for a coordinator where none has been found yet."""
        if self.connection is None:
            if self._is_direct and not self.lost and now >= self._next_try:
                self._look_for_coordinator()
                self._next_try = now + _RETRY_SECONDS
            return
        self.connection.flush()
        if now - self._last_beat >= self._limits.beat:
            self._last_beat = now
            self.connection.send(**{"is": "beat"})
            self._check()

    def _look_for_coordinator(self) -> None:
        """Try the next of the ports on which it may be."""
        self._port = next(self._ports)
        with contextlib.suppress(OSError):
            self._connect(self._port)

    def _check(self) -> None:
        connection = self.connection
        if connection is None or self.lost:
            return
        silent = time.monotonic() - connection.heard
        if not connection.closed and silent <= self._limits.silence:
            return
        if self._is_direct and not self._accepted:  # something else listens there
            connection.close()
            self.connection = None
            return
        if not self._accepted and connection.closed:
            self.lost = f"what answers at {self._address}:{self._port} is not this job's launch"
            return
        coordinator = "rank 0's agent" if self._is_direct else "launch.sh"
        how = "has ended" if connection.closed else f"has not been heard of for {silent:.0f} s"
        self.lost = f"{coordinator} ({self._address}) {how}"

    def close(self) -> None:
        """Send what is left, and end the connection."""
        if self.connection is not None:
            self.connection.flush()
            self.connection.close()
