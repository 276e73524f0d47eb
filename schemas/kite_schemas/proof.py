"""Events of the effect proof: measured evidence that a loaded blend changes the output."""

from enum import StrEnum

from kite_schemas.model import Micronats, Name, Text, Version
from kite_schemas.upcycle import EffectPrint
from kite_schemas.why import Outcome


class EffectProven(Outcome):
    """The blend's distributions are far enough from the base and, later on, near enough to its print."""

    TYPE = "kite.proof.effect_proven.v1"

    instance: Name
    version: Version
    base_micronats: Micronats
    base_min_micronats: Micronats
    print_micronats: Micronats | None = None
    print_max_micronats: Micronats | None = None
    effect_print: EffectPrint


class Missing(StrEnum):
    """Why an effect counts as missing."""

    NOT_LISTED = "not_listed"
    LIKE_BASE = "like_base"
    UNLIKE_PRINT = "unlike_print"
    NOT_FINITE = "not_finite"


class EffectMissing(Outcome):
    """The engine answered 200 OK, but the output says otherwise."""

    TYPE = "kite.proof.effect_missing.v1"

    instance: Name
    version: Version
    code: Missing
    message: Text
    base_micronats: Micronats | None = None
    print_micronats: Micronats | None = None
