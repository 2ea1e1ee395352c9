"""Authentication between the launchers of several hosts. Both sides are in one process, on the loopback address."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from threading import Thread

import pytest

from gaccum_ms.launch import hosts
from gaccum_ms.launch.cluster import Cluster, LaunchError
from gaccum_ms.launch.hosts import STRANGERS, Host0, OtherHost, link
from gaccum_ms.launch.link import numbers, proof_of
from gaccum_ms.launch.wire import MESSAGE_BYTES, STRANGER_BYTES

SECRET = b"a secret of sixteen letters"


def cluster(node_rank: int = 0, port: int = 0, secret: bytes = SECRET) -> Cluster:
    return Cluster(nodes=2, node_rank=node_rank, processes=1, master_port=port, secret=secret, start_timeout=20)


@contextlib.contextmanager
def host_0(secret: bytes = SECRET) -> Iterator[Host0]:
    """Host 0, on a port that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with link(cluster(port=port - 1, secret=secret)) as host:
        yield host


@pytest.fixture
def other(monkeypatch) -> Iterator:
    """A function that makes host 1, which takes the loopback address for another host's address."""
    monkeypatch.setattr(hosts, "is_local", lambda address: False)
    with contextlib.ExitStack() as stack:
        yield lambda host, secret=SECRET: stack.enter_context(
            link(cluster(1, host.cluster.master_port, secret)),
        )


def both_talk(host: Host0, other: OtherHost) -> list:
    """The messages that host 0 gets when host 1 has joined. Joining takes some turns of both."""

    other.send({"rank": 1, "code": 0})
    joins = Thread(target=other.receive)
    joins.start()
    heard: list = []
    until = time.monotonic() + 10
    while time.monotonic() < until and not heard:
        heard += host.receive()
        time.sleep(0.01)
    joins.join(10)
    return heard


@contextlib.contextmanager
def stranger(host: Host0, *sent: bytes) -> Iterator[socket.socket]:
    """Connects to host 0, and sends `sent` after the challenge."""
    with socket.create_connection(("127.0.0.1", host.cluster.master_port + 1), timeout=5) as connection:
        time.sleep(0.05)
        assert host.receive() == []
        assert len(connection.recv(100)) == 33, "host 0 speaks first"
        for data in sent:
            with contextlib.suppress(OSError):  # host 0 may have closed the connection
                connection.sendall(data)
                time.sleep(0.05)
                assert host.receive() == []
        yield connection


def is_cut_off(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1000):
            assert data == b"refused\n"
    return True


def test_hosts_with_one_secret_join(other):
    with host_0() as host:
        assert both_talk(host, other(host)) == [{"rank": 1, "code": 0}]
        assert host.absent() == []


def test_without_a_secret_hosts_join(other):
    with host_0(b"") as host:
        assert both_talk(host, other(host, b"")) == [{"rank": 1, "code": 0}]


END = json.dumps({"end": True, "error": "ended by a stranger", "code": 1}).encode()
WHO = json.dumps({"node": 1, **numbers(Cluster(nodes=2, processes=1))}).encode()


@pytest.mark.parametrize(
    "sent",
    [
        [WHO + b"\n" + END + b"\n"],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b"0123456789abcdef " + b"0" * 64 + b"\n", WHO + b"\n", END + b"\n"],
        [b"\n" * 10, END + b"\n"],
        [b"x" * (STRANGER_BYTES + 1)],
        [b"x" * 200, b"x" * 200],
        [b"\xff\x00" * 40 + b"\n"],
    ],
    ids=["messages", "a browser", "a wrong proof", "empty lines", "no end", "no end, slowly", "no text"],
)
def test_a_stranger_is_cut_off_unheard_and_the_launch_goes_on(other, sent):
    with host_0() as host:
        with stranger(host, *sent) as connection:
            assert is_cut_off(connection)
        assert host._unknown == {}
        assert both_talk(host, other(host)) == [{"rank": 1, "code": 0}]


def test_a_proof_is_good_for_one_connection():
    with host_0() as host:
        for challenge in (b"what another connection was sent", None):
            with socket.create_connection(("127.0.0.1", host.cluster.master_port + 1), timeout=5) as connection:
                time.sleep(0.05)
                host.receive()
                sent = connection.recv(100).strip()
                proof = proof_of(SECRET, b"other", challenge or sent, b"mine")
                connection.sendall(b"mine " + proof + b"\n")
                time.sleep(0.05)
                host.receive()
                good = proof_of(SECRET, b"host 0", sent, b"mine")
                assert connection.recv(100) == (b"refused\n" if challenge else good + b"\n")


def test_silent_strangers_do_not_keep_a_host_out(other, monkeypatch):
    monkeypatch.setattr(hosts, "STRANGER_SECONDS", 0.5)
    with host_0() as host, contextlib.ExitStack() as stack:
        for _ in range(STRANGERS + 5):
            address = "127.0.0.1", host.cluster.master_port + 1
            stack.enter_context(socket.create_connection(address, timeout=5))
        host.receive()
        assert len(host._unknown) == STRANGERS
        monkeypatch.setattr(hosts, "STRANGER_SECONDS", 0.1)
        time.sleep(0.2)
        host.receive()
        monkeypatch.setattr(hosts, "STRANGER_SECONDS", 5.0)
        assert both_talk(host, other(host)) == [{"rank": 1, "code": 0}]


def test_a_host_that_sends_a_line_without_an_end_is_cut_off(other):
    with host_0() as host:
        joined = other(host)
        both_talk(host, joined)
        joined._wire._socket.settimeout(10)

        def flood():
            with contextlib.suppress(OSError):
                while True:
                    joined._wire._socket.sendall(b"x" * 65536)

        floods = Thread(target=flood)
        floods.start()
        with pytest.raises(LaunchError, match=r"host 1 .* is lost"):
            for _ in range(1000):
                host.receive()
                assert len(host._wires[1]._buffer) <= MESSAGE_BYTES + 1
                time.sleep(0.01)
        host._wires[1].close()
        floods.join(15)


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, b"another secret of the same"), (SECRET, b""), (b"", SECRET)])
def test_a_host_with_another_secret_says_so_and_host_0_goes_on(other, capsys, ours, theirs):

    with host_0(ours) as host:
        stops = []
        serves = Thread(target=lambda: [(host.receive(), time.sleep(0.01)) for _ in iter(lambda: not stops, False)])
        serves.start()
        try:
            with pytest.raises(LaunchError, match="GACCUM_MS_SECRET or --secret-file must be the same") as error:
                other(host, theirs).receive()
        finally:
            stops.append(1)
            serves.join(10)
        assert error.value.code == 2
        assert host.absent() == [1]
    assert "a connection was refused that does not know the secret" in capsys.readouterr().err


def test_one_who_is_not_host_0_is_not_obeyed(other):
    """A stranger listens at the port, and answers without the secret."""

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"0123456789abcdef\n")
                connection.recv(1000)
                connection.sendall(b"0" * 64 + b"\n" + END + b"\n")

        serves = Thread(target=serve)
        serves.start()
        host = type("Host", (), {"cluster": cluster(port=server.getsockname()[1] - 1)})
        with pytest.raises(LaunchError, match=r"the secret of host 0 at 127\.0\.0\.1 is not this host's"):
            other(host).receive()
        serves.join(10)
