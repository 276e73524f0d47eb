"""The socket on which the engines of a node send their readings."""

import hashlib
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Self

from kite.telemetry import READING_MAX_BYTES, MalformedReading, Reading, address, decode

PREFIX = "@kite-telemetry-"
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: <sys/socket.h>, struct ucred
BURST = 256  # datagrams read in one go; the kernel queues about ten, so that this is never reached in order


class Listener:
    """A datagram socket in Linux's abstract namespace: no path to outgrow 108 bytes, and nothing left behind.

    Engines share their yoco's network namespace, and with it this one. Everybody there could send, so the kernel is
    asked who did: only this user's datagrams are taken.
    """

    def __init__(self, name: str | None = None) -> None:
        """Bind it; without a name it takes one that nobody else has. Raises OSError when somebody has it."""
        self.name = name or f"{PREFIX}{secrets.token_hex(8)}"
        self.refused = 0  # malformed, or of another user
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(address(self.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; senders lose their readings and do not mind."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the descriptor, for an event loop."""
        return self._socket.fileno()

    def receive(self) -> list[Reading]:
        """Return what has come, without waiting."""
        found: list[Reading] = []
        for _ in range(BURST):
            try:
                raw, ancillary, _flags, _sender = self._socket.recvmsg(
                    READING_MAX_BYTES, socket.CMSG_SPACE(CREDENTIALS.size)
                )
            except BlockingIOError:
                break
            if (reading := self._accepted(raw, ancillary)) is not None:
                found.append(reading)
        return found

    def _accepted(self, raw: bytes, ancillary: list[tuple[int, int, bytes]]) -> Reading | None:
        try:
            reading = decode(raw) if sent_by_us(ancillary) else None
        except MalformedReading:
            reading = None
        self.refused += reading is None
        return reading


def channel_name(folder: Path) -> str:
    """Return the name of a yoco's socket, from its state folder: engines that it adopts send to the same one."""
    return f"{PREFIX}{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}"


def sent_by_us(ancillary: list[tuple[int, int, bytes]]) -> bool:
    """Say whether the kernel vouches that a process of this user sent it."""
    return any(
        level == socket.SOL_SOCKET
        and kind == socket.SCM_CREDENTIALS
        and len(content) >= CREDENTIALS.size
        and CREDENTIALS.unpack_from(content)[1] == os.getuid()
        for level, kind, content in ancillary
    )
