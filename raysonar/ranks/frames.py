"""Messages over a TCP connection between the driver and a rank: a length, a kind, and bytes."""

import socket
import struct
from enum import IntEnum

_HEADER = struct.Struct("<QB")


class Kind(IntEnum):
    """What a frame carries."""

    HELLO = 0
    """A rank's number and the group's secret, as the first frame of its connection."""
    STEP = 1
    """A packed plan or result."""
    FAILURE = 2
    """What went wrong at the rank, as text; its last frame."""


def send_frame(connection: socket.socket, kind: Kind, payload: bytes) -> None:
    """Raises OSError when the other side is gone, or takes nothing for the socket's timeout."""
    connection.sendall(_HEADER.pack(len(payload), kind) + payload)


def receive_frame(connection: socket.socket) -> tuple[Kind, bytes]:
    """Wait for a whole frame. Raises OSError when the other side is gone, or after the socket's timeout."""
    size, kind = _HEADER.unpack(_receive(connection, _HEADER.size))
    return Kind(kind), _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other side has closed the connection")
        view = view[count:]
    return bytes(buffer)
