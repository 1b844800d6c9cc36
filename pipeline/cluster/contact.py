"""A guard's connection to the hub. No torch."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from pipeline.cluster.hub_settings import DIRECT_PORTS, Limits
from pipeline.cluster.rank_environment import LOOPBACK, RankEnvironment
from pipeline.cluster.ticket import Ticket
from pipeline.cluster.wire import Connection, Message

_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 1.0


class Unreachable(Exception):
    """There is no hub."""


class Refused(Exception):
    """The hub does not take this rank."""


def tell_refusal(ticket: Ticket, text: str) -> bool:
    """Tell the launch why this process can be none of its ranks, which a launcher's exit code does not; False
    where it does not hear it."""
    try:
        address = (ticket.address, ticket.port)
        with socket.create_connection(address, timeout=_CONNECT_SECONDS) as stream:
            Connection(stream).send(token=ticket.token, wrong_world=text)
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

    Raises:
        Unreachable: the launch does not answer.
    """

    def __init__(self, ticket: Ticket, place: RankEnvironment, hello: Message, limits: Limits) -> None:
        self._place = place
        self._limits = limits
        self._hello = hello
        self._is_direct = not ticket.port
        self._unsent: list[Message] = []
        self._accepted = False
        self._next_try = self._last_beat = 0.0
        self._port = place.master_port
        self._orders: list[Message] = []
        self.connection: Connection | None = None
        self.lost = ""
        if self._is_direct:
            self._orders.append({"do": "start", "environment": {}, "logs": None, "mark": ""})
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
        stream = socket.create_connection((self._address, port), timeout=_CONNECT_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Connection(stream)
        self.connection.send(**self._hello)

    def send(self, **message: Any) -> None:
        """Send now, or when there is a hub."""
        if self.connection is None or not self._accepted:
            self._unsent.append(message)
        else:
            self.connection.send(**message)

    def receive(self) -> list[Message]:
        """What the hub has ordered since the last call."""
        orders, self._orders = self._orders, []
        if self.connection is None:
            return orders
        for order in self.connection.receive():
            if order["do"] == "refuse":
                if not self._is_direct:
                    self.lost = str(order["reason"])
                break
            if not self._accepted:
                self._accepted = True
                for message in self._unsent:
                    self.connection.send(**message)
                self._unsent.clear()
            if not (self._is_direct and order["do"] == "start"):  # it was started at once
                orders.append(order)
            elif order["logs"]:
                orders.append(order | {"do": "log"})
        self._check()
        return orders

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
        """Try the next of the ports beside the rendezvous."""
        first = self._place.master_port + 1
        self._port = self._port + 1 if self._port < first + DIRECT_PORTS - 1 else first
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
        hub = "rank 0's guard" if self._is_direct else "launch.sh"
        how = "has ended" if connection.closed else f"has not been heard of for {silent:.0f} s"
        self.lost = f"{hub} ({self._address}) {how}"

    def close(self) -> None:
        """Send what is left, and end the connection."""
        if self.connection is not None:
            self.connection.flush()
            self.connection.close()
