"""Trust: who signs what it says, whose keys are taken, and how a key file is kept. Ed25519 throughout."""

from kite.trust.errors import KeyFileExists, KeyFileMissing, KeyFileOpen, KeyFileUnreadable, KeyFileUnwritable
from kite.trust.files import PUBLIC_SUFFIX, kept_key, load_public, load_signer, new_key, public_path
from kite.trust.keyring import Distrusted, Keyring, ProducerKey, speaks
from kite.trust.signing import SIGNATURE, Signature, Signer, key_id, parse, verifies

__all__ = [
    "PUBLIC_SUFFIX",
    "SIGNATURE",
    "Distrusted",
    "KeyFileExists",
    "KeyFileMissing",
    "KeyFileOpen",
    "KeyFileUnreadable",
    "KeyFileUnwritable",
    "Keyring",
    "ProducerKey",
    "Signature",
    "Signer",
    "kept_key",
    "key_id",
    "load_public",
    "load_signer",
    "new_key",
    "parse",
    "public_path",
    "speaks",
    "verifies",
]
