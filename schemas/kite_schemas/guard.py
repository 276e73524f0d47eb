"""Events of the guard: do two instances that should answer alike do so?"""

from pydantic import Field

from kite_schemas.model import Count, Endpoint, EventId, Micronats, Model, Name, Ppm, Text, Us
from kite_schemas.why import Order, Outcome, Request


class Side(Model):
    """One side of a comparison."""

    instance: Name
    endpoint: Endpoint


class ComparisonRequested(Request):
    """Compare what two instances answer; without a blend, the first one that both hold, or else the base."""

    TYPE = "kite.guard.comparison_requested.v1"

    first: Name
    second: Name
    blend: Name | None = None


class ComparisonOrdered(Order):
    """Measure the next-token distributions of `model` on both sides and compare them."""

    TYPE = "kite.guard.comparison_ordered.v1"

    request: EventId | None = Field(default=None, description="absent when the guard compares by itself")
    sides: tuple[Side, Side]
    model: Text = Field(description="the served name: a version, or the base")


class Compared(Outcome):
    """KL over the union of both sides' likeliest tokens and a bucket for the rest: a lower bound of the true KL."""

    TYPE = "kite.guard.compared.v1"

    request: EventId | None = None
    first: Name
    second: Name
    model: Text
    kl_micronats: Micronats = Field(description="mean over the positions")
    p99_micronats: Micronats
    covered_ppm: Ppm = Field(description="mean probability mass inside the compared tokens")
    positions: Count
    duration_us: Us


class ComparisonFailed(Outcome):
    """No verdict could be reached; this never counts as agreement."""

    TYPE = "kite.guard.comparison_failed.v1"

    request: EventId | None = None
    first: Name
    second: Name
    code: Name
    message: Text
