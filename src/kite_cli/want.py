"""`kite yoco add`: a pool for a fleet whose services somebody else runs, as docker-compose does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli.embedded.options import (
    Blends,
    Critical,
    Engine,
    KvCacheBytes,
    MaxLoraRank,
    MaxModelLen,
    Node,
    Numbers,
    PoolOptions,
    Prewarmed,
    Ready,
    Served,
    StandbyMode,
    Standbys,
)
from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, Reason
from kite_cli.output import Progress, fail, say, say_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import JsonValue

    from kite_cli.place import Address
    from kite_schemas.policy import Pool

DEFAULTS = PoolOptions(base=Path())


def register(app: typer.Typer) -> None:
    """Add `add` to the commands of `kite yoco`."""
    app.command()(add)


def add(
    base: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the base, at the same path for its node.")],
    *,
    node: Node = DEFAULTS.node,
    name: Served = None,
    engine: Engine = DEFAULTS.engine,
    ready: Ready = DEFAULTS.ready,
    standbys: Standbys = DEFAULTS.standbys,
    standby_mode: StandbyMode = DEFAULTS.standby_mode,
    prewarmed: Prewarmed = DEFAULTS.prewarmed,
    critical: Critical = DEFAULTS.critical,
    blends: Blends = DEFAULTS.blends,
    max_lora_rank: MaxLoraRank = DEFAULTS.max_lora_rank,
    dtype: Numbers = DEFAULTS.dtype,
    max_model_len: MaxModelLen = DEFAULTS.max_model_len,
    kv_cache_bytes: KvCacheBytes = DEFAULTS.kv_cache_bytes,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would run.")] = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Have a node run instances of a base; the pool of the same base on that node is replaced.

    For a fleet whose services run already; `kite up` has its pool by itself. `kite yoco instances` shows them start.
    """
    from kite_cli.embedded.readiness import load_pool

    options = PoolOptions(
        base=base,
        node=node,
        name=name,
        engine=engine,
        ready=ready,
        standbys=standbys,
        standby_mode=standby_mode,
        prewarmed=prewarmed,
        critical=critical,
        dtype=dtype,
        max_model_len=max_model_len,
        blends=blends,
        max_lora_rank=max_lora_rank,
        kv_cache_bytes=kv_cache_bytes,
    )
    return _want(load_pool(options), directory, reason, dry_run=dry_run, as_json=as_json)


def _want(pool: "Pool", directory: Path | None, reason: str, *, dry_run: bool, as_json: bool) -> int:
    from kite_cli import place
    from kite_cli.asking import request
    from kite_cli.embedded.fleet import POOLS
    from kite_cli.running import run

    fleet = place.find(directory)
    wanted = with_pool(_present(fleet), pool)
    if not dry_run:
        value: list[JsonValue] = [one.model_dump(mode="json") for one in wanted]
        with Progress(f"adding {pool.spec.served_name} on {pool.node}"):
            outcome = run(request.change(fleet, [(POOLS, value)], reason=reason))
        if not outcome.ok:
            fail(f"the pool is refused: {outcome.detail}", "`kite yoco pool` shows what there is")
            return Exit.FAILED
    _tell(pool, dry_run=dry_run, as_json=as_json)
    return Exit.OK


def _present(fleet: "Address") -> "Sequence[Pool]":
    """Return the pools of the policy in force. Raises the errors of `place.reading`."""
    from kite_cli import place
    from kite_cli.view import latest

    with place.reading(fleet) as reader:
        policy = latest(reader).policy
    return policy.fleet.pools if policy else ()


def with_pool(present: "Sequence[Pool]", pool: "Pool") -> "tuple[Pool, ...]":
    """Return the pools with one more, in the place of that of the same base on the same node."""

    def key(one: "Pool") -> tuple[str, str]:
        return one.node, one.spec.served_name

    if key(pool) not in map(key, present):
        return (*present, pool)
    return tuple(pool if key(one) == key(pool) else one for one in present)


def _tell(pool: "Pool", *, dry_run: bool, as_json: bool) -> None:
    counts = {"ready": pool.ready, "standbys": pool.standbys, "prewarmed": pool.prewarmed or 0}
    base = pool.spec.served_name
    if as_json:
        engine = {"engine": pool.spec.kind, "base_digest": pool.base_digest}
        say_json({"base": base, "node": pool.node, **counts, **engine, "dry_run": dry_run})
    else:
        kept = f", {pool.prewarmed} prewarmed" if pool.prewarmed else ""
        does = "would run" if dry_run else "runs"
        say(f"{pool.node} {does} {base} on {pool.spec.kind}: {pool.ready} ready, {pool.standbys} asleep{kept}")
