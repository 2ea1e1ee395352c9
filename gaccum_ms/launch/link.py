"""Shared by both sides of the connection between launchers, and the side of a single host."""

from __future__ import annotations

import hmac

from gaccum_ms.launch.cluster import Cluster
from gaccum_ms.launch.wire import Message


class Link:
    """This host's side of the connections between launchers. With one host there are none, and it does nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def meet(self, cluster: Cluster) -> Cluster | None:
        """Report that this host is ready to start the ranks of an attempt.

        Returns:
            Cluster, with the hosts that take part, once all of them are ready; None before.

        Raises:
            LaunchError: If too few hosts join, or host 0 ends the launch.
        """
        return cluster

    def send(self, message: Message) -> None:
        """Send a message to host 0, or from host 0 to all others."""

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting.

        Raises:
            LaunchError: If a host is lost, or joins with numbers that differ from host 0's.
        """
        return []


def numbers(cluster: Cluster) -> Message:
    """The numbers that must be equal on all hosts."""
    names = ("nodes", "processes", "max_restarts", "min_processes")
    return {name: getattr(cluster, name) for name in names}


def as_options(given: Message) -> str:
    """These numbers as options, without zeros."""
    shown = {f"--{name.replace('_', '-')}": given.get(name) for name in numbers(Cluster())}
    return " ".join(f"{option} {value}" for option, value in shown.items() if value)


def proof_of(secret: bytes, who: bytes, random_0: bytes, random_1: bytes) -> bytes:
    """The proof that a launcher has the secret: an HMAC of two random words."""
    return hmac.new(secret, b" ".join((who, random_0, random_1)), "sha256").hexdigest().encode()
