"""What the whole run shares: one tiny base, one fake server, one real vLLM (started when the first test asks)."""

import asyncio
import importlib.util
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from kite.engine import EngineProcess, EngineSpec
from kite.engine.process import members
from kite.testing import bases
from kite.testing.engine import START_S, Adapters, make_adapters, tiny_spec
from kite.testing.llama import Llama
from kite.testing.otlp import Receiver
from kite.testing.postgres import DATABASE, Postgres


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run of tests have more fault runs, or one again."""
    text = "how many fault runs (tests/simulation/test_faults.py), or which, as in 7-7"
    parser.addoption("--fault-seeds", default="100", metavar="N", help=text)


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Generator[None]:
    """A command that runs inside a test quiets the logs of its process; the next test hears them again."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def tiny_base() -> Path:
    """The folder of the tiny base."""
    return bases.tiny(bases.cache())


@pytest.fixture(scope="session")
def tiny_adapters(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Adapters:
    """Adapters for the tiny base, good and bad."""
    return make_adapters(tmp_path_factory.mktemp("adapters"), tiny_base)


@pytest.fixture(scope="session")
def tiny_model(tiny_base: Path) -> Llama:
    """The tiny base in plain torch."""
    return Llama.load(tiny_base)


@pytest.fixture(scope="session")
def collector() -> Generator[Receiver]:
    """A receiver of the spans of both servers."""
    with Receiver() as collector:
        yield collector


@pytest.fixture(scope="session")
def postgres() -> Generator[Postgres]:
    """A running PostgreSQL (about 1 s to start), which no test may harm."""
    with Postgres.start() as server:
        yield server


@pytest.fixture(scope="session")
def database(postgres: Postgres) -> str:
    """The one database of its that tests share; see `empty_database`."""
    return postgres.create_database(DATABASE)


@pytest.fixture
def empty_database(postgres: Postgres, database: str) -> Generator[str]:
    """The URL of an empty database, which tests use one after the other."""
    yield database
    postgres.clear(DATABASE)


@pytest.fixture(scope="module")
def mortal() -> Generator[Postgres]:
    """A server that may be harmed: the shared one has too many databases to come back quickly."""
    with Postgres.start() as server:
        server.create_database(DATABASE)
        yield server


@contextmanager
def running(spec: EngineSpec, log: Path, collector: Receiver) -> Generator[EngineProcess]:
    """Give a healthy server; at the end nothing of it may be left.

    It has an event loop of its own, since it outlives the loops of single tests.
    """
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        process = runner.run(EngineProcess.start(spec, log=log, env=env))
        try:
            runner.run(process.wait_healthy(START_S))
            yield process
        finally:
            runner.run(process.stop())
    assert members(process.pid) == []


@pytest.fixture(scope="session")
def fake_server(
    tiny_base: Path, tmp_path_factory: pytest.TempPathFactory, collector: Receiver
) -> Generator[EngineProcess]:
    """A running fake with the tiny base."""
    log = tmp_path_factory.mktemp("fake") / "engine.log"
    with running(tiny_spec("fake", tiny_base), log, collector) as process:
        yield process


@pytest.fixture(scope="session")
def vllm_server(
    tiny_base: Path, tmp_path_factory: pytest.TempPathFactory, collector: Receiver
) -> Generator[EngineProcess]:
    """A running vLLM on CPU with the tiny base (about 30 s to start)."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    log = tmp_path_factory.mktemp("vllm") / "engine.log"
    with running(tiny_spec("vllm", tiny_base), log, collector) as process:
        yield process
