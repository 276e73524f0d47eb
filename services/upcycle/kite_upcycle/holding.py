"""What is done with engines: versions loaded, proven, taken out again, and retired."""

import asyncio
from pathlib import Path

from kite import clock, proof
from kite.engine import Engine, EngineRefused, Loaded, Refusal
from kite.orders import Emit, Received, stage
from kite.probes import Probes
from kite.proof import Missing, Proven
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.upcycle import (
    BlendLoaded,
    BlendUnloaded,
    EffectPrint,
    LoadOrdered,
    RetireOrdered,
    RollbackOrdered,
    RolledBack,
)
from kite_upcycle import core
from kite_upcycle.channel import Channel
from kite_upcycle.engines import Engines
from kite_upcycle.errors import NotListed, StillListed
from kite_upcycle.making import Making

USE_POLL_S = 0.1  # between two looks whether requests still use a version: a page of metrics costs vLLM 8 ms
RESET_POLL_S = 0.1
RESET_TRIES = 50  # the cache of an engine cannot be reset while a request holds blocks of it


class Holding:
    """The handlers that work on the engines of the node; the report of its channel learns from the loads."""

    def __init__(self, making: Making, engines: Engines, probe_set: Probes, watched: Channel, root: Path) -> None:
        self._making = making
        self._engines = engines
        self._probes = probe_set
        self._channel = watched
        self._root = root

    async def load(self, received: Received[LoadOrdered], emit: Emit) -> EffectProven | EffectMissing:
        """Load a version unless the engine has it, say so, and prove its effect."""
        order = received.data
        version = order.resident.version
        async with self._engines.lend(order.endpoint) as engine:
            self._channel.taken(order)
            began_us = clock.mono_us()
            stage("list")
            listed = await engine.models()
            plan = core.plan_load(order.resident, listed)
            given = await self._give(engine, order) if plan.load else Loaded(None, await engine.held())
            told = BlendLoaded(
                instance=order.instance,
                version=version,
                duration_us=clock.mono_us() - began_us,
                slot=given.slot,
                slots_taken=core.number(given.held),
            )
            await emit(told)
            stage("prove")
            found = await self._prove(engine, order, plan.effect_print)
        if plan.load and isinstance(found, Proven):
            self._channel.proven(received, listed)
        return proof.outcome(found, order.instance, version)

    async def roll_back(self, received: Received[RollbackOrdered], emit: Emit) -> RolledBack:
        """Take a version out of an engine, if it is there; after numbers that were not finite, heal its cache."""
        del emit
        order = received.data
        async with self._engines.lend(order.endpoint) as engine:
            await take(engine, order.version, order.slot)
            healed = await self._healed(engine, order.base) if order.base is not None else None
            taken = core.number(await engine.held())
        return RolledBack(
            request=order.request, instance=order.instance, version=order.version, slots_taken=taken, healed=healed
        )

    async def retire(self, received: Received[RetireOrdered], emit: Emit) -> BlendUnloaded:
        """Take the name away and wait for the requests that use the version, for as long as the order lives."""
        del emit
        began_us = clock.mono_us()
        order = received.data
        async with self._engines.lend(order.endpoint) as engine:
            await take(engine, order.version, order.slot)
            taken = core.number(await engine.held())
        took_us = clock.mono_us() - began_us
        return BlendUnloaded(instance=order.instance, version=order.version, slots_taken=taken, duration_us=took_us)

    async def _give(self, engine: Engine, order: LoadOrdered) -> Loaded:
        """Check the stored version, load it, and look whether the engine has it; return what it holds then."""
        stage("check")
        resident = order.resident
        checked = await self._making.checked(resident)
        stage("load")
        began_us = clock.wall_us()
        given = await _load(engine, resident.version, str(checked.path))
        self._channel.loaded(order, began_us, clock.wall_us())
        stage("list")
        if resident.version not in await engine.models():
            raise NotListed(resident.version)
        return given

    async def _prove(self, engine: Engine, order: LoadOrdered, effect_print: EffectPrint | None) -> Proven | Missing:
        base, version, noise = order.base, order.resident.version, order.noise_micronats
        if effect_print is None:
            return await proof.prove_first(engine, base, version, self._probes, noise, self._root)
        return await proof.prove_again(engine, base, version, effect_print, self._probes, noise, self._root)

    async def _healed(self, engine: Engine, base: str) -> bool:
        """Forget all prefixes and read every probe of the base: numbers that are not finite stay in blocks of KV.

        A request that holds blocks keeps the cache from being reset: then it is tried again, and then it is not healed.
        """
        stage("heal")
        if not await reset(engine):
            return False
        try:
            await engine.distributions(base, self._probes.prompts)
        except EngineRefused as error:
            if error.reason is not Refusal.NOT_FINITE:
                raise
            return False
        return True


async def _load(engine: Engine, version: str, path: str) -> Loaded:
    """Load a version; one that came in between the two looks, by an order that was given up, is there already."""
    try:
        return await engine.load(version, path)
    except EngineRefused as error:
        if error.reason is not Refusal.ALREADY_LOADED:
            raise
        return Loaded(None, await engine.held())


async def take(engine: Engine, version: str, slot: int | None) -> None:
    """Unload a version, wait until no request uses it, and let the engine drop what it holds of it.

    A name that is gone already is fine. Raises StillListed, and the engine's errors.
    """
    stage("list")
    if version in await engine.models():
        await _unload(engine, version)
    stage("drain")
    while await engine.in_use(version):  # noqa: ASYNC110 # another process: it sets no event of ours
        await asyncio.sleep(USE_POLL_S)
    stage("drop")
    held = await engine.held()
    if slot is not None and held is not None and slot in held:
        await engine.drop(slot)


async def _unload(engine: Engine, version: str) -> None:
    stage("unload")
    try:
        await engine.unload(version)
    except EngineRefused as error:
        if error.reason is not Refusal.MODEL_UNKNOWN:
            raise
    stage("list")
    if version in await engine.models():
        raise StillListed(version)


async def reset(engine: Engine) -> bool:
    """Have the engine forget its prefixes; False when requests kept it from that for all of RESET_TRIES."""
    for _ in range(RESET_TRIES):
        try:
            await engine.reset_prefix_cache()
        except EngineRefused as error:
            if error.reason is not Refusal.BUSY:
                raise
            await asyncio.sleep(RESET_POLL_S)
        else:
            return True
    return False
