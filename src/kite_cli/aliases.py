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

SECTIONS: dict[str, str] = {"arbitrator.": "arbitration."}
"""How the source documents begin names → how the settings begin."""

ALIASES: dict[str, str] = {
    "upcycle.weight_decay": "upcycle.weight_decay_ppm",
    "yoco.reserve_pool": "yoco.reserve_pressure_ppm",
    "yoco.reserve_memory": "yoco.reserve_bytes",
    "arbitrator.concurrency_threshold": "arbitration.concurrency_max",
    "arbitrator.cache_miss_jump": "arbitration.miss_jump_ppm",
    "arbitrator.memory_fragmentation": "arbitration.fragmentation_max_ppm",
    "arbitrator.kv_cache_hit_rate": "arbitration.hit_rate_min_ppm",
    "arbitrator.latency_sigma": "arbitration.latency_sigma_max_us",
    "arbitrator.jitter_window": "arbitration.switch_window_us",
    "arbitrator.injection_rate": "arbitration.injection_rate_max_milli",
    "arbitrator_sync_timeout": "arbitration.sync_timeout_us",
    "arbitrator.tcp_sync_timeout": "arbitration.sync_timeout_reliable_us",
    "arbitrator.udp_loss": "arbitration.loss_max_ppm",
    "arbitrator.udp_loss_times": "arbitration.loss_windows",
    "arbitrator.semantic_guard_kl_threshold": "guard.kl_max_micronats",
    "arbitrator.semantic_guard_freeze": "guard.freeze_us",
    "arbitrator.enable_semantic_guard": "guard.enabled",
}
"""What the source documents call things → the setting. Beside these, every setting may be named without its unit."""

UNSET = "unset"
"""The value of a setting that has none."""

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
    Unit("_milli", "thousandths", "a number, as 2.5", {"": 1_000, "milli": 1}),
    Unit(
        "_bytes",
        "bytes",
        "bytes, or another unit, as 1.8GB, 512MiB",
        {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30},
    ),
)

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) ?([A-Za-z%]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Named:
    """A setting as it was named, and its key."""

    given: str
    key: str

    @property
    def is_alias(self) -> bool:
        """Whether it goes by another name here: one that has no unit takes a bare number in people's unit."""
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
    own = _in_own_section(given)
    for key in (given, ALIASES.get(given, ""), own, *(f"{own}{unit.suffix}" for unit in UNITS)):
        if key in keys:
            return Named(given, key)
    meant = " or ".join(guess(keys, given))
    known = "`kite config list` shows every setting"
    raise UsageError(f"unknown setting {given!r}", hint=f"did you mean {meant}? {known}" if meant else known)


def _in_own_section(given: str) -> str:
    for theirs, ours in SECTIONS.items():
        if given.startswith(theirs):
            return ours + given.removeprefix(theirs)
    return given


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

    `unset` and JSON's null are None. Raises UsageError for what is no such number, or would not be whole in
    the unit of the key.

    >>> read(Named("upcycle.weight_decay", "upcycle.weight_decay_ppm"), "0.93")
    930000
    >>> read(Named("expiry.wake_us", "expiry.wake_us"), "90s"), read(Named("expiry.wake_us", "expiry.wake_us"), "90")
    (90000000, 90)
    """
    if text.strip() in {UNSET, "null"}:
        return None
    unit = unit_of(named.key)
    found = _QUANTITY.fullmatch(text.strip())
    by_people = named.is_alias and unit is not None and not named.given.endswith(unit.suffix)
    if unit and found and (by_people or found[2]):
        return _convert(named, unit, found[1], found[2])
    if unit and by_people:
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
