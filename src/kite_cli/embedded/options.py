"""What a pool, and an embedded fleet with one, can be told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from kite_cli.place import DEFAULT_DIR

EngineKind = Literal["vllm", "fake"]
Dtype = Literal["bfloat16", "float32"]
Mode = Literal["paused", "kv", "l1", "l2"]

COUNT_MAX = 64
SLOTS_PER_BLEND = 2  # of each blend the version in force and the one before
SLOTS_BESIDE = 2  # for versions that are being loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What a pool is told.

    `name` is the served name of the base (default: its folder's), `max_model_len` in tokens (default: what the base
    has, at most 2 048), `kv_cache_bytes` per engine. `prewarmed` processes are kept without the weights, more often in
    a `critical` pool.
    """

    base: Path
    node: str = "local"
    name: str | None = None
    engine: EngineKind = "vllm"
    ready: int = 1
    standbys: int = 1
    standby_mode: Mode = "paused"
    prewarmed: int = 0
    critical: bool = False
    blends: int = 1
    max_lora_rank: int = 8
    dtype: Dtype = "bfloat16"
    max_model_len: int | None = None
    block_size: int = 32
    kv_cache_bytes: int = 512 * 1024**2

    @property
    def max_loras(self) -> int:
        """How many versions each engine has room for."""
        return SLOTS_PER_BLEND * self.blends + SLOTS_BESIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PoolOptions):
    """What `kite up` takes.

    `nats_port` is the port of the bus (default: a free one), `metrics_port` the arbitrator's, those behind it are
    yoco's, upcycle's and the guard's (default: none).
    """

    dir: Path = DEFAULT_DIR
    nats_port: int | None = None
    metrics_port: int | None = None
    log_level: str = "info"


Node: TypeAlias = Annotated[str, typer.Option("--node", help="Name of the node that runs it.")]
Served: TypeAlias = Annotated[str | None, typer.Option("--name", help="Served name of the base (else its folder's).")]
Engine: TypeAlias = Annotated[EngineKind, typer.Option("--engine", help="The server to run.")]
Ready: TypeAlias = Annotated[int, typer.Option("--ready", min=0, max=COUNT_MAX, help="Instances that serve.")]
Standbys: TypeAlias = Annotated[int, typer.Option("--standbys", min=0, max=COUNT_MAX, help="Instances that sleep.")]
StandbyMode: TypeAlias = Annotated[
    Mode, typer.Option("--standby-mode", help="How standbys sleep, where the engine offers it.")
]
Prewarmed: TypeAlias = Annotated[
    int, typer.Option("--prewarmed", min=0, max=COUNT_MAX, help="Processes kept ready to load the weights.")
]
Critical: TypeAlias = Annotated[
    bool, typer.Option("--critical", help="Prewarm more often (90 s instead of 120 s as shipped).")
]
Blends: TypeAlias = Annotated[
    int,
    typer.Option("--blends", min=1, max=COUNT_MAX, help="Blends to have room for: 2 versions of each, and 2."),
]
MaxLoraRank: TypeAlias = Annotated[int, typer.Option("--max-lora-rank", help="Highest rank of a blend.")]
Numbers: TypeAlias = Annotated[Dtype, typer.Option("--dtype", help="Numbers of the engines.")]
MaxModelLen: TypeAlias = Annotated[
    int | None, typer.Option("--max-model-len", min=1, help="Context in tokens (else the base's, at most 2048).")
]
KvCacheBytes: TypeAlias = Annotated[int, typer.Option("--kv-cache-bytes", min=1, help="KV cache of each engine.")]
"""The options of the command line that say what a pool is, for each command that makes one."""
