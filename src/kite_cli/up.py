"""`kite up`: an embedded fleet for one's own base, until Ctrl-C."""

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
    Options,
    Prewarmed,
    Ready,
    Served,
    StandbyMode,
    Standbys,
)
from kite_cli.exits import Exit
from kite_cli.flags import AsJson
from kite_cli.output import Progress, duration, note, say, say_json
from kite_cli.place import DEFAULT_DIR

if TYPE_CHECKING:
    import asyncio

    from kite_cli.embedded.fleet import Fleet
    from kite_schemas.envelope import Event

DEFAULTS = Options(base=Path())


def register(app: typer.Typer) -> None:
    """Add `kite up`."""
    app.command(name="up")(up)


def up(
    *,
    base: Annotated[Path, typer.Option("--base", metavar="PATH", help="Folder of the base model.")],
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
    node: Node = DEFAULTS.node,
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", envvar="KITE_DIR", help="Folder of the fleet.")
    ] = DEFAULT_DIR,
    nats_port: Annotated[
        int | None, typer.Option("--nats-port", min=1, max=65_535, help="Port of the bus (else a free one).")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            envvar="KITE_METRICS_PORT",
            min=1,
            max=65_532,
            help="First of four ports for metrics: arbitrator, yoco, upcycle, guard (else none).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Run an embedded fleet until Ctrl-C; the same DIR again resumes the same ledger."""
    from kite_cli.running import run

    options = Options(
        base=base,
        name=name,
        ready=ready,
        standbys=standbys,
        standby_mode=standby_mode,
        prewarmed=prewarmed,
        critical=critical,
        engine=engine,
        dir=directory,
        node=node,
        nats_port=nats_port,
        metrics_port=metrics_port,
        dtype=dtype,
        max_model_len=max_model_len,
        blends=blends,
        max_lora_rank=max_lora_rank,
        kv_cache_bytes=kv_cache_bytes,
    )
    run(_until_told(options, as_json=as_json))
    return Exit.OK


async def _until_told(options: Options, *, as_json: bool) -> None:
    """Run the fleet; the first Ctrl-C or SIGTERM ends it in order, in whichever phase it is, later ones are told so."""
    import asyncio
    import signal

    task = asyncio.ensure_future(_serve(options, as_json=as_json))
    loop = asyncio.get_running_loop()
    told: list[bool] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end, task, told)
    try:
        await task
    except asyncio.CancelledError:
        if not told:
            raise
        note("fleet stopped")


def _end(task: "asyncio.Task[None]", told: list[bool]) -> None:
    note("still stopping" if told else "stopping the fleet")
    if not told:
        told.append(True)
        task.cancel()


async def _serve(options: Options, *, as_json: bool) -> None:
    from kite_cli.embedded.fleet import embedded

    with Progress("starting the fleet") as progress:
        async with embedded(options) as fleet:
            fleet.listen(progress.step)
            progress.step(f"bus at {fleet.nats_url}; {', '.join(fleet.services)} run; logs in {fleet.logs}")
            progress.waiting("waiting for the instances")
            await fleet.wait_settled(on_event=lambda event: _step(progress, event))
            progress.stop()
            _ready(fleet, as_json=as_json)
            await fleet.follow(lambda event: _step(progress, event))


def _step(progress: Progress, event: "Event") -> None:
    """Print what happens to an instance; what requests bring about is for those who made them."""
    from kite_cli.embedded.readiness import SUPERSEDED
    from kite_schemas.yoco import (
        InstanceChanged,
        InstanceReady,
        OrderFailed,
        OrderRefused,
        PrewarmOrdered,
        StartOrdered,
    )

    match event.data:
        case StartOrdered(instance=instance, device=device):
            progress.step(f"{instance} starting on {device}")
        case PrewarmOrdered(instance=instance, device=device):
            progress.step(f"{instance} prewarming on {device}")
        case InstanceReady(instance=instance, path=path, t_first_token_us=took_us):
            progress.step(f"{instance} ready ({path}, {duration(took_us)})")
        case InstanceChanged(instance=instance, to_state=state, code=code) if state not in ("starting", "warming"):
            progress.step(f"{instance} {state} ({code})")
        case OrderFailed(code=code) if code in SUPERSEDED:
            pass
        case OrderFailed(instance=instance, code=code, message=message):
            progress.step(f"{instance} failed: {code}: {message}")
        case OrderRefused(instance=instance, code=code, message=message):
            progress.step(f"{instance} refuses: {code}: {message}")
        case _:
            pass


def _ready(fleet: "Fleet", *, as_json: bool) -> None:
    pool = fleet.pool
    if as_json:
        record = {
            "event": "fleet_ready",
            "base": fleet.base,
            "ready": pool.ready,
            "standbys": pool.standbys,
            "prewarmed": pool.prewarmed or 0,
            "dir": str(fleet.dir),
            "nats_url": fleet.nats_url,
            "ledger_url": fleet.ledger_url,
            "adapter_root": str(fleet.adapter_root),
        }
        say_json(record)
    else:
        kept = f", {pool.prewarmed} prewarmed" if pool.prewarmed else ""
        counts = f"{pool.ready} ready, {pool.standbys} standby{kept}"
        say(f"fleet ready: {fleet.base}, {counts}; --dir {fleet.dir}; Ctrl-C stops it")
