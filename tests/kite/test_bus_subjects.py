"""Subjects carry any id, are valid for NATS, and can be read back."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kite.bus import (
    DEC,
    EVT,
    FLEET,
    TEL,
    dec_filters,
    dec_subject,
    escape,
    evt_subject,
    stream_of,
    tel_subject,
    unescape,
)

VALID_TOKEN = re.compile(r"[\x21-\x7e]+")


@given(st.text())
@example("")
@example("%")
@example("blend@inst/1.2 *>\r\n\x00é漢")
def test_any_id_becomes_one_valid_token_and_back(text: str):
    token = escape(text)
    assert VALID_TOKEN.fullmatch(token)
    assert not set(token) & set(".*> \t\r\n")
    assert unescape(token) == text


@given(st.text(), st.text())
def test_two_ids_never_share_a_token(one: str, other: str):
    assert (escape(one) == escape(other)) == (one == other)


def test_an_event_says_what_happened_to_whom():
    subject = evt_subject("kite.upcycle.blend_loaded.v2", "blend/credit@node-1.a")
    assert subject == "kite.evt.v1.upcycle.blend.credit%40node-1%2Ea.blend_loaded"
    assert stream_of(subject) == EVT


@pytest.mark.parametrize(
    ("event_type", "subject"),
    [("upcycle.blend_loaded.v1", "a/b"), ("kite.upcycle.v1", "a/b"), ("kite.a.b.v1", "nothing"), ("kite.a.b.v1", "/x")],
)
def test_a_malformed_event_has_no_subject(event_type: str, subject: str):
    with pytest.raises(ValueError, match="no bus subject"):
        evt_subject(event_type, subject)


def test_a_worker_hears_its_node_and_the_fleet():
    own, fleet = dec_filters("yoco", "node.1")
    assert dec_subject("yoco", "node.1", "wake_ordered", "i-1").startswith(own.removesuffix(">"))
    assert dec_subject("yoco", FLEET, "wake_ordered", "i-1").startswith(fleet.removesuffix(">"))


def test_every_subject_has_its_stream():
    assert stream_of(dec_subject("guard", "n", "k", "t")) == DEC
    assert stream_of(tel_subject("n")) == TEL
    with pytest.raises(ValueError, match="no stream"):
        stream_of("somewhere.else")
