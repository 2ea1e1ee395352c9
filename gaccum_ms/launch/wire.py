"""One connection between the launchers of two hosts, with bounded memory for any input."""

from __future__ import annotations

import json
import select
import socket
import time

Message = dict[str, object]

SEND_SECONDS = 10.0
LOST_AFTER_SECONDS = 20  # a host that does not answer for so long is lost
STRANGER_BYTES = 256  # the limit of a line before the proof of the secret
MESSAGE_BYTES = 4 << 20  # the limit of a message: the ends of a few logs, in JSON


class Wire:
    """One connection, which carries lines; after the proof of the secret, each is a message in JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self._limit = STRANGER_BYTES
        self.trusted = False
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

    def trust(self) -> None:
        """Accept messages from now on."""
        self.trusted, self._limit = True, MESSAGE_BYTES

    def send(self, message: Message) -> None:
        """Send a message; if that fails, the connection is closed."""
        self.send_line(json.dumps(message).encode())

    def send_line(self, line: bytes) -> None:
        """Send a line; if that fails, the connection is closed."""
        try:
            self._socket.sendall(line + b"\n")
        except OSError:
            self.closed = True

    def line(self, seconds: float = 0.0) -> bytes | None:
        """Return the next line, after waiting at most `seconds` for it."""
        give_up = time.monotonic() + seconds
        while True:
            self._read(max(0.0, give_up - time.monotonic()))
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                return line
            if self.closed or time.monotonic() >= give_up:
                return None

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting. A line that is no message closes the connection."""
        self._read()
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):
            self.closed = True
            return []

    def _read(self, seconds: float = 0.0) -> None:
        """Read the data that have arrived, or wait `seconds` for the first. A line that is too long closes the
        connection."""
        try:
            while not self.closed and select.select([self._socket], [], [], seconds)[0]:
                seconds = 0.0
                data = self._socket.recv(min(65536, self._limit + 1 - len(self._buffer)))
                self._buffer += data
                self.closed = not data
                if len(self._buffer) > self._limit:
                    if b"\n" not in self._buffer:
                        self.closed, self._buffer = True, b""
                    return
        except OSError:
            self.closed = True

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._socket.close()
