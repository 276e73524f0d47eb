"""What the arbitrator's state is made of: frozen records of integers and names."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from kite_schemas.arbitration import Channel, Transport
from kite_schemas.model import Data
from kite_schemas.upcycle import (
    Ending,
    InjectionRequested,
    Member,
    Resident,
    RollbackRequested,
)
from kite_schemas.why import Reason
from kite_schemas.yoco import Device, EngineOffer, OrderRequested, Path, SleepMode
from kite_schemas.yoco import State as Life


class Row(Struct, frozen=True, kw_only=True):
    """One ledger row as the core sees it; `data` is None when this version does not know the type."""

    pos: int
    id: str
    type: str
    subject: str
    ledger_us: int
    data: Data | None


class Phase(StrEnum):
    """Where an injection is."""

    REQUESTED = "requested"
    VERIFYING = "verifying"
    VERIFIED = "verified"
    DEFERRED = "deferred"
    REFUSED = "refused"
    BLENDING = "blending"
    LOADING = "loading"
    FAILING = "failing"


class Node(Struct, frozen=True, kw_only=True):
    """A node as it last registered."""

    id: str
    boot: str
    devices: tuple[Device, ...]
    sleep_modes: tuple[SleepMode, ...]
    pos: int
    offers: tuple[EngineOffer, ...] = ()


class Told(Struct, frozen=True, kw_only=True):
    """What an instance should hold, as last decided: the decision, the process that it means, the versions."""

    id: str
    endpoint: str
    versions: tuple[str, ...]
    interval_us: int = 0


class Call(Struct, frozen=True, kw_only=True):
    """When an instance was ordered to be ready, on which path, and within what time."""

    at_us: int
    path: Path
    deadline_us: int


class Instance(Struct, frozen=True, kw_only=True):
    """An instance as last reported; `pos` and `seen_us` are those of that report."""

    id: str
    node: str
    base: str
    device: str
    standby: bool
    state: Life
    endpoint: str = ""
    versions: tuple[str, ...] = ()
    noise_micronats: int = 0
    summoned: bool = False  # a standby that was woken, and is not to sleep yet
    asked: bool = False  # woken because somebody asked: no rule puts it to sleep
    failures: int = 0
    retry_us: int = 0
    probed_until_us: int = 0  # until then KITE's own requests may be among those it counts
    strays: tuple[tuple[str, str], ...] = ()  # versions it holds by an order that was given up, with their requests
    slots: tuple[tuple[str, int], ...] = ()  # the engine's own numbers of versions, where it told them
    slots_taken: int | None = (
        None  # adapters that the engine holds, as last told; unloaded ones count until it drops them
    )
    poisoned: tuple[str, ...] = ()  # versions whose numbers were not finite on it
    told: Told | None = None  # what its node's upcycle was told that it should hold
    drifted: tuple[str, ...] = ()  # names that it listed and should not, as last observed
    mode: SleepMode | None = None  # how it sleeps, while it does
    parked: bool = False  # drained because somebody asked: no rule wakes it
    quarantined_us: int = 0  # when it was
    called: Call | None = None  # the order by which it is to be ready, until it is
    path: Path | None = None  # on which it was ready last
    pos: int = 0
    seen_us: int = 0


class Blend(Struct, frozen=True, kw_only=True):
    """What a blend's name means now."""

    name: str
    base: str
    resident: Resident
    members: tuple[Member, ...]
    base_weight_ppm: int
    pos: int


class Standing(StrEnum):
    """What becomes of a version in the store."""

    FRESH = "fresh"  # its injection is open
    PROMOTED = "promoted"
    RETAINED = "retained"  # the one before: loaded still, to be returned to at once
    RETIRING = "retiring"  # its name is being taken from the instances
    RELEASED = "released"  # no instance holds it; the store does
    UNWANTED = "unwanted"  # never promoted, and never to be
    DELETING = "deleting"


class Stored(Struct, frozen=True, kw_only=True):
    """One version in the store, until it is deleted. `since_us` is when it came to its standing."""

    resident: Resident
    digest: str
    base: str
    request: str  # that brought it
    members: tuple[Member, ...]
    base_weight_ppm: int
    standing: Standing
    since_us: int
    pos: int
    left_us: int = 0  # when another version took its place, 0 unless it was promoted before
    size_bytes: int = 0
    max_lora_rank: int = 0  # it was made for, as its residual
    residual_max_ppm: int | None = None
    quarantined: bool = False  # its effect was missing: never promoted again
    damaged: bool = False  # its files are gone or not its own

    @property
    def version(self) -> str:
        """The name under which engines serve it."""
        return self.resident.version


class Account(Struct, frozen=True, kw_only=True):
    """What old versions take on a node: now, and over 7 days as the byte-seconds of each hour that has any."""

    node: str
    retained_bytes: int = 0
    since_us: int = 0
    hours: tuple[tuple[int, int], ...] = ()  # hour of ledger time, byte-seconds in it; the newest last


class Passage(Struct, frozen=True, kw_only=True):
    """How the instances of a pool came to be ready on one path: how many, how many in time, and the last durations."""

    node: str
    base: str
    path: Path
    ready: int = 0
    met: int = 0
    missed: int = 0
    took_us: tuple[int, ...] = ()  # from the order to ready, in ledger time; the newest last


class Injection(Struct, frozen=True, kw_only=True):
    """One open injection; it leaves the state when it is closed."""

    id: str
    pos: int
    request: InjectionRequested
    phase: Phase = Phase.REQUESTED
    share_ppm: int = 0
    blend_share_ppm: int = 0
    fact_pos: int = 0
    fact_us: int = 0
    members: tuple[Member, ...] = ()
    base_weight_ppm: int = 0
    targets: tuple[str, ...] = ()
    resident: Resident | None = None
    touched: tuple[str, ...] = ()  # instances that may hold the version
    proven: tuple[str, ...] = ()
    ending: Ending = Ending.ROLLED_BACK
    reason: Reason = Reason.LOAD_FAILED
    failed: tuple[str, ...] = ()  # targets that are given up, of one that may be partial
    max_lora_rank: int = 0  # that its blend is made for
    residual_max_ppm: int | None = None


class Rollback(Struct, frozen=True, kw_only=True):
    """One open rollback that was asked for; it leaves the state when it is closed."""

    id: str
    pos: int
    request: RollbackRequested
    version: str = ""
    former: str = ""
    targets: tuple[str, ...] = ()
    touched: tuple[str, ...] = ()  # instances that were given a load for it
    brought: tuple[str, ...] = ()  # of these, those that did not list it before: what fails is taken out there
    proven: tuple[str, ...] = ()
    failed: str = ""  # why it cannot be done, once that is known
    reason: Reason = Reason.LOAD_FAILED
    rebuilt: bool = False  # its version's files were found damaged: they are made again, once


class Delay(Struct, frozen=True, kw_only=True):
    """What failed of a version's end or repair, and is not ordered again before its cause may have passed."""

    target: str
    failures: int
    retry_us: int


class Watch(Struct, frozen=True, kw_only=True):
    """What the guard knows of one blend: its last verdict, and when the next one is due."""

    blend: str
    due_us: int = 0
    ordered_us: int = 0
    kl_micronats: int = 0
    verdict_us: int = 0
    pos: int = 0
    lonely: bool = False  # said once that there is nobody to compare with


class Freeze(Struct, frozen=True, kw_only=True):
    """Admissions are stopped: since when, until when at least, for which blend, how often renewed."""

    blend: str
    since_us: int
    until_us: int
    severity: int


class OpenOrder(Struct, frozen=True, kw_only=True):
    """An order without an outcome yet."""

    id: str
    type: str
    target: str
    node: str
    instance: str | None
    device: str | None
    request: str | None
    issued_us: int
    expires_us: int
    boot: str = ""  # of the node, when it was ordered
    asks: tuple[str, ...] = ()  # the instances that its worker sends requests to
    wanted: OrderRequested | None = None  # the request for one more instance that it answers
    version: str = ""  # that it is about


class Sample(Struct, frozen=True):
    """What an instance has counted up to a moment of ledger time, since its node's windows began.

    `queries` and `hits` are of all prompts, the `user_` ones without those among which KITE's own may be, as latencies.
    """

    at_us: int
    finished: int = 0
    latency_sum_us: int = 0
    latency_squares_ms2: int = 0
    queries: int = 0
    hits: int = 0
    user_queries: int = 0
    user_hits: int = 0


class Load(Struct, frozen=True, kw_only=True):
    """What the windows tell of one instance; None is not known. `samples` reach back SAMPLES_US."""

    samples: tuple[Sample, ...]
    in_flight: int | None = None
    hit_ppm: int | None = None
    sigma_us: int | None = None
    outside: bool | None = None  # of the limits of the Upcycle channel


class Span(Struct, frozen=True, kw_only=True):
    """The windows of SPAN_WINDOWS expected sequence numbers: how many came."""

    number: int = 0
    received: int = 0
    lossy: int = 0  # spans before it, in a row, that lost more than the limit
    loss_ppm: int = 0  # of the last one
    lossless_since_us: int = 0


class Feed(Struct, frozen=True, kw_only=True):
    """The windows of one node: how fresh they are, how many are lost, and what they say.

    `lag_us` is the transport's, above the least of the last minute (`floors`, by ten seconds), which takes the offset
    of the two clocks away. `held_us` is how long the newest window was on its way from sample to bus, `silent_us` how
    long after the one before it came.
    """

    node: str
    boot: str = ""
    seq: int = 0
    pos: int = 0
    seen_us: int = 0
    interval_us: int = 0
    held_us: int = 0
    lag_us: int = 0
    silent_us: int = 0
    floors: tuple[tuple[int, int], ...] = ()
    span: Span = Span()
    transport: Transport = Transport.FAST
    lost: bool = False
    fragmentation_ppm: int | None = None
    loads: Mapping[str, Load] = {}
    turned: bool = False  # an instance has crossed a limit of the Upcycle channel with the newest window


def pool_subject(node: str, base: str) -> str:
    """Return the subject of events about the pool of a base on a node: there is one at most."""
    return f"pool/{node}.{base}"


class Pressure(Struct, frozen=True, kw_only=True):
    """The concurrency of one pool against its limit: since when above or below, and whether misses jumped meanwhile."""

    node: str
    base: str
    on: bool = False
    since_us: int = 0  # of the last change
    above_us: int | None = None
    below_us: int | None = None
    jump_ppm: int | None = None  # the largest while above
    in_flight: int = 0
    heard_us: int = 0

    @property
    def id(self) -> str:
        """Return the subject of decisions about the pool."""
        return pool_subject(self.node, self.base)


class Selected(Struct, frozen=True, kw_only=True):
    """The channel of a blend."""

    blend: str
    channel: Channel
    since_us: int
    pos: int


class Hold(Struct, frozen=True, kw_only=True):
    """What is not done about a subject, as it was last said."""

    subject: str
    reason: Reason
    pos: int
    since_us: int


class Turn(Struct, frozen=True, kw_only=True):
    """The last decision about a target that has an opposite."""

    target: str
    up: bool
    at_us: int
    pos: int
    discarded: bool = False  # its opposite came too soon, and that was said
