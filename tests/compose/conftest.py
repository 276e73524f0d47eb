"""The images, built once, and one fleet of containers for all tests of them."""

import os
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from urllib.request import urlopen

import pytest

from kite.engine.process import free_port
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite.testing.otlp import Tree, grow, spans
from kite_cli.deploy.testing.builds import build, sizes
from kite_cli.deploy.testing.stack import Stack
from kite_cli.testing import run

ROOT = Path(__file__).parents[2]
OWNER = 10_001
SPANS_S = 30.0


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The variables that name the images."""
    found = build(ROOT, Path(__file__).parent / "images", tmp_path_factory.mktemp("images"))
    for name, size in sorted(sizes(found).items()):
        print(f"\nimage {name}: {size / 1e6:.0f} MB", end="")
    return found


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `kite init` makes."""
    directory = tmp_path_factory.mktemp("compose") / "deployment"
    owner = [] if os.getuid() else ["--owner", str(OWNER)]
    done = run("init", str(directory), *owner)
    assert done.code == 0, done.err
    return directory


@pytest.fixture(scope="module")
def env(images: Mapping[str, str], tiny_base: Path) -> Mapping[str, str]:
    """What varies between machines."""
    return {**images, "KITE_BASES": str(tiny_base.parent), "KITE_JAEGER_PORT": str(free_port())}


@pytest.fixture(scope="module")
def stack(deployment: Path, env: Mapping[str, str]) -> Generator[Stack]:
    """The fleet, brought up; it leaves nothing behind."""
    with Stack(ROOT, deployment, env) as stack:
        print(f"\nup within {stack.up_s:.1f} s", end="")
        yield stack


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """A folder of adapters, which every user may read."""
    folder = tmp_path_factory.mktemp("material") / "in"
    folder.mkdir(mode=0o755)
    for seed, name in enumerate(("credit", "fraud"), 1):
        adapters.adapter(folder / name, tiny_base, seed=seed)
    return folder


async def traced(port: str, trace_id: object, wanted: set[str]) -> Tree:
    """Return a trace as one connected tree, once the receiver has spans of all the wanted services."""

    def whole() -> Tree | None:
        with urlopen(f"http://127.0.0.1:{port}/spans", timeout=10) as page:
            found = [span for span in spans(page.read()) if span.trace_id == trace_id]
        try:
            tree = grow(found)
        except AssertionError:  # not connected yet: each process sends its spans at its own time
            return None
        return tree if wanted <= {span.service for span in tree.walk()} else None

    tree = await eventually(whole, SPANS_S)
    assert tree is not None
    return tree


Traced = Callable[[object, set[str]], Awaitable[Tree]]


@pytest.fixture(name="traced")
def traced_(env: Mapping[str, str]) -> Traced:
    """Find a trace among the spans that came in."""
    return lambda trace_id, wanted: traced(env["KITE_JAEGER_PORT"], trace_id, wanted)
