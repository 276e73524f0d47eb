"""How servers hold the KV cache and which ranks they take: from a running server, from options, or the defaults."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kite.errors import Unreachable, UsageError
from kite_cli.embedded.options import Options

if TYPE_CHECKING:
    from kite.engine import Facts
    from kite_upcycle.base import Base
    from kite_upcycle.layout import Scalar, Serving

MAX_LORA_RANK = Options(base=Path()).max_lora_rank
PARAMS_SHARE_MAX_PPM = 8_000  # as in the shipped policy


def told(
    *, kv_dtype: str | None, block_size: int | None, kv_layout: str | None, tp: int | None, pp: int | None
) -> "dict[str, Scalar]":
    """Return what the options say, by the names of `Serving`."""
    fields: dict[str, Scalar] = {
        "kv_dtype": kv_dtype,
        "block_size": block_size,
        "kv_layout": kv_layout,
        "tp": tp,
        "pp": pp,
    }
    return {name: value for name, value in fields.items() if value is not None}


def of(facts: "Facts") -> "dict[str, Scalar]":
    """Return what a server told, by the names of `Serving`."""
    return told(
        kv_dtype=facts.kv_dtype, block_size=facts.block_size, kv_layout=facts.kv_layout, tp=facts.tp, pp=facts.pp
    )


def complete(
    *, kv_dtype: str | None, block_size: int | None, kv_layout: str | None, tp: int | None, pp: int | None
) -> "Serving":
    """Return what the options say, and the defaults where they say nothing."""
    from kite_upcycle.layout import Serving

    usual = Serving()
    return Serving(
        kv_dtype=kv_dtype or usual.kv_dtype,
        block_size=block_size or usual.block_size,
        kv_layout=kv_layout or usual.kv_layout,
        tp=tp or usual.tp,
        pp=pp or usual.pp,
    )


def ask(url: str) -> "Facts":
    """Return what a running server tells of itself. Raises UsageError, Unreachable or EngineError."""
    from kite.engine import Engine, EngineUnreachable
    from kite_cli.running import run

    async def asked() -> "Facts":
        async with Engine(_checked(url)) as engine:
            return await engine.facts()

    try:
        return run(asked())
    except EngineUnreachable as error:
        raise Unreachable(str(error), hint=error.hint) from error


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise UsageError(f"{url!r} is no address of a server", hint="as in http://127.0.0.1:8000")
    return url.rstrip("/")


def notes(facts: "Facts", base: "Base", max_lora_rank: int) -> Iterator[str]:
    """Say what the server serves if that has another name than the base, and what it does not tell."""
    folder = (facts.root or facts.base).rstrip("/").rsplit("/", 1)[-1]
    if folder not in base.names:
        yield f"the server serves {facts.base}{f' from {facts.root}' if facts.root else ''}, not {base.path.name}"
    if facts.max_lora_rank is None:
        yield f"the server does not tell its highest rank (vLLM does in its development mode); {max_lora_rank} counts"
