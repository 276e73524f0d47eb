"""What each setting of the policy means and takes, from the policy's own schema, in words for people."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, Field, JsonValue, ValidationError

from kite.errors import UsageError
from kite_cli.aliases import Named, bare, read, shown, unit_of
from kite_schemas.model import INT64_MAX
from kite_schemas.policy import Change, Policy, PolicyInvalid, amend

KINDS = {"boolean": "true or false", "string": "a text", "array": "a JSON list", "object": "a JSON object"}
"""What a JSON type that has no bounds is called."""

WRONG = {"missing": "is missing", "extra_forbidden": "is not known"}
"""What is wrong inside of a list or an object, by pydantic's name for it."""


class Schema(BaseModel):
    """As much of JSON Schema as pydantic writes for a setting."""

    ref: str = Field(default="", alias="$ref")
    defs: "dict[str, Schema]" = Field(default_factory=dict, alias="$defs")
    properties: "dict[str, Schema]" = Field(default_factory=dict)
    any_of: "tuple[Schema, ...]" = Field(default=(), alias="anyOf")
    type: str = ""
    description: str = ""
    minimum: int | None = None
    maximum: int | None = None
    const: JsonValue = None
    enum: tuple[JsonValue, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `choices` are all the values it takes, empty for any of its kind between the bounds."""

    key: str
    meaning: str
    kind: str
    lowest: int | None
    highest: int | None
    choices: tuple[JsonValue, ...]
    optional: bool

    @property
    def unit(self) -> str:
        """The unit of its values, empty without one."""
        unit = unit_of(self.key)
        return unit.name if unit else ""


def settings() -> dict[str, Setting]:
    """Return every setting by its key, in the order of the policy."""
    root = Schema.model_validate(Policy.model_json_schema())
    return {key: _setting(key, schema, root) for key, schema in _leaves(root)}


def _leaves(root: Schema) -> Iterator[tuple[str, Schema]]:
    for section, schema in root.properties.items():
        inner = _target(schema, root).properties
        if inner:
            yield from ((f"{section}.{name}", leaf) for name, leaf in inner.items())
        else:
            yield section, schema


def _target(schema: Schema, root: Schema) -> Schema:
    return root.defs[schema.ref.rpartition("/")[2]] if schema.ref else schema


def _setting(key: str, schema: Schema, root: Schema) -> Setting:
    options = [_target(option, root) for option in schema.any_of or (schema,)]
    value = next((option for option in options if option.type != "null"), schema)
    return Setting(
        key=key,
        meaning=schema.description or value.description,
        kind=value.type,
        lowest=value.minimum,
        highest=value.maximum,
        choices=value.enum if value.const is None else (value.const,),
        optional=any(option.type == "null" for option in options),
    )


def takes(setting: Setting) -> str:
    """Say what a setting takes, with unit and bounds.

    >>> takes(settings()["upcycle.weight_min_ppm"])
    'a whole number of parts per million from 0 to 1000000'
    """
    return _values(setting) + (", or unset" if setting.optional else "")


def _values(setting: Setting) -> str:
    if setting.choices:
        said = [json.dumps(choice) for choice in setting.choices]
        return f"only {said[0]}" if len(said) == 1 else f"one of {', '.join(said)}"
    if setting.kind != "integer":
        return KINDS.get(setting.kind, "another value")
    return f"a whole number{f' of {setting.unit}' if setting.unit else ''}{_range(setting)}"


def _range(setting: Setting) -> str:
    lowest, highest = setting.lowest, setting.highest
    if lowest is None or highest is None:
        return ""
    return f", {lowest} or more" if highest == INT64_MAX else f" from {lowest} to {highest}"


def fits(setting: Setting, value: JsonValue) -> bool:
    """Tell whether a setting by itself could take a value; lists and objects are for the policy to judge."""
    if value is None:
        return setting.optional
    if setting.choices:
        return any(value == choice and type(value) is type(choice) for choice in setting.choices)
    match setting.kind:
        case "integer":
            return type(value) is int and _inside(setting, value)
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case _:
            return True


def _inside(setting: Setting, value: int) -> bool:
    above = setting.lowest is None or value >= setting.lowest
    return above and (setting.highest is None or value <= setting.highest)


def wanted(known: dict[str, Setting], named: Named, text: str) -> Change:
    """Return the change that gives a setting a value as it was written. Raises UsageError, saying what it takes."""
    value = read(named, text)
    setting = known[named.key]
    if value is None and not setting.optional:
        raise UsageError(f"{named.key} cannot be unset: it takes {takes(setting)}", hint=_otherwise(named.key))
    if not fits(setting, value):
        most = f", {INT64_MAX} at most" if type(value) is int and value > INT64_MAX == setting.highest else ""
        said = f"{named.key} takes {takes(setting)}{most}, not {_given(text, value)}"
        raise UsageError(said, hint=_otherwise(named.key))
    return Change(key=named.key, value=value)


def _given(text: str, value: JsonValue) -> str:
    converted = type(value) is int and str(value) != text
    return f"{shown(text)} ({value})" if converted else shown(text)


def _otherwise(key: str) -> str:
    unit = unit_of(key)
    listed = "`kite config list` shows every setting with its unit and value"
    return f"{bare(key)} takes {unit.people}; {listed}" if unit else listed


def amended(policy: Policy, changes: Sequence[Change]) -> Policy:
    """Return the policy with all changes made. Raises UsageError for a value inside a list, or for a combination."""
    try:
        return amend(policy, changes)
    except PolicyInvalid as error:
        said = f"the policy would not be valid: {_worded(error)}"
        raise UsageError(said, hint="`kite config get` shows a valid one") from error


def _worded(error: PolicyInvalid) -> str:
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return str(error)
    first = cause.errors(include_url=False, include_context=False, include_input=False)[0]
    wrong = WRONG.get(first["type"])
    return f"{'.'.join(str(part) for part in first['loc'])} {wrong}" if wrong else str(error)
