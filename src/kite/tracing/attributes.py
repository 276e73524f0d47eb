"""Names of span attributes: OpenTelemetry's messaging conventions, and KITE's own under `kite.`."""

from typing import Literal

ORDER_ID = "kite.order.id"
DECISION_ID = "kite.decision.id"
EVENT_TYPE = "kite.event.type"
POS = "kite.pos"
STREAM = "kite.stream"
SEQ = "kite.seq"
ATTEMPT = "kite.attempt"

Operation = Literal["send", "receive", "process", "settle"]


def messaging(operation: Operation, template: str) -> dict[str, str]:
    """Return the attributes of a span that handles messages; the span is named `{operation} {template}`.

    `template` is the subject without what varies, as in `kite.dec.v1.yoco.node-1`: names of spans stay few.
    https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
    """
    return {
        "messaging.system": "nats",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.template": template,
    }
