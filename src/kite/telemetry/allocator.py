"""What torch's allocator holds on a GPU, asked of vLLM's worker: the class that `--worker-extension-cls` mixes into it.

Its method runs in the worker's process, between two steps of the engine, when yoco calls it by `/collective_rpc`.
"""

EXTENSION = "kite.telemetry.allocator.Allocator"
METHOD = "kite_allocator"
RESERVED, INACTIVE = "reserved_bytes", "inactive_split_bytes"


class Allocator:
    """A worker that tells what its allocator has reserved, and how much of that it cannot give to anything larger."""

    def kite_allocator(self) -> dict[str, int] | None:
        """Return both in bytes; None on a worker without a GPU, whose memory torch does not manage so."""
        import torch

        if not torch.cuda.is_available():
            return None
        stats = torch.cuda.memory_stats()
        return {
            RESERVED: int(stats["reserved_bytes.all.current"]),
            INACTIVE: int(stats["inactive_split_bytes.all.current"]),
        }
