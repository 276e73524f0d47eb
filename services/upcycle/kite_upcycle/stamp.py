"""The stamp: what an adapter was trained on, as texts under `kite.*` in the metadata of its safetensors file.

Shapes cannot tell an epsilon or a rotary base, and a wrong one is served without an error. So they are written down at
training time, exactly, and compared exactly: 10000 is 10000.0, and 9.999999747378752e-06 is not 1e-05.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from kite import __version__
from kite_upcycle import layout, strict
from kite_upcycle.base import Base
from kite_upcycle.geometry import Geometry, Rope
from kite_upcycle.layout import CURRENT_VERSION, Record, Scalar, Serving, UnhashableLayout
from kite_upcycle.violations import Code, Violation, clip, violation

T = TypeVar("T")

PREFIX = "kite."
VERSION = "kite.stamp_version"
LAYOUT_HASH = "kite.kv_cache_layout_hash"
LAYOUT = "kite.kv_cache_layout"
NORM_EPS = "kite.norm_eps"
NORM_EPS_FIELD = "kite.norm_eps_field"
ROPE_THETA = "kite.rope_theta"
ROPE_DEFAULTED = "kite.rope_theta_defaulted"
BASE = "kite.base"
TOOL = "kite.version"

NO_STAMP = (
    "no stamp: shapes fit or not, but norm_eps, rope_theta and the layout of the KV cache could not be compared"
    " (`kite adapter stamp` writes them)"
)
DIFFERENCES_SHOWN = 3
_HASH = re.compile(r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SERVING = tuple(asdict(Serving()))


@dataclass(frozen=True)
class Stamp:
    """A stamp of a known version.

    `layout` is what `layout_hash` is the hash of. `rope_theta` is by kind of layer, None for one without rotary
    embedding; the kinds in `rope_defaulted` had theirs from the family, not from config.json. `base` is the base's
    digest, `tool` the version of kite that wrote it.
    """

    version: int
    layout_hash: str
    layout: Record
    norm_eps: float
    norm_eps_field: str
    rope_theta: Mapping[str, float | None]
    rope_defaulted: tuple[str, ...]
    base: str
    tool: str

    def metadata(self) -> dict[str, str]:
        """Return the texts to write; numbers in the shortest form that reads back as the same float64."""
        return {
            VERSION: str(self.version),
            LAYOUT_HASH: self.layout_hash,
            LAYOUT: _dump(self.layout),
            NORM_EPS: repr(self.norm_eps),
            NORM_EPS_FIELD: self.norm_eps_field,
            ROPE_THETA: _dump(self.rope_theta),
            ROPE_DEFAULTED: _dump(self.rope_defaulted),
            BASE: self.base,
            TOOL: self.tool,
        }


@dataclass(frozen=True)
class Demand:
    """What is asked of a stamp. `strict`: it must be there, of the current version, and of exactly this base.

    `told` are fields of `layout.Serving` that are known of the servers. The others are the defaults when strict, and
    otherwise not compared.
    """

    strict: bool = False
    told: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])


@dataclass(frozen=True)
class Verdict:
    """What a comparison found. `stamp` is None when there is none that can be read."""

    stamp: Stamp | None
    violations: tuple[Violation, ...]
    notes: tuple[str, ...]


def of(base: Base, serving: Serving) -> Stamp:
    """Return the stamp for adapters that are trained on a base. Reads all weights, for their digest.

    Raises UnhashableLayout.
    """
    thetas = rope_of(base.geometry)
    return Stamp(
        version=CURRENT_VERSION,
        layout_hash=layout.layout_hash(base.geometry, serving),
        layout=layout.record(base.geometry, serving),
        norm_eps=base.geometry.norm_eps,
        norm_eps_field=base.geometry.norm_eps_field,
        rope_theta={name: rope and rope.theta for name, rope in thetas.items()},
        rope_defaulted=tuple(name for name, rope in thetas.items() if rope and rope.defaulted),
        base=base.digest,
        tool=__version__,
    )


def rope_of(geometry: Geometry) -> dict[str, Rope | None]:
    """Return the rotary embedding by kind of layer; a second kind of the same name gets its number behind it."""
    found: dict[str, Rope | None] = {}
    for kind in dict.fromkeys(geometry.kinds):
        name = kind.name if kind.name not in found else f"{kind.name}_{len(found)}"
        found[name] = kind.rope
    return found


def parse(metadata: Mapping[str, str]) -> tuple[Stamp | None, list[Violation]]:
    """Read the stamp in a file's metadata, and all that is wrong with it; None and nothing when there is none."""
    if not any(name.startswith(PREFIX) for name in metadata):
        return None, []
    wrong: list[Violation] = []
    version = _take(metadata, VERSION, _version, wrong)
    if version is None:
        return None, wrong
    layout_hash = _take(metadata, LAYOUT_HASH, _matching(_HASH, "16 hex digits"), wrong)
    record = _take(metadata, LAYOUT, _record, wrong)
    norm_eps = _take(metadata, NORM_EPS, _number, wrong)
    norm_eps_field = _take(metadata, NORM_EPS_FIELD, str, wrong)
    rope_theta = _take(metadata, ROPE_THETA, _thetas, wrong)
    defaulted = _take(metadata, ROPE_DEFAULTED, _names, wrong)
    base = _take(metadata, BASE, _matching(_DIGEST, "a sha256 of 64 hex digits"), wrong)
    tool = _take(metadata, TOOL, str, wrong)
    if (
        layout_hash is None
        or record is None
        or norm_eps is None
        or norm_eps_field is None
        or rope_theta is None
        or defaulted is None
        or base is None
        or tool is None
    ):
        return None, wrong
    stamp = Stamp(version, layout_hash, record, norm_eps, norm_eps_field, rope_theta, defaulted, base, tool)
    return stamp, [*wrong, *_unsound(stamp)]


def _take(metadata: Mapping[str, str], name: str, read: Callable[[str], T], wrong: list[Violation]) -> T | None:
    if name not in metadata:
        wrong.append(violation(Code.STAMP_FIELD, name, expected="to be there", found="absent"))
        return None
    try:
        return read(metadata[name])
    except ValueError as error:
        code = Code.STAMP_VERSION if name == VERSION else Code.STAMP_FIELD
        wrong.append(violation(code, name, expected=str(error), found=metadata[name]))
        return None


def _version(text: str) -> int:
    known = {str(version): version for version in layout.VERSIONS}
    if text in known:
        return known[text]
    msg = f"one of {', '.join(known)}"
    raise ValueError(msg)


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if pattern.fullmatch(text):
            return text
        raise ValueError(what)

    return read


def _json(text: str, what: str) -> strict.JSON:
    """Parse JSON that came from a stranger. Raises ValueError with what is wanted."""
    try:
        return strict.parse(text.encode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise ValueError(what) from error


def _number(text: str) -> float:
    what = "a finite number above 0"
    return _positive(_json(text, what), what)


def _positive(value: strict.JSON, what: str) -> float:
    """Return a number as float64, which `true` and `"10000"` are not."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and number == value:
            return number
    raise ValueError(what)


def _thetas(text: str) -> dict[str, float | None]:
    what = "a finite number above 0, or null, for each kind of layer"
    found = _json(text, what)
    if not isinstance(found, dict):
        raise ValueError(what)
    return {name: None if value is None else _positive(value, what) for name, value in found.items()}


def _names(text: str) -> tuple[str, ...]:
    what = "a list of kinds of layers"
    found = _json(text, what)
    if isinstance(found, list) and all(isinstance(name, str) for name in found):
        return tuple(str(name) for name in found)
    raise ValueError(what)


def _record(text: str) -> dict[str, Scalar]:
    what = "an object of numbers, texts, true, false and null"
    found = _json(text, what)
    if not isinstance(found, dict):
        raise ValueError(what)
    scalars = {name: value for name, value in found.items() if not isinstance(value, list | dict)}
    if len(scalars) < len(found):
        raise ValueError(what)
    return scalars


def _unsound(stamp: Stamp) -> Iterator[Violation]:
    """A record that its own hash does not fit was altered by hand: nothing in it can be believed."""
    hashed = _hash_of(stamp.layout, stamp.version)
    if hashed != stamp.layout_hash:
        yield violation(Code.STAMP_FIELD, LAYOUT, expected=f"a record with hash {stamp.layout_hash}", found=hashed)


def _hash_of(record: Record, version: int) -> str:
    try:
        return layout.hash_of(record, version)
    except UnhashableLayout as error:
        return f"no hash: {error}"


def check(metadata: Mapping[str, str], base: Base, demand: Demand) -> Verdict:
    """Compare the stamp in a file's metadata with a base. Raises UnreadableBase; reads the weights only when strict."""
    stamp, wrong = parse(metadata)
    if stamp is None:
        missing = not wrong
        if missing and demand.strict:
            wrong = [violation(Code.STAMP_MISSING, "metadata", expected="a stamp (kite adapter stamp)", found="none")]
        return Verdict(None, tuple(wrong), (NO_STAMP,) if missing and not demand.strict else ())
    return Verdict(
        stamp,
        (
            *wrong,
            *_layout(stamp, base, demand),
            *_eps(stamp, base),
            *_rope(stamp, base),
            *_strictly(stamp, base, demand),
        ),
        tuple(_notes(stamp, base, demand)),
    )


def _layout(stamp: Stamp, base: Base, demand: Demand) -> Iterator[Violation]:
    ours = _ours(stamp, base, demand)
    expected = _hash_of(ours, stamp.version)
    if expected != stamp.layout_hash:
        found = f"{stamp.layout_hash} ({_listed(layout.differences(stamp.layout, ours))})"
        yield violation(Code.KV_CACHE_LAYOUT_HASH, "the adapter's stamp", expected=expected, found=found)


def _ours(stamp: Stamp, base: Base, demand: Demand) -> dict[str, Scalar]:
    """Return the record of this base as it is served; what nobody told of the servers is as the demand says."""
    ours = layout.record(base.geometry, Serving())
    unknown = {} if demand.strict else {name: stamp.layout.get(name, ours[name]) for name in _SERVING}
    return ours | unknown | dict(demand.told)


def _listed(differences: Sequence[str]) -> str:
    more = len(differences) - DIFFERENCES_SHOWN
    shown = ", ".join(differences[:DIFFERENCES_SHOWN]) or "the same fields"
    return f"{shown} and {more} more" if more > 0 else shown


def _eps(stamp: Stamp, base: Base) -> Iterator[Violation]:
    ours = base.geometry
    if stamp.norm_eps != ours.norm_eps:
        expected = _named(ours.norm_eps, ours.norm_eps_field)
        found = _named(stamp.norm_eps, stamp.norm_eps_field)
        yield violation(Code.NORM_EPS, ours.norm_eps_field or "norm_eps", expected=expected, found=found)


def _named(norm_eps: float, field_name: str) -> str:
    """Write an epsilon exactly, with the alias under which it stood."""
    return f"{norm_eps!r} ({field_name or 'a default: config.json has none'})"


def _rope(stamp: Stamp, base: Base) -> Iterator[Violation]:
    ours, theirs = rope_of(base.geometry), _stamped_rope(stamp)
    for kind in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(kind), theirs.get(kind)
        if (kind in ours) != (kind in theirs) or (one and one.theta) != (other and other.theta):
            expected = _theta(one) if kind in ours else "no such layers"
            found = _theta(other) if kind in theirs else "absent"
            yield violation(Code.ROPE_THETA, f"rope_theta of {kind} layers", expected=expected, found=found)


def _stamped_rope(stamp: Stamp) -> dict[str, Rope | None]:
    defaulted = stamp.rope_defaulted
    thetas = stamp.rope_theta.items()
    return {kind: None if theta is None else Rope(theta, kind in defaulted, "") for kind, theta in thetas}


def _theta(rope: Rope | None) -> str:
    if rope is None:
        return "no rotary embedding"
    return f"{rope.theta!r}{' (a default: config.json has none)' if rope.defaulted else ''}"


def _strictly(stamp: Stamp, base: Base, demand: Demand) -> Iterator[Violation]:
    if not demand.strict:
        return
    if stamp.version != CURRENT_VERSION:
        expected = f"{CURRENT_VERSION} (kite adapter migrate)"
        yield violation(Code.STAMP_VERSION, VERSION, expected=expected, found=str(stamp.version))
    if stamp.base != base.digest:
        yield violation(Code.BASE_IDENTITY, BASE, expected=base.digest, found=stamp.base)


def _notes(stamp: Stamp, base: Base, demand: Demand) -> Iterator[str]:
    if not base.geometry.known:
        yield clip(f"{base.geometry.family} is no family that is known here: its fields were read by their usual names")
    if stamp.version != CURRENT_VERSION and not demand.strict:
        yield f"the stamp is of version {stamp.version}: `kite adapter migrate` makes it version {CURRENT_VERSION}"
    source: Mapping[str, Scalar] = asdict(Serving()) if demand.strict else stamp.layout
    untold = ", ".join(f"{name} {source.get(name)}" for name in _SERVING if name not in demand.told)
    if untold:
        how = "taken as the defaults" if demand.strict else "believed as stamped"
        yield clip(f"nothing told how the servers hold the KV cache; {how}: {untold}")


def _dump(value: Mapping[str, Scalar] | Sequence[str]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
