"""How the launchers of several hosts act as one: host 0's listens beside MindSpore's scheduler, the others join it.

The others send what happens to their ranks and host 0 decides, so that all hosts end together, with the same error. A
host that is lost (its launcher killed, its power cut, the network gone) is noticed by its connection.

Who connects must show first that it knows the hosts' secret, and host 0 shows it in turn, without either sending it:

    host 0 to other:  random 0
    other to host 0:  random 1, HMAC(secret, "other" + random 0 + random 1)
    host 0 to other:  HMAC(secret, "host 0" + random 0 + random 1)
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import sys
import time

from gaccum_ms.launch.cluster import SECRET, Cluster, LaunchError, bind, is_local
from gaccum_ms.launch.wire import Message, Wire

CONNECT_SECONDS = 1.0
STRANGERS = 32  # connections at a time that have not shown that they know the secret
STRANGER_SECONDS = 10.0  # in which to show it
REFUSED = b"refused"


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
        self._unknown: dict[Wire, tuple[bytes, float]] = {}  # and what was sent it, and when
        self._refused = False
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
            while len(self._unknown) < STRANGERS:
                wire, random = Wire(self._listener.accept()[0]), secrets.token_hex(16).encode()
                wire.send_line(random)
                self._unknown[wire] = random, time.monotonic()
        messages = []
        for wire, (random, since) in list(self._unknown.items()):
            if wire.trusted or self._knows_secret(wire, random):
                messages += self._join(wire)
            elif wire.closed or time.monotonic() - since > STRANGER_SECONDS:
                del self._unknown[wire]
                wire.close()
        for node, wire in self._wires.items():
            messages += wire.receive()
            if wire.closed and not any("error" in message for message in messages):
                who = f"host {node} (ranks {self.cluster.names_of(node)})"
                raise LaunchError(f"{who} is lost: its launcher was killed or cannot be reached.")
        return messages

    def _knows_secret(self, wire: Wire, random: bytes) -> bool:
        """Tell whether a connection has shown that it knows the secret; close one that does not."""
        line = wire.line()
        if line is None:
            return False
        theirs, _, proof = line.partition(b" ")
        if not hmac.compare_digest(proof, _proof(self.cluster.secret, b"other", random, theirs)):
            wire.send_line(REFUSED)
            wire.closed = True
            if not self._refused:
                print("note: a connection was refused that does not know the secret of this launch.", file=sys.stderr)
                self._refused = True
            return False
        wire.send_line(_proof(self.cluster.secret, b"host 0", random, theirs))
        wire.trust()
        return True

    def _join(self, wire: Wire) -> list[Message]:
        """Take in a launcher that has said who it is; return what else it has said."""
        messages = wire.receive()
        if messages or wire.closed:
            del self._unknown[wire]
        if not messages:
            return []
        who, *others = messages
        node = who.get("node")
        theirs = f"--nodes {who.get('nodes')} --processes {who.get('processes')}"
        ours = f"--nodes {self.cluster.nodes} --processes {self.cluster.processes}"
        if theirs == ours and node in self.absent():
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
            wire = Wire(socket.create_connection(address, timeout=CONNECT_SECONDS))
            self._show_secret(wire)
        except OSError as error:
            if time.monotonic() > self._give_up:
                why = f"no launcher of host 0 answers at {address[0]}, port {address[1]} ({error})"
                waited = f"after {self.cluster.start_timeout:g} s. Start it there with --node-rank 0."
                raise LaunchError(f"{why}, {waited}", code=124) from None
            return
        self._wire = wire
        who: Message = {"node": self.cluster.node_rank}
        who |= {"nodes": self.cluster.nodes, "processes": self.cluster.processes}
        for message in [who, *self._waiting]:
            self._wire.send(message)

    def _show_secret(self, wire: Wire) -> None:
        """Show host 0 that this one knows the secret, and have it show the same.

        Raises:
            OSError: If it does not answer.
            LaunchError: If its secret is another.
        """
        theirs, ours = wire.line(STRANGER_SECONDS) or b"", secrets.token_hex(16).encode()
        wire.send_line(ours + b" " + _proof(self.cluster.secret, b"other", theirs, ours))
        answer = wire.line(STRANGER_SECONDS)
        if answer is None:
            wire.close()
            raise OSError("it does not talk as a launcher does")
        if not hmac.compare_digest(answer, _proof(self.cluster.secret, b"host 0", theirs, ours)):
            wire.close()
            here = "this host's" if self.cluster.secret else "none, as here"
            why = f"the secret of host 0 at {self.cluster.master_addr} is not {here}"
            raise LaunchError(f"{why}; {SECRET} or --secret-file must be the same on all hosts.", code=2)
        wire.trust()


def _proof(secret: bytes, who: bytes, random_0: bytes, random_1: bytes) -> bytes:
    """What only one who knows the secret can say, in answer to two random words."""
    return hmac.new(secret, b" ".join((who, random_0, random_1)), "sha256").hexdigest().encode()


def link(cluster: Cluster) -> Link:
    """Return this host's side, to be used in a ``with`` statement."""
    kind = Link if cluster.nodes == 1 else Host0 if cluster.node_rank == 0 else OtherHost
    return kind(cluster)
