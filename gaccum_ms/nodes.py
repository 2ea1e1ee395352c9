"""How the launchers of several hosts act as one: host 0's listens beside MindSpore's scheduler, the others join it.

The others send what happens to their ranks and host 0 decides, so that all hosts end together, with the same error. A
host that is lost (its launcher killed, its power cut, the network gone) is noticed by its connection.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time

from gaccum_ms.cluster import Cluster, LaunchError, bind, is_local

Message = dict[str, object]

CONNECT_SECONDS = 1.0
SEND_SECONDS = 10.0
LOST_AFTER_SECONDS = 20  # a host that answers nothing for so long is lost


class Wire:
    """One connection: messages as lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self.closed = False
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 5),
            (socket.TCP_KEEPCNT, LOST_AFTER_SECONDS // 5 - 1),
            (socket.TCP_USER_TIMEOUT, LOST_AFTER_SECONDS * 1000),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message) -> None:
        """Send a message; a connection that does not take it is closed."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """Return the messages that have come; does not wait for more. Who talks something else is cut off."""
        try:
            while not self.closed and select.select([self._socket], [], [], 0)[0]:
                data = self._socket.recv(65536)
                self._buffer += data
                self.closed = not data
        except OSError:
            self.closed = True
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            self.closed = True
            return []

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._socket.close()


class Link:
    """This host's side of the connections between launchers. With one host there is none, and it does nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def absent(self) -> list[int]:
        """The hosts that this one waits for: those that have not joined host 0 yet, or host 0."""
        return []

    def send(self, message: Message) -> None:
        """Send a message to host 0, or from there to all others."""

    def receive(self) -> list[Message]:
        """Return the messages that have come; does not wait for more.

        Raises:
            LaunchError: If a host is lost, or joins with other numbers than host 0's.
        """
        return []


class Host0(Link):
    """Host 0's side."""

    def __enter__(self) -> Link:
        self._wires: dict[int, Wire] = {}
        self._unknown: list[Wire] = []
        address = self.cluster.master_addr
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind(self._listener, address, self.cluster.master_port + 1)
        self._listener.listen()
        self._listener.setblocking(False)
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()
        for wire in [*self._unknown, *self._wires.values()]:
            wire.close()

    def absent(self) -> list[int]:
        return [node for node in range(1, self.cluster.nodes) if node not in self._wires]

    def send(self, message: Message) -> None:
        for wire in self._wires.values():
            wire.send(message)

    def receive(self) -> list[Message]:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._unknown.append(Wire(self._listener.accept()[0]))
        messages = []
        for wire in list(self._unknown):
            messages += self._join(wire)
        for node, wire in self._wires.items():
            messages += wire.receive()
            if wire.closed and not any("error" in message for message in messages):
                who = f"host {node} (ranks {self.cluster.names_of(node)})"
                raise LaunchError(f"{who} is lost: its launcher was killed or cannot be reached.")
        return messages

    def _join(self, wire: Wire) -> list[Message]:
        """Take in a launcher that has said who it is; return what else it has said."""
        messages = wire.receive()
        if messages or wire.closed:
            self._unknown.remove(wire)
        if not messages:
            return []
        who, *others = messages
        node = who.get("node")
        theirs = f"--nodes {who.get('nodes')} --processes {who.get('processes')}"
        ours = f"--nodes {self.cluster.nodes} --processes {self.cluster.processes}"
        if theirs == ours and node not in self._wires:
            self._wires[int(str(node))] = wire
            return others
        if theirs != ours:
            why = f"host {node} was started with {theirs}, but host 0 with {ours}; all hosts need the same."
        else:
            why = f"two hosts say --node-rank {node}; each must say its own."
        wire.send({"end": True, "error": why, "code": 2})
        wire.close()
        raise LaunchError(why, code=2)


class OtherHost(Link):
    """The side of a host that is not host 0."""

    def __enter__(self) -> Link:
        if is_local(self.cluster.master_addr):
            raise LaunchError(
                f"--master-addr '{self.cluster.master_addr}' is an address of this host, which --node-rank says is "
                f"host {self.cluster.node_rank}; it is one of host 0's.",
                code=2,
            )
        self._wire: Wire | None = None
        self._waiting: list[Message] = []
        self._give_up = time.monotonic() + self.cluster.start_timeout
        return self

    def __exit__(self, *error: object) -> None:
        if self._wire is not None:
            self._wire.close()

    def absent(self) -> list[int]:
        return [0] if self._wire is None else []

    def send(self, message: Message) -> None:
        if self._wire is None:
            self._waiting.append(message)
        else:
            self._wire.send(message)

    def receive(self) -> list[Message]:
        if self._wire is None:
            self._connect()
        if self._wire is None:
            return []
        messages = self._wire.receive()
        if self._wire.closed and not messages:
            raise LaunchError("host 0 is lost: its launcher was killed or cannot be reached.")
        return messages

    def _connect(self) -> None:
        address = self.cluster.master_addr, self.cluster.master_port + 1
        try:
            self._wire = Wire(socket.create_connection(address, timeout=CONNECT_SECONDS))
        except OSError as error:
            if time.monotonic() > self._give_up:
                why = f"no launcher of host 0 answers at {address[0]}, port {address[1]} ({error})"
                waited = f"after {self.cluster.start_timeout:g} s. Start it there with --node-rank 0."
                raise LaunchError(f"{why}, {waited}", code=124) from None
            return
        who: Message = {"node": self.cluster.node_rank}
        who |= {"nodes": self.cluster.nodes, "processes": self.cluster.processes}
        for message in [who, *self._waiting]:
            self._wire.send(message)


def link(cluster: Cluster) -> Link:
    """Return this host's side, to be used in a ``with`` statement."""
    kind = Link if cluster.nodes == 1 else Host0 if cluster.node_rank == 0 else OtherHost
    return kind(cluster)
