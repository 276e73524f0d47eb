"""An instance is ready when what it should hold is loaded and proven, however it became so."""

from pathlib import Path

from kite.testing import zoo
from kite_schemas.proof import EffectProven
from kite_schemas.upcycle import BlendLoaded
from kite_schemas.yoco import InstanceChanged, InstanceReady, OrderFailed, State
from kite_yoco.testing import (
    VERSION,
    asleep,
    ready,
    recorded,
    running,
    sleep_order,
    start_order,
    stop_order,
    wake_order,
)


async def test_a_start_ends_with_its_residents_proven_or_in_quarantine(tmp_path: Path, tiny_base: Path) -> None:
    async with running(tmp_path) as yoco:
        resident = await recorded(yoco, tiny_base, (await ready(yoco, start_order(tiny_base))).endpoint)
        await yoco.desk.carry_out(stop_order())

        order_id = await yoco.desk.order(start_order(tiny_base, residents=(resident,)))
        started = await yoco.desk.done(order_id)
        assert isinstance(started, InstanceReady), started
        assert started.versions == (VERSION,)
        told = [type(fact) for fact in yoco.desk.outcomes(order_id)]
        assert told == [InstanceChanged, InstanceChanged, BlendLoaded, EffectProven, InstanceReady]

        order_id = await yoco.desk.order(start_order(tiny_base, residents=(resident,)))
        again = await yoco.desk.done(order_id)
        assert isinstance(again, InstanceReady)
        assert (again.pid, again.versions) == (started.pid, (VERSION,))
        assert [type(fact) for fact in yoco.desk.outcomes(order_id)] == [EffectProven, InstanceReady]

        await yoco.desk.carry_out(stop_order())
        zoo.defective(yoco.adapter_root / "risk", yoco.adapter_root / "hollow", "wrong_prefix")
        hollow = resident.model_copy(update={"path": "hollow"})
        failed = await yoco.desk.carry_out(start_order(tiny_base, residents=(hollow,)))
        assert isinstance(failed, OrderFailed), failed
        assert (failed.state, failed.stage, failed.code) == (State.QUARANTINED, "prove", "effect_missing")


async def test_what_is_as_it_should_be_says_so(tmp_path: Path, tiny_base: Path) -> None:
    async with running(tmp_path) as yoco:
        started = await ready(yoco, start_order(tiny_base))
        woken = await yoco.desk.carry_out(wake_order(await recorded(yoco, tiny_base, started.endpoint)))
        assert isinstance(woken, InstanceReady), woken
        assert (woken.pid, woken.versions) == (started.pid, (VERSION,))
        await asleep(yoco)
        slept = await yoco.desk.carry_out(sleep_order())
        assert isinstance(slept, InstanceChanged), slept
        assert (slept.from_state, slept.to_state) == (State.ASLEEP, State.ASLEEP)
