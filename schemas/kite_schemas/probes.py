"""Events about probe sets: the fixed prompts that measurements are taken after. Events name a set, never its texts."""

from typing import Annotated

from pydantic import Field

from kite_schemas.model import Count, Digest, Name, RelativePath
from kite_schemas.why import Request

PROBES_MAX = 64
"""Probes of one set."""


class Registered(Request):
    """From here the instances of a base are compared with this set of probes, a file of the store."""

    TYPE = "kite.probes.registered.v1"

    base: Name
    digest: Digest = Field(description="SHA-256 of the file")
    path: RelativePath
    probes: Annotated[Count, Field(ge=1, le=PROBES_MAX)]
    longest_tokens: Count | None = Field(default=None, description="absent where the base's tokenizer was not at hand")
