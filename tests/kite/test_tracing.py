"""Traces hold together across processes, with a collector and without one, and never hold up the end of a process."""

import asyncio
import gzip
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from kite import tracing
from kite.clock import US_PER_S, mono_us
from kite.testing.eventually import eventually
from kite.testing.otlp import Receiver
from kite.tracing.export import STOP_S

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03"

CHILD = f"""
from kite import tracing
tracing.start("child")
with tracing.span("work", parent={CALLER!r}):
    with tracing.span("part"):
        pass
tracing.stop()
"""


@pytest.fixture(autouse=True)
def off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ENDPOINT, raising=False)
    yield
    tracing.stop()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as running:
        monkeypatch.setenv(ENDPOINT, running.endpoint)
        yield running


class TestOff:
    def test_outside_any_trace_there_is_nothing_to_pass_on(self) -> None:
        tracing.start("test")
        with tracing.span("step") as span:
            assert (span.traceparent, span.trace_id) == ("", "")
            assert (tracing.traceparent(), tracing.headers()) == (None, {})

    def test_the_callers_trace_goes_on_unchanged(self) -> None:
        tracing.start("test")
        with tracing.span("outer", parent=CALLER), tracing.span("inner") as span:
            span.set(tracing.POS, 1)
            span.fail("nothing_records_it")
            assert span.traceparent == tracing.traceparent() == CALLER
            assert tracing.headers() == {"traceparent": CALLER}
        assert tracing.traceparent() is None

    def test_a_disabled_sdk_is_off(self, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        tracing.start("test")
        with tracing.span("step", parent=CALLER) as span:
            assert span.traceparent == CALLER
        tracing.stop()
        assert receiver.spans == []

    def test_the_sdk_is_not_even_imported(self) -> None:
        script = CHILD + "import sys; print([name for name in sys.modules if name.startswith('opentelemetry')])"
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == "[]"


class TestOn:
    def test_spans_of_a_request_form_one_tree_with_names_and_attributes(self, receiver: Receiver) -> None:
        tracing.start("test")
        template = "kite.dec.v1.yoco.n1"
        with (
            tracing.span("ask") as root,
            tracing.span(
                f"process {template}",
                kind="consumer",
                links=[root.traceparent],
                attributes={**tracing.messaging("process", template), tracing.ORDER_ID: "o1"},
            ) as step,
        ):
            step.set(tracing.POS, 7)
            assert tracing.traceparent() == step.traceparent != root.traceparent
        tracing.stop()
        tree = receiver.tree(root.trace_id)
        assert tree.outline() == f"test: ask\n  test: process {template}"
        span = tree.find(f"process {template}")
        assert (span.kind, span.links, span.failed) == ("consumer", (tree.span.span_id,), False)
        assert span.attributes == {
            "messaging.system": "nats",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.template": template,
            "kite.order.id": "o1",
            "kite.pos": 7,
        }
        assert span.begun_us <= span.ended_us

    async def test_tasks_inherit_the_span_and_do_not_mix(self, receiver: Receiver) -> None:
        tracing.start("test")

        async def step(name: str) -> None:
            with tracing.span(name):
                await asyncio.sleep(0)
                with tracing.span(f"{name}.part"):
                    await asyncio.sleep(0)

        with tracing.span("root") as root:
            await asyncio.gather(step("a"), step("b"))
        await eventually(lambda: len(receiver.trace(root.trace_id)) == 5)
        assert {name: receiver.tree(root.trace_id).find(name).parent_id for name in ("a.part", "b.part")} == {
            "a.part": receiver.named("a")[0].span_id,
            "b.part": receiver.named("b")[0].span_id,
        }

    def test_a_failure_is_marked_with_a_word_and_no_text(self, receiver: Receiver) -> None:
        tracing.start("test")
        with pytest.raises(ValueError, match="secret"), tracing.span("step"):
            raise ValueError("secret")
        tracing.stop()
        (span,) = receiver.named("step")
        assert (span.failed, span.error, span.attributes) == (True, "ValueError", {})

    def test_another_process_joins_through_the_traceparent(self, receiver: Receiver) -> None:
        tracing.start("parent")
        with tracing.span("ask") as root:
            script = CHILD.replace(CALLER, root.traceparent)
            subprocess.run([sys.executable, "-c", script], check=True)
        tracing.stop()
        assert receiver.tree(root.trace_id).outline() == "parent: ask\n  child: work\n    child: part"

    def test_a_malformed_parent_begins_a_new_trace(self, receiver: Receiver) -> None:
        tracing.start("test")
        with tracing.span("step", parent="not a traceparent"):
            pass
        tracing.stop()
        assert receiver.named("step")[0].parent_id == ""

    def test_stop_can_be_repeated_and_start_begins_anew(self, receiver: Receiver) -> None:
        for service in ("first", "second"):
            tracing.start(service)
            with tracing.span("step"):
                pass
            tracing.stop()
            tracing.stop()
        assert [span.service for span in receiver.named("step")] == ["first", "second"]

    def test_a_collector_that_takes_and_never_answers_delays_the_end_by_its_bound(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{silent.getsockname()[1]}")
            tracing.start("test")
            for _ in range(2_000):
                with tracing.span("step"):
                    pass
            before_us = mono_us()
            tracing.stop()
            assert mono_us() - before_us < (STOP_S + 1) * US_PER_S

    def test_a_process_whose_collector_is_gone_ends_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{port}")
        run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=30)
        assert run.stdout == ""


class TestReceiver:
    def test_takes_gzip(self, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        tracing.start("test")
        with tracing.span("step"):
            pass
        tracing.stop()
        assert len(receiver.named("step")) == 1

    @pytest.mark.parametrize(
        ("path", "body", "encoding", "status"),
        [
            ("/v1/metrics", b"", "", 404),
            ("/v1/traces", b"\xff\xff", "", 400),
            ("/v1/traces", b"no gzip", "gzip", 400),
            ("/v1/traces", gzip.compress(b"\xff\xff"), "gzip", 400),
        ],
    )
    def test_refuses_what_it_cannot_read(
        self, receiver: Receiver, path: str, body: bytes, encoding: str, status: int
    ) -> None:
        answer = httpx.post(receiver.endpoint + path, content=body, headers={"Content-Encoding": encoding})
        assert answer.status_code == status

    def test_a_trace_with_a_missing_parent_is_no_tree(self, receiver: Receiver) -> None:
        tracing.start("test")
        with tracing.span("orphan", parent=CALLER) as span:
            pass
        tracing.stop()
        with pytest.raises(AssertionError, match="0 roots and 1 orphans in 1 spans: test: orphan"):
            receiver.tree(span.trace_id)
