"""What an embedded fleet can be told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kite_cli.place import DEFAULT_DIR

EngineKind = Literal["vllm", "fake"]
Dtype = Literal["bfloat16", "float32"]
Mode = Literal["paused", "kv", "l1", "l2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `kite up` takes.

    `name` is the served name of the base (default: its folder's), `max_model_len` in tokens (default: what the base
    has, at most 2 048), `nats_port` the port of the bus (default: a free one), `kv_cache_bytes` per engine.
    `prewarmed` processes are kept without the weights, more often in a `critical` pool. `max_loras` is 2 * blends + 2:
    of each blend the version in force and the one before, and room for two that are being loaded. `metrics_port` is the
    arbitrator's, those behind it are yoco's, upcycle's and the guard's (default: none).
    """

    base: Path
    name: str | None = None
    ready: int = 1
    standbys: int = 1
    standby_mode: Mode = "paused"
    prewarmed: int = 0
    critical: bool = False
    engine: EngineKind = "vllm"
    dir: Path = DEFAULT_DIR
    node: str = "local"
    nats_port: int | None = None
    metrics_port: int | None = None
    dtype: Dtype = "bfloat16"
    max_model_len: int | None = None
    max_loras: int = 4
    max_lora_rank: int = 8
    block_size: int = 32
    kv_cache_bytes: int = 512 * 1024**2
    log_level: str = "info"
