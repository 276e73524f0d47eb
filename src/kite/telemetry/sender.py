"""The thread of an engine that sends its readings: every 100 ms, idle or not, and never to the engine's harm."""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

from kite.clock import US_PER_S, mono_us
from kite.telemetry.reading import Reading, Totals, encode

SOCKET = "KITE_TELEMETRY_SOCKET"  # a name of Linux's abstract namespace behind `@`, or a path
INSTANCE = "KITE_TELEMETRY_INSTANCE"
INTERVAL_US = 100_000
SEND_S = 0.05  # for a receiver that is behind: its queue holds about ten datagrams

Read: TypeAlias = Callable[[], Totals | None]
"""Returns what the engine knows now; None when it cannot tell."""


def variables(socket_name: str, instance: str) -> dict[str, str]:
    """Return the variables that make an engine send its readings to a socket, as those of `instance`."""
    return {SOCKET: socket_name, INSTANCE: instance}


def address(name: str) -> str:
    """Return the address of a socket from its name in the environment.

    >>> address("@kite")
    '\\x00kite'
    """
    return f"\0{name[1:]}" if name.startswith("@") else name


def start(read: Read, environment: Mapping[str, str] = os.environ) -> "Sender | None":
    """Send readings from a thread of their own, if the environment names a socket."""
    name, instance = environment.get(SOCKET), environment.get(INSTANCE)
    if not name or not instance:
        return None
    sender = Sender(name, instance, read)
    sender.start()
    return sender


class Sender(threading.Thread):
    """Sends at the multiples of the interval on the monotonic clock, so that receiver and senders keep step.

    A socket that is gone, or full, costs the reading and nothing else: the next one holds all that it said.
    """

    def __init__(self, name: str, instance: str, read: Read, interval_us: int = INTERVAL_US) -> None:
        super().__init__(name="kite-telemetry", daemon=True)
        self._address = address(name)
        self._instance = instance
        self._read = read
        self._interval_us = interval_us
        self._started_us = mono_us()
        self._ended = threading.Event()
        self.sent = 0
        self.lost = 0

    def run(self) -> None:
        """Send until told to end."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(SEND_S)
            while not self._ended.wait(wait_us(mono_us(), self._interval_us) / US_PER_S):
                self._send(channel)

    def end(self) -> None:
        """End the thread and wait for it."""
        self._ended.set()
        self.join()

    def _send(self, channel: socket.socket) -> None:
        totals = self._read()
        if totals is None:
            return
        reading = Reading(
            instance=self._instance,
            started_us=self._started_us,
            seq=self.sent + self.lost + 1,
            sent_us=mono_us(),
            totals=totals,
        )
        try:
            channel.sendto(encode(reading), self._address)
            self.sent += 1
        except OSError:  # nobody listens, or too slowly
            self.lost += 1


def wait_us(now_us: int, interval_us: int) -> int:
    """Return the time until the next multiple of the interval, never 0.

    >>> wait_us(1_230_000, 100_000)
    70000
    """
    return interval_us - now_us % interval_us
