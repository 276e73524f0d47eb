"""Events of the guard: do two instances that should answer alike do so?

Instances of one node are compared by its guard with one order. Across nodes it takes three, and no guard asks an
engine of another node: the first side's likeliest tokens are measured, then those and its own on the second side, and
the first side's guard, which is given that distribution, reads exactly its tokens and compares.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from kite_schemas.model import INT64_MAX, PPM, Count, Digest, Endpoint, EventId, Micronats, Model, Name, Ppm, Text, Us
from kite_schemas.probes import PROBES_MAX
from kite_schemas.why import Order, Outcome, Request

TOKENS_MAX = 128
"""Tokens of one position: what one read of an engine gives."""

TOP_TOKENS = 20
"""Likeliest tokens that a measurement adds to those it is asked for."""

ASKED_TOKENS_MAX = TOKENS_MAX - TOP_TOKENS

Micrologs = Annotated[
    tuple[Annotated[int, Field(strict=True, ge=-INT64_MAX, le=PPM)], ...],
    Field(min_length=1, max_length=TOKENS_MAX, description="millionths of a nat, one for each token"),
]


class Logprobs(Model):
    """What a model gives to some tokens after one probe; the rest of the vocabulary shares what they leave of 1."""

    tokens: Annotated[tuple[Count, ...], Field(min_length=1, max_length=TOKENS_MAX)]
    logprobs_micronats: Micrologs

    @model_validator(mode="after")
    def _one_to_one(self) -> Self:
        if not len(set(self.tokens)) == len(self.tokens) == len(self.logprobs_micronats):
            msg = "tokens and log-probabilities are not one to one"
            raise ValueError(msg)
        return self


Positions = Annotated[tuple[Logprobs, ...], Field(min_length=1, max_length=PROBES_MAX)]
"""One for each probe, in the order of their set."""

AskedTokens = Annotated[tuple[Count, ...], Field(max_length=ASKED_TOKENS_MAX)]


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
    probes: Digest | None = Field(default=None, description="the set to ask; absent: the shipped one")
    measured: Positions | None = Field(
        default=None, description="what the second side gave on its own node: only the first is asked, for these tokens"
    )


class MeasurementOrdered(Order):
    """Measure one side of a comparison across nodes: its likeliest tokens, and those of the other side."""

    TYPE = "kite.guard.measurement_ordered.v1"

    request: EventId | None = None
    first: Name
    second: Name
    side: Side = Field(description="the one of the two that is asked")
    model: Text
    probes: Digest | None = Field(default=None, description="the set to ask; absent: the shipped one")
    tokens: Annotated[tuple[AskedTokens, ...], Field(max_length=PROBES_MAX)] | None = Field(
        default=None, description="for each probe what the other side found likeliest"
    )


class DistributionMeasured(Outcome):
    """What one side of a comparison gives to the tokens of a partition, exactly."""

    TYPE = "kite.guard.distribution_measured.v1"

    request: EventId | None = None
    first: Name
    second: Name
    instance: Name = Field(description="the one of the two that was asked")
    model: Text
    probes: Digest
    positions: Positions
    duration_us: Us


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
    probes: Digest | None = Field(default=None, description="the set that was asked")


class ComparisonFailed(Outcome):
    """No verdict could be reached; this never counts as agreement."""

    TYPE = "kite.guard.comparison_failed.v1"

    request: EventId | None = None
    first: Name
    second: Name
    code: Name
    message: Text
