"""The health check of a container: the page of metrics, one metric of it, and a network that is gone."""

import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from kite.alive import FIRST, PORT, main
from kite.engine.process import free_port
from kite.metrics import Metric, counter, page, served
from kite.settings import MetricsSettings


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """The interfaces of a network that is connected."""
    for name in ("lo", "eth0"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """A service that serves its page, with one metric at 1."""
    port = free_port()
    monkeypatch.setenv(PORT, str(port))
    registry = page()
    counter(Metric("kite_test_orders_total", "counter", "orders"), registry).inc()
    with served(registry, MetricsSettings(metrics_port=port)):
        yield


def never(pid: int, number: int) -> None:
    raise AssertionError((pid, number))


@pytest.mark.usefixtures("service")
def test_a_page_that_answers_is_well(network: Path) -> None:
    assert main([], interfaces=network, end=never) == 0


@pytest.mark.usefixtures("service")
def test_a_metric_has_to_be_1(network: Path) -> None:
    assert main(["kite_test_orders_total"], interfaces=network, end=never) == 0
    assert main(["kite_trace_spans_total"], interfaces=network, end=never) == 1


def test_no_page_is_ill(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT, str(free_port()))
    assert main([], interfaces=network, end=never) == 1


def test_a_network_with_only_a_loopback_ends_the_container(tmp_path: Path) -> None:
    (tmp_path / "lo").mkdir()
    ended: list[tuple[int, int]] = []
    assert main([], interfaces=tmp_path, end=lambda pid, number: ended.append((pid, number))) == 1
    assert ended == [(FIRST, signal.SIGTERM)]
