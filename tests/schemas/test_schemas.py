"""Events as bytes: what is written can be read, and what is wrong is refused with the place."""

from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError
from pydantic_core import from_json, to_json

from kite_schemas import generate
from kite_schemas.envelope import EVENT_MAX_BYTES, Header, MalformedEvent, decode, encode
from kite_schemas.ledger import Tick
from kite_schemas.model import Data
from kite_schemas.registry import TYPES
from kite_schemas.upcycle import AdapterRef
from kite_schemas.yoco import OrderRequested

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "events"


def header(data_type: str = OrderRequested.TYPE) -> Header:
    return Header(
        id="018f0000-0000-7000-8000-000000000000",
        source="kite/cli/test",
        type=data_type,
        subject="base/tiny",
        time="2026-01-01T00:00:00.000000Z",
        producer="cli@0",
    )


def test_an_event_is_read_as_it_was_written():
    request = OrderRequested(actor="me", base="tiny")
    event = decode(encode(header(), request))
    assert event.header == header()
    assert event.data == request


def test_unknown_fields_are_refused_when_written_and_ignored_when_read():
    with pytest.raises(ValidationError):
        OrderRequested.model_validate({"actor": "me", "base": "tiny", "colour": "red"})
    fields = from_json(encode(header(), OrderRequested(actor="me", base="tiny")))
    fields["data"]["colour"] = "red"
    assert decode(to_json(fields)).data == OrderRequested(actor="me", base="tiny")


def test_an_unknown_type_keeps_its_header_and_has_no_payload():
    raw = encode(header("kite.weather.changed.v1"), Tick())
    event = decode(raw)
    assert event.data is None
    assert event.header.type == "kite.weather.changed.v1"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"specversion": "2.0"}', "specversion"),
        (b"\xff\xfe", "not JSON"),
        (b'{"data": NaN}', "not JSON"),
        (b"x" * (EVENT_MAX_BYTES + 1), "at most"),
    ],
)
def test_malformed_bytes_are_refused_with_the_reason(raw: bytes, said: str):
    with pytest.raises(MalformedEvent, match=said):
        decode(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [("time", "2026-01-01T00:00:00"), ("id", "7"), ("type", "kite.yoco"), ("subject", "tiny"), ("traceparent", "00-1")],
)
def test_a_header_that_is_wrong_is_refused_and_the_field_named(field: str, value: str):
    fields = from_json(encode(header(), OrderRequested(actor="me", base="tiny")))
    with pytest.raises(MalformedEvent, match=field):
        decode(to_json(fields | {field: value}))


@pytest.mark.parametrize("path", ["/etc", "../up", "a/../../b", "a/..", "", "a\\b", "a\x00b"])
def test_an_adapter_path_never_leaves_the_root(path: str):
    with pytest.raises(ValidationError):
        AdapterRef(name="a", path=path, digest="0" * 64)


@pytest.mark.parametrize("path", ["a", "a/b", "a..b/c", ".hidden/..x"])
def test_an_adapter_path_below_the_root_is_taken(path: str):
    assert AdapterRef(name="a", path=path, digest="0" * 64).path == path


def test_no_payload_that_a_decision_reads_has_a_float():
    text = "".join(generate.schema(model) for model in TYPES.values())
    assert '"type": "number"' not in text


@pytest.mark.parametrize("model", TYPES.values(), ids=TYPES)
def test_what_may_be_absent_has_a_default_since_it_is_left_out_when_written(model: type[Data]):
    required = [field for field in model.model_fields.values() if field.is_required()]
    assert not any(type(None) in get_args(field.annotation) for field in required)


def test_the_committed_schemas_are_those_of_the_models():
    assert generate.differing(ROOT, generate.files()) == []


def test_no_schema_is_left_of_a_type_that_is_gone():
    assert {path.stem for path in (ROOT / generate.SCHEMAS).glob("*.json")} == set(TYPES)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_every_recorded_event_can_still_be_read(path: Path):
    event = decode(path.read_bytes())
    assert event.header.type == path.stem
    assert event.data is not None
