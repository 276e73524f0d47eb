"""Changes of the policy: the whole of it is one decision, so that a ledger never depends on a file."""

from collections.abc import Iterator

from kite_arbitrator.rules.draft import Draft, why
from kite_arbitrator.state import Row, State
from kite_schemas.policy import ChangeRejected, ChangeRequested, Policy, PolicyInvalid, PolicySet, amend, digest
from kite_schemas.why import Reason

SUBJECT = "policy/fleet"


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
    account = why(state, row, Reason.POLICY_CHANGED)
    yield Draft(SUBJECT, PolicySet(request=row.id, policy=policy, digest=digest(policy), why=account))


def _wanted(state: State, data: ChangeRequested) -> Policy:
    start = data.policy or state.policy
    if start is None:
        raise PolicyInvalid("there is no policy yet: the first request carries the whole one")
    return amend(start, data.changes)
