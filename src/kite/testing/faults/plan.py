"""What is done to one run, and at which points: drawn from its seed."""

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from kite.testing.crash import Point
from kite.testing.load.chance import chance

FAULTS = (1, 1, 2, 2, 3, 4)
"""How many faults a run has; each number is as likely as it is there often. Some become two."""

COUNT_MAX = 10
"""Up to which passage of its point a fault may wait."""

SHARED_IN = 10
"""One run in so many has its ledger on a database server."""


class Role(StrEnum):
    """The two processes that are made to fail by themselves."""

    ARBITRATOR = "arbitrator"
    WORKER = "worker"


class Step(StrEnum):
    """The points of an arbitrator."""

    MID_WRITE = "mid_write"  # half of the rows of an append are on their way
    BEFORE_COMMIT = "before_commit"  # all of them are
    AFTER_COMMIT = "after_commit"  # before the state moves
    BEFORE_PUBLISH = "before_publish"
    AFTER_PUBLISH = "after_publish"  # before it is noted that the bus has them


class Victim(StrEnum):
    """Who is hurt when a point is passed. All end without a word, and are started again."""

    SELF = "self"
    PEER = "peer"
    BUS = "bus"
    DATABASE = "database"
    SESSION = "session"  # the ledger's connection, cut by its server


class Store(StrEnum):
    """What becomes of the bus's store while its server is down."""

    KEPT = "kept"
    COPIED = "copied"
    OLDER = "older"  # the copy is put back
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Fault:
    """Hurt `victims` when the process of `role` passes `point` for the `count`-th time in its life, from 1."""

    role: Role
    point: str
    count: int
    victims: tuple[Victim, ...]
    store: Store = Store.KEPT

    def __str__(self) -> str:
        """Return it in one line."""
        store = "" if self.store is Store.KEPT else f", store {self.store}"
        return f"{self.role} at {self.point} #{self.count}: {' and '.join(self.victims)}{store}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `shared`: the ledger is on a database server. The node starts anew after `rebooted` of the requests."""

    seed: int
    shared: bool
    faults: tuple[Fault, ...]
    standbys: int
    requests: int
    rebooted: int | None

    @property
    def replaced(self) -> bool:
        """Whether the bus is to come back as another one."""
        return any(fault.store in {Store.OLDER, Store.DELETED} for fault in self.faults)

    def __str__(self) -> str:
        """Return it in one line."""
        ledger = "PostgreSQL" if self.shared else "SQLite"
        return f"{ledger}; {'; '.join(map(str, self.faults))}"


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed. The bus is replaced at most once: what it alone held can be told then."""
    rng = chance(seed, "faults")
    shared = rng.randrange(SHARED_IN) == 0
    faults = [_of_database(rng)] if shared else []
    requests = rng.randint(5, 9)
    for _ in range(rng.choice(FAULTS) - len(faults)):
        faults += _faults(rng, may_replace=all(fault.store is Store.KEPT for fault in faults))
    return Plan(
        seed=seed,
        shared=shared,
        faults=tuple(faults),
        standbys=rng.randint(2, 5),
        requests=requests,
        rebooted=rng.randrange(requests) if rng.randrange(4) == 0 else None,
    )


def _of_database(rng: Random) -> Fault:
    victim = rng.choice((Victim.DATABASE, Victim.SESSION))
    point = rng.choice((Step.MID_WRITE, Step.BEFORE_COMMIT))
    return Fault(Role.ARBITRATOR, point, rng.randint(2, COUNT_MAX), (victim,))


def _faults(rng: Random, *, may_replace: bool) -> list[Fault]:
    """Return one fault, or two where the second needs what the first has kept."""
    role = rng.choice((Role.ARBITRATOR, Role.WORKER))
    point = rng.choice([*Step] if role is Role.ARBITRATOR else [*Point])
    count = rng.randint(1, COUNT_MAX)
    kinds = ((Victim.SELF,), (Victim.SELF,), (Victim.SELF,), (Victim.PEER, Victim.SELF), (Victim.BUS, Victim.SELF))
    victims = rng.choice((*kinds, (Victim.BUS,), (Victim.BUS,), (Victim.BUS,)))
    store = rng.choice((Store.KEPT, Store.DELETED, Store.OLDER))
    if Victim.BUS not in victims or not may_replace or store is Store.KEPT:
        return [Fault(role, point, count, victims)]
    if store is Store.DELETED:
        return [Fault(role, point, count, victims, store)]
    copied = Fault(role, point, count, (Victim.BUS,), Store.COPIED)
    return [copied, Fault(role, point, count + rng.randint(1, 4), victims, store)]
