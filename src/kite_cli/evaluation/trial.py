"""Base, members and blends on one engine: how far each blend is from its parts, and how each does the tasks."""

import os
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kite.engine import Engine, EngineError, EngineProcess, EngineSpec, EngineUnreachable
from kite.proof import Answers, Comparison, agreement_ppm, apart, count_right, read_several
from kite_cli.evaluation.recipes import BASE, Recipe
from kite_cli.evaluation.tasks import Task
from kite_cli.output import note

START_S = 300.0  # vLLM takes 40 to 75 s on two cores, more on a busy machine
LORAS_MAX = 4  # that an own engine holds at once; it reads others from disk again, in 10 to 30 ms
READS = 2  # of every probe: `read_several`
NAME_BYTES = 4


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a blend is from the base or one of its members: KL(other ‖ blend), and how often both agree on top."""

    recipe: Recipe
    other: str
    weight_ppm: int
    anchored: bool
    measured: Comparison
    top1_ppm: int


@dataclass(frozen=True, slots=True)
class Accuracy:
    """After how many prompts of a task a model holds the right token likeliest, over the whole vocabulary."""

    task: str
    model: str
    right: int
    prompts: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a trial found."""

    distances: tuple[Distance, ...]
    accuracies: tuple[Accuracy, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """What is read: folders of members and blends by their names, the blends' recipes, probes and tasks."""

    members: Mapping[str, Path]
    blends: Mapping[str, Path]
    recipes: tuple[Recipe, ...]
    probes: tuple[str, ...]
    tasks: tuple[Task, ...]

    @property
    def models(self) -> tuple[str, ...]:
        """Everything that is read: the base, the members, the blends."""
        return (BASE, *self.members, *self.blends)

    @property
    def answers(self) -> int:
        """How many answers are read."""
        return len(self.models) * (READS * len(self.probes) + sum(len(task.prompts) for task in self.tasks))


Step = Callable[[int], None]
"""Called with how many answers are read so far."""


async def run(trial: Trial, engine: Engine, step: Step) -> Found:
    """Load everything, read it, and take it away again. Raises the engine's errors."""
    done = 0

    def told(_model: str, prompts: int) -> None:
        nonlocal done
        done += prompts
        step(done)

    async with loaded(engine, {**trial.members, **trial.blends}) as served:
        read = await read_several(engine, list(served.values()), trial.probes, told)
        answers = {model: read[name] for model, name in served.items()}
        accuracies = [
            Accuracy(
                task.name, model, await count_right(engine, name, task.prompts, task.answers, told), len(task.prompts)
            )
            for task in trial.tasks
            for model, name in served.items()
        ]
    return Found(tuple(distances(trial.recipes, answers)), tuple(accuracies))


def distances(recipes: Sequence[Recipe], answers: Mapping[str, Answers]) -> list[Distance]:
    """Compare every blend with the base and with each of its members."""
    return [_distance(recipe, other, answers) for recipe in recipes for other in (BASE, *_members(recipe))]


def _members(recipe: Recipe) -> list[str]:
    return [share.member for share in recipe.shares]


def _distance(recipe: Recipe, other: str, answers: Mapping[str, Answers]) -> Distance:
    share = next((share for share in recipe.shares if share.member == other), None)
    blended = answers[recipe.name]
    return Distance(
        recipe=recipe,
        other=other,
        weight_ppm=recipe.base_weight_ppm if share is None else share.weight_ppm,
        anchored=share is not None and share.anchored,
        measured=apart(answers[other], blended),
        top1_ppm=agreement_ppm(answers[other], blended),
    )


@asynccontextmanager
async def loaded(engine: Engine, folders: Mapping[str, Path]) -> AsyncGenerator[dict[str, str]]:
    """Load adapters under names that nobody else has; gives the served name of the base and of each of them."""
    run_id = secrets.token_hex(NAME_BYTES)
    names = {model: f"eval-{run_id}-{number}" for number, model in enumerate(folders, 1)}
    tried: list[str] = []
    try:
        (base, *_) = await engine.models()
        for model, name in names.items():
            tried.append(name)
            await engine.load(name, str(folders[model].resolve()))
        yield {BASE: base, **names}
    finally:
        await _unload(engine, tried)


async def _unload(engine: Engine, names: Sequence[str]) -> None:
    """Take names away that are there; what ended the trial is what is told, not that this failed as well."""
    try:
        for name in sorted(set(await engine.models()) & set(names)):
            await engine.unload(name)
    except EngineError as error:
        note(f"note: adapters may be left on the server: {error}")


@asynccontextmanager
async def own(spec: EngineSpec, log: Path, waiting: Callable[[str], None]) -> AsyncGenerator[Engine]:
    """Run an engine of our own; nothing of it is left at the end. Raises EngineDied and EngineLate."""
    process = await EngineProcess.start(spec, log=log)
    try:
        await process.wait_healthy(START_S, lambda elapsed_s, _: waiting(f"starting {spec.kind}: {elapsed_s:.0f} s"))
        async with Engine(process.url) as engine:
            yield engine
    except EngineUnreachable:
        if process.exit_code is not None:
            raise process.died() from None
        raise
    finally:
        await process.stop()


def cores() -> str:
    """Return the cores that an engine on CPU may use, as vLLM reads them; empty where there is a GPU."""
    from kite_yoco.devices import find_devices

    on_gpu = any(device.kind == "gpu" for device in find_devices())
    return "" if on_gpu else ",".join(map(str, sorted(os.sched_getaffinity(0))))
