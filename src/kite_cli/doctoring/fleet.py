"""Checks of a fleet: each takes facts and gives one verdict. Pure."""

from collections.abc import Iterator

from kite.bus import DEC, EVT, FILL_ALARM_PPM, Storage
from kite.clock import US_PER_S
from kite.ledger.tables import REVISIONS
from kite.trust.files import OTHERS
from kite_cli.doctoring.facts import Bus, Disk, Fleet, Secret, Unknown
from kite_cli.doctoring.machine import NATS_MIN, old_vllm
from kite_cli.doctoring.verdict import Finding, Said, Verdict, ok, unknown, worst
from kite_cli.health import SILENT_US
from kite_cli.output import count, duration, percent, size
from kite_yoco.offers import numbers

GIB = 1024**3
FREE_MIN_BYTES = 1 * GIB
"""Below it NATS and the ledger are about to stop."""
FREE_LOW_BYTES = 5 * GIB
FREE_LOW_SHARE = 0.05

SKEW_US = 100_000
SKEW_MAX_US = 1 * US_PER_S
"""Orders end by the wall clock of their worker: the shortest lives 10 s."""

BEHIND_MSGS = 500

DURABLE = frozenset({EVT, DEC})
SYNC_HINT = (
    "set `sync_interval: always` in the jetstream block of nats.conf: an acknowledgement comes before the disk else"
)
MONITOR_HINT = "name the monitoring port by KITE_NATS_MONITOR_URL"


def bus(fleet: Fleet) -> Finding:
    """Say whether the bus answers."""
    found = fleet.bus
    if isinstance(found, Unknown):
        return unknown("bus", found)
    told = f"nats-server {found.peer.version} answers at {found.url}"
    if numbers(found.peer.version) < NATS_MIN:
        return Finding("bus", Verdict.PROBLEM, told, f"KITE needs {'.'.join(map(str, NATS_MIN))} or newer")
    return ok("bus", told)


def durability(fleet: Fleet) -> Finding:
    """Say whether what the bus acknowledges survives a crash."""
    found = fleet.bus
    if isinstance(found, Unknown):
        return unknown("durability", Unknown("the bus was not asked"))
    said = [*_kept(found), *_synced(found)]
    copies = min((one.replicas for one in found.storages if one.stream in DURABLE), default=0)
    return worst("durability", said, f"facts and decisions in files, {count(copies, 'replica')}, synced always")


def _kept(found: Bus) -> Iterator[Said]:
    for one in found.storages:
        if one.stream in DURABLE:
            yield from _stream(one, clustered=found.peer.clustered)


def _stream(one: Storage, *, clustered: bool) -> Iterator[Said]:
    if not one.in_files:
        yield Verdict.PROBLEM, f"{one.stream} is kept in memory", "make the stream anew with file storage"
    if one.synced_later:
        yield Verdict.PROBLEM, f"{one.stream} is acknowledged before it is synced", "take persist_mode from the stream"
    if clustered and one.replicas == 1:
        hint = "3 replicas survive the loss of a server"
        yield Verdict.WARNING, f"{one.stream} has one copy in a cluster of several servers", hint


def _synced(found: Bus) -> Iterator[Said]:
    if isinstance(found.sync_always, Unknown):
        yield Verdict.UNKNOWN, found.sync_always.why, found.sync_always.hint
    elif not found.sync_always:
        yield Verdict.PROBLEM, "the server acknowledges what is not on disk yet", SYNC_HINT


def room(fleet: Fleet) -> Finding:
    """Say whether the streams have room."""
    found = fleet.bus
    if isinstance(found, Unknown):
        return unknown("streams", Unknown("the bus was not asked"))
    durable = [one for one in found.states if one.stream in DURABLE]
    hint = "a full stream refuses what is published: raise its bound, or find who publishes so much"
    said = [
        (Verdict.WARNING, f"{one.stream} is {percent(one.fill_ppm)} full", hint)
        for one in durable
        if one.fill_ppm > FILL_ALARM_PPM
    ]
    return worst("streams", said, ", ".join(f"{one.stream} {percent(one.fill_ppm)} full" for one in durable))


def ledger(fleet: Fleet) -> Finding:
    """Say whether the ledger can be read, and whether its schema is this version's."""
    found = fleet.ledger
    if isinstance(found, Unknown):
        return unknown("ledger", found)
    told = f"{found.place}, position {found.pos}, schema {found.schema}"
    if found.schema == REVISIONS[-1]:
        return ok("ledger", told)
    hint = f"this version writes {REVISIONS[-1]}: the arbitrator migrates it when it starts"
    return Finding("ledger", Verdict.WARNING, told, hint)


def lag(fleet: Fleet) -> Finding:
    """Say whether the arbitrator writes, and how far it is behind the bus."""
    stood, on_bus = fleet.ledger, fleet.bus
    if isinstance(stood, Unknown) or isinstance(on_bus, Unknown):
        return unknown("arbitrator", Unknown("bus and ledger did not both answer"))
    silent_us = fleet.now_us - stood.ledger_us
    if silent_us > SILENT_US:
        hint = "see that an arbitrator runs and reaches bus and ledger; its log says why a term ended"
        return Finding("arbitrator", Verdict.PROBLEM, f"nothing written for {duration(silent_us)}", hint)
    if isinstance(stood.facts_seq, Unknown):
        return unknown("arbitrator", stood.facts_seq)
    last = max((one.last_seq for one in on_bus.states if one.stream == EVT), default=0)
    behind = max(0, last - stood.facts_seq)
    if behind > BEHIND_MSGS:
        hint = "a burst passes by itself; if it grows, the ledger's disk is too slow for what comes in"
        return Finding("arbitrator", Verdict.WARNING, f"{count(behind, 'message')} behind the bus", hint)
    return ok("arbitrator", f"writes, {count(behind, 'message')} behind the bus")


def clocks(fleet: Fleet) -> Finding:
    """Say whether the clocks of bus, ledger and this machine agree."""
    hint = "let one time service (chrony, systemd-timesyncd) set the clocks of all machines"
    said = [
        (Verdict.PROBLEM if abs(by_us) > SKEW_MAX_US else Verdict.WARNING, f"{whose}'s clock is {_off(by_us)}", hint)
        for whose, by_us in _skews(fleet)
        if abs(by_us) > SKEW_US
    ]
    if not said and isinstance(fleet.bus, Unknown):
        return unknown("clocks", Unknown("the bus was not asked"))
    return worst("clocks", said, f"within {duration(SKEW_US)} of each other")


def _skews(fleet: Fleet) -> Iterator[tuple[str, int]]:
    """Yield by how much each clock is at least ahead of this one; a ledger's is only known to be ahead."""
    if not isinstance(fleet.bus, Unknown) and fleet.bus.storages:
        best = min(fleet.bus.storages, key=lambda one: one.within_us)
        ahead_us = best.ahead_us
        yield "the bus", (max(0, abs(ahead_us) - best.within_us)) * (1 if ahead_us >= 0 else -1)
    if not isinstance(fleet.ledger, Unknown):
        yield "the arbitrator", max(0, fleet.ledger.ledger_us - fleet.now_us)


def _off(by_us: int) -> str:
    return f"{duration(abs(by_us))} {'ahead of' if by_us > 0 else 'behind'} this one"


def disks(fleet: Fleet) -> Finding:
    """Say whether there is room on the disks that the fleet writes to."""
    if not fleet.disks:
        return unknown("disk", Unknown("no folder of the fleet is on this machine"))
    said = [one for disk in fleet.disks if (one := _short(disk))]
    return worst("disk", said, ", ".join(f"{size(disk.free_bytes)} free at {disk.path}" for disk in fleet.disks))


def _short(disk: Disk) -> Said | None:
    found = f"{size(disk.free_bytes)} of {size(disk.total_bytes)} free at {disk.path}"
    hint = "free some: when it is full, NATS and the ledger refuse to write, and the fleet stands"
    if disk.free_bytes < FREE_MIN_BYTES:
        return Verdict.PROBLEM, found, hint
    low = disk.free_bytes < FREE_LOW_BYTES or disk.free_bytes < FREE_LOW_SHARE * disk.total_bytes
    return (Verdict.WARNING, found, hint) if low else None


def secrets(fleet: Fleet) -> Finding:
    """Say which files others can read that must not."""
    said = [
        (Verdict.PROBLEM, f"{one.path} has mode {one.mode:04o}", f"`chmod {_mode(one):04o} {one.path}`")
        for one in fleet.secrets
        if one.mode & OTHERS
    ]
    if not fleet.secrets:
        return unknown("permissions", Unknown("no keys of the fleet are on this machine"))
    return worst("permissions", said, f"{count(len(fleet.secrets), 'secret')}, each its owner's alone")


def _mode(one: Secret) -> int:
    return one.mode & ~OTHERS


def engines(fleet: Fleet) -> Finding:
    """Say which vLLM the nodes of the fleet run."""
    if not fleet.vllm:
        return unknown("nodes", Unknown("no node has registered a vLLM"))
    said = [one for node, version in fleet.vllm.items() if (one := old_vllm(version, f"on {node}"))]
    return worst("nodes", said, ", ".join(f"vLLM {version} on {node}" for node, version in fleet.vllm.items()))


CHECKS = (bus, durability, room, ledger, lag, clocks, disks, secrets, engines)
