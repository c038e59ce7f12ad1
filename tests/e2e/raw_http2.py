"""HTTP/2 frames by hand, for clients that break the rules."""

from __future__ import annotations

import socket
import struct
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def field(name: bytes, value: bytes) -> bytes:
    """A header as HPACK writes it without any table: both lengths below 127."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def request_headers(path: str) -> bytes:
    return b"".join(field(*f) for f in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"localhost"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc")))


def message(size: int) -> bytes:
    """The prefix of a gRPC message."""
    return b"\0" + struct.pack(">I", size)


class Connection:
    """One that has said hello, unless told not to."""

    def __init__(self, address: tuple[str, int], settings: bytes = b"", greet: bool = True):
        self.socket = socket.create_connection(address)
        self.socket.settimeout(0.2)
        self.next_stream = 1
        self.received = b""
        if greet:
            self.send(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0))

    def send(self, data: bytes) -> bool:
        """False when the server has closed the connection, or takes no more."""
        try:
            self.socket.sendall(data)
            return True
        except OSError:
            return False

    def open(self, path: str, end: bool = False) -> int:
        """Headers of a new call, as bytes to send; the stream's number is in next_stream - 2."""
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        self.send(frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, request_headers(path)))
        return stream

    def closed(self, within: float) -> bool:
        """The server closes the connection; what it says until then is in `received`."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            try:
                data = self.socket.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                return True
            if not data:
                return True
            self.received = (self.received + data)[-65536:]
        return False

    def close(self) -> None:
        self.socket.close()
