"""A standby sleeps as deep as it is told, wakes with its resident proven, and is refused what its engine cannot do."""

from pathlib import Path

import httpx
import pytest

from kite.engine import Engine
from kite_schemas.proof import EffectProven
from kite_schemas.upcycle import BlendLoaded
from kite_schemas.yoco import PATHS, EngineOffer, InstanceChanged, InstanceReady, Lack, SleepMode, State
from kite_yoco.rest import ModeUnsupported, check_mode
from kite_yoco.testing import (
    VERSION,
    drain_order,
    ready,
    recorded,
    running,
    sleep_order,
    start_order,
    wake_order,
)

GIVEN: dict[SleepMode, tuple[int, list[str]]] = {
    SleepMode.PAUSED: (0, []),
    SleepMode.KV: (0, ["kv_cache"]),
    SleepMode.L1: (1, ["kv_cache", "weights"]),
    SleepMode.L2: (2, ["kv_cache", "weights"]),
}
"""What an engine that sleeps in a mode tells of its level, and of what it has given back."""


async def given(endpoint: str) -> tuple[int, list[str]]:
    """Return how the fake sleeps."""
    async with httpx.AsyncClient(base_url=endpoint) as client:
        found = (await client.get("/is_sleeping")).json()
    assert found["is_sleeping"]
    return found["level"], found["tags"]


async def test_a_standby_sleeps_in_every_mode_and_wakes_with_its_resident_proven(
    tmp_path: Path, tiny_base: Path
) -> None:
    async with running(tmp_path) as yoco:
        endpoint = (await ready(yoco, start_order(tiny_base))).endpoint
        resident = await recorded(yoco, tiny_base, endpoint)
        async with Engine(endpoint) as engine:
            await engine.load(VERSION, str(yoco.adapter_root / "risk"))
        for mode in SleepMode:
            await yoco.desk.carry_out(drain_order())
            slept = await yoco.desk.carry_out(sleep_order(mode=mode))
            assert isinstance(slept, InstanceChanged), slept
            assert (slept.to_state, slept.code) == (State.ASLEEP, mode)
            assert await given(endpoint) == GIVEN[mode]
            order_id = await yoco.desk.order(wake_order(resident, path=PATHS[mode]))
            woken = await yoco.desk.done(order_id)
            assert isinstance(woken, InstanceReady), woken
            assert (woken.path, woken.versions) == (PATHS[mode], (VERSION,))
            loaded = [BlendLoaded] if mode is SleepMode.L2 else []  # only that one has lost it
            told = [type(fact) for fact in yoco.desk.outcomes(order_id)]
            assert told == [InstanceChanged, *loaded, EffectProven, InstanceReady]
            print(f"{mode}: woken in {woken.t_wake_us} us, first token after {woken.t_first_token_us} us")


async def test_a_wake_that_fails_ends_in_the_same_sleep(tmp_path: Path, tiny_base: Path) -> None:
    mode = SleepMode.L2
    async with running(tmp_path) as yoco:
        endpoint = (await ready(yoco, start_order(tiny_base))).endpoint
        resident = await recorded(yoco, tiny_base, endpoint)
        await yoco.desk.carry_out(drain_order())
        await yoco.desk.carry_out(sleep_order(mode=mode))
        await yoco.desk.carry_out(wake_order(resident.model_copy(update={"path": "nowhere"})))
        assert await given(endpoint) == GIVEN[mode]
        assert isinstance(await yoco.desk.carry_out(wake_order(resident)), InstanceReady)


def test_a_mode_that_is_lacking_is_refused_with_the_reason() -> None:
    lack = Lack(mode=SleepMode.L1, reason="there is no GPU")
    offer = EngineOffer(kind="vllm", version="0.32.0", modes=(SleepMode.PAUSED,), lacks=(lack,))
    check_mode([offer], "vllm", SleepMode.PAUSED)
    check_mode([offer], "fake", SleepMode.L1)  # of which nothing is known
    with pytest.raises(ModeUnsupported, match="vllm cannot sleep in mode l1: there is no GPU") as caught:
        check_mode([offer], "vllm", SleepMode.L1)
    assert (caught.value.code, caught.value.mode) == ("mode_unsupported", SleepMode.L1)
