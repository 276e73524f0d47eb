"""Whose word is taken: one event that is, and every way in which one is not."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kite.clock import iso
from kite.events import Composed, Origin, compose, new_id
from kite.trust import Distrusted, Keyring, Signature, Signer, speaks
from kite_schemas.envelope import Event, decode
from kite_schemas.ledger import ProducerKeyAdded, Tick
from kite_schemas.model import Data
from kite_schemas.policy import ChangeRequested
from kite_schemas.telemetry import Window
from kite_schemas.upcycle import BlendLoaded
from kite_schemas.yoco import InstanceChanged, OrderRequested, State

OPERATOR, YOCO, GUARD, CLI, STRANGER = (Signer.of(bytes([number]) * 32) for number in range(5))
YOCO_SOURCE = "kite/yoco/node-a"
INSTANCE = "instance/node-a-tiny-0"


def added(signer: Signer, source: str) -> ProducerKeyAdded:
    return ProducerKeyAdded(actor="op", reason="a test", source=source, public_key=signer.public.hex())


@pytest.fixture
def ring() -> Keyring:
    """The operator's key demanded, and three producers let in."""
    found = Keyring(OPERATOR.public)
    for signer, source in ((YOCO, YOCO_SOURCE), (GUARD, "kite/guard/node-a"), (CLI, "kite/cli/ann")):
        found.admit(added(signer, source))
    return found


def ready(node: str = "node-a") -> InstanceChanged:
    return InstanceChanged(
        instance="node-a-tiny-0",
        node=node,
        from_state=State.WARMING,
        to_state=State.READY,
        code="ordered",
        duration_us=1,
    )


def window(node: str) -> Window:
    return Window(node=node, boot=new_id(), seq=1, interval_us=100_000, sampled_us=1, emitted_us=2)


def said(data: Data, source: str = YOCO_SOURCE, subject: str = INSTANCE) -> Composed:
    return compose(subject, data, Origin(source, "test@0"))


def judged(ring: Keyring, event: Composed, signer: Signer | None) -> Signature | Distrusted | None:
    header = signer.sign(event.raw).header if signer else ""
    return ring.check(event.raw, header, decode(event.raw))


def test_a_signed_fact_is_taken(ring: Keyring):
    event = said(ready())
    found = judged(ring, event, YOCO)
    assert found == YOCO.sign(event.raw)
    assert ring.sources[YOCO.key_id] == YOCO_SOURCE


def test_its_own_windows_are_taken(ring: Keyring):
    assert isinstance(judged(ring, said(window("node-a"), subject="node/node-a"), YOCO), Signature)


def test_an_unsigned_event_is_not(ring: Keyring):
    assert judged(ring, said(ready()), None) is Distrusted.UNSIGNED


def test_a_key_that_nobody_let_in(ring: Keyring):
    assert judged(ring, said(ready()), STRANGER) is Distrusted.KEY_UNKNOWN


@pytest.mark.parametrize("header", ["x", f"{YOCO.key_id}.", f"{YOCO.key_id}.AAAA", "ü.ü", "." * 300])
def test_a_header_that_is_garbage(ring: Keyring, header: str):
    event = said(ready())
    assert ring.check(event.raw, header, decode(event.raw)) is Distrusted.SIGNATURE_WRONG


def test_a_signature_of_another_key_under_this_one_s_name(ring: Keyring):
    event = said(ready())
    forged = replace(STRANGER.sign(event.raw), key_id=YOCO.key_id)
    assert ring.check(event.raw, forged.header, decode(event.raw)) is Distrusted.SIGNATURE_WRONG


def test_a_signature_of_another_event(ring: Keyring):
    event = said(ready())
    header = YOCO.sign(said(ready()).raw).header
    assert ring.check(event.raw, header, decode(event.raw)) is Distrusted.SIGNATURE_WRONG


@given(bit=st.integers(min_value=0))
def test_any_flipped_bit_of_the_payload_is_refused(bit: int):
    ring = Keyring(OPERATOR.public)
    ring.admit(added(YOCO, YOCO_SOURCE))
    event = said(ready())
    place = bit % (8 * len(event.raw))
    altered = bytearray(event.raw)
    altered[place // 8] ^= 1 << place % 8
    assert ring.check(bytes(altered), YOCO.sign(event.raw).header, decode(event.raw)) is Distrusted.SIGNATURE_WRONG


@dataclass(frozen=True)
class Case:
    """Something that its signer may not say."""

    signer: Signer
    data: Data
    source: str
    subject: str = INSTANCE


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(GUARD, ready(), YOCO_SOURCE), id="in the name of another"),
        pytest.param(Case(YOCO, ready(), "kite/yoco/node-b"), id="in the name of another node"),
        pytest.param(Case(GUARD, ready(), "kite/guard/node-a"), id="another service's family"),
        pytest.param(Case(YOCO, ready("node-b"), YOCO_SOURCE), id="about another node"),
        pytest.param(Case(YOCO, window("node-b"), YOCO_SOURCE, "node/node-b"), id="a window of another node"),
        pytest.param(Case(YOCO, added(STRANGER, "kite/yoco/x"), YOCO_SOURCE, "key/x"), id="a key, by a producer"),
        pytest.param(Case(CLI, added(STRANGER, "kite/yoco/x"), "kite/cli/ann", "key/x"), id="a key, by a user's key"),
        pytest.param(Case(CLI, ready(), "kite/cli/ann"), id="a fact, by a user's key"),
        pytest.param(Case(OPERATOR, ready(), YOCO_SOURCE), id="a fact, by the operator"),
        pytest.param(Case(OPERATOR, Tick(), "kite/cli/op", "ledger/fleet"), id="a ledger row, by the operator"),
        pytest.param(
            Case(YOCO, OrderRequested(actor="y", base="tiny"), YOCO_SOURCE, "base/tiny"), id="a request, by a producer"
        ),
    ],
)
def test_what_a_key_may_not_say(ring: Keyring, case: Case):
    event = said(case.data, case.source, case.subject)
    assert judged(ring, event, case.signer) is Distrusted.NOT_OF_PRODUCER


def test_requests_of_a_user_and_of_the_operator(ring: Keyring):
    request = said(ChangeRequested(actor="ann", reason="", changes=()), "kite/cli/ann", "policy/fleet")
    assert isinstance(judged(ring, request, CLI), Signature)
    assert isinstance(judged(ring, request, OPERATOR), Signature)


def test_only_the_operator_lets_a_key_in(ring: Keyring):
    adding = added(STRANGER, "kite/yoco/node-b")
    request = said(adding, "kite/cli/op", f"key/{STRANGER.key_id}")
    assert isinstance(judged(ring, request, OPERATOR), Signature)
    theirs = said(ready("node-b"), "kite/yoco/node-b")
    assert judged(ring, theirs, STRANGER) is Distrusted.KEY_UNKNOWN
    ring.admit(adding)
    assert isinstance(judged(ring, theirs, STRANGER), Signature)
    ring.admit(added(STRANGER, "kite/yoco/node-c"))  # the operator's last word about a key holds
    assert judged(ring, theirs, STRANGER) is Distrusted.NOT_OF_PRODUCER


def test_two_keys_of_one_source_both_speak(ring: Keyring):
    ring.admit(added(STRANGER, YOCO_SOURCE))  # the next key comes before the last one goes
    for signer in (YOCO, STRANGER):
        assert isinstance(judged(ring, said(ready()), signer), Signature)


def test_the_operator_s_key_let_in_as_a_producer_s_stays_the_operator_s(ring: Keyring):
    ring.admit(added(OPERATOR, YOCO_SOURCE))
    assert judged(ring, said(ready()), OPERATOR) is Distrusted.NOT_OF_PRODUCER


def unknown(event_type: str, source: str) -> bytes:
    """Return an event of a type that this version does not have."""
    head = f'"id":"{new_id()}","source":"{source}","type":"{event_type}","subject":"node/node-a"'
    return f'{{"specversion":"1.0",{head},"time":"{iso(0)}","producer":"y@9","data":{{}}}}'.encode()


@pytest.mark.parametrize(
    ("event_type", "source", "signer", "taken"),
    [
        ("kite.yoco.image_taken.v1", YOCO_SOURCE, YOCO, True),
        ("kite.upcycle.blend_loaded.v9", YOCO_SOURCE, YOCO, True),  # of its residents, at a start or a wake
        ("kite.upcycle.blend_stored.v9", YOCO_SOURCE, YOCO, False),
        ("kite.guard.image_taken.v1", YOCO_SOURCE, YOCO, False),
        ("kite.predictor.asked_for.v1", "kite/cli/op", OPERATOR, True),
        ("kite.predictor.asked_for.v1", "kite/cli/ann", CLI, False),  # it may be a fact
    ],
)
def test_a_type_that_is_not_known_yet_goes_by_its_name(
    ring: Keyring, event_type: str, source: str, signer: Signer, taken: bool
):
    raw = unknown(event_type, source)
    found = ring.check(raw, signer.sign(raw).header, decode(raw))
    assert isinstance(found, Signature) if taken else found is Distrusted.NOT_OF_PRODUCER


def test_without_an_operator_s_key_nothing_is_demanded_and_no_key_comes_in():
    ring = Keyring(None)
    assert not ring.demands
    assert judged(ring, said(ready()), None) is None
    assert judged(ring, said(ready()), STRANGER) is None
    adding = said(added(STRANGER, YOCO_SOURCE), "kite/cli/op", "key/x")
    assert judged(ring, adding, None) is Distrusted.UNSIGNED
    assert judged(ring, adding, OPERATOR) is Distrusted.UNSIGNED


def test_services_that_state_no_facts():
    loaded: Event = decode(said(BlendLoaded(instance="i", version=f"b@{0:012}", duration_us=1)).raw)
    assert not speaks("kite/arbitrator/leader", loaded.header.type, loaded.data)
    assert speaks("kite/upcycle/node-a", loaded.header.type, loaded.data)
