"""Who takes part in a deployment, and what each may do on the bus: nothing that it does not do."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kite.bus import DEC, EVT, TEL, escape, tel_subject
from kite.bus.rights import looks, makes, reads, works
from kite.errors import UsageError
from kite.trust import speaks
from kite_schemas import upcycle, yoco
from kite_schemas.model import Data
from kite_schemas.registry import TYPES
from kite_schemas.telemetry import Window
from kite_schemas.why import Fact, Request

ARBITRATOR, OPERATOR, PROVISIONER = "arbitrator", "operator", "provisioner"
NODE_SERVICES = ("upcycle", "yoco", "guard")
LEADER = "kite/arbitrator/leader"
NODE_MAX_CHARS = 63
_NODE = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{NODE_MAX_CHARS - 1}}}")

OF_NODES = (yoco.NodeRegistered, yoco.ChannelSampled, upcycle.ChannelSampled)
"""Facts about `node/<its own>`: each node says them of itself only, which the subject shows."""


@dataclass(frozen=True, slots=True)
class Member:
    """A user of the bus. `source` is whom its signing key speaks for; "" when it has none, or needs no introduction."""

    name: str
    source: str
    publish: tuple[str, ...]


def members(nodes: Iterable[str]) -> tuple[Member, ...]:
    """Return everybody, the services of each node last. Raises UsageError for a node that cannot be."""
    checked = check(nodes)
    return (
        Member(PROVISIONER, "", tuple(subject for stream in (EVT, DEC, TEL) for subject in makes(stream))),
        Member(ARBITRATOR, LEADER, ("kite.dec.v1.>", *reads(EVT), *reads(TEL), *looks(DEC))),
        Member(OPERATOR, "", (*requests(), *reads(EVT), *reads(DEC))),
        *(_of_node(service, node) for node in checked for service in NODE_SERVICES),
    )


def check(nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the nodes. Raises UsageError when one cannot be, or comes twice, or there is none."""
    found = tuple(nodes)
    if not found:
        raise UsageError("a deployment has at least one node", hint="name each by --node")
    for node in found:
        if not _NODE.fullmatch(node):
            raise UsageError(
                f"{node!r} cannot be the name of a node",
                hint=f"at most {NODE_MAX_CHARS} letters, digits, dots, dashes and underscores, a letter or digit first",
            )
    if len({node.lower() for node in found}) < len(found):
        raise UsageError("two nodes have one name", hint="name each node once")
    return found


def _of_node(service: str, node: str) -> Member:
    name = f"{service}-{node}"
    extra = {"upcycle": reads(TEL, tel_subject(node)), "yoco": (tel_subject(node),)}.get(service, ())
    return Member(name, f"kite/{service}/{node}", (*facts(service, node), *works(DEC, name), *extra))


def facts(service: str, node: str) -> tuple[str, ...]:
    """Return where a service publishes its facts: every type that its key may sign, windows apart.

    >>> facts("guard", "n1")[0]
    'kite.evt.v1.guard.*.*.compared'
    """
    source = f"kite/{service}/{node}"
    found = (kind for name, kind in TYPES.items() if issubclass(kind, Fact) and speaks(source, name, None))
    return tuple(sorted({_subject(kind, node) for kind in found if kind is not Window}))


def requests() -> tuple[str, ...]:
    """Return where people's requests are published."""
    return tuple(sorted({_subject(kind) for kind in TYPES.values() if issubclass(kind, Request)}))


def _subject(kind: type[Data], node: str = "") -> str:
    """Return the pattern of the subjects of a type, as `kite.bus.evt_subject` makes them."""
    _, family, verb, _ = kind.TYPE.split(".")
    about = f"node.{escape(node)}" if kind in OF_NODES else "*.*"
    return f"kite.evt.v1.{escape(family)}.{about}.{escape(verb)}"
