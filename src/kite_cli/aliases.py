"""What people call a setting, and the units they give its value in."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from kite.errors import UsageError
from kite_cli.share import PPM, whole

if TYPE_CHECKING:
    from pydantic import JsonValue

ALIASES: dict[str, str] = {
    "upcycle.weight_decay": "upcycle.weight_decay_ppm",
    "arbitrator.semantic_guard_kl_threshold": "guard.kl_max_micronats",
    "arbitrator.enable_semantic_guard": "guard.enabled",
}
"""The source documents' names → the setting. Beside these, every setting may be named without its unit."""

MEANT_MAX = 3
"""How many settings an unknown name is answered with."""

SHOWN_MAX_CHARS = 60
"""How much of a value an error repeats."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit that ends keys. `words` says how much each word behind a number counts; "" is a number without one."""

    suffix: str
    name: str
    people: str
    words: Mapping[str, int]


UNITS = (
    Unit("_ppm", "parts per million", "a share, as 0.3 or 30%", {"": PPM, "%": PPM // 100, "ppm": 1}),
    Unit(
        "_us",
        "microseconds",
        "seconds, or another unit, as 0.417, 417ms, 90s, 2m",
        {"": 10**6, "us": 1, "ms": 10**3, "s": 10**6, "m": 60 * 10**6, "h": 3_600 * 10**6, "d": 86_400 * 10**6},
    ),
    Unit("_micronats", "micronats", "nats, as 0.32", {"": 10**6, "nats": 10**6, "micronats": 1}),
)

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) ?([A-Za-z%]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Named:
    """A setting as it was named, and its key."""

    given: str
    key: str

    @property
    def is_alias(self) -> bool:
        """Whether it goes by another name here: then a bare number is in people's unit."""
        return self.given != self.key


def unit_of(key: str) -> Unit | None:
    """Return the unit that ends a key, None without one.

    >>> unit_of("yoco.cold_start_deadline_us").name
    'microseconds'
    """
    return next((unit for unit in UNITS if key.endswith(unit.suffix)), None)


def bare(key: str) -> str:
    """Return a key without its unit.

    >>> bare("upcycle.weight_min_ppm"), bare("rules")
    ('upcycle.weight_min', 'rules')
    """
    unit = unit_of(key)
    return key.removesuffix(unit.suffix) if unit else key


def resolve(keys: Collection[str], given: str) -> Named:
    """Return the setting that a key or another name of it stands for. Raises UsageError with what may be meant."""
    for key in (given, ALIASES.get(given, ""), *(f"{given}{unit.suffix}" for unit in UNITS)):
        if key in keys:
            return Named(given, key)
    meant = " or ".join(guess(keys, given))
    known = "`kite config list` shows every setting"
    raise UsageError(f"unknown setting {given!r}", hint=f"did you mean {meant}? {known}" if meant else known)


def guess(keys: Collection[str], given: str) -> list[str]:
    """Return the names most like one that is unknown, the likeliest first, one a setting.

    >>> guess(["upcycle.weight_decay_ppm", "rules"], "upcycle.wieght_decay")
    ['upcycle.weight_decay']
    """
    names = {name: key for key in keys for name in (key, bare(key))}
    names |= {name: key for name, key in ALIASES.items() if key in keys}
    wanted = given.lower()
    close = get_close_matches(wanted, names, n=len(names))
    meant: dict[str, str] = {}
    for name in [*close, *(name for name in names if wanted and wanted in name)]:
        meant.setdefault(names[name], name)
    return list(meant.values())[:MEANT_MAX]


def read(named: Named, text: str) -> "JsonValue":
    """Read a value: JSON; with a unit's word behind it, or under another name than the key, a decimal. Exactly.

    Raises UsageError for what is no such number, or would not be whole in the unit of the key.

    >>> read(Named("upcycle.weight_decay", "upcycle.weight_decay_ppm"), "0.93")
    930000
    >>> read(Named("expiry.wake_us", "expiry.wake_us"), "90s"), read(Named("expiry.wake_us", "expiry.wake_us"), "90")
    (90000000, 90)
    """
    unit = unit_of(named.key)
    found = _QUANTITY.fullmatch(text.strip())
    if unit and found and (named.is_alias or found[2]):
        return _convert(named, unit, found[1], found[2])
    if unit and named.is_alias and text != "null":
        raise UsageError(f"{shown(text)} is no number", hint=f"{named.given} takes {unit.people}")
    return _json(text)


def _convert(named: Named, unit: Unit, number: str, word: str) -> int:
    if word not in unit.words:
        known = ", ".join(sorted(known for known in unit.words if known))
        raise UsageError(f"{named.given} is not given in {word!r}", hint=f"known are {known}")
    hint = f"{named.given} takes {unit.people}, and is kept in whole {unit.name}"
    return whole(number, unit.words[word], hint=hint)


def _json(text: str) -> "JsonValue":
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # a word is a string; whether the setting takes one is for the policy to say


def shown(text: str) -> str:
    """Quote a value for an error, cut when it is long.

    >>> shown("half"), len(shown("x" * 1_000))
    ("'half'", 63)
    """
    return repr(text) if len(text) <= SHOWN_MAX_CHARS else f"{text[:SHOWN_MAX_CHARS]!r}…"


def said(named: Named) -> str:
    """Say which setting another name means.

    >>> said(Named("upcycle.weight_decay", "upcycle.weight_decay_ppm"))
    'upcycle.weight_decay means upcycle.weight_decay_ppm (parts per million)'
    """
    unit = unit_of(named.key)
    return f"{named.given} means {named.key}" + (f" ({unit.name})" if unit else "")
