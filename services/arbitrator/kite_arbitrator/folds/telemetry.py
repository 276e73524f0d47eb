"""How windows, and what is decided about them, change the feeds: freshness, loss, and what each instance does.

This runs for every window of every node: it copies one small mapping per node and looks at that node's instances only.
"""

from collections.abc import Mapping

from msgspec import structs

from kite_arbitrator.folds import injections, pressure, samples
from kite_arbitrator.records import Feed, Load, Node, Pressure, Row, Sample, Span
from kite_arbitrator.state import State, probed, put
from kite_schemas.arbitration import Transport, TransportChanged
from kite_schemas.ledger import LeaseTaken
from kite_schemas.model import PPM
from kite_schemas.policy import ArbitrationPolicy
from kite_schemas.telemetry import DeviceWindow, InstanceWindow, NodeFound, NodeLost, Window
from kite_schemas.yoco import NodeRegistered

INTERVAL_US = 100_000
"""Distance of two windows of a node."""

SPAN_WINDOWS = 20
"""Expected windows over which loss is judged."""

FLOOR_BUCKET_US = 10_000_000
FLOOR_BUCKETS = 6
"""The least lag of the last minute counts as no lag."""


def window(state: State, row: Row, data: Window) -> State:
    """Take in a window; one that comes behind a newer one adds its counts only.

    One of another boot than the node's says nothing: it is late, or comes before the registration, as does one of a
    node that has left.
    """
    node = state.nodes.get(data.node)
    if node is None or node.boot != data.boot:
        return state
    feed = state.feeds.get(data.node)
    if feed is None or not feed.seq:
        feed = _begun(state, feed, data)
    if data.seq <= feed.seq:
        return put(state, _late(state, feed, data))
    policy = state.policy.arbitration if state.policy else None
    fragmentation_ppm = _worst_ppm(data.devices)
    # A node that was held up sends a longer window; the next one is due after the usual interval all the same.
    interval_us = min(data.interval_us, INTERVAL_US)
    loads = _loads(state, feed, data.instances, policy, fragmentation_ppm)
    floors = _floors(feed.floors, row.ledger_us, row.ledger_us - data.emitted_us)
    moved = structs.replace(
        feed,
        seq=data.seq,
        pos=row.pos,
        seen_us=row.ledger_us,
        interval_us=interval_us,
        held_us=max(0, data.emitted_us - data.sampled_us),
        lag_us=row.ledger_us - data.emitted_us - min(least for _, least in floors),
        silent_us=row.ledger_us - feed.seen_us if feed.pos else 0,
        floors=floors,
        span=_span(feed.span, row.ledger_us, data.seq, policy),
        fragmentation_ppm=fragmentation_ppm,
        loads=loads,
        turned=_turned(feed.loads, loads),
    )
    return pressure.press(put(state, moved), moved)


def registered(state: State, row: Row, data: NodeRegistered) -> State:
    """A new boot sends fast and counts its windows from 1; one that stays silent is lost, if windows ever came.

    One that is lost is found by its next window.
    """
    former = state.feeds.get(data.node)
    if former is None:
        return state
    seen_us = former.seen_us if former.lost else row.ledger_us
    anew = Feed(node=data.node, boot=data.boot, seen_us=seen_us, pos=row.pos, interval_us=INTERVAL_US, lost=former.lost)
    return pressure.broken(put(state, anew), data.node)


def leased(state: State, row: Row, _data: LeaseTaken) -> State:
    """A new leader hears every node anew: what came while nobody led was not lost by the transport.

    Nothing that windows said before it stays in the state, so that a leader need not read them to begin.
    """
    feeds = {name: _anew(state, row, node) for name, node in state.nodes.items()}
    pressures = {
        subject: Pressure(node=found.node, base=found.base, on=True, since_us=found.since_us, heard_us=row.ledger_us)
        for subject, found in state.pressures.items()
        if found.on
    }
    return structs.replace(state, feeds=feeds, pressures=pressures)


def lost(state: State, _row: Row, data: NodeLost) -> State:
    """What a silent node last said is not known any more, and no injection waits for its instances."""
    gone = structs.replace(_feed(state, data.node), lost=True, loads={}, fragmentation_ppm=None)
    state = pressure.broken(put(state, gone), data.node)
    for instance in [i.id for i in state.instances.values() if i.node == data.node]:
        state = injections.lost(state, instance)
    return state


def found(state: State, _row: Row, data: NodeFound) -> State:
    return put(state, structs.replace(_feed(state, data.node), lost=False))


def transport_changed(state: State, row: Row, data: TransportChanged) -> State:
    """The spans begin anew: what was lost before the change says nothing about the transport after it."""
    feed = structs.replace(_feed(state, data.node), boot=data.boot)
    number = (feed.seq - 1) // SPAN_WINDOWS
    span = Span(number=number, received=_expected(number, feed.seq), lossless_since_us=row.ledger_us)
    return put(state, structs.replace(feed, transport=data.transport, span=span))


def _feed(state: State, node: str) -> Feed:
    """Return the feed that a decision was about; the windows that it stood on may not have been read."""
    return state.feeds.get(node) or Feed(node=node)


def _anew(state: State, row: Row, node: Node) -> Feed:
    former = _feed(state, node.id)
    transport = former.transport if former.boot == node.boot else Transport.FAST
    anew = Feed(node=node.id, boot=node.boot, seen_us=row.ledger_us, pos=row.pos, interval_us=INTERVAL_US)
    return structs.replace(anew, transport=transport, lost=former.lost)


def _begun(state: State, former: Feed | None, data: Window) -> Feed:
    """Begin with the first window that is seen: those before it are nobody's loss."""
    number = (data.seq - 1) // SPAN_WINDOWS
    span = Span(number=number, received=_expected(number, data.seq) - 1, lossless_since_us=state.now_us)
    return structs.replace(former or Feed(node=data.node, boot=data.boot), seq=data.seq - 1, span=span)


def _expected(number: int, seq: int) -> int:
    """Return how many windows of a span have a sequence number up to `seq`."""
    return seq - number * SPAN_WINDOWS


def _late(state: State, feed: Feed, data: Window) -> Feed:
    loads = dict(feed.loads)
    for told in data.instances:
        load = loads.get(told.id)
        if load is not None:
            counted = samples.counted(load.samples, state.now_us, told, probed=probed(state, told.id))
            loads[told.id] = structs.replace(load, samples=counted)
    in_span = (data.seq - 1) // SPAN_WINDOWS == feed.span.number
    span = structs.replace(feed.span, received=feed.span.received + 1) if in_span else feed.span
    return structs.replace(feed, loads=loads, span=span)


def _floors(floors: tuple[tuple[int, int], ...], now_us: int, raw_us: int) -> tuple[tuple[int, int], ...]:
    bucket = now_us // FLOOR_BUCKET_US
    if floors and floors[-1][0] == bucket:
        return floors if floors[-1][1] <= raw_us else (*floors[:-1], (bucket, raw_us))
    return (*(kept for kept in floors if kept[0] > bucket - FLOOR_BUCKETS), (bucket, raw_us))


def _span(span: Span, now_us: int, seq: int, policy: ArbitrationPolicy | None) -> Span:
    """Count a window; the first one of a later span closes the spans before it."""
    number = (seq - 1) // SPAN_WINDOWS
    if number == span.number:
        return structs.replace(span, received=span.received + 1)
    limit_ppm = policy.loss_max_ppm if policy else None
    loss_ppm = max(0, (SPAN_WINDOWS - span.received) * PPM // SPAN_WINDOWS)
    skipped = number - span.number - 1
    return Span(
        number=number,
        received=1,
        lossy=_in_a_row(span.lossy, loss_ppm, skipped, limit_ppm),
        loss_ppm=PPM if skipped else loss_ppm,
        lossless_since_us=now_us if loss_ppm or skipped else span.lossless_since_us,
    )


def _in_a_row(lossy: int, loss_ppm: int, skipped: int, limit_ppm: int | None) -> int:
    """Return how many spans in a row lost more than the limit, after one that has ended and the skipped ones."""
    if limit_ppm is None or limit_ppm >= PPM:
        return 0
    ended = lossy + 1 if loss_ppm > limit_ppm else 0
    return ended + skipped


def _loads(
    state: State,
    feed: Feed,
    instances: tuple[InstanceWindow, ...],
    policy: ArbitrationPolicy | None,
    fragmentation_ppm: int | None,
) -> Mapping[str, Load]:
    """Return what the instances of the window do; one that is not in it has no process any more.

    What an instance counts while KITE itself asks it is not what its users do: it is left out.
    """
    loads: dict[str, Load] = {}
    now_us = state.now_us
    for told in instances:
        former = feed.loads.get(told.id)
        begun = former.samples if former else (Sample(now_us - 1),)
        counted = samples.counted(begun, now_us, told, probed=probed(state, told.id))
        hit_ppm, sigma_us = samples.measured(counted, now_us)
        loads[told.id] = Load(
            samples=counted,
            in_flight=None if told.running is None or told.waiting is None else told.running + told.waiting,
            hit_ppm=hit_ppm,
            sigma_us=sigma_us,
            outside=outside(policy, fragmentation_ppm, hit_ppm, sigma_us),
        )
    return loads


def outside(
    policy: ArbitrationPolicy | None, fragmentation_ppm: int | None, hit_ppm: int | None, sigma_us: int | None
) -> bool | None:
    """Tell whether a known value is outside the limits of the Upcycle channel; None when none is and one is absent."""
    if policy is None:
        return None
    least_ppm = policy.hit_rate_min_ppm
    crossed = (
        _above(fragmentation_ppm, policy.fragmentation_max_ppm),
        _above(None if hit_ppm is None else -hit_ppm, None if least_ppm is None else -least_ppm),
        _above(sigma_us, policy.latency_sigma_max_us),
    )
    if True in crossed:
        return True
    return None if None in crossed else False


def _above(value: int | None, limit: int | None) -> bool | None:
    """Tell whether a value is above its limit: None when it is not known, never when there is no limit."""
    if limit is None:
        return False
    return None if value is None else value > limit


def _turned(former: Mapping[str, Load], loads: Mapping[str, Load]) -> bool:
    """Tell whether an instance came, went, or crossed a limit of the Upcycle channel."""
    if former.keys() != loads.keys():
        return True
    return any(load.outside is not former[name].outside for name, load in loads.items())


def _worst_ppm(devices: tuple[DeviceWindow, ...]) -> int | None:
    known = [device.fragmentation_ppm for device in devices if device.fragmentation_ppm is not None]
    return max(known, default=None)
