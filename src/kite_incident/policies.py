"""The history of the policy: what was asked for, whether it was made, and what it changed. Pure over rows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pydantic import JsonValue

from kite.errors import Fault, KiteError
from kite.ledger import Row
from kite_arbitrator import shipped
from kite_schemas.envelope import decode
from kite_schemas.policy import ChangeRejected, ChangeRequested, Policy, PolicySet, flatten

TYPES = frozenset({ChangeRequested.TYPE, PolicySet.TYPE, ChangeRejected.TYPE})
"""The rows that the history is made of: the others may be left out, and are ignored."""

SHIPPED = "shipped"
NOW = "now"
DIGEST_PREFIX_MIN_CHARS = 6
POS_MAX_DIGITS = 19


class NoPolicy(KiteError):
    """The ledger has no policy yet."""

    code = "no_policy"
    fault = Fault.OPERATOR

    def __init__(self) -> None:
        super().__init__("there is no policy yet", hint="`kite up` sets the first one")


class NoSuchPolicy(KiteError):
    """No policy of the ledger answers to that name."""

    code = "no_such_policy"
    fault = Fault.USER

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"no policy {name!r}: {why}", hint="`kite config history` lists positions and digests")
        self.name = name


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that differs, or a place inside it (`fleet.pools[0].ready`); what is not there or unset is None."""

    key: str
    before: JsonValue
    after: JsonValue


@dataclass(frozen=True, slots=True)
class Decided:
    """One request to change the policy as it was decided.

    `policy` is the new one, None when it was rejected; `first` tells that there was none before.
    """

    pos: int
    at_us: int
    request: str
    actor: str
    reason: str
    changes: tuple[Difference, ...]
    digest: str
    detail: str
    policy: Policy | None
    first: bool


def history(rows: Iterable[Row]) -> list[Decided]:
    """Return every decision about the policy, by position; `rows` begin with the first of the ledger."""
    asked: dict[str, ChangeRequested] = {}
    decided: list[Decided] = []
    policy: Policy | None = None
    for row in rows:
        data = decode(row.raw).data if row.type in TYPES else None
        match data:
            case ChangeRequested():
                asked[row.event_id] = data
            case PolicySet():
                decided.append(_set(row, data, asked.pop(data.request, None), policy))
                policy = data.policy
            case ChangeRejected():
                decided.append(_rejected(row, data, asked.pop(data.request, None), policy))
            case _:
                pass
    return decided


def _set(row: Row, data: PolicySet, request: ChangeRequested | None, before: Policy | None) -> Decided:
    return Decided(
        pos=row.pos,
        at_us=row.ledger_us,
        request=data.request,
        actor=request.actor if request else "",
        reason=request.reason if request else "",
        changes=tuple(differences(before, data.policy)),
        digest=data.digest,
        detail="",
        policy=data.policy,
        first=before is None,
    )


def _rejected(row: Row, data: ChangeRejected, request: ChangeRequested | None, before: Policy | None) -> Decided:
    return Decided(
        pos=row.pos,
        at_us=row.ledger_us,
        request=data.request,
        actor=request.actor if request else "",
        reason=request.reason if request else "",
        changes=tuple(_asked(request, before)) if request else (),
        digest="",
        detail=data.detail,
        policy=None,
        first=before is None,
    )


def _asked(request: ChangeRequested, before: Policy | None) -> Iterator[Difference]:
    """Yield what a request would have changed; an unknown key was nothing before."""
    if request.policy is not None:
        yield from differences(before, request.policy)
    flat = flatten(before) if before else {}
    yield from (Difference(change.key, flat.get(change.key), change.value) for change in request.changes)


def differences(before: Policy | None, after: Policy) -> Iterator[Difference]:
    """Yield what differs between two policies, in the order of the model; without one before, every setting."""
    old = flatten(before) if before else {}
    for key, value in flatten(after).items():
        yield from _differ(key, old.get(key), value)


def _differ(key: str, before: JsonValue, after: JsonValue) -> Iterator[Difference]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before | after:
            yield from _differ(f"{key}.{name}", before.get(name), after.get(name))
    elif isinstance(before, list) and isinstance(after, list):
        for number, (old, new) in enumerate(zip_longest(before, after)):
            yield from _differ(f"{key}[{number}]", old, new)
    else:
        yield Difference(key, before, after)


def current(decided: Sequence[Decided]) -> Policy:
    """Return the policy in force after the last decision. Raises NoPolicy."""
    found = next((one.policy for one in reversed(decided) if one.policy is not None), None)
    if found is None:
        raise NoPolicy
    return found


def choose(decided: Sequence[Decided], name: str, end: int) -> Policy:
    """Return a policy by name: `shipped`, `now`, a position up to `end` (what was in force there), or part of a digest.

    Raises NoPolicy and NoSuchPolicy.
    """
    if name == SHIPPED:
        return shipped.policy()
    if name == NOW:
        return current(decided)
    if name.isdecimal() and len(name) <= POS_MAX_DIGITS and int(name) <= end:
        before = [one for one in decided if one.pos <= int(name)]
        if not any(one.policy for one in before):
            raise NoSuchPolicy(name, "none was in force at that position")
        return current(before)
    return _by_digest(decided, name, end)


def _by_digest(decided: Sequence[Decided], prefix: str, end: int) -> Policy:
    if len(prefix) < DIGEST_PREFIX_MIN_CHARS:
        short = f"give {SHIPPED}, {NOW}, a position up to {end}, or {DIGEST_PREFIX_MIN_CHARS} characters of a digest"
        raise NoSuchPolicy(prefix, short)
    found = {one.digest: one.policy for one in decided if one.policy is not None and one.digest.startswith(prefix)}
    if len(found) != 1:
        raise NoSuchPolicy(prefix, f"{len(found)} policies have a digest that begins so")
    (policy,) = found.values()
    return policy
