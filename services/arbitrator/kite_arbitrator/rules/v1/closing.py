"""How an injection ends, for every rule that ends one."""

from collections.abc import Iterator, Sequence

from kite_arbitrator.records import Injection, Row
from kite_arbitrator.rules.draft import Draft, why
from kite_arbitrator.rules.v1.weights import Weights
from kite_arbitrator.state import State, lasting, members, serving
from kite_schemas.policy import Pool
from kite_schemas.upcycle import (
    BaseRef,
    Ending,
    InjectionClosed,
    InjectionRejected,
)
from kite_schemas.why import Reason, RuleValue


def reject(state: State, row: Row, injection: Injection, reason: Reason, detail: str) -> Iterator[Draft]:
    """Say why an injection cannot be, and close it."""
    request = injection.request
    data = InjectionRejected(request=injection.id, blend=request.blend, detail=detail, why=why(state, row, reason))
    yield Draft(subject(injection), data)
    yield closed(state, row, injection, Ending.REJECTED, reason)


def closed(
    state: State,
    row: Row,
    injection: Injection,
    ending: Ending,
    reason: Reason,
    *,
    weights: Weights | None = None,
    rules: Sequence[RuleValue] = (),
) -> Draft:
    """Return the one end of an injection; a promoted one says who has it and who lacks it."""
    told = lasting(state) and ending is Ending.PROMOTED
    others = (i.id for i in members(state, injection.request.base) if serving(i) and i.id not in injection.proven)
    return Draft(
        subject(injection),
        InjectionClosed(
            request=injection.id,
            blend=injection.request.blend,
            outcome=ending,
            members=weights.members if weights else injection.members,
            base_weight_ppm=weights.base_ppm if weights else injection.base_weight_ppm,
            version=injection.resident.version if injection.resident and ending is Ending.PROMOTED else None,
            instances=tuple(n for n in injection.targets if n in injection.proven) if told else None,
            missing=tuple(others) if told else None,
            why=why(state, row, reason, rules=rules),
        ),
    )


def subject(injection: Injection) -> str:
    """Return the subject of what is decided about an injection."""
    return f"blend/{injection.request.blend}"


def base_of(pool: Pool) -> BaseRef:
    """Return the base that a pool serves."""
    return BaseRef(name=pool.spec.served_name, path=pool.base_path, digest=pool.base_digest)
