"""`kite init`: the folder of a deployment with all its secrets. `kite provision`: the streams of its bus."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli.exits import Exit
from kite_cli.flags import AsJson
from kite_cli.output import count, note, say, say_json

if TYPE_CHECKING:
    from kite_cli.deploy.folder import Plan

TLS_MISSING = (
    "the bus does not start before tls/ holds server.crt, which names the host `nats`, server.key (mode 0600), and "
    "ca.crt, the authority that signed server.crt"
)


def register(app: typer.Typer) -> None:
    """Add `init` and `provision`."""
    app.command()(init)
    app.command()(provision)


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make; it must not exist.")],
    *,
    node: Annotated[
        list[str] | None, typer.Option("--node", metavar="NAME", help="A node of the fleet; once for each (local).")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Have the bus encrypt; DIR/tls takes the certificates.")] = False,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where the bus listens.")
    ] = "0.0.0.0:4222",  # inside its container: docker-compose.yml publishes it on loopback
    monitor: Annotated[
        str, typer.Option("--monitor", metavar="HOST:PORT", help="Where its monitoring listens, which asks for no key.")
    ] = "0.0.0.0:8222",  # likewise, and not published: the arbitrator asks it how the bus syncs
    store: Annotated[
        str, typer.Option("--store", metavar="PATH", help="Folder of its streams, as the bus sees it.")
    ] = "/data/jetstream",
    owner: Annotated[
        int | None, typer.Option("--owner", metavar="UID", min=1, help="Give all files to this user (as root).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be written.")] = False,
    as_json: AsJson = False,
) -> int:
    """[changes] Write the folder of a deployment: nats.conf, keys, seeds, a database password, .env. Replaces nothing.

    Everything is its owner's alone. The bus knows each service and node by an nkey of its own, which may do what that
    service does; facts and requests are signed besides. Then: docker-compose up, and `kite key introduce DIR`.
    """
    import os

    from kite_cli.deploy import folder
    from kite_cli.deploy.conf import Server

    server = Server(_address("--listen", listen), _address("--monitor", monitor), store, tls)
    mine = (os.getuid(), os.getgid()) if owner is None else (owner, owner)
    plan = folder.Plan(tuple(node or ["local"]), server, *mine)
    names = folder.files(plan) if dry_run else folder.write(directory, plan)
    _tell(directory, plan, names, dry_run=dry_run, as_json=as_json)
    return Exit.OK


def _address(option: str, text: str) -> str:
    """Return HOST:PORT. Raises UsageError for anything else."""
    from kite.errors import UsageError

    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65_535:  # noqa: PLR2004 - the last port
        raise UsageError(f"{option} {text!r} is no address", hint="HOST:PORT, as in 127.0.0.1:4222")
    return text


def _tell(directory: Path, plan: "Plan", names: list[Path], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        written = [str(directory / name) for name in names]
        say_json({"dir": str(directory), "nodes": list(plan.nodes), "files": written, "dry_run": dry_run})
    else:
        for name in names:
            say(f"{'would write' if dry_run else 'wrote'} {directory / name}")
    if plan.server.tls:
        note(TLS_MISSING)
    if not plan.owner:
        note("the files are root's: what runs as another user cannot read them (--owner UID)")


def provision(
    *,
    facts_gib: Annotated[
        int, typer.Option("--facts-gib", min=1, metavar="GIB", help="Bound of facts and of decisions, each.")
    ] = 4,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", min=1, max=5, metavar="N", help="On how many servers of a cluster (else unchanged)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Make the streams of the bus at KITE_NATS_URL, or adjust their limits; again is no error.

    Where `kite init` gave each service its own permissions nobody else may: the provisioner's seed does.
    """
    from kite.bus.streams import GIB
    from kite_cli.running import run

    found = run(_provision(facts_gib * GIB, replicas))
    for stream, (limit_bytes, copies) in found.items():
        if as_json:
            say_json({"stream": stream, "limit_bytes": limit_bytes, "replicas": copies})
        else:
            say(f"{stream}: at most {limit_bytes / GIB:g} GiB, {count(copies, 'replica')}")
    return Exit.OK


async def _provision(facts_bytes: int, replicas: int | None) -> dict[str, tuple[int, int]]:
    """Return each stream's bound in bytes and number of copies. Raises UsageError, and as `connect` and `provision`."""
    from kite.bus import DEC, EVT, TEL, Bus
    from kite.errors import UsageError
    from kite_cli.place import login
    from kite_cli.settings import PlaceSettings

    url = PlaceSettings().nats_url
    if not url:
        raise UsageError("no bus is named", hint="set KITE_NATS_URL; `kite up` makes its streams by itself")
    async with await Bus.connect(url, "provisioner", login=login()) as bus:
        await bus.provision(facts_bytes=facts_bytes, replicas=replicas)
        return {
            stream: ((await bus.stream(stream)).limit_bytes, (await bus.storage(stream)).replicas)
            for stream in (EVT, DEC, TEL)
        }
