"""The keys of an embedded fleet: made once, in a folder that only its owner enters, and told to the ledger."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kite.trust import kept_key, public_path
from kite_cli.asking import keys
from kite_cli.place import OPERATOR_KEY, Address

REASON = "kite up"
LEADER = "kite/arbitrator/leader"
"""For whom the arbitrator's key speaks, whichever process leads: it signs checkpoints."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The key files of a fleet's folder."""

    directory: Path

    @property
    def operator(self) -> Path:
        """The private key that signs requests, and lets the others in."""
        return self.directory / OPERATOR_KEY

    @property
    def operator_public(self) -> Path:
        """What the arbitrator trusts to begin with."""
        return public_path(self.operator)

    def of(self, name: str) -> Path:
        """Return the private key of a process of the fleet."""
        return self.operator.with_name(f"{name}.key")


def sources(services: Iterable[str], node: str) -> dict[str, str]:
    """Return, by the name of each process that has a key, for whom it speaks.

    >>> sources(["yoco"], "local")
    {'arbitrator': 'kite/arbitrator/leader', 'yoco': 'kite/yoco/local'}
    """
    return {"arbitrator": LEADER, **{name: f"kite/{name}/{node}" for name in services}}


def make(directory: Path, names: Iterable[str]) -> Keys:
    """Make the operator's key and one for each process, unless they are there. Raises the errors of `kept_key`."""
    found = Keys(directory)
    for path in (found.operator, *map(found.of, names)):
        kept_key(path)
    return found


async def introduce(fleet: Address, made: Keys, sources: Mapping[str, str]) -> None:
    """Have the ledger trust the keys of the processes (source by name) that it does not trust yet.

    Raises what `asking.keys.add` raises.
    """
    known = {(key.id, key.source) for key in keys.known(fleet)}
    for name, source in sources.items():
        signer = kept_key(made.of(name))
        if (signer.key_id, source) not in known:
            await keys.add(fleet, source, signer.public, reason=REASON)
