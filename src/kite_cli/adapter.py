"""`kite adapter`: what can be said of adapters, and done to them, without a fleet."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kite.errors import MissingPath
from kite_cli.exits import Exit
from kite_cli.flags import AsJson, group
from kite_cli.output import count, fail, note, percent, say, say_json
from kite_cli.serving import MAX_LORA_RANK, PARAMS_SHARE_MAX_PPM
from kite_cli.upcycle import show_violations

if TYPE_CHECKING:
    from kite_upcycle.verify import Report

app = group("Look at adapters, stamp and migrate them, without a fleet.")

BasePath: TypeAlias = Annotated[Path, typer.Option("--base", metavar="PATH", help="Folder of the base.")]
AnyBase: TypeAlias = Annotated[
    Path | None, typer.Option("--base", metavar="PATH", help="Folder of a base, to say what share of it they are.")
]
MaxRank: TypeAlias = Annotated[
    int, typer.Option("--max-lora-rank", min=1, help="Highest rank that the servers take, unless --server tells.")
]
MaxShare: TypeAlias = Annotated[
    int, typer.Option("--params-share-max-ppm", min=0, help="Parameters, as share of the base's.")
]
Server: TypeAlias = Annotated[
    str | None, typer.Option("--server", metavar="URL", help="A running server, whose limits count.")
]
KvDtype: TypeAlias = Annotated[
    str | None, typer.Option("--kv-dtype", metavar="NAME", help="Dtype of the KV cache (else auto: the base's).")
]
BlockSize: TypeAlias = Annotated[
    int | None, typer.Option("--block-size", metavar="TOKENS", min=1, help="Tokens a KV block (else 32).")
]
KvLayout: TypeAlias = Annotated[
    str | None, typer.Option("--kv-layout", metavar="NAME", help="Order of the KV cache's axes (else NHD).")
]
Tp: TypeAlias = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor parallelism (else 1).")]
Pp: TypeAlias = Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline parallelism (else 1).")]
Plan: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


@app.callback()
def adapter() -> None:
    """Look at adapters, stamp and migrate them, without a fleet."""


@app.command()
def verify(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders of adapters.")],
    *,
    base: BasePath,
    strict: Annotated[bool, typer.Option("--strict", help="The stamp is needed, and this very base.")] = False,
    server: Server = None,
    max_lora_rank: MaxRank = MAX_LORA_RANK,
    params_share_max_ppm: MaxShare = PARAMS_SHARE_MAX_PPM,
    kv_dtype: KvDtype = None,
    block_size: BlockSize = None,
    kv_layout: KvLayout = None,
    tp: Tp = None,
    pp: Pp = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Check adapters against the contract of a base; every violation is listed, exit 1 when there is one."""
    from kite_cli import serving
    from kite_upcycle.base import Base
    from kite_upcycle.stamp import Demand
    from kite_upcycle.verify import Limits
    from kite_upcycle.verify import verify as examine

    for path in paths:
        _check_folder(path)
    known = Base.load(base)
    given = serving.told(kv_dtype=kv_dtype, block_size=block_size, kv_layout=kv_layout, tp=tp, pp=pp)
    rank = max_lora_rank
    if server is not None:
        facts = serving.ask(server)
        for text in serving.notes(facts, known, rank):
            note(f"note: {text}")
        rank, given = facts.max_lora_rank or rank, given | serving.of(facts)
    demand = Demand(strict, given)
    reports = [(path, examine(path, known, Limits(rank, params_share_max_ppm), demand=demand)) for path in paths]
    for path, report in reports:
        if as_json:
            say_json(_record(path, report))
        else:
            _print(path, report)
    return Exit.OK if all(report.accepted for _, report in reports) else Exit.FAILED


@app.command()
def stamp(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the adapter.")],
    *,
    base: BasePath,
    force: Annotated[bool, typer.Option("--force", help="Also in the place of a stamp for another base.")] = False,
    kv_dtype: KvDtype = None,
    block_size: BlockSize = None,
    kv_layout: KvLayout = None,
    tp: Tp = None,
    pp: Pp = None,
    dry_run: Plan = False,
    as_json: AsJson = False,
) -> int:
    """[changes] Write into an adapter what base it was trained on; exit 1 when it breaks the contract."""
    from kite_cli import serving
    from kite_cli.stamping import print_imprint, record_of
    from kite_upcycle.base import Base
    from kite_upcycle.imprint import imprint

    _check_folder(path)
    known = Base.load(base)
    served = serving.complete(kv_dtype=kv_dtype, block_size=block_size, kv_layout=kv_layout, tp=tp, pp=pp)
    made = imprint(path, known, served, dry_run=dry_run, force=force)
    if as_json:
        say_json(record_of(path, made, dry_run=dry_run))
    else:
        print_imprint(path, made, dry_run=dry_run)
    return Exit.FAILED if made.outcome == "refused" else Exit.OK


@app.command()
def migrate(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of an adapter, or of many.")],
    *,
    from_version: Annotated[
        str, typer.Option("--from-version", "--version", metavar="VERSION", help="What wrote the stamps: 3.5.")
    ],
    dry_run: Plan = False,
    as_json: AsJson = False,
) -> int:
    """[changes] Bring stamps of version 1 to version 2, after a backup; exit 1 when one cannot be."""
    from kite_cli.stamping import do_steps, say_plan
    from kite_upcycle import migrate as migration

    version = migration.source_version(from_version)
    _check_folder(path)
    steps = migration.plan(path, version)
    if not steps:
        raise MissingPath(f"no adapter lies at {path} or below", hint="give the folder of an adapter, or of many")
    say_plan(steps, dry_run=dry_run)
    return do_steps(steps, dry_run=dry_run, as_json=as_json)


@app.command(name="list")
def list_(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of adapters (else the current one).")] = Path(),
    *,
    base: AnyBase = None,
    as_json: AsJson = False,
) -> int:
    """[reads] List the adapters below a folder."""
    from kite_cli.cards import print_list
    from kite_upcycle.base import Base
    from kite_upcycle.card import card
    from kite_upcycle.migrate import folders

    _check_folder(path)
    known = None if base is None else Base.load(base)
    print_list([card(folder) for folder in folders(path)], path, known, as_json=as_json)
    return Exit.OK


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the adapter.")],
    *,
    base: AnyBase = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Show one adapter: sizes, arithmetic and stamp; exit 1 when it cannot be read."""
    from kite_cli.cards import print_card
    from kite_upcycle.base import Base
    from kite_upcycle.card import card

    _check_folder(path)
    known = None if base is None else Base.load(base)
    found = card(path)
    print_card(found, known, as_json=as_json)
    return Exit.FAILED if found.violations else Exit.OK


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise MissingPath(f"adapter {path} is not a folder", hint="give the folder that PEFT's save_pretrained wrote")


def _print(path: Path, report: "Report") -> None:
    for text in report.notes:
        note(f"note: {text}")
    if report.accepted:
        size = f"rank {report.rank}, {report.modules} modules, {percent(report.share_ppm)} of the base's parameters"
        say(f"{path.name} keeps the contract: {size}")
    else:
        show_violations(report.violations)
        for violation in report.violations:
            if violation.code == "attention_heads":
                say(str(violation))
        fail(f"{path.name} breaks the contract: {count(len(report.violations), 'violation')}")


def _record(path: Path, report: "Report") -> dict[str, object]:
    return {
        "adapter": str(path),
        "accepted": report.accepted,
        "digest": report.digest,
        "parameters": report.parameters,
        "share_ppm": report.share_ppm,
        "rank": report.rank,
        "modules": report.modules,
        "stamp_version": report.stamp and report.stamp.version,
        "violations": [{**vars(violation), "text": str(violation)} for violation in report.violations],
        "notes": list(report.notes),
    }
