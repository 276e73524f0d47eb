"""The AsyncAPI 3 document: what travels on the bus, for readers and tools outside of KITE. Generated from the registry.

An AsyncAPI document describes one application. Here that is the arbitrator, the only decider: it receives what
producers publish on `KITE_EVT` and `KITE_TEL`, and sends on `KITE_DEC`. A worker reads the operations the other way
round. Everything is in the one document, so that it can be read without the files of `schemas/json`.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import TypeAlias

from pydantic.json_schema import JsonSchemaValue, models_json_schema

from kite_schemas.envelope import EVENT_MAX_BYTES, Header
from kite_schemas.ledger import Checkpointed
from kite_schemas.model import Data
from kite_schemas.registry import TYPES
from kite_schemas.telemetry import Window
from kite_schemas.why import Decision, Fact, Order, Request

ASYNCAPI = "3.0.0"
DISTRIBUTION = "kite-control-plane"
EVENT_TYPE = "application/cloudevents+json"
NATS_PORT = "4222"

FACTS, WINDOWS, DECISIONS = "KITE_EVT", "KITE_TEL", "KITE_DEC"
"""The streams of the bus; a channel is called like the stream that stores it."""

ADDRESSES = {
    FACTS: "kite.evt.v1.{family}.{entity}.{id}.{verb}",
    WINDOWS: "kite.tel.v1.{node}",
    DECISIONS: "kite.dec.v1.{service}.{node}.{kind}.{target}",
}
FLEET = "_"  # as service or node of a decision: for every one

ESCAPED = (
    "Letters, digits, `_`, `-` and `~` stand for themselves, every other byte of its UTF-8 is `%XX`, empty is `%`."
)

DESCRIPTION = f"""\
What travels on KITE's bus, as the arbitrator sees it: it receives facts, requests and telemetry windows, and sends
decisions. Workers and producers read the operations the other way round.

Every message is a CloudEvents 1.0 event in structured JSON, at most {EVENT_MAX_BYTES} bytes. A reader ignores
fields that it does not know; a writer may not invent any. Types of the ledger that no channel lists are never sent: the
arbitrator writes them, and they are read from the ledger.
"""

Json: TypeAlias = JsonSchemaValue
Models: TypeAlias = Mapping[str, type[Data]]


def document() -> Json:
    """Return the whole document, ready for JSON. Its version is that of the installed distribution."""
    return {
        "asyncapi": ASYNCAPI,
        "id": "urn:kite:bus:v1",
        "info": _info(),
        "defaultContentType": EVENT_TYPE,
        "servers": {"bus": _server()},
        "channels": {
            FACTS: _facts(),
            WINDOWS: _windows(),
            DECISIONS: _decisions(),
        },
        "operations": {
            "takeFacts": _operation(
                "receive", FACTS, "Every fact and request becomes one row of the ledger, in order."
            ),
            "takeWindows": _operation("receive", WINDOWS, "Windows are lossy by contract; what is lost is counted."),
            "sendDecisions": _operation("send", DECISIONS, "The outbox: at least once, after the decision is durable."),
        },
        "components": {
            "messages": {name: _message(model) for name, model in TYPES.items()},
            "schemas": schemas(TYPES),
            "correlationIds": {"request": _correlation()},
        },
    }


def sent(*kinds: type[Data]) -> Models:
    """Return the types of these kinds that travel on KITE_EVT or KITE_DEC."""
    return {name: model for name, model in TYPES.items() if issubclass(model, kinds) and model is not Window}


def _info() -> Json:
    return {
        "title": "KITE bus",
        "version": version(DISTRIBUTION),
        "description": DESCRIPTION,
        "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        "tags": _tags(*_kinds()),
    }


def _kinds() -> Iterable[str]:
    return dict.fromkeys(model.KIND for model in TYPES.values())


def _server() -> Json:
    return {
        "host": "{host}:{port}",
        "protocol": "nats",
        "description": "NATS with JetStream, 2.12 or later, that syncs every write to disk.",
        "variables": {
            "host": {"default": "127.0.0.1", "description": "`kite up` starts a bus of its own on a free port."},
            "port": {"default": NATS_PORT},
        },
    }


def _facts() -> Json:
    models = sent(Fact, Request)
    parameters = {
        "family": _one_of("The type's family.", {_family(name) for name in models}),
        "entity": {
            "description": "What the event is about, as in its `subject` before the slash.",
            "examples": ["node"],
        },
        "id": {"description": f"Which one, as after the slash. {ESCAPED}", "examples": ["node-1%2Ea"]},
        "verb": _one_of("What the type says happened.", {_verb(name) for name in models}),
    }
    return _channel(
        FACTS, "Facts and requests: about one entity each. Kept 7 days; full means wait.", models, parameters
    )


def _windows() -> Json:
    node = {"description": f"The node that measured. {ESCAPED}", "examples": ["node-1"]}
    return _channel(
        WINDOWS, "Telemetry windows, ten a second and node. Kept one hour.", {Window.TYPE: Window}, {"node": node}
    )


def _decisions() -> Json:
    models = sent(Decision, Checkpointed)
    services = {_family(name) for name, model in models.items() if issubclass(model, Order)}
    parameters = {
        "service": _one_of(f"The worker's service; `{FLEET}`: whoever listens.", services | {FLEET}),
        "node": {"description": f"The worker's node; `{FLEET}`: every node. {ESCAPED}", "examples": ["node-1", FLEET]},
        "kind": _one_of("What the type says is decided.", {_verb(name) for name in models}),
        "target": {
            "description": f"The order's target, else the event's subject. {ESCAPED}",
            "examples": ["instance%2Fnode-1-0"],
        },
    }
    return _channel(DECISIONS, "Decisions; written only by the arbitrator's outbox. Kept 7 days.", models, parameters)


def _channel(stream: str, description: str, models: Models, parameters: Json) -> Json:
    return {
        "address": ADDRESSES[stream],
        "title": stream,
        "description": description,
        "servers": [{"$ref": "#/servers/bus"}],
        "parameters": parameters,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in models},
    }


def _operation(action: str, channel: str, summary: str) -> Json:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": summary}


def _one_of(description: str, tokens: Iterable[str]) -> Json:
    return {"description": description, "enum": sorted(tokens)}


def _family(event_type: str) -> str:
    return event_type.split(".")[1]


def _verb(event_type: str) -> str:
    return event_type.split(".")[2]


def _tags(*names: str) -> list[Json]:
    return [{"name": name} for name in names]


def _message(model: type[Data]) -> Json:
    says = {"type": {"const": model.TYPE}, "data": _ref(model.TYPE)}
    event: Json = {"type": "object", "properties": says, "required": list(says)}
    return {
        "name": model.TYPE,
        "title": model.__name__,
        "summary": (model.__doc__ or "").strip().splitlines()[0],
        "contentType": EVENT_TYPE,
        "tags": _tags(model.KIND),
        "correlationId": {"$ref": "#/components/correlationIds/request"},
        "headers": _ref("Headers"),
        "payload": {"allOf": [_ref("Envelope"), event]},
    }


def _correlation() -> Json:
    return {"description": "The request that began it all.", "location": "$message.payload#/correlationid"}


def schemas(models: Models) -> Json:
    """Return every schema by its name: a payload is called like its type, a part of payloads like its class."""
    places, found = models_json_schema(
        [(model, "validation") for model in models.values()], ref_template="#/components/schemas/{model}"
    )
    names = {
        ref["$ref"].rpartition("/")[2]: model.TYPE for (model, _), ref in places.items() if issubclass(model, Data)
    }
    defs: Json = found["$defs"]
    parts: Json = {names.get(name, name): part for name, part in defs.items()}
    return {"Headers": _headers(), "Envelope": _envelope()} | parts


def _ref(schema: str) -> Json:
    return {"$ref": f"#/components/schemas/{schema}"}


def _envelope() -> Json:
    """Return the schema of the header; it is open, since `data` stands beside it and readers ignore what is new."""
    schema = Header.model_json_schema()
    del schema["additionalProperties"]
    return schema | {"title": "Envelope"}


def _headers() -> Json:
    texts = {
        "Nats-Msg-Id": "`<event id>.<first 16 hex digits of sha256 over the payload>`: a repeat is stored once.",
        "Nats-Expected-Stream": "The stream that must store the message.",
        "traceparent": "W3C trace context.",
        "tracestate": "W3C trace context.",
        "Kite-Signature": "`<key id>.<Ed25519 over the exact payload, in URL-safe base64>`; needed where keys are.",
    }
    properties: Json = {name: {"type": "string", "description": text} for name, text in texts.items()}
    properties["Nats-Msg-Id"]["pattern"] = r"^[0-9a-f-]{36}\.[0-9a-f]{16}$"
    properties["Nats-Expected-Stream"]["enum"] = list(ADDRESSES)
    properties["Kite-Signature"]["pattern"] = r"^[0-9a-f]{16}\.[A-Za-z0-9_-]{86}==$"
    return {"type": "object", "properties": properties, "required": ["Nats-Msg-Id", "Nats-Expected-Stream"]}
