"""The two orders that change what an instance holds for a blend: load one version, or take it out again."""

from kite_arbitrator.records import Instance, Row
from kite_arbitrator.rules.draft import Draft, seen, why, within
from kite_arbitrator.state import State, current, lasting
from kite_schemas.upcycle import (
    LoadOrdered,
    Resident,
    RollbackOrdered,
)
from kite_schemas.why import Reason, Why


def load(
    state: State,
    row: Row,
    instance: Instance,
    resident: Resident,
    request: str | None,
    *,
    reason: Reason = Reason.VERIFIED,
) -> Draft:
    """Return the order to load one version into one instance and prove it; without a request it is a repair."""
    reason = Reason.RESIDENT_MISSING if request is None else reason
    return Draft(
        f"instance/{instance.id}",
        LoadOrdered(
            node=instance.node,
            target=f"load/{resident.blend}@{instance.id}",
            **within(state, current(state).expiry.load_us),
            request=request,
            instance=instance.id,
            endpoint=instance.endpoint,
            base=instance.base,
            resident=resident,
            noise_micronats=instance.noise_micronats,
            why=why(state, row, reason, inputs=[seen(state, instance)]),
        ),
    )


def rollback(state: State, instance: Instance, version: str, request: str, account: Why) -> Draft:
    """Return the order to take a version that was not promoted out of one instance again.

    Where its numbers were not finite, its worker forgets all prefixes too, and asks the base whether that heals.
    """
    blend = version.partition("@")[0]
    ill = lasting(state) and version in instance.poisoned
    return Draft(
        f"instance/{instance.id}",
        RollbackOrdered(
            node=instance.node,
            target=f"load/{blend}@{instance.id}",
            **within(state, current(state).expiry.load_us),
            request=request,
            instance=instance.id,
            endpoint=instance.endpoint,
            version=version,
            slot=dict(instance.slots).get(version),
            base=instance.base if ill else None,
            why=account,
        ),
    )
