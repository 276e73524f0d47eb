"""Both engines keep the contract of `kite.testing.engine`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from kite.engine import EngineProcess, EngineSpec
from kite.testing.engine import EngineContract, ProcessContract, tiny_spec
from kite_schemas.yoco import SleepMode
from kite_yoco.devices import find_devices
from kite_yoco.offers import find_offers

NO_VLLM = importlib.util.find_spec("vllm") is None


def offered(kind: str) -> Sequence[SleepMode]:
    """Return what yoco would say of this machine."""
    return next(offer.modes for offer in find_offers(find_devices()) if offer.kind == kind)


class TestFake(EngineContract):
    """The fake while it runs."""

    @pytest.fixture
    def server(self, fake_server: EngineProcess) -> EngineProcess:
        return fake_server

    @pytest.fixture
    def modes(self) -> Sequence[SleepMode]:
        return offered("fake")


class TestFakeProcess(ProcessContract):
    """The fake's process."""

    @pytest.fixture
    def spec(self, tiny_base: Path) -> EngineSpec:
        return tiny_spec("fake", tiny_base)


@pytest.mark.vllm
class TestVllm(EngineContract):
    """Real vLLM while it runs."""

    @pytest.fixture
    def server(self, vllm_server: EngineProcess) -> EngineProcess:
        return vllm_server

    @pytest.fixture
    def modes(self) -> Sequence[SleepMode]:
        return offered("vllm")


@pytest.mark.vllm
@pytest.mark.skipif(NO_VLLM, reason="vLLM is not installed")
class TestVllmProcess(ProcessContract):
    """The process of real vLLM."""

    @pytest.fixture
    def spec(self, tiny_base: Path) -> EngineSpec:
        return tiny_spec("vllm", tiny_base)
