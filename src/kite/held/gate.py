"""Where an engine waits before it reads its weights: a socket that it listens at until somebody lets it on.

The socket has a name in Linux's abstract namespace, so that nothing is left of it when the engine is gone. Whoever
connects is told that the engine is there; who answers `GO` lets it on, and who only closes has asked. Only the engine's
own user, and root, are listened to.
"""

import os
import socket
import struct
from collections.abc import Mapping

GATE = "KITE_GATE"  # the variable that names the socket; without it nobody waits
HELD = b"held\n"
GO = b"go\n"
SAY_S = 5.0  # for one who has connected to say something: the next in line waits as long
PEER = struct.Struct("3i")  # <sys/socket.h>, struct ucred: process, user, group


def address(name: str) -> str:
    """Return the address of a gate.

    >>> address("kite-gate-8000")
    '\\x00kite-gate-8000'
    """
    return f"\0{name}"


def wait(environment: Mapping[str, str] = os.environ) -> bool:
    """Wait until somebody opens the gate that the environment names; False at once when it names none.

    Raises OSError when the name is taken.
    """
    name = environment.get(GATE)
    if not name:
        return False
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(name))
        listener.listen()
        while not opened(listener):
            continue
    return True


def opened(listener: socket.socket) -> bool:
    """Hear the next one, and say whether it opened the gate; one that is not understood did not."""
    visitor, _ = listener.accept()
    with visitor:
        visitor.settimeout(SAY_S)
        if peer(visitor)[1] not in (os.geteuid(), 0):
            return False
        try:
            visitor.sendall(HELD)
            return visitor.recv(len(GO)) == GO
        except OSError:  # it went away, or said nothing
            return False


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group at the other end, as they were when it connected, or began to listen."""
    process, user, group = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return process, user, group
