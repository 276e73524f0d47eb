"""The envelope: CloudEvents 1.0 in structured JSON, with KITE's extensions."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError
from pydantic_core import from_json, to_json

from kite_schemas.model import Data, EventId, Model, Text
from kite_schemas.registry import TYPES

EVENT_MAX_BYTES = 1_000_000
"""The bus takes messages of 1 MiB; the rest is for headers."""

TypeName = Annotated[str, StringConstraints(pattern=r"^kite\.[a-z]+\.[a-z_]+\.v[1-9][0-9]*$", max_length=96)]
Subject = Annotated[str, StringConstraints(pattern=r"^[a-z]+/[^\s/]+$", max_length=256)]
Rfc3339 = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")]
TraceParent = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]


class MalformedEvent(ValueError):
    """Bytes that are no KITE event."""


class Header(Model):
    """Everything of an event but its payload."""

    specversion: Literal["1.0"] = "1.0"
    id: EventId
    source: Text
    type: TypeName
    subject: Subject
    time: Rfc3339
    datacontenttype: Literal["application/json"] = "application/json"
    correlationid: EventId | None = None
    causationid: EventId | None = None
    traceparent: TraceParent | None = None
    producer: Text = Field(description="service@version")


class Event(Model):
    """A header and its payload; `data` is None when the type is not known to this version."""

    header: Header
    data: Data | None


def encode(header: Header, data: Data) -> bytes:
    """Return the event as JSON bytes, in the order of the fields, absent fields left out."""
    fields: dict[str, Any] = header.model_dump(exclude_none=True)
    fields["data"] = data.model_dump(mode="json", exclude_none=True)
    return to_json(fields)


def decode(raw: bytes) -> Event:
    """Read an event. Raises MalformedEvent with the first thing that is wrong; unknown fields are ignored."""
    if len(raw) > EVENT_MAX_BYTES:
        raise MalformedEvent(f"event of {len(raw)} bytes, at most {EVENT_MAX_BYTES} are taken")
    try:
        fields = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise MalformedEvent(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedEvent("not a JSON object")
    try:
        header = Header.model_validate(fields, extra="ignore")
        model = TYPES.get(header.type)
        payload = fields.get("data")  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType] # JSON
        data = model.model_validate(payload, extra="ignore") if model else None
    except ValidationError as error:
        raise MalformedEvent(_first(error)) from error
    return Event(header=header, data=data)


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in detail["loc"])
    return f"{error.title}.{where}: {detail['msg']}"
