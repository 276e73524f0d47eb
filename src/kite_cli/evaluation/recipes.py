"""Which blends are to be evaluated: members by name, each with an exact weight; the base takes what is left."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from kite.errors import UsageError
from kite_cli.asking.intake import proper
from kite_cli.blends import NoSuchBlend
from kite_cli.share import PPM
from kite_cli.upcycle import weight_ppm

if TYPE_CHECKING:
    from kite_arbitrator.state import State
    from kite_cli.place import Place

BASE = "base"
"""How the base is called among the models; no member can be called so."""

MEMBERS_MAX = 64
BLENDS_MAX = 16


@dataclass(frozen=True, slots=True)
class Share:
    """A member's part of a blend; an anchored one keeps its weight whatever comes later."""

    member: str
    weight_ppm: int
    anchored: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """One blend to be made, its members in the order in which they were given."""

    shares: tuple[Share, ...]

    @property
    def base_weight_ppm(self) -> int:
        """What the members leave to the base."""
        return PPM - sum(share.weight_ppm for share in self.shares)

    @property
    def name(self) -> str:
        """What it is made of, as in `credit=0.6,laundering=0.4`."""
        return ",".join(f"{share.member}={decimal(share.weight_ppm)}" for share in self.shares)


@dataclass(frozen=True, slots=True)
class Asked:
    """Everything that was asked for: folders of the members by name, and the blends of them."""

    members: Mapping[str, Path]
    recipes: tuple[Recipe, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A member as the command line names it; without a weight it shares equally in what the others leave."""

    path: Path
    weight_ppm: int | None
    called: str = ""

    @property
    def name(self) -> str:
        """What it is called, else the name of its folder."""
        return self.called or proper(self.path.resolve().name)


def decimal(ppm: int) -> str:
    """Write a weight as people write it.

    >>> decimal(600_000), decimal(333_333), decimal(1_000_000)
    ('0.6', '0.333333', '1')
    """
    return f"{(Decimal(ppm) / PPM).normalize():f}"


def pair(paths: Sequence[Path], weights: str | None) -> tuple[Part, ...]:
    """Return the parts of `--adapter-pair A B --weights W,W`. Raises UsageError."""
    if weights is None:
        return tuple(Part(path, None) for path in paths)
    given = weights.split(",")
    if len(given) != len(paths):
        raise UsageError(f"--weights {weights} names {len(given)} weights", hint="one for each of the pair: 0.5,0.5")
    return tuple(Part(path, weight_ppm(text)) for path, text in zip(paths, given, strict=True))


def listed(text: str) -> tuple[Part, ...]:
    """Read `PATH[=WEIGHT],…`. Raises UsageError.

    >>> [(str(part.path), part.weight_ppm) for part in listed("a/credit=0.6,b/mood")]
    [('a/credit', 600000), ('b/mood', None)]
    """
    return tuple(_part(one) for one in text.split(","))


def _part(text: str) -> Part:
    path, equals, weight = text.rpartition("=")
    if not (path if equals else weight):
        raise UsageError(f"{text!r} names no adapter", hint="as in --blend PATH=0.6,PATH=0.4")
    return Part(Path(path), weight_ppm(weight)) if equals else Part(Path(weight), None)


def anchors(texts: Iterable[str]) -> dict[str, int]:
    """Read `NAME=WEIGHT` of each anchor. Raises UsageError.

    >>> anchors(["credit=0.6"])
    {'credit': 600000}
    """
    found: dict[str, int] = {}
    for text in texts:
        name, _, weight = text.rpartition("=")
        if not name or name in found:
            raise UsageError(f"--anchor {text} cannot be", hint="each member once, as in --anchor credit=0.6")
        found[name] = weight_ppm(weight)
    return found


def order(blends: Sequence[Sequence[Part]], anchored: Mapping[str, int]) -> Asked:
    """Put blends together, each weight fixed. Raises UsageError for what cannot be.

    An anchor holds in every blend that has the member. Members without a weight get equal ones, rounded down to a
    millionth, out of what the others leave.
    """
    members = _folders(part for blend in blends for part in blend)
    if strangers := sorted(anchored.keys() - members.keys()):
        raise UsageError(f"--anchor {strangers[0]}: no such member", hint=f"members are {', '.join(sorted(members))}")
    recipes = tuple(_recipe(blend, anchored) for blend in blends)
    return Asked(members, recipes)


def together(asked: Sequence[Asked]) -> Asked:
    """Return several requests as one. Raises UsageError when two members share a name and are not the same."""
    _folders(Part(path, None, name) for each in asked for name, path in each.members.items())
    members = {name: path for each in asked for name, path in each.members.items()}
    return checked(Asked(members, tuple(recipe for each in asked for recipe in each.recipes)))


def checked(asked: Asked) -> Asked:
    """Return what was asked for, within bounds. Raises UsageError."""
    twice = [name for name, count in Counter(recipe.name for recipe in asked.recipes).items() if count > 1]
    if twice:
        raise UsageError(f"the blend {twice[0]} is given twice")
    if not 1 <= len(asked.recipes) <= BLENDS_MAX or len(asked.members) > MEMBERS_MAX:
        given = f"{len(asked.recipes)} blends of {len(asked.members)} members"
        raise UsageError(given, hint=f"give 1 to {BLENDS_MAX} blends, of {MEMBERS_MAX} members at most")
    return asked


def _folders(parts: Iterable[Part]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for part in parts:
        if found.setdefault(part.name, part.path).resolve() != part.path.resolve():
            two = f"{found[part.name]} and {part.path}"
            raise UsageError(f"two members are called {part.name}: {two}", hint="give their folders different names")
        if part.name == BASE:
            raise UsageError("no member can be called base", hint="rename its folder")
    return found


def _recipe(parts: Sequence[Part], anchored: Mapping[str, int]) -> Recipe:
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise UsageError(f"a member is listed twice in {','.join(names)}", hint="give it once, with the sum of weights")
    given = {part.name: _given(part, anchored) for part in parts}
    room = PPM - sum(weight or 0 for weight in given.values())
    open_ones = sum(weight is None for weight in given.values())
    if room < 0 or (open_ones and room < open_ones):
        hint = "weights add up to 1 at most; the base takes the rest"
        raise UsageError(f"the weights of {', '.join(names)} leave no room", hint=hint)
    equal = room // open_ones if open_ones else 0
    return Recipe(tuple(Share(name, weight or equal, name in anchored) for name, weight in given.items()))


def _given(part: Part, anchored: Mapping[str, int]) -> int | None:
    anchor = anchored.get(part.name)
    if anchor is not None and part.weight_ppm not in (None, anchor):
        raise UsageError(f"{part.name} has two weights", hint="give it by --anchor, or in the blend")
    return part.weight_ppm if anchor is None else anchor


def names_promoted(text: str) -> bool:
    """Say whether `--blend TEXT` can only be the name of a promoted blend: one word that is no folder here."""
    return not any(mark in text for mark in "=,/") and not Path(text).is_dir()


def promoted(state: "State", fleet: "Place", name: str) -> tuple[Asked, Path | None]:
    """Return a promoted blend of a fleet and the folder of its base, None when no pool serves it any more.

    Raises NoSuchBlend, and UsageError when the adapter root is not known.
    """
    blend = state.blends.get(name)
    if blend is None:
        raise NoSuchBlend(name, sorted(state.blends))
    if fleet.adapter_root is None:
        raise UsageError("the adapter root of the fleet is not known", hint="name --dir, or set KITE_ADAPTER_ROOT")
    members = {member.adapter.name: fleet.adapter_root / member.adapter.path for member in blend.members}
    shares = tuple(Share(member.adapter.name, member.weight_ppm, member.anchored) for member in blend.members)
    pools = () if state.policy is None else state.policy.fleet.pools
    base = next((Path(pool.base_path) for pool in pools if pool.spec.served_name == blend.base), None)
    return Asked(members, (Recipe(shares),)), base
