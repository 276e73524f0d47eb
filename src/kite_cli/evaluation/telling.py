"""How `kite eval` tells what it found: bars on a terminal, plain columns in a pipe, JSON lines on request."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from kite_cli.asking.telling import nats
from kite_cli.evaluation.making import Made
from kite_cli.evaluation.recipes import BASE, Recipe, decimal
from kite_cli.evaluation.trial import Accuracy, Distance, Found
from kite_cli.output import Progress, Record, count, percent, say, say_json, table
from kite_cli.share import PPM

CELLS = 10  # of a bar
QUARTERS = 4
EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class Ran:
    """What it ran on: the engine and its numbers (None: not known), the probe set and its size."""

    engine: str
    dtype: str | None
    probes: str
    positions: int


def bar(share: float, cells: int = CELLS) -> str:
    """Draw a share, 0 to 1, in eighths of a cell.

    >>> bar(0.5, 4), bar(0.03, 4), bar(1.0, 2)
    ('██  ', '▏   ', '██')
    """
    whole, rest = divmod(math.ceil(share * cells * len(EIGHTHS)), len(EIGHTHS))
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(cells)


def steps(progress: Progress, total: int) -> Callable[[int], None]:
    """Return what tells how far the reading is: a bar on a terminal, and a line at each quarter anywhere."""
    before = 0

    def step(done: int) -> None:
        nonlocal before
        if done * QUARTERS // total > before * QUARTERS // total:
            progress.step(f"{done} of {total} answers read")
        before = done
        progress.waiting(f"{bar(done / total)} {done} of {total} answers")

    return step


def blended(made: Made) -> str:
    """Say what a blend is made of, its rank, and what recompressing it lost."""
    lost = f", recompressed: {percent(made.blend.residual_ppm)} lost" if made.blend.method == "recompress" else ""
    return f"{made.recipe.name}: rank {made.rank}{lost}"


def tell(base: str, ran: Ran, made: Sequence[Made], found: Found, *, as_json: bool) -> None:
    """Print what was found."""
    if as_json:
        for record in records(base, ran, made, found):
            say_json(record)
        return
    drawn = sys.stdout.isatty()
    for each in made:
        mine = [distance for distance in found.distances if distance.recipe == each.recipe]
        say(f"\n{blended(each)}")
        table(("SEEN FROM", "WEIGHT", "KL MEAN", "KL P99", "SAME TOP TOKEN"), [_row(one, drawn=drawn) for one in mine])
    if found.accuracies:
        say("\nprompts whose likeliest next token is the right one")
        table(*_accuracies(found.accuracies, drawn=drawn))
    say(f"\n{count(ran.positions, 'probe')} on {ran.engine}, base {base}; KL of the blend, least possible 0 nats")


def _row(one: Distance, *, drawn: bool) -> tuple[str, ...]:
    weight = decimal(one.weight_ppm) + (" anchored" if one.anchored else "")
    agreed = _share(one.top1_ppm, drawn=drawn)
    return one.other, weight, nats(one.measured.kl_micronats), nats(one.measured.p99_micronats), agreed


def _share(ppm: int, *, drawn: bool) -> str:
    share = f"{ppm / PPM:.3f}"
    return f"{bar(ppm / PPM)} {share}" if drawn else share


def _accuracies(found: Sequence[Accuracy], *, drawn: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header, one task a column, and one row a model."""
    tasks = list(dict.fromkeys(one.task for one in found))
    cells = {(one.model, one.task): _share(one.right * PPM // one.prompts, drawn=drawn) for one in found}
    models = list(dict.fromkeys(one.model for one in found))
    return ("MODEL", *tasks), [(model, *(cells[model, task] for task in tasks)) for model in models]


def records(base: str, ran: Ran, made: Sequence[Made], found: Found) -> Iterable[Record]:
    """Yield what was found as records: the run, then distances, then accuracies."""
    yield {
        "record": "run",
        "base": base,
        "engine": ran.engine,
        "dtype": ran.dtype,
        "kite": version("kite-control-plane"),
        "probes": ran.probes,
        "positions": ran.positions,
        "blends": {each.recipe.name: _made(each) for each in made},
    }
    for one in found.distances:
        yield {
            "record": "distance",
            "blend": one.recipe.name,
            "from": one.other,
            "weight_ppm": one.weight_ppm,
            "anchored": one.anchored,
            "kl_micronats": one.measured.kl_micronats,
            "p99_micronats": one.measured.p99_micronats,
            "covered_ppm": one.measured.covered_ppm,
            "top1_ppm": one.top1_ppm,
        }
    for one in found.accuracies:
        accuracy_ppm = one.right * PPM // one.prompts
        record = {"record": "accuracy", "task": one.task, "model": one.model, "right": one.right}
        yield {**record, "prompts": one.prompts, "accuracy_ppm": accuracy_ppm}


def _made(each: Made) -> Record:
    how = {"method": each.blend.method, "rank": each.rank, "residual_ppm": each.blend.residual_ppm}
    return {**how, "weights_ppm": _weights(each.recipe)}


def _weights(recipe: Recipe) -> dict[str, int]:
    return {BASE: recipe.base_weight_ppm, **{share.member: share.weight_ppm for share in recipe.shares}}
