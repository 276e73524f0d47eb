"""How far a stream was read, and how to tell that it is no longer the stream that was read: pure."""

from dataclasses import dataclass

from kite.bus.message import Message
from kite_schemas.ledger import EpochEnd

PPM = 1_000_000
FILL_ALARM_PPM = 700_000  # of a stream's bound: from here the operator should know


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream holds. `created` (RFC 3339, as the server gives it) tells a stream from its successor."""

    stream: str
    created: str
    first_seq: int
    last_seq: int
    bytes: int
    limit_bytes: int = 0

    @property
    def fill_ppm(self) -> int:
        """How full it is, in millionths of its bound; 0 when it has none."""
        return self.bytes * PPM // self.limit_bytes if self.limit_bytes > 0 else 0


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a stream was read, and what was there: enough to tell it from another one. "" or 0 where not known.

    The time counts beside the id: the same message can stand at the same place of another life, published again.
    """

    seq: int
    msg_id: str = ""
    created: str = ""
    published_us: int = 0

    @classmethod
    def at(cls, message: Message, created: str) -> "Mark":
        """Return the mark of a message that was read of the stream made at `created`."""
        return cls(message.seq, message.msg_id, created, message.published_us)


def epoch_end(mark: Mark, state: StreamState, stored: Message | None) -> EpochEnd | None:
    """Tell how the stream is not the one that was read up to `mark`, None when nothing says so.

    `stored` is the message at the mark. That it is absent proves something only where its id is known (a reader may
    have been sent on past a hole), and where its age does not explain it.
    """
    if mark.created not in {"", state.created}:
        return EpochEnd.CREATED_ANEW
    if state.last_seq < mark.seq:
        return EpochEnd.SHORTER
    if not mark.msg_id:
        return None
    if stored is not None:
        same = stored.msg_id == mark.msg_id and mark.published_us in {0, stored.published_us}
        return None if same else EpochEnd.OTHER_MESSAGE
    return EpochEnd.MESSAGE_MISSING if state.first_seq <= mark.seq else None
