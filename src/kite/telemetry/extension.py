"""What vLLM's worker tells and does for us: the class that `--worker-extension-cls` mixes into it.

Its methods run in the worker's process, between two steps of the engine, when they are called by `/collective_rpc`.
"""

from typing import Protocol, cast

EXTENSION = "kite.telemetry.extension.Extension"
ALLOCATOR, ADAPTERS, DROP = "kite_allocator", "kite_adapters", "kite_drop"
"""The names of its methods, as `/collective_rpc` takes them."""

RESERVED, INACTIVE = "reserved_bytes", "inactive_split_bytes"


class Worker(Protocol):
    """The part of vLLM's worker that is used here."""

    def list_loras(self) -> set[int]:
        """Return the engine's numbers of the adapters that it holds."""
        ...

    def remove_lora(self, lora_id: int) -> bool:
        """Let go of one; False when it is not there."""
        ...


class Extension:
    """A worker that tells what its allocator cannot give away, and which adapters it holds, and lets go of one."""

    def kite_allocator(self) -> dict[str, int] | None:
        """Return what is reserved, and how much of that is of no use to anything larger, in bytes.

        None on a worker without a GPU, whose memory torch does not manage so.
        """
        import torch

        if not torch.cuda.is_available():
            return None
        stats = torch.cuda.memory_stats()
        return {
            RESERVED: int(stats["reserved_bytes.all.current"]),
            INACTIVE: int(stats["inactive_split_bytes.all.current"]),
        }

    def kite_adapters(self) -> list[int]:
        """Return the engine's own numbers of the adapters that it holds, unloaded ones that were not evicted too."""
        return sorted(cast("Worker", self).list_loras())

    def kite_drop(self, slot: int) -> list[int]:
        """Let go of one adapter and return the numbers that are left; one that is not there is fine."""
        cast("Worker", self).remove_lora(slot)
        return self.kite_adapters()
