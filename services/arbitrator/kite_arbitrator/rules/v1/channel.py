"""The channel of each blend: its loaded version on every instance, or the woken standby."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from kite_arbitrator.folds.telemetry import outside
from kite_arbitrator.records import Blend, Feed, Instance, Row
from kite_arbitrator.rules.draft import Draft, at_least, at_most, bases, heard, why
from kite_arbitrator.rules.v1.gate import said
from kite_arbitrator.state import State, current, serving, stale
from kite_schemas.arbitration import Channel, ChannelSelected, Held
from kite_schemas.ledger import Tick
from kite_schemas.telemetry import Window
from kite_schemas.why import InputAge, Reason, RuleValue

INPUTS_MAX = 64
"""How many windows a decision names as its inputs."""


class Worst(Struct, frozen=True, kw_only=True):
    """The worst values over the instances of a blend; None is not known by any of them. `nodes` told them."""

    nodes: tuple[str, ...]
    fragmentation_ppm: int | None
    hit_ppm: int | None
    sigma_us: int | None


def select(state: State, row: Row) -> Iterator[Draft]:
    """Decide the channel of every blend that the row may have something to say about."""
    limits = current(state).arbitration
    set_to = (limits.fragmentation_max_ppm, limits.hit_rate_min_ppm, limits.latency_sigma_max_us)
    ruled = any(limit is not None for limit in set_to)
    for blend in _concerned(state, row):
        if not ruled:
            yield from _freed(state, row, blend)
        elif blend.name not in state.channels:
            account = why(state, row, Reason.INITIAL)
            yield _draft(blend, ChannelSelected(blend=blend.name, channel=Channel.UPCYCLE, why=account))
        else:
            yield from _decide(state, row, blend)


def _concerned(state: State, row: Row) -> list[Blend]:
    """Return the blends to decide about, by name: new ones, at a tick all, at a window those of a node that turned."""
    match row.data:
        case Window(node=node):
            feed = state.feeds.get(node)
            if feed is None or not feed.turned:
                return []  # no blend is new at a window
            served = bases(state, node)
            found = [blend for blend in state.blends.values() if blend.base in served]
        case Tick():
            found = list(state.blends.values())
        case _:
            found = [blend for blend in state.blends.values() if blend.name not in state.channels]
    return sorted(found, key=lambda blend: blend.name)


def _freed(state: State, row: Row, blend: Blend) -> Iterator[Draft]:
    """Give a blend back to the Upcycle channel: no limit is set any more that could keep it off."""
    known = state.channels.get(blend.name)
    if known is not None and known.channel is Channel.YOCO:
        account = why(state, row, Reason.POLICY_CHANGED)
        yield _draft(blend, ChannelSelected(blend=blend.name, channel=Channel.UPCYCLE, why=account))


def _decide(state: State, row: Row, blend: Blend) -> Iterator[Draft]:
    """Hold the worst values against the limits. One outside is enough; to be inside, none may be stale or absent."""
    told = {i.id: state.feeds[i.node] for i in _holding(state, blend) if i.node in state.feeds}
    fresh = {name: feed for name, feed in told.items() if not stale(state, feed.node)}
    worst, limits = _worst(fresh), current(state).arbitration
    crossed = outside(limits, worst.fragmentation_ppm, worst.hit_ppm, worst.sigma_us)
    if not told:
        return
    if fresh and crossed:
        yield from _selected(state, row, blend, Channel.YOCO, worst)
    elif not fresh or any(not feed.lost for name, feed in told.items() if name not in fresh):
        yield from _held(state, row, blend, Reason.STALE, "windows of instances that hold it are too old to act on")
    elif crossed is None:
        detail = f"nobody knows {', '.join(_missing(state, worst))}"
        yield from _held(state, row, blend, Reason.INPUT_ABSENT, detail)
    else:
        yield from _selected(state, row, blend, Channel.UPCYCLE, worst)


def _holding(state: State, blend: Blend) -> list[Instance]:
    """Return the serving instances that hold the promoted version, in no order that matters: this runs at windows."""
    base, version = blend.base, blend.resident.version
    return [i for i in state.instances.values() if i.base == base and version in i.versions and serving(i)]


def _worst(heard_of: Mapping[str, Feed]) -> Worst:
    loads = [load for name, feed in heard_of.items() if (load := feed.loads.get(name)) is not None]
    return Worst(
        nodes=tuple(sorted({feed.node for feed in heard_of.values()})),
        fragmentation_ppm=max(_known(feed.fragmentation_ppm for feed in heard_of.values()), default=None),
        hit_ppm=min(_known(load.hit_ppm for load in loads), default=None),
        sigma_us=max(_known(load.sigma_us for load in loads), default=None),
    )


def _known(values: Iterable[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _rules(state: State, worst: Worst) -> list[RuleValue]:
    """Hold the known values against the limits that are set."""
    limits = current(state).arbitration
    rules: list[RuleValue] = []
    if worst.fragmentation_ppm is not None and limits.fragmentation_max_ppm is not None:
        rules.append(
            at_most("arbitration.fragmentation_max_ppm", worst.fragmentation_ppm, limits.fragmentation_max_ppm)
        )
    if worst.hit_ppm is not None and limits.hit_rate_min_ppm is not None:
        rules.append(at_least("arbitration.hit_rate_min_ppm", worst.hit_ppm, limits.hit_rate_min_ppm))
    if worst.sigma_us is not None and limits.latency_sigma_max_us is not None:
        rules.append(at_most("arbitration.latency_sigma_max_us", worst.sigma_us, limits.latency_sigma_max_us))
    return rules


def _missing(state: State, worst: Worst) -> list[str]:
    """Return what has a limit and is not known."""
    limits = current(state).arbitration
    values = (
        ("fragmentation", worst.fragmentation_ppm, limits.fragmentation_max_ppm),
        ("hit rate", worst.hit_ppm, limits.hit_rate_min_ppm),
        ("deviation of the latency", worst.sigma_us, limits.latency_sigma_max_us),
    )
    return [name for name, value, limit in values if value is None and limit is not None]


def _inputs(state: State, worst: Worst) -> list[InputAge]:
    return [heard(state, state.feeds[node]) for node in worst.nodes[:INPUTS_MAX]]


def _selected(state: State, row: Row, blend: Blend, channel: Channel, worst: Worst) -> Iterator[Draft]:
    """Select the channel, when it is another one or when it had to be held."""
    if state.channels[blend.name].channel is channel and f"channel/{blend.name}" not in state.holds:
        return
    reason = Reason.LIMIT_CROSSED if channel is Channel.YOCO else Reason.LIMITS_KEPT
    account = why(state, row, reason, rules=_rules(state, worst), inputs=_inputs(state, worst))
    yield _draft(blend, ChannelSelected(blend=blend.name, channel=channel, why=account))


def _held(state: State, row: Row, blend: Blend, reason: Reason, detail: str) -> Iterator[Draft]:
    if said(state, f"channel/{blend.name}", reason):
        return
    channel = state.channels[blend.name].channel
    yield _draft(blend, Held(detail=f"{channel} goes on: {detail}", why=why(state, row, reason)))


def _draft(blend: Blend, data: ChannelSelected | Held) -> Draft:
    return Draft(f"channel/{blend.name}", data)
