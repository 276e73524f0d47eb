"""Checkpoints: the arbitrator's signature under the end of the ledger. Who keeps one notices a cut tail."""

from kite.ledger import Head
from kite.trust import Signer
from kite_schemas.ledger import Checkpointed, sealed

CHECKPOINT_ROWS = 1_000
"""How many rows may lie behind the last checkpoint while the arbitrator runs."""


def is_due(pos: int, sealed_pos: int) -> bool:
    """Tell whether the ledger, now at `pos`, has grown enough since the checkpoint at `sealed_pos`."""
    return pos - sealed_pos >= CHECKPOINT_ROWS


def checkpoint(signer: Signer, ledger: str, head: Head) -> Checkpointed:
    """Return the checkpoint of the ledger's end."""
    digest = head.hash.hex()
    signature = signer.sign(sealed(ledger, head.pos, digest))
    return Checkpointed(
        ledger=ledger, pos=head.pos, hash=digest, key_id=signature.key_id, signature=signature.value.hex()
    )
