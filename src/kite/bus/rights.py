"""What a user of the bus has to be allowed for each thing that this package does: pure text, for a server's nats.conf.

Subjects are all that a server checks of a request, and not that of its answer: who may read one message of a stream
can have it sent to any subject. Hence signatures.
"""

from kite.bus.link import API
from kite.bus.subjects import escape

ACK = "$JS.ACK"


def looks(stream: str) -> tuple[str, ...]:
    """To ask what a stream holds: `Bus.stream`."""
    return (f"{API}.STREAM.INFO.{stream}",)


def reads(stream: str, subject: str = "") -> tuple[str, ...]:
    """To read a stream, or only one subject of it: `Bus.pull`, `follow`, `message`. The consumers have random names.

    >>> reads("S", "a.b")[2]
    '$JS.API.CONSUMER.CREATE.S.*.a.b'
    """
    made = f"{API}.CONSUMER.CREATE.{stream}.*"
    return (
        *looks(stream),
        f"{API}.DIRECT.GET.{stream}",
        f"{made}.{subject}" if subject else made,
        f"{API}.CONSUMER.MSG.NEXT.{stream}.*",
    )


def works(stream: str, durable: str) -> tuple[str, ...]:
    """To take work from a stream by one durable consumer: `Bus.work`."""
    name = escape(durable)
    return (
        f"{API}.CONSUMER.CREATE.{stream}.{name}",
        f"{API}.CONSUMER.MSG.NEXT.{stream}.{name}",
        f"{ACK}.{stream}.{name}.>",
        f"{API}.DIRECT.GET.{stream}",
    )


def makes(stream: str) -> tuple[str, ...]:
    """To make a stream and adjust its limits: `Bus.provision`. Nobody may delete or purge one."""
    return (*looks(stream), f"{API}.STREAM.CREATE.{stream}", f"{API}.STREAM.UPDATE.{stream}")
