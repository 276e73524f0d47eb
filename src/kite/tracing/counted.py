"""The SDK's batches, with a tally of what became of each span. Imported only when a collector is named."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from kite.tracing.tally import Tally


class CountedExporter(SpanExporter):
    """Sends by another exporter and counts what it answers."""

    def __init__(self, exporter: SpanExporter, tally: Tally) -> None:
        self._exporter = exporter
        self._tally = tally

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self._tally.take(len(spans))
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._tally.export(len(spans), sent=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        """End the other exporter."""
        self._exporter.shutdown()


class CountedProcessor(BatchSpanProcessor):
    """The SDK's own processor, which counts the spans that come in."""

    def __init__(self, exporter: SpanExporter, tally: Tally, *, queue: int, delay_ms: int, batch: int) -> None:
        super().__init__(
            CountedExporter(exporter, tally),
            max_queue_size=queue,
            schedule_delay_millis=delay_ms,
            max_export_batch_size=batch,
        )
        self._tally = tally

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span that ended; one that is not sampled is none of ours."""
        if span.context and span.context.trace_flags.sampled:
            self._tally.end()
        super().on_end(span)
