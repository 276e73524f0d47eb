"""What an engine says of itself: cumulative readings, sent ten times a second to the yoco that started it.

Used inside the engine's process: `plugin` there is vLLM's, and nothing here imports more than msgspec.
"""

from kite.telemetry.reading import READING_MAX_BYTES, MalformedReading, Reading, Totals, decode, encode
from kite.telemetry.sender import INSTANCE, INTERVAL_US, SOCKET, Sender, address, start, variables

__all__ = [
    "INSTANCE",
    "INTERVAL_US",
    "READING_MAX_BYTES",
    "SOCKET",
    "MalformedReading",
    "Reading",
    "Sender",
    "Totals",
    "address",
    "decode",
    "encode",
    "start",
    "variables",
]
