"""Changes of the policy: the whole of it is one decision, so that a ledger never depends on a file."""

from collections.abc import Iterator

from kite_arbitrator.records import Row
from kite_arbitrator.rules.draft import Draft, at_least, why
from kite_arbitrator.state import State
from kite_schemas.policy import ChangeRejected, ChangeRequested, Policy, PolicyInvalid, PolicySet, amend, digest
from kite_schemas.why import Reason, RuleValue

SUBJECT = "policy/fleet"

PREWARM_INTERVAL_MIN_US = 60_000_000
"""Prewarming more often than this takes the cores from inference."""


def change(state: State, row: Row) -> Iterator[Draft]:
    """Set the policy that was asked for, or say why it cannot be."""
    data = row.data
    if not isinstance(data, ChangeRequested):
        return
    try:
        policy = _wanted(state, data)
    except PolicyInvalid as error:
        account = why(state, row, Reason.POLICY_INVALID)
        yield Draft(SUBJECT, ChangeRejected(request=row.id, detail=str(error), why=account))
        return
    harm = () if data.force else tuple(_harm(state, policy))
    if harm:
        account = why(state, row, Reason.POLICY_INVALID, rules=harm)
        yield Draft(SUBJECT, ChangeRejected(request=row.id, detail=_told(harm), why=account))
        return
    account = why(state, row, Reason.POLICY_CHANGED)
    yield Draft(SUBJECT, PolicySet(request=row.id, policy=policy, digest=digest(policy), why=account))


def _wanted(state: State, data: ChangeRequested) -> Policy:
    start = data.policy or state.policy
    if start is None:
        raise PolicyInvalid("there is no policy yet: the first request carries the whole one")
    return amend(start, data.changes)


def _harm(state: State, policy: Policy) -> Iterator[RuleValue]:
    """Yield the rules by which a new policy would do harm; what is in force already was forced, and stays."""
    before, after = state.policy.yoco if state.policy else None, policy.yoco
    intervals = {
        "yoco.prewarm_interval_us": (before and before.prewarm_interval_us, after.prewarm_interval_us),
        "yoco.prewarm_interval_critical_us": (
            before and before.prewarm_interval_critical_us,
            after.prewarm_interval_critical_us,
        ),
    }
    for key, (former_us, interval_us) in intervals.items():
        if interval_us is not None and interval_us != former_us:
            rule = at_least(key, interval_us, PREWARM_INTERVAL_MIN_US)
            yield from (rule,) if rule.fired else ()


def _told(harm: tuple[RuleValue, ...]) -> str:
    first = harm[0]
    return (
        f"{first.id} of {first.value} us is below {first.threshold} us: prewarming so often takes CPU from inference; "
        "ask with force to have it all the same"
    )
