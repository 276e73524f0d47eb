"""What was valid at the last release is valid now: the models of today against the schemas released then.

`python -m kite_schemas.compat` is run at a release: it writes `schemas/released.json` anew, or says what broke. Types,
optional fields and members of an enum may come, bounds may widen; everything else needs a new version of the type. A
default stays too: an old event that leaves the field out would be read as another one.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from operator import gt, lt
from pathlib import Path
from typing import Any, TypeAlias, cast

from kite_schemas.asyncapi import DISTRIBUTION, schemas
from kite_schemas.registry import TYPES

Schema: TypeAlias = dict[str, Any]
Schemas: TypeAlias = Mapping[str, Schema]
"""Schemas by name; one refers to another by `#/components/schemas/<name>`."""

RELEASED = Path("schemas/released.json")
HELD = re.compile(r"kite\.[a-z]+\.[a-z_]+\.v\d+|Envelope")
"""What keeps its name; the parts are reached from there, and may be called otherwise."""

ANNOTATIONS = frozenset({"$comment", "description", "examples", "title"})
BOUNDS = {
    "maxItems": lt,
    "maxLength": lt,
    "maximum": lt,
    "minItems": gt,
    "minLength": gt,
    "minimum": gt,
}
"""Of each bound, when a new value is narrower than the old one."""
UNDERSTOOD = frozenset(
    {
        *("additionalProperties", "anyOf", "const", "default", "enum", "items", "pattern", "prefixItems"),
        *("properties", "required", "type", *BOUNDS),
    }
)
ABSENT = "nothing"


def present() -> Schemas:
    """Return the schemas of today's models, without what only people read."""
    return {name: bare(schema) for name, schema in schemas(TYPES).items() if name != "Headers"}


def released(text: str) -> Schemas:
    """Read the schemas of the last release."""
    return cast("dict[str, Schema]", json.loads(text)["schemas"])


def release(found: Schemas) -> str:
    """Return the file that a release leaves: one schema a line, so that a difference can be read."""
    lines = [f"{json.dumps(name)}: {json.dumps(schema, sort_keys=True)}" for name, schema in sorted(found.items())]
    return f'{{"version": "{version(DISTRIBUTION)}", "schemas": {{\n' + ",\n".join(lines) + "\n}}\n"


def bare(schema: Schema) -> Schema:
    """Return a schema without its annotations.

    >>> bare({"title": "A", "properties": {"title": {"type": "string", "description": "what it is called"}}})
    {'properties': {'title': {'type': 'string'}}}
    """
    return {key: _bare(key, value) for key, value in schema.items() if key not in ANNOTATIONS}


def _bare(key: str, value: object) -> object:
    match key, value:
        case "default" | "const" | "enum", _:
            return value
        case "properties", dict():
            return {name: bare(part) for name, part in cast("Schemas", value).items()}
        case (("anyOf" | "prefixItems"), list()):
            return [bare(part) for part in cast("list[Schema]", value)]
        case _, dict():
            return bare(cast("Schema", value))
        case _:
            return value


def breaks(old: Schemas, new: Schemas) -> list[str]:
    """Return every place where something that is valid by `old` is not valid by `new`, with the reason."""
    comparison = _Comparison(old, new)
    return [found for name in old if HELD.fullmatch(name) for found in comparison.whole(name)]


class _Comparison:
    """Walks two sets of schemas side by side, each by its own references."""

    def __init__(self, old: Schemas, new: Schemas) -> None:
        self._old = old
        self._new = new
        self._under_way: set[tuple[int, int]] = set()  # pairs of schemas, by identity: one may contain itself

    def whole(self, name: str) -> list[str]:
        return self._compare(name, self._old[name], self._new[name]) if name in self._new else [f"{name}: is gone"]

    def _compare(self, place: str, old: Schema, new: Schema) -> list[str]:
        pair = (id(old), id(new))
        if pair in self._under_way:
            return []
        self._under_way.add(pair)
        before, after = _resolved(old, self._old), _resolved(new, self._new)
        found = [*_default(place, before, after), *self._kinds(place, before, after)]
        self._under_way.discard(pair)
        return found

    def _kinds(self, place: str, old: Schema, new: Schema) -> list[str]:
        """Compare one of several: each of the old ones must be taken by one of the new ones."""
        if "anyOf" in old:
            return [found for branch in old["anyOf"] for found in self._kinds(place, _resolved(branch, self._old), new)]
        if "anyOf" in new:
            branches = [_resolved(branch, self._new) for branch in new["anyOf"]]
            tried = [(branch, self._kinds(place, old, branch)) for branch in branches]
            return min(tried, key=lambda one: (bool(one[1]), one[0].get("type") != old.get("type"), len(one[1])))[1]
        return [*_scalar(place, old, new), *self._fields(place, old, new), *self._elements(place, old, new)]

    def _fields(self, place: str, old: Schema, new: Schema) -> Iterator[str]:
        fields: Schemas = new.get("properties", {})
        for name, field in old.get("properties", {}).items():
            if name in fields:
                yield from self._compare(f"{place}/{name}", field, fields[name])
            else:
                yield f"{place}/{name}: is gone"
        for name in sorted({*new.get("required", ())} - {*old.get("required", ())}):
            yield f"{place}/{name}: is required now"
        yield from self._others(f"{place}/*", old, new)

    def _others(self, place: str, old: Schema, new: Schema) -> Iterator[str]:
        """Compare what is said of fields that have no name in the schema; without a word, any are taken."""
        before, after = old.get("additionalProperties", True), new.get("additionalProperties", True)
        if before is False or after is True:
            return
        if after is False:
            yield f"{place}: other fields are no longer taken"
        else:
            yield from self._compare(place, {} if before is True else before, after)

    def _elements(self, place: str, old: Schema, new: Schema) -> Iterator[str]:
        if "items" in new:
            yield from self._compare(f"{place}[]", old.get("items", {}), new["items"])
        before, after = old.get("prefixItems", ()), new.get("prefixItems", ())
        if after and len(before) != len(after):
            yield f"{place}: has {len(after)} elements, not {len(before)}"
            return
        for index, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from self._compare(f"{place}[{index}]", one, other)


def _resolved(schema: Schema, among: Schemas) -> Schema:
    """Return the schema that is meant; what stands beside a reference counts too."""
    if "$ref" not in schema:
        return schema
    beside = {key: value for key, value in schema.items() if key != "$ref"}
    return _resolved(among[schema["$ref"].rpartition("/")[2]], among) | beside


def _default(place: str, old: Schema, new: Schema) -> Iterator[str]:
    before = old.get("default", ABSENT)
    if "default" in old and new.get("default", ABSENT) != before:
        yield f"{place}: the default was {before!r}, and is {new.get('default', ABSENT)!r}"


def _scalar(place: str, old: Schema, new: Schema) -> Iterator[str]:
    """Compare what is said of a value itself."""
    before, after = old.get("type"), new.get("type")
    if after not in {None, before} and (before, after) != ("integer", "number"):
        yield f"{place}: is {after}, not {before or 'anything'}"
        return
    yield from _members(place, old, new)
    if new.get("pattern") not in {None, old.get("pattern")}:
        yield f"{place}: the pattern was {old.get('pattern', ABSENT)!r}, and is {new['pattern']!r}"
    for bound, narrower in BOUNDS.items():
        if bound in new and (bound not in old or narrower(new[bound], old[bound])):
            yield f"{place}: {bound} was {old.get(bound, ABSENT)}, and is {new[bound]}"
    for key in sorted({*old, *new} - UNDERSTOOD):
        if old.get(key) != new.get(key):
            yield f"{place}: {key} changed, which this comparison does not understand"


def _members(place: str, old: Schema, new: Schema) -> Iterator[str]:
    before, after = _listed(old), _listed(new)
    if after is None:
        return
    if before is None:
        yield f"{place}: takes only {after}"
        return
    for member in before:
        if member not in after:
            yield f"{place}: {member!r} is no longer taken"


def _listed(schema: Schema) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def main() -> int:
    """Write what is released now below the current folder, unless something broke; return the exit code."""
    now = present()
    found = breaks(released(RELEASED.read_text(encoding="utf-8")), now) if RELEASED.is_file() else []
    if found:
        sys.stderr.write("\n".join([*found, "a new version of the type is needed, with an upcaster", ""]))
        return 1
    RELEASED.write_text(release(now), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
