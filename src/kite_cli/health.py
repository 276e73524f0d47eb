"""How a fleet is, in one sentence, from its ledger."""

from dataclasses import dataclass

from kite.ledger import Head, Reader
from kite_arbitrator.rules.v1.fleet import instance_id
from kite_arbitrator.state import Instance, State
from kite_cli.output import count, duration, moment
from kite_incident.replay import state_at
from kite_schemas.envelope import decode
from kite_schemas.ledger import LeaseTaken, Tick
from kite_schemas.yoco import State as Life

SILENT_US = 5_000_000
"""The arbitrator writes at least a tick a second."""

RECENT_ROWS = 10_000
"""How far back a tick is looked for."""

ILL = frozenset({Life.FAILED, Life.QUARANTINED})


@dataclass(frozen=True, slots=True)
class Health:
    """A fleet at one moment: `verdict` is one word, `sentence` begins with it. Ages are against the wall clock."""

    state: State
    head: Head
    holder: str
    tick_age_us: int | None
    silent_us: int
    verdict: str
    sentence: str

    @property
    def ledger(self) -> str:
        """Leader and ledger in one line."""
        tick = "none yet" if self.tick_age_us is None else f"{duration(self.tick_age_us)} ago"
        return (
            f"guard {guard(self.state)}; leader {self.holder or 'unknown'}, epoch {self.head.epoch}; "
            f"ledger at position {self.head.pos}, {moment(self.head.ledger_us)}; last tick {tick}"
        )

    def record(self) -> dict[str, object]:
        """Return it as JSON, without instances and blends."""
        return {
            "kind": "status",
            "verdict": self.verdict,
            "sentence": self.sentence,
            "epoch": self.head.epoch,
            "holder": self.holder,
            "pos": self.head.pos,
            "ledger_us": self.head.ledger_us,
            "tick_age_us": self.tick_age_us,
            "policy": self.state.policy_digest,
            "guard": guard(self.state),
            "nodes": len(self.state.nodes),
            "instances": len(self.state.instances),
            "blends": len(self.state.blends),
            "open_injections": len(self.state.injections),
            "open_orders": len(self.state.orders),
        }


def look(reader: Reader, now_us: int) -> Health:
    """Read the ledger and judge it at `now_us` of the wall clock."""
    state, head = state_at(reader.rows()), reader.head
    silent_us = max(0, now_us - head.ledger_us)
    verdict, said = judge(state, silent_us)
    tick_us = last_us(reader, head.pos)
    return Health(
        state=state,
        head=head,
        holder=holder(reader),
        tick_age_us=None if tick_us is None else max(0, now_us - tick_us),
        silent_us=silent_us,
        verdict=verdict,
        sentence=f"{verdict}: {said}",
    )


def judge(state: State, silent_us: int) -> tuple[str, str]:
    """Return one word for the state of a fleet, and what stands behind it."""
    pools = state.policy.fleet.pools if state.policy else ()
    if silent_us > SILENT_US:
        return "stopped", f"the arbitrator has written nothing for {duration(silent_us)}"
    if not pools:
        return "empty", "the policy asks for no instance"
    gone = sorted({pool.node for pool in pools} - state.nodes.keys())
    if gone:
        return "stopped" if state.instances else "settling", f"node {', '.join(gone)} is not registered"
    wanted = [(instance_id(pool, n), n >= pool.ready) for pool in pools for n in range(pool.ready + pool.standbys)]
    ill = [name for name, _ in wanted if name in state.instances and state.instances[name].state in ILL]
    if ill:
        return "degraded", f"{', '.join(ill)} failed; {_counts(state, wanted)}"
    resting = sum(_rests(state.instances.get(name), standby=standby) for name, standby in wanted)
    return "healthy" if resting == len(wanted) else "settling", _counts(state, wanted)


def guard(state: State) -> str:
    """Return how the divergence breaker is: `off` unless the policy switches it on."""
    if state.freeze is not None:
        return f"frozen until {moment(state.freeze.until_us)}, severity {state.freeze.severity}"
    return "on" if state.policy and state.policy.guard.enabled else "off"


def _counts(state: State, wanted: list[tuple[str, bool]]) -> str:
    found = [state.instances[name].state for name, _ in wanted if name in state.instances]
    counts = f"{found.count(Life.READY)} ready, {found.count(Life.ASLEEP)} asleep of {count(len(wanted), 'instance')}"
    open_now = len(state.injections)
    under_way = f", {count(open_now, 'injection')} under way" if open_now else ""
    return f"{counts}, {count(len(state.blends), 'blend')}{under_way}"


def _rests(instance: Instance | None, *, standby: bool) -> bool:
    if instance is None:
        return False
    asleep = standby and not instance.summoned
    return instance.state is (Life.ASLEEP if asleep else Life.READY)


def holder(reader: Reader) -> str:
    """Return who leads, as it wrote itself down; empty before anybody did."""
    names = [decode(row.raw).data for row in reader.find(types={LeaseTaken.TYPE})]
    taken = names[-1] if names else None
    return taken.holder if isinstance(taken, LeaseTaken) else ""


def last_us(reader: Reader, end: int) -> int | None:
    """Return the ledger time of the last tick among the rows up to position `end`, None without one."""
    found = reader.find(types={Tick.TYPE}, first=max(1, end - RECENT_ROWS), last=end)
    return max((row.ledger_us for row in found), default=None)
