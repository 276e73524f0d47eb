"""Subjects of the bus: pure text, reversible, and valid for NATS whatever the ids contain."""

from urllib.parse import quote, unquote

EVT = "KITE_EVT"
TEL = "KITE_TEL"
DEC = "KITE_DEC"

FLEET = "_"  # as node of a decision: for the workers of every node
EMPTY = "%"  # NATS has no empty token; quote() never yields a lone percent sign

_PREFIXES = {"kite.evt.v1.": EVT, "kite.tel.v1.": TEL, "kite.dec.v1.": DEC}


def escape(token: str) -> str:
    """Turn any text into one subject token of letters, digits, `_`, `-`, `~` and `%XX` (bytes of UTF-8).

    >>> escape("blend@0.5 *")
    'blend%400%2E5%20%2A'
    """
    return quote(token, safe="").replace(".", "%2E") or EMPTY


def unescape(token: str) -> str:
    """Undo `escape`.

    >>> unescape("blend%400%2E5%20%2A")
    'blend@0.5 *'
    """
    return "" if token == EMPTY else unquote(token)


def evt_subject(event_type: str, subject: str) -> str:
    """Subject of a fact or request: type `kite.<family>.<verb>.v<N>`, about `<entity>/<id>`.

    Raises ValueError when either does not have that form.

    >>> evt_subject("kite.yoco.instance_ready.v1", "instance/node-1.a")
    'kite.evt.v1.yoco.instance.node-1%2Ea.instance_ready'
    """
    parts = event_type.split(".")
    entity, slash, entity_id = subject.partition("/")
    if len(parts) != 4 or parts[0] != "kite" or not slash or not entity:  # noqa: PLR2004 - the parts named above
        msg = f"no bus subject for type {event_type!r} about {subject!r}"
        raise ValueError(msg)
    _, family, verb, _ = parts
    return f"kite.evt.v1.{escape(family)}.{escape(entity)}.{escape(entity_id)}.{escape(verb)}"


def dec_subject(service: str, node: str, kind: str, target: str) -> str:
    """Subject of a decision for `service` on `node` (`FLEET` for all of them).

    >>> dec_subject("yoco", FLEET, "wake_ordered", "i/2")
    'kite.dec.v1.yoco._.wake_ordered.i%2F2'
    """
    return f"kite.dec.v1.{escape(service)}.{escape(node)}.{escape(kind)}.{escape(target)}"


def dec_filters(service: str, node: str) -> tuple[str, str]:
    """Filters of the worker of `service` on `node`: its own decisions and the fleet-wide ones."""
    prefix = f"kite.dec.v1.{escape(service)}"
    return f"{prefix}.{escape(node)}.>", f"{prefix}.{FLEET}.>"


def tel_subject(node: str) -> str:
    """Subject of a node's telemetry windows."""
    return f"kite.tel.v1.{escape(node)}"


def stream_of(subject: str) -> str:
    """Return the stream that stores `subject`. Raises ValueError when none of KITE's does.

    >>> stream_of("kite.tel.v1.node-1")
    'KITE_TEL'
    """
    for prefix, stream in _PREFIXES.items():
        if subject.startswith(prefix):
            return stream
    msg = f"no stream stores subject {subject!r}"
    raise ValueError(msg)
