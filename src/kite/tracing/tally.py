"""What became of the spans of this process: pure counting, from outside of the SDK, whose own counts are a log line."""


class Tally:
    """Counts spans: ended, handed to the exporter, and of these sent or failed; `room` is how many may wait.

    A span that ends while the queue is full pushes out the oldest one. That is seen from what has ended and was not
    handed over: more than fits. Spans that end while a batch is on its way out of the queue may be counted as dropped,
    a batch of them at most, and only while the queue is full anyway.
    """

    def __init__(self, room: int) -> None:
        self.sent = 0
        self.failed = 0
        self.dropped = 0
        self._room = room
        self._ended = 0
        self._taken = 0

    def end(self) -> None:
        """Count a span that ended.

        >>> tally = Tally(room=2)
        >>> for _ in range(5):
        ...     tally.end()
        >>> tally.dropped
        3
        """
        self._ended += 1
        self.dropped = max(self.dropped, self._ended - self._taken - self._room)

    def export(self, spans: int, *, sent: bool) -> None:
        """Count a batch that left the queue, whether the collector took it or not.

        >>> tally = Tally(room=2)
        >>> tally.end()
        >>> tally.export(1, sent=False)
        >>> tally.sent, tally.failed, tally.dropped
        (0, 1, 0)
        """
        if sent:
            self.sent += spans
        else:
            self.failed += spans

    def take(self, spans: int) -> None:
        """Count a batch that leaves the queue, before it is sent: from here there is room for so many again."""
        self._taken += spans
