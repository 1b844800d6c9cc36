"""A guard's connection to the hub. No torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from typing import Any

from pipeline.cluster.agent.credential import introduce, is_proven
from pipeline.cluster.agent.hub_settings import Limits
from pipeline.cluster.agent.messages import is_order
from pipeline.cluster.agent.peers import leads_to_another_user
from pipeline.cluster.agent.rank_place import direct_ports
from pipeline.cluster.agent.ticket import Ticket
from pipeline.cluster.agent.wire import Connection, Message
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.job.world import LOOPBACK

_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 1.0
# A first message is short.
_LONGEST_REFUSAL = 10_000


class Unreachable(Exception):
    """There is no hub."""


def tell_refusal(ticket: Ticket, key: str, text: str) -> bool:
    """Tell the launch why this process can be none of its ranks, which a launcher's exit code does not; False
    where it does not hear it."""
    try:
        address = (ticket.address, ticket.port)
        with socket.create_connection(address, timeout=_CONNECT_SECONDS) as stream:
            Connection(stream).send(**introduce(key), wrong_world=text[:_LONGEST_REFUSAL])
    except OSError:
        return False
    return True


class Contact:
    """Signs of life in both directions, and messages.

    With a launch the hub must be there from the beginning. Without one it is the guard of rank 0, which may
    be started later: until it answers, the rank runs, and torch's rendezvous has its own time limit.

    Attributes:
        connection: None while there is none.
        lost: Why there is no contact any more; empty while there is.
        is_wrong_job: It is that this rank is none of the hub's job.

    Args:
        hello: What the hub must know of this rank; the proof that it holds `key` goes with it.

    Raises:
        Unreachable: the launch does not answer.
    """

    def __init__(
        self, ticket: Ticket, key: str, place: RankEnvironment, hello: Message, limits: Limits
    ) -> None:
        self._place = place
        self._limits = limits
        self._key = key
        self._hello = hello
        self._nonce = ""
        self._is_direct = not ticket.port
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
            self._address = ticket.address
            self._port = ticket.port
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
                        f"{where}: {error.strerror or error}. See to the firewall, or give --launch_addr"
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
        """Send now, or when there is a hub."""
        if self.connection is None or not self._accepted:
            if message.get("is") == "progress":  # one a second, for as long as there is no hub
                self._unsent = [each for each in self._unsent if each.get("is") != "progress"]
            self._unsent.append(message)
        else:
            self.connection.send(**message)

    def receive(self) -> list[Message]:
        """What the hub has ordered since the last call."""
        orders, self._orders = self._orders, []
        if self.connection is None:
            return orders
        for order in self.connection.receive():
            if not is_order(order) or not (self._accepted or self._is_first_word(order)):
                self.connection.closed = True
                break
            if order["do"] == "refuse":
                self._be_refused(order)
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
        """Whether it comes from this start's hub, or turns this rank away."""
        return order["do"] == "refuse" or (
            order["do"] == "accept" and is_proven(order, self._key, "hub", self._nonce)
        )

    def _be_refused(self, order: Message) -> None:
        """Without a launch, who refuses before it has accepted is another job's hub."""
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
        """Give a sign of life when it is time; look for a hub where none has been found yet."""
        if self.connection is None:
            if self._is_direct and not self.lost and now >= self._next_try:
                self._look_for_hub()
                self._next_try = now + _RETRY_SECONDS
            return
        self.connection.flush()
        if now - self._last_beat >= self._limits.beat:
            self._last_beat = now
            self.connection.send(**{"is": "beat"})
            self._check()

    def _look_for_hub(self) -> None:
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
        hub = "rank 0's guard" if self._is_direct else "launch.sh"
        how = "has ended" if connection.closed else f"has not been heard of for {silent:.0f} s"
        self.lost = f"{hub} ({self._address}) {how}"

    def close(self) -> None:
        """Send what is left, and end the connection."""
        if self.connection is not None:
            self.connection.flush()
            self.connection.close()
