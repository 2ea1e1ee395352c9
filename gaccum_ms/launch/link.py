"""What both sides of the connection between launchers have in common, and the side of a host that is alone."""

from __future__ import annotations

import hmac

from gaccum_ms.launch.cluster import Cluster
from gaccum_ms.launch.wire import Message


class Link:
    """This host's side of the connections between launchers. With one host there is none, and it does nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def meet(self, cluster: Cluster) -> Cluster | None:
        """Say that this host is ready to start the ranks of an attempt.

        Returns:
            Cluster, as it is now that all have met who take part; None until then.

        Raises:
            LaunchError: If too few hosts come, or host 0 says that there will be no attempt.
        """
        return cluster

    def send(self, message: Message) -> None:
        """Send a message to host 0, or from there to all others."""

    def receive(self) -> list[Message]:
        """Return the messages that have come; does not wait for more.

        Raises:
            LaunchError: If a host is lost, or joins with other numbers than host 0's.
        """
        return []


def numbers(cluster: Cluster) -> Message:
    """What all hosts must have alike."""
    names = ("nodes", "processes", "max_restarts", "min_processes")
    return {name: getattr(cluster, name) for name in names}


def as_options(given: Message) -> str:
    """Those numbers as options, without what is not asked for."""
    shown = {f"--{name.replace('_', '-')}": given.get(name) for name in numbers(Cluster())}
    return " ".join(f"{option} {value}" for option, value in shown.items() if value)


def proof_of(secret: bytes, who: bytes, random_0: bytes, random_1: bytes) -> bytes:
    """What only one who knows the secret can say, in answer to two random words."""
    return hmac.new(secret, b" ".join((who, random_0, random_1)), "sha256").hexdigest().encode()
