"""What every payload is made of: frozen models, and scalars that carry their unit and bounds."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

PPM = 1_000_000
"""Parts per million: the integer 1 000 000 stands for 1."""

NAME_MAX_CHARS = 64
PATH_MAX_CHARS = 512
TEXT_MAX_CHARS = 2_000
INT64_MAX = 2**63 - 1

Count = Annotated[int, Field(strict=True, ge=0, le=INT64_MAX)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=INT64_MAX)]
Us = Annotated[int, Field(strict=True, ge=0, le=INT64_MAX)]
Micronats = Annotated[int, Field(strict=True, ge=0, le=INT64_MAX)]
Ppm = Annotated[int, Field(strict=True, ge=0, le=PPM)]
Ratio = Annotated[int, Field(strict=True, ge=0, le=INT64_MAX)]
"""Parts per million that may exceed one whole."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=NAME_MAX_CHARS)]
Version = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*@[0-9a-f]{12}$", max_length=128)]
"""The name under which an engine serves a blend: `<blend>@<first 12 hex digits of its digest>`."""
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
EventId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
RelativePath = Annotated[
    str,
    StringConstraints(pattern=r"^(?!/)(?!(.*/)?\.\.(/|$))[^\x00\\]+$", max_length=PATH_MAX_CHARS, min_length=1),
    Field(description="a path below the adapter root, without a step upwards"),
]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$", max_length=PATH_MAX_CHARS)]
Endpoint = Annotated[str, StringConstraints(pattern=r"^http://[^\s/]+$", max_length=NAME_MAX_CHARS)]
Text = Annotated[str, StringConstraints(max_length=TEXT_MAX_CHARS)]

Kind = Literal["request", "fact", "decision", "ledger"]


class Model(BaseModel):
    """A frozen record. Unknown fields are refused when it is written and ignored when it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", regex_engine="python-re", use_enum_values=False)


class Data(Model):
    """The payload of one event type. A subclass names its type; the registry finds it by that name."""

    TYPE: ClassVar[str]
    KIND: ClassVar[Kind]
