"""A released schema only grows: what was valid then is valid now."""

from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kite_schemas import compat

Schema: TypeAlias = dict[str, Any]

ROOT = Path(__file__).parents[2]
TYPE = "kite.weather.changed.v1"
TEXT: Schema = {"type": "string"}
NOTHING: Schema = {"type": "null"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
WIND: Schema = {"enum": ["calm", "storm"], "type": "string"}


def record(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def either(*schemas: Schema, **beside: Any) -> Schema:
    return {"anyOf": list(schemas), **beside}


def listed(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def pair(*elements: Schema) -> Schema:
    return {"type": "array", "prefixItems": list(elements)}


def compare(old: Schema, new: Schema) -> list[str]:
    return compat.breaks({TYPE: record(sky=old)}, {TYPE: record(sky=new)})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(record(a=TEXT), record(a=TEXT, b=COUNT), id="a new field that may be left out"),
        pytest.param(record(("a",), a=TEXT), record(a=TEXT), id="a field may be left out now"),
        pytest.param(WIND, {"enum": ["gale", "storm", "calm"], "type": "string"}, id="a new member"),
        pytest.param({"const": "calm", "type": "string"}, WIND, id="a constant gets company"),
        pytest.param(WIND, TEXT, id="any text instead of some"),
        pytest.param(COUNT, {"type": "integer", "minimum": -1, "maximum": 10}, id="wider bounds"),
        pytest.param(COUNT, {"type": "integer"}, id="no bounds"),
        pytest.param(COUNT, {"type": "number"}, id="a number instead of a whole one"),
        pytest.param(COUNT, {}, id="anything"),
        pytest.param({"type": "string", "pattern": "^a$"}, TEXT, id="no pattern"),
        pytest.param(TEXT, either(NOTHING, TEXT), id="or nothing"),
        pytest.param({**TEXT, "default": ""}, either(TEXT, NOTHING, default=""), id="or nothing, with its default"),
        pytest.param(either(TEXT, NOTHING), either(NOTHING, FLAG, TEXT), id="one more kind"),
        pytest.param(listed(COUNT, maxItems=4), listed(COUNT, maxItems=5), id="a longer list"),
        pytest.param(record(), {**record(), "additionalProperties": TEXT}, id="fields of any name"),
        pytest.param({**TEXT, "title": "Sky", "description": "a"}, {**TEXT, "title": "Heaven"}, id="other words"),
    ],
)
def test_what_grows_is_no_break_and_the_way_back_is_one(old: Schema, new: Schema):
    old, new = compat.bare(old), compat.bare(new)
    assert compare(old, new) == []
    assert compare(new, old) or old == new


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param(record(a=TEXT, b=TEXT), record(a=TEXT), "/sky/b: is gone", id="a field is gone"),
        pytest.param(
            record(a=TEXT), record(("b",), a=TEXT, b=TEXT), "/sky/b: is required now", id="a new one is required"
        ),
        pytest.param(record(a=TEXT), record(("a",), a=TEXT), "/sky/a: is required now", id="an old one is required"),
        pytest.param(TEXT, COUNT, "/sky: is integer, not string", id="another type"),
        pytest.param({}, TEXT, "/sky: is string, not anything", id="no longer anything"),
        pytest.param(WIND, {**WIND, "enum": ["calm"]}, "/sky: 'storm' is no longer taken", id="a member is gone"),
        pytest.param(TEXT, WIND, "/sky: takes only ['calm', 'storm']", id="some text instead of any"),
        pytest.param(COUNT, {**COUNT, "maximum": 8}, "/sky: maximum was 9, and is 8", id="a lower maximum"),
        pytest.param(TEXT, {**TEXT, "maxLength": 8}, "/sky: maxLength was nothing, and is 8", id="a new bound"),
        pytest.param(TEXT, {**TEXT, "pattern": "a"}, "/sky: the pattern was 'nothing', and is 'a'", id="a new pattern"),
        pytest.param(either(TEXT, NOTHING), TEXT, "/sky: is string, not null", id="nothing is no longer taken"),
        pytest.param(
            either(record(a=COUNT), NOTHING),
            either(NOTHING, record(a={**COUNT, "minimum": 1, "maximum": 8})),
            "/sky/a: minimum was 0, and is 1",
            id="within one of several",
        ),
        pytest.param(listed(TEXT), listed(COUNT), "/sky[]: is integer, not string", id="within a list"),
        pytest.param(pair(TEXT, TEXT), pair(TEXT, COUNT), "/sky[1]: is integer, not string", id="within a pair"),
        pytest.param(pair(TEXT, TEXT), pair(TEXT), "/sky: has 1 elements, not 2", id="a pair becomes one"),
        pytest.param(
            {**TEXT, "default": "a"},
            {**TEXT, "default": "b"},
            "/sky: the default was 'a', and is 'b'",
            id="what is left out means something else",
        ),
        pytest.param(
            {"type": "object", "additionalProperties": TEXT},
            record(),
            "/sky/*: other fields are no longer taken",
            id="no fields of any name",
        ),
        pytest.param(
            TEXT,
            {**TEXT, "format": "date"},
            "/sky: format changed, which this comparison does not understand",
            id="a word that the comparison does not know",
        ),
    ],
)
def test_a_break_is_named_with_its_place(old: Schema, new: Schema, said: str):
    assert f"{TYPE}{said}" in compare(old, new)


def test_a_type_that_is_gone_is_a_break_and_a_new_one_is_none():
    old, new = {TYPE: record()}, {"kite.weather.changed.v2": record()}
    assert compat.breaks(old, new) == [f"{TYPE}: is gone"]
    assert compat.breaks(old, old | new) == []


def test_a_part_may_be_called_otherwise_but_not_become_narrower():
    old = {TYPE: record(sky={"$ref": "#/components/schemas/Sky"}), "Sky": record(wind=WIND)}
    renamed = {TYPE: record(sky={"$ref": "#/components/schemas/Heaven"}), "Heaven": record(wind=WIND)}
    assert compat.breaks(old, renamed) == []
    assert compat.breaks(old, {**renamed, "Heaven": record()}) == [f"{TYPE}/sky/wind: is gone"]


def test_a_schema_that_contains_itself_is_compared_once():
    old = {TYPE: record(below=either({"$ref": f"#/components/schemas/{TYPE}"}, NOTHING), wind=WIND)}
    assert compat.breaks(old, old) == []
    narrower = {TYPE: record(below=old[TYPE]["properties"]["below"], wind={**WIND, "enum": ["calm"]})}
    assert f"{TYPE}/wind: 'storm' is no longer taken" in compat.breaks(old, narrower)


def test_nothing_that_was_released_has_become_narrower():
    released = compat.released((ROOT / compat.RELEASED).read_text(encoding="utf-8"))
    assert "Envelope" in released
    assert compat.breaks(released, compat.present()) == []


def test_a_release_is_read_as_it_was_written():
    assert compat.released(compat.release(compat.present())) == compat.present()


def test_a_release_that_breaks_an_older_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    compat.RELEASED.parent.mkdir()
    assert compat.main() == 0
    before = compat.RELEASED.read_text()
    compat.RELEASED.write_text(before.replace("kite.ledger.tick.v1", "kite.ledger.tock.v1"))
    assert compat.main() == 1
    assert "kite.ledger.tock.v1" in compat.RELEASED.read_text()
