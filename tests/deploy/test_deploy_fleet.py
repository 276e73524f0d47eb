"""The real services, each with its own nkey and signing key, all permissions on: what they do works, end to end."""

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kite.bus import EVT, TEL, tel_subject
from kite.events import Composed, Origin, compose
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite.trust import SIGNATURE, load_signer
from kite_cli.deploy.members import NODE_SERVICES, OPERATOR
from kite_cli.deploy.testing import NODES, Deployment
from kite_cli.embedded.options import Options
from kite_cli.embedded.readiness import load_pool
from kite_schemas.guard import Compared
from kite_schemas.ledger import ProducerKeyAdded, Refusal, Rejected
from kite_schemas.telemetry import Window
from kite_schemas.upcycle import ChannelSampled, DriftObserved
from kite_schemas.yoco import InstanceReady, NodeRegistered, OrderFailed, State

NODE, OTHER = NODES
BASE = "tiny"
READY_S = 90.0


@pytest.fixture
async def led(deployment: Deployment) -> AsyncGenerator[Deployment]:
    """The deployment with its arbitrator, which knows the keys of all services."""
    async with deployment.leading():
        code, out, err = await deployment.kite("key", "introduce", str(deployment.dir), "--json")
        assert code == 0, err
        assert len(out.splitlines()) == 1 + len(NODES) * len(NODE_SERVICES)
        yield deployment


@pytest.fixture
async def fleet(led: Deployment, tiny_base: Path) -> AsyncGenerator[Deployment]:
    """One node of it at work, with two ready engines."""
    pool = load_pool(Options(base=tiny_base, name=BASE, ready=2, standbys=0, engine="fake", node=NODE))
    async with AsyncExitStack() as stack:
        for service in NODE_SERVICES:
            await stack.enter_async_context(led.service(service, NODE))
        wanted = f"fleet.pools={json.dumps([pool.model_dump(mode='json')])}"
        calm = (
            "arbitration.fragmentation_max_ppm=1000000",
            "arbitration.hit_rate_min_ppm=0",
            "arbitration.latency_sigma_max_us=3600000000",
        )
        code, _, err = await led.kite("config", "set", wanted, *calm)
        assert code == 0, err
        await eventually(lambda: len(led.found(InstanceReady)) >= 2, READY_S)
        yield led


async def test_an_injection_goes_through_with_all_permissions_on(fleet: Deployment, tiny_base: Path, tmp_path: Path):
    path = adapters.adapter(tmp_path / "adapter-root" / "credit", tiny_base, seed=3)
    code, out, err = await fleet.kite(
        "upcycle", "inject", "--adapter", str(path), "--target", BASE, "--blend", "risk", "--json"
    )
    assert code == 0, err + fleet.log(f"upcycle-{NODE}").read_text()
    assert json.loads(out.splitlines()[-1])["outcome"] == "promoted"
    code, _, err = await fleet.kite("guard", "compare", f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1")
    assert code == 0, err
    assert fleet.found(Compared)
    assert fleet.found(NodeRegistered)
    await eventually(lambda: fleet.found(Window))
    await eventually(lambda: fleet.found(ChannelSampled))
    assert fleet.found(Rejected) == []
    assert fleet.found(DriftObserved) == []
    code, out, err = await fleet.kite("ledger", "verify")
    assert code == 0, err + out
    for name in ("arbitrator", *(f"{service}-{NODE}" for service in NODE_SERVICES)):
        said = fleet.log(name).read_text()
        assert "bus_forbidden" not in said
        assert "order_forged" not in said


async def test_keys_are_introduced_once(led: Deployment):
    before = len(led.found(ProducerKeyAdded))
    code, out, err = await led.kite("key", "introduce", str(led.dir))
    assert code == 0, err
    assert out.count("speaks for") == before
    assert len(led.found(ProducerKeyAdded)) == before


async def test_a_folder_that_is_no_deployment_introduces_nobody(led: Deployment, tmp_path: Path):
    for content, said in (
        (None, "No such file"),
        ("{}", "not what"),
        ('{"format": 2}', "format 2"),
        ("x", "names no keys"),
    ):
        if content is not None:
            (tmp_path / "trust.json").write_text(content)
        code, _, err = await led.kite("key", "introduce", str(tmp_path))
        assert code == 1
        assert said in err


def failed(node: str) -> Composed:
    data = OrderFailed(instance="a", state=State.FAILED, stage="start", code="failed", message="forged")
    return compose("instance/a", data, Origin(f"kite/yoco/{node}", "yoco@0"))


@pytest.mark.parametrize(
    ("signed_by", "why"),
    [(f"yoco-{NODE}", Refusal.NOT_OF_PRODUCER), ("", Refusal.UNSIGNED), (OPERATOR, Refusal.NOT_OF_PRODUCER)],
)
async def test_what_is_injected_past_the_permissions_is_a_row_that_says_why(
    led: Deployment, signed_by: str, why: Refusal
):
    """A node has the server answer into the stream of facts, on a subject of another node."""
    event = failed(OTHER)
    headers = {SIGNATURE: load_signer(led.key(signed_by)).sign(event.raw).header} if signed_by else {}
    async with led.link(f"yoco-{NODE}") as forger, led.link(f"upcycle-{NODE}") as accomplice:
        await forger.nc.request(tel_subject(NODE), event.raw, headers=headers)
        subject = "kite.evt.v1.yoco.instance.a.order_failed"
        await accomplice.send(f"$JS.API.DIRECT.GET.{TEL}", b'{"seq": 1}', reply=subject)
        found = await eventually(lambda: [row for row in led.found(Rejected) if row.stream == EVT])
    assert [row.code for row in found] == [why]
    assert led.found(OrderFailed) == []
