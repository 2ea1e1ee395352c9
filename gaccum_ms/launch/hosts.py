"""Connects the launchers of several hosts: host 0's launcher listens on the port after MindSpore's scheduler, and the
others join it.

No rank starts before all hosts have joined. Then the other hosts report the events of their ranks, and host 0 decides:
all hosts end together, with the same error, or meet again and restart together. A lost host (its launcher was killed,
or its power or network failed) is detected by its connection. It may join again.

A launcher that connects must first prove that it has the hosts' secret, and host 0 proves it too. Neither sends it:

    host 0 to other:  random 0
    other to host 0:  random 1, HMAC(secret, "other" + random 0 + random 1)
    host 0 to other:  HMAC(secret, "host 0" + random 0 + random 1)
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import secrets
import socket
import sys
import time

from gaccum_ms.launch.cluster import SECRET, Cluster, LaunchError, bind, is_local
from gaccum_ms.launch.link import Link, as_options, numbers, proof_of
from gaccum_ms.launch.wire import Message, Wire

CONNECT_SECONDS = 1.0
STRANGERS = 32  # the largest number of connections that have not proved the secret
STRANGER_SECONDS = 10.0  # the time for the proof
REFUSED = b"refused"


class Host0(Link):
    """Host 0's side."""

    def __enter__(self) -> Link:
        self._now = self.cluster  # as of the last meeting
        self._wires: dict[int, Wire] = {}
        self._ready: dict[int, int] = {}  # the attempt for which a host is ready
        self._since: dict[int, float] = {}  # when the meeting for an attempt began
        self._unknown: dict[Wire, tuple[bytes, float]] = {}  # without proof: the random word sent to it, and when
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
        """The hosts that have not joined."""
        return [node for node in range(1, self.cluster.nodes) if node not in self._wires]

    def meet(self, cluster: Cluster) -> Cluster | None:
        self._now = dataclasses.replace(self._now, without=cluster.without)
        for node in cluster.without:
            if node in self._wires:
                self._send_away(self._wires[node])
        self._hear_who_is_ready(cluster)
        now, attempt, limit = time.monotonic(), cluster.attempt, self.cluster.start_timeout
        late = now - self._since.setdefault(attempt, now) > limit
        wanted = [node for node in range(1, self.cluster.nodes) if node not in cluster.without]
        here = [node for node in wanted if self._ready.get(node, 0) >= attempt]
        missing = [node for node in wanted if node not in here]
        enough = (1 + len(here)) * cluster.processes >= (cluster.min_processes or self.cluster.size)
        ending = any(node in self._wires for node in missing)
        if missing and not (enough and (late or (attempt > 1 and not ending))):
            if late:
                hosts = ", ".join(f"{node} (ranks {self.cluster.names_of(node)})" for node in missing)
                raise LaunchError(f"hosts that did not join within {limit:g} s: {hosts}.", code=124)
            return None
        self._now = dataclasses.replace(cluster, nodes=1 + len(here), hosts=(0, *here))
        for node in here:
            self._ready[node] = attempt - 1
            self._wires[node].send({"start": attempt, "hosts": " ".join(map(str, self._now.hosts))})
        return self._now

    def _hear_who_is_ready(self, cluster: Cluster) -> None:
        """Accept hosts that join; remove hosts that are lost."""
        try:
            for message in self.receive():
                if "end" in message:
                    raise LaunchError(str(message["error"]), int(str(message["code"])), again=False)
        except LaunchError as error:
            if not cluster.max_restarts or error.code != 1 or error.again is not None:
                raise
        for node in [node for node, wire in self._wires.items() if wire.closed]:
            self._wires.pop(node).close()
            self._ready.pop(node, None)

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
            messages += self._of_now(node, wire.receive())
            takes_part = node in self._now.hosts or not self._now.hosts
            if wire.closed and takes_part and not any("error" in message for message in messages):
                who = f"host {node} (ranks {self._now.names_of(node)})"
                raise LaunchError(f"{who} is lost: its launcher was killed or cannot be reached.")
        return messages

    def _of_now(self, node: int, messages: list[Message]) -> list[Message]:
        """The messages of this attempt. Messages that a host is ready for the next attempt are noted."""
        for message in messages:
            if "ready" in message:  # a host outside this attempt is ready for any
                self._ready[node] = int(str(message["ready"])) if node in self._now.hosts else sys.maxsize
        return [one for one in messages if one.pop("attempt", 1) == self._now.attempt or "end" in one]

    def _knows_secret(self, wire: Wire, random: bytes) -> bool:
        """Whether a connection has proved the secret; close it if the proof is wrong."""
        line = wire.line()
        if line is None:
            return False
        theirs, _, proof = line.partition(b" ")
        if not hmac.compare_digest(proof, proof_of(self.cluster.secret, b"other", random, theirs)):
            wire.send_line(REFUSED)
            wire.closed = True
            if not self._refused:
                print("note: a connection was refused that does not know the secret of this launch.", file=sys.stderr)
                self._refused = True
            return False
        wire.send_line(proof_of(self.cluster.secret, b"host 0", random, theirs))
        wire.trust()
        return True

    def _join(self, wire: Wire) -> list[Message]:
        """Accept a launcher that has sent its number; return its other messages."""
        messages = wire.receive()
        if messages or wire.closed:
            del self._unknown[wire]
        if not messages:
            return []
        who, *others = messages
        node = who.get("node")
        theirs, ours = as_options(who), as_options(numbers(self.cluster))
        if theirs == ours and node in self._now.without:
            self._send_away(wire)
            return []
        if theirs == ours and node in self.absent():
            self._wires[int(str(node))], self._ready[int(str(node))] = wire, sys.maxsize
            return self._of_now(int(str(node)), others)
        if theirs != ours:
            why = f"host {node} was started with {theirs}, but host 0 with {ours}; all hosts need the same."
        else:
            why = f"two hosts say --node-rank {node}; each must say its own."
        wire.send({"end": True, "error": why, "code": 2})
        wire.close()
        raise LaunchError(why, code=2)

    def _send_away(self, wire: Wire) -> None:
        why = "a rank of this host failed twice in succession; the others go on without it."
        wire.send({"end": True, "error": why, "code": 1})
        wire.close()


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
        self._come: list[Message] = []  # messages after "start" that were not returned yet
        self._attempt = 1
        self._give_up = time.monotonic() + self.cluster.start_timeout
        return self

    def __exit__(self, *error: object) -> None:
        if self._wire is not None:
            self._wire.close()

    def meet(self, cluster: Cluster) -> Cluster | None:
        if cluster.attempt != self._attempt:  # a host that joins is ready for any
            self.send({"ready": cluster.attempt})
            self._attempt = cluster.attempt
        messages = self.receive()
        for place, message in enumerate(messages):
            if "end" in message:
                why = str(message.get("error", "host 0 ended the launch before this host could take part."))
                raise LaunchError(why, int(str(message.get("code", 1))), again=False)
            if "start" in message:
                self._come = messages[place + 1 :]
                self._attempt, hosts = int(str(message["start"])), tuple(map(int, str(message["hosts"]).split()))
                place_here = hosts.index(self.cluster.node_rank)
                return dataclasses.replace(
                    cluster, attempt=self._attempt, nodes=len(hosts), hosts=hosts, node_rank=place_here
                )
        return None

    def send(self, message: Message) -> None:
        message = {**message, "attempt": self._attempt}
        if self._wire is None:
            self._waiting.append(message)
        else:
            self._wire.send(message)

    def receive(self) -> list[Message]:
        if self._wire is None:
            self._connect()
        if self._wire is None:
            return []
        messages, self._come = [*self._come, *self._wire.receive()], []
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
        for message in [{"node": self.cluster.node_rank, **numbers(self.cluster)}, *self._waiting]:
            self._wire.send(message)

    def _show_secret(self, wire: Wire) -> None:
        """Prove to host 0 that this host has the secret, and check host 0's proof.

        Raises:
            OSError: If host 0 does not answer.
            LaunchError: If its secret is another.
        """
        theirs, ours = wire.line(STRANGER_SECONDS) or b"", secrets.token_hex(16).encode()
        wire.send_line(ours + b" " + proof_of(self.cluster.secret, b"other", theirs, ours))
        answer = wire.line(STRANGER_SECONDS)
        if answer is None:
            wire.close()
            raise OSError("it does not talk as a launcher does")
        if not hmac.compare_digest(answer, proof_of(self.cluster.secret, b"host 0", theirs, ours)):
            wire.close()
            here = "this host's" if self.cluster.secret else "none, as here"
            why = f"the secret of host 0 at {self.cluster.master_addr} is not {here}"
            raise LaunchError(f"{why}; {SECRET} or --secret-file must be the same on all hosts.", code=2)
        wire.trust()


def link(cluster: Cluster) -> Link:
    """Return this host's side, for a ``with`` statement."""
    kind = Link if cluster.nodes == 1 else Host0 if cluster.node_rank == 0 else OtherHost
    return kind(cluster)
