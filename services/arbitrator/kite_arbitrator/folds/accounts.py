"""What old versions take on each node: now, and on average over 7 days, in whole bytes and by the hour.

The mean is that of upcycle.md: the bytes of released versions times how long they were held, over a fixed 7 days, so
that a fleet which is a day old has a low one.
"""

from collections.abc import Iterator

from msgspec import structs

from kite_arbitrator.records import Account, Standing, Stored
from kite_arbitrator.state import State, current, put, without
from kite_schemas.model import PPM

METADATA_BYTES = 1_200_000
"""What a retained version takes beside its files (upcycle.md)."""

SECOND_US = 1_000_000
HOUR_US = 3_600 * SECOND_US
WEEK_HOURS = 7 * 24
WEEK_S = WEEK_HOURS * 3_600


def counted(stored: Stored) -> int:
    """Return the bytes that a version counts for while it is retained in the store."""
    return stored.size_bytes + METADATA_BYTES


def accounted(state: State) -> State:
    """Bring the account of every node up to now, where what old versions take there has changed."""
    if state.policy is None:
        return state
    taken = dict[str, int]()
    for stored in state.versions.values():
        if stored.standing is Standing.RELEASED:
            taken[stored.base] = taken.get(stored.base, 0) + counted(stored)
    for node in dict.fromkeys((*state.pools, *state.accounts)):
        bases = dict.fromkeys(pool.spec.served_name for pool in state.pools.get(node, ()))
        state = _set(state, node, sum(taken.get(base, 0) for base in bases))
    return state


def _set(state: State, node: str, retained_bytes: int) -> State:
    account = state.accounts.get(node) or Account(node=node, since_us=state.now_us)
    if account.retained_bytes == retained_bytes:
        return state
    settled = structs.replace(
        account, retained_bytes=retained_bytes, since_us=state.now_us, hours=_hours(account, state.now_us)
    )
    if not settled.hours and not retained_bytes:
        return structs.replace(state, accounts=without(state.accounts, node))
    return put(state, settled)


def _hours(account: Account, now_us: int) -> tuple[tuple[int, int], ...]:
    """Return the hours of the last 7 days that have any byte-seconds, with those since the last change added."""
    first = now_us // HOUR_US - WEEK_HOURS
    hours = {hour: byte_s for hour, byte_s in account.hours if hour > first}
    for hour, us in _split(max(account.since_us, (first + 1) * HOUR_US), now_us):
        byte_s = account.retained_bytes * us // SECOND_US
        if byte_s:
            hours[hour] = hours.get(hour, 0) + byte_s
    return tuple(sorted(hours.items()))


def _split(start_us: int, end_us: int) -> Iterator[tuple[int, int]]:
    """Yield the hours of a span of ledger time, and the µs of it in each."""
    while start_us < end_us:
        hour = start_us // HOUR_US
        until_us = min(end_us, (hour + 1) * HOUR_US)
        yield hour, until_us - start_us
        start_us = until_us


def mean_bytes(account: Account, now_us: int) -> int:
    """Return what old versions took on a node on average over the 7 days before `now_us`.

    The hour that begins the span counts whole, as those are kept by the hour.
    """
    first = now_us // HOUR_US - WEEK_HOURS
    kept = sum(byte_s for hour, byte_s in account.hours if hour > first)
    since_us = max(account.since_us, (first + 1) * HOUR_US)
    return (kept + account.retained_bytes * max(0, now_us - since_us) // SECOND_US) // WEEK_S


def limit_bytes(state: State, node: str) -> int | None:
    """Return what old versions may take of a node's device memory, None without a limit or an unknown node."""
    share_ppm, known = current(state).upcycle.retained_share_max_ppm, state.nodes.get(node)
    if share_ppm is None or known is None:
        return None
    return sum(device.memory_bytes for device in known.devices) * share_ppm // PPM
