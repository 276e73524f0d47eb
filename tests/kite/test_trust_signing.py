"""A signature is over exact bytes: the same every time, one spelling in the header, and gone with any flipped bit."""

from base64 import urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kite.trust import Signature, Signer, key_id, parse, verifies

SEED = bytes(range(32))
SIGNER = Signer.of(SEED)
PAYLOAD = b'{"id": "1"}'
SIGNED = SIGNER.sign(PAYLOAD)


def flipped(content: bytes, bit: int) -> bytes:
    """Flip one bit; `bit` is taken modulo the length."""
    place = bit % (8 * len(content))
    return bytes(byte ^ (1 << place % 8 if number == place // 8 else 0) for number, byte in enumerate(content))


def test_signing_is_deterministic():
    assert Signer.of(SEED).sign(PAYLOAD) == Signer.of(SEED).sign(PAYLOAD)
    assert Signer.generate().public != Signer.generate().public


def test_the_vector_of_rfc_8032_comes_out():
    seed = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    public = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    wanted = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    signer = Signer.of(seed)
    assert (signer.public, signer.sign(b"\x72").value) == (public, wanted)
    assert verifies(public, b"\x72", wanted)


@given(payload=st.binary(min_size=1, max_size=2_000), bit=st.integers(min_value=0))
def test_any_flipped_bit_is_noticed(payload: bytes, bit: int):
    signature = SIGNER.sign(payload).value
    assert verifies(SIGNER.public, payload, signature)
    assert not verifies(SIGNER.public, flipped(payload, bit), signature)
    assert not verifies(SIGNER.public, payload, flipped(signature, bit))
    assert not verifies(flipped(SIGNER.public, bit), payload, signature)


@given(st.binary(min_size=64, max_size=64))
def test_a_header_comes_back(value: bytes):
    signature = Signature(SIGNER.key_id, value)
    assert parse(signature.header) == signature


@given(st.text(max_size=200))
def test_what_anybody_writes_into_a_header_is_no_signature(header: str):
    found = parse(header)
    assert found is None or found.header == header


@pytest.mark.parametrize(
    "header",
    [
        "",
        ".",
        SIGNED.key_id,
        SIGNED.header[:-4],
        f"{SIGNED.header}AAAA",
        f"{SIGNED.header}\n",
        SIGNED.header.replace(".", ".*"),  # a lenient reader drops what is not base64
        SIGNED.header.rstrip("="),
        f"{SIGNED.header[:-3]}{chr(ord(SIGNED.header[-3]) + 1)}==",  # the last bits say nothing: a second spelling
        f"{SIGNED.key_id}.{urlsafe_b64encode(bytes(63)).decode()}",
        f"{SIGNED.key_id}.ü",
    ],
)
def test_a_signature_has_one_spelling(header: str):
    assert parse(header) is None


def test_keys_that_cannot_be():
    assert not verifies(bytes(32), PAYLOAD, bytes(64))  # a point of small order: anybody could sign for it
    assert not verifies(b"short", PAYLOAD, SIGNED.value)
    assert not verifies(SIGNER.public, PAYLOAD, b"short")
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        Signer.of(SEED[:31])


def test_a_signer_does_not_tell_its_key():
    assert repr(SIGNER) == str(SIGNER) == f"Signer({key_id(SIGNER.public)})"
    assert SEED.hex() not in repr(SIGNER)
