"""vLLM for the CPU in a container: built on the spot (6 min the first time), started, injected into, handed over."""

from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path

import pytest

from kite.testing.otlp import Tree
from kite_cli.deploy.testing.builds import build, sizes
from kite_cli.deploy.testing.stack import Stack

pytestmark = [pytest.mark.compose, pytest.mark.vllm, pytest.mark.timeout(3_000)]

ROOT = Path(__file__).parents[2]
BASE = "tiny"
READY_S = 600.0


@pytest.fixture(scope="module")
def cpu(deployment: Path, env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Generator[Stack]:
    """A fleet with vLLM, brought up; it leaves nothing behind."""
    images = build(ROOT, Path(__file__).parent / "images", tmp_path_factory.mktemp("images"), cpu=True)
    name = images["KITE_NODE_CPU_IMAGE"]
    print(f"\nimage {name}: {sizes(images)[name] / 1e6:.0f} MB", end="")
    with Stack(ROOT, deployment, {**env, **images}, "cpu", name="cpu") as stack:
        yield stack


async def test_an_injection_into_vllm_is_one_tree(
    cpu: Stack, material: Path, traced: Callable[[object, set[str]], Awaitable[Tree]]
) -> None:
    await cpu.well()
    cpu.told("yoco", "add", "/bases/tiny-3", "--name", BASE, "--dtype", "float32")
    await cpu.resting(READY_S)
    inject = ("upcycle", "inject", "--target", BASE, "--blend", "risk", "--adapter", "/in/credit")
    injected = cpu.told(*inject, mount=material)[0]
    assert injected["outcome"] == "promoted"
    tree = await traced(injected["trace_id"], {"kite", "arbitrator", "upcycle", "vllm"})
    assert tree.find("llm_request").service == "vllm"
    handed = cpu.told("yoco", "order", BASE, "--late")[0]
    assert (handed["ok"], handed["path"]) == (True, "hot")
    assert cpu.told("replay")[0]["identical"]
