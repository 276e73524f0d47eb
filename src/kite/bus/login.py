"""Who a connection is to the server: its nkey, and the authority that vouches for the server. Secrets are never shown.

An nkey is one line of base32: `SU…` is the seed of a user, `U…` its public half. The server holds public halves only,
and has each nonce signed. A user listens below a prefix of its own, which its public key names: the default one would
let every user read the answers to all others.
"""

import os
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, cast

import nkeys  # pyright: ignore[reportMissingTypeStubs] # it has no types; _Nkeys below

from kite.bus.errors import BusAuthorityUnusable, NkeyUnusable
from kite.trust import KeyFileOpen
from kite.trust.files import FILE_MAX_BYTES, OTHERS

INBOX = "_INBOX"
SEED_BYTES = 32
SEED_CHARS = 58
_USER_SEED = re.compile(r"SU[A-Z2-7]{56}")


class _Nkeys(Protocol):
    """What is used of the library, which has no types."""

    PREFIX_BYTE_USER: int

    def encode_seed(self, src: bytes, prefix: int) -> bytes:
        """Return the text of a seed (32 bytes)."""
        ...

    def decode_seed(self, src: bytearray) -> tuple[int, bytes]:
        """Return the kind and the 32 bytes of a seed."""
        ...

    def from_seed(self, seed: bytearray) -> "_Pair":
        """Return both halves of a key."""
        ...


class _Pair(Protocol):
    @property
    def public_key(self) -> bytes:
        """Text of the public half."""
        ...


_nkeys = cast("_Nkeys", nkeys)


@dataclass(frozen=True, slots=True, repr=False)
class Nkey:
    """A user of the bus: the text of its seed, which is secret, and of its public half."""

    seed: str
    public: str

    @classmethod
    def generate(cls) -> Self:
        """Return a new one."""
        return cls.of(_nkeys.encode_seed(os.urandom(SEED_BYTES), _nkeys.PREFIX_BYTE_USER).decode())

    @classmethod
    def of(cls, seed: str) -> Self:
        """Return the user of a seed. Raises ValueError when it is none of a user, or mistyped."""
        if not _USER_SEED.fullmatch(seed):
            raise ValueError(f"not one line `SU…` of {SEED_CHARS} letters and digits, the seed of a user")
        kind, raw = _nkeys.decode_seed(bytearray(seed.encode()))
        if _nkeys.encode_seed(bytes(raw), kind).decode() != seed:  # the library leaves the checksum unread
            raise ValueError("its checksum is wrong")
        return cls(seed, _nkeys.from_seed(bytearray(seed.encode())).public_key.decode())

    def __repr__(self) -> str:
        return f"Nkey({self.public})"


@dataclass(frozen=True, slots=True)
class Login:
    """What a connection shows, and whom it believes; by default nothing, and the authorities of the system."""

    nkey: Nkey | None = None
    tls: ssl.SSLContext | None = None

    @classmethod
    def load(cls, nkey_file: Path | None, ca_file: Path | None) -> Self:
        """Read the files that settings name. Raises NkeyUnusable, KeyFileOpen, BusAuthorityUnusable."""
        nkey = load_nkey(nkey_file) if nkey_file else None
        return cls(nkey, load_authority(ca_file) if ca_file else None)

    @property
    def public(self) -> str:
        """The public half of the nkey, "" without one."""
        return self.nkey.public if self.nkey else ""

    @property
    def inbox(self) -> str:
        """What the subjects of all answers begin with."""
        return inbox_of(self.public) if self.public else INBOX


def inbox_of(public: str) -> str:
    """Return the prefix below which the user of a public key listens.

    >>> inbox_of("UABC")
    '_INBOX_UABC'
    """
    return f"{INBOX}_{public}"


def load_nkey(path: Path) -> Nkey:
    """Read a seed. Raises NkeyUnusable, and KeyFileOpen when others than its owner can read it."""
    try:
        with path.open("rb") as stream:
            text = stream.read(FILE_MAX_BYTES).decode("ascii").strip()
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
    except OSError as error:
        raise NkeyUnusable(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise NkeyUnusable(path, "not one line of text") from error
    if mode & OTHERS:
        raise KeyFileOpen(path, mode)
    if not text:
        raise NkeyUnusable(path, "it is empty")
    try:
        return Nkey.of(text)
    except ValueError as error:
        raise NkeyUnusable(path, str(error)) from None  # what the library saw of the seed is not for a trace


def load_authority(path: Path) -> ssl.SSLContext:
    """Return what believes servers that the authorities in a PEM file vouch for. Raises BusAuthorityUnusable."""
    try:
        if not path.read_bytes().strip():
            raise BusAuthorityUnusable(path, "it is empty")
        return ssl.create_default_context(cafile=str(path))
    except ssl.SSLError as error:
        raise BusAuthorityUnusable(path, f"no certificate in PEM ({error.reason})") from error
    except OSError as error:
        raise BusAuthorityUnusable(path, error.strerror or str(error)) from error
