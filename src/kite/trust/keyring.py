"""Whose word is taken: the operator's key, and the keys that it let in. Pure but for the arithmetic of signatures."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kite.trust.signing import Signature, key_id, parse, verifies
from kite_schemas.envelope import Event
from kite_schemas.ledger import ProducerKeyAdded
from kite_schemas.model import Data
from kite_schemas.why import Fact, Request

STATES: Mapping[str, tuple[str, ...]] = {
    "upcycle": ("upcycle.", "proof."),
    "yoco": ("yoco.", "telemetry.", "proof.", "upcycle.blend_loaded."),  # residents are loaded and proven before ready
    "guard": ("guard.",),
}
"""How the types of the facts begin that each service may state, behind `kite.`."""


class Distrusted(StrEnum):
    """Why a message is not taken at its word."""

    UNSIGNED = "unsigned"
    KEY_UNKNOWN = "key_unknown"
    SIGNATURE_WRONG = "signature_wrong"
    NOT_OF_PRODUCER = "not_of_producer"


@dataclass(frozen=True, slots=True)
class ProducerKey:
    """A public key (32 bytes), and the source it speaks for: `kite/<service>/<node or name>`."""

    source: str
    public: bytes

    @classmethod
    def of(cls, added: ProducerKeyAdded) -> "ProducerKey":
        """Return the key that an event brings."""
        return cls(added.source, bytes.fromhex(added.public_key))

    @property
    def id(self) -> str:
        """Id of the key."""
        return key_id(self.public)


class Keyring:
    """The keys that are trusted. Without the operator's (None) nothing has to be signed, and nobody can add a key."""

    def __init__(self, operator: bytes | None) -> None:
        self._operator = operator
        self._operator_id = key_id(operator) if operator else ""
        self._keys: dict[str, ProducerKey] = {}

    @property
    def demands(self) -> bool:
        """Whether messages have to be signed."""
        return self._operator is not None

    @property
    def sources(self) -> Mapping[str, str]:
        """Source by key id, of the keys that were let in."""
        return {key.id: key.source for key in self._keys.values()}

    def admit(self, added: ProducerKeyAdded) -> None:
        """Let a key in. The caller has seen that the operator asked for it."""
        key = ProducerKey.of(added)
        self._keys[key.id] = key

    def copy(self) -> "Keyring":
        """Return a keyring that grows apart from this one."""
        other = Keyring(self._operator)
        other._keys = dict(self._keys)
        return other

    def check(self, payload: bytes, header: str, event: Event) -> Signature | Distrusted | None:
        """Return who signed the event, or why it is not believed; None where nothing has to be signed.

        The operator may make any request, and is the only one to add a key; it states no facts. A producer states facts
        of its own service about its own node, or, for `kite/cli/<name>`, makes requests. Without a demand for
        signatures nobody adds a key either: the ledger would hold keys that nobody vouched for.
        """
        if self._operator is None:
            return Distrusted.UNSIGNED if isinstance(event.data, ProducerKeyAdded) else None
        if not header:
            return Distrusted.UNSIGNED
        signature = parse(header)
        if signature is None:
            return Distrusted.SIGNATURE_WRONG
        public = self._public(signature.key_id)
        if public is None:
            return Distrusted.KEY_UNKNOWN
        if not verifies(public, payload, signature.value):
            return Distrusted.SIGNATURE_WRONG
        return signature if self._may(signature.key_id, event) else Distrusted.NOT_OF_PRODUCER

    def _public(self, wanted: str) -> bytes | None:
        if wanted == self._operator_id:
            return self._operator
        found = self._keys.get(wanted)
        return found.public if found else None

    def _may(self, signer: str, event: Event) -> bool:
        if signer == self._operator_id:
            return event.data is None or isinstance(event.data, Request)
        source = self._keys[signer].source
        return source == event.header.source and speaks(source, event.header.type, event.data)


def speaks(source: str, event_type: str, data: Data | None) -> bool:
    """Tell whether a producer may say this: its kinds of facts, about its own node; a type that is not known yet goes
    by its name.
    """
    _, service, place = source.split("/")
    if service == "cli":
        return isinstance(data, Request) and not isinstance(data, ProducerKeyAdded)
    if not event_type.removeprefix("kite.").startswith(STATES.get(service, ())):
        return False
    return data is None or (isinstance(data, Fact) and getattr(data, "node", place) == place)
