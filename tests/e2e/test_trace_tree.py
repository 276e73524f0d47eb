"""One injection is one tree of spans: from the command line over the arbitrator and upcycle to vLLM's own span."""

from collections.abc import Generator
from pathlib import Path

import pytest

from kite import probes, tracing
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite.testing.otlp import Receiver, Span, Tree
from kite_cli.asking.capacity import order
from kite_cli.asking.request import inject
from kite_cli.embedded.fleet import Fleet, embedded
from kite_cli.embedded.options import EngineKind, Options
from kite_schemas.upcycle import Ending

UP_S = 240.0
EXPORT_S = 30.0
"""Exporters send every five seconds, vLLM's own too."""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Generator[Receiver]:
    """A receiver that this process and every process of the fleet sends its spans to."""
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        tracing.start("cli")
        yield receiver
        tracing.stop()


def services(tree: Tree) -> set[str]:
    return {span.service for span in tree.walk()}


async def grown(receiver: Receiver, trace_id: str, wanted: set[str]) -> Tree:
    """Return the trace as one connected tree once spans of all the wanted services have come in."""

    def whole() -> Tree | None:
        try:
            tree = receiver.tree(trace_id)
        except AssertionError:  # not connected yet: each process sends its spans at its own time
            return None
        return tree if wanted <= services(tree) else None

    tracing.stop()  # this process's own spans: the root
    tree = await eventually(whole, EXPORT_S)
    assert tree is not None
    return tree


async def inject_one(fleet: Fleet, base: Path, folder: Path) -> str:
    adapter = adapters.adapter(folder / "credit", base)
    injection = await inject(fleet, adapter=adapter, base=fleet.base, blend="risk")
    assert injection.ending is Ending.PROMOTED
    return injection.story.trace_id


@pytest.mark.parametrize("engine", ["fake", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_an_injection_is_one_connected_tree(
    engine: EngineKind, receiver: Receiver, tiny_base: Path, tmp_path: Path
):
    options = Options(base=tiny_base, name="tiny", engine=engine, dir=tmp_path / "fleet", standbys=0, dtype="float32")
    async with embedded(options) as fleet:
        await fleet.wait_settled(UP_S)
        trace_id = await inject_one(fleet, tiny_base, tmp_path)
        tree = await grown(receiver, trace_id, {"cli", "arbitrator", "upcycle", "vllm"})
        decided = tree.find("decide kite.upcycle.load_ordered.v1")
        (committed,) = await eventually(lambda: linking(receiver, decided), EXPORT_S)
    assert tree.span.service == "cli"
    worked = next(span for span in tree.walk() if span.parent_id == decided.span_id)
    assert worked.service == "upcycle"
    asked = [span for span in tree.walk() if span.name == "llm_request"]
    assert asked
    assert {span.service for span in asked} == {"vllm"}
    assert (committed.parent_id, committed.trace_id != trace_id) == ("", True), "batches are linked, never above"
    assert spoken(receiver) == [], "what was asked of an engine is in no span"


def linking(receiver: Receiver, decided: Span) -> list[Span]:
    """Return the commits that hold a decision."""
    return [span for span in receiver.named("commit batch") if decided.span_id in span.links]


def spoken(receiver: Receiver) -> list[str]:
    """Return what spans say of the prompts that engines were proven with."""
    said = [f"{span.name} {span.error} {sorted(span.attributes.items())}" for span in receiver.spans]
    prompts = [prompt for prompt in probes.default().prompts if len(prompt) > len("10, 20")]
    return [text for text in said if any(prompt in text for prompt in prompts)]


async def test_an_order_is_one_connected_tree(receiver: Receiver, tiny_base: Path, tmp_path: Path):
    options = Options(base=tiny_base, name="tiny", engine="fake", dir=tmp_path / "fleet", dtype="float32")
    async with embedded(options) as fleet:
        await fleet.wait_settled(UP_S)
        handover = await order(fleet, "tiny")
        assert handover.ok
        tree = await grown(receiver, handover.story.trace_id, {"cli", "arbitrator", "yoco", "vllm"})
    assert services(tree) == {"cli", "arbitrator", "yoco", "vllm"}
