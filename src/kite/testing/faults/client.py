"""Who asks in a fault run: people and a node, over a connection that may break at any time. It never gives up."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pydantic import JsonValue

from kite.bus import Bus, PublishFailed
from kite.events import Composed, Origin, compose, publish
from kite.testing.faults.plan import Plan
from kite.testing.faults.yoco import NODE, ORIGIN
from kite.testing.load.chance import chance
from kite_schemas.arbitration import GapAcknowledged
from kite_schemas.model import Data
from kite_schemas.policy import Change, ChangeRequested
from kite_schemas.yoco import Device, NodeRegistered, OrderRequested, SleepMode

PEOPLE = Origin(source="kite/cli/test", producer="cli@test")
DEVICES = 3
PACE_MS = 60
"""How long the client thinks between two requests, at most."""

PATIENCE_S = 0.15
"""How long it waits for an instance that sleeps, before it asks in vain."""

BOOT = "00000000-0000-4000-8000-00000000000{}"


class Client:
    """`acked` are the events that the bus has acknowledged, by id. `asleep` is set while an instance can be woken."""

    def __init__(
        self, bus: Bus, plan: Plan, settings: Mapping[str, JsonValue], base: str, asleep: asyncio.Event
    ) -> None:
        self.acked: dict[str, bytes] = {}
        self._said: list[Composed] = []
        self._bus = bus
        self._plan = plan
        self._settings = settings
        self._base = base
        self._asleep = asleep
        self._rng = chance(plan.seed, "client")

    async def run(self) -> None:
        """Set the fleet, let the node come, and ask for instances."""
        await self._say("policy/fleet", _changed(self._settings))
        await self._register(0)
        for number in range(self._plan.requests):
            await asyncio.sleep(self._rng.randrange(PACE_MS) / 1_000)
            if number % 3:
                await self._patience()
            if number == self._plan.rebooted:
                await self._register(1)
            asked = await self._say(f"base/{self._base}", OrderRequested(actor="client", base=self._base))
            if self._rng.randrange(3) == 0:
                await self._insist(asked)  # as after an acknowledgement that was lost
            if self._rng.randrange(4) == 0:
                await self._say("policy/fleet", _changed({"upcycle.weight_min_ppm": self._rng.randrange(1, 20_000)}))

    async def look(self) -> None:
        """Acknowledge a gap, as somebody who has looked at what it was, and perhaps say everything once more."""
        if self._rng.randrange(2):
            for event in list(self._said):
                await self._insist(event)
        await self._say("arbitration/fleet", GapAcknowledged(actor="operator"))

    async def _patience(self) -> None:
        """Wait for an instance that can be woken, for a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._asleep.wait()

    async def _register(self, boot: int) -> None:
        devices = tuple(Device(id=f"cpu{n}", kind="cpu", memory_bytes=1 << 35) for n in range(DEVICES))
        fact = NodeRegistered(
            node=NODE,
            boot=BOOT.format(boot),
            devices=devices,
            memory_bytes=1 << 37,
            sleep_modes=(SleepMode.PAUSED,),
        )
        await self._say(f"node/{NODE}", fact, ORIGIN)

    async def _say(self, subject: str, data: Data, origin: Origin = PEOPLE) -> Composed:
        event = compose(subject, data, origin)
        await self._insist(event)
        self._said.append(event)
        return event

    async def _insist(self, event: Composed) -> None:
        while True:
            try:
                await publish(self._bus, event)
            except PublishFailed as error:
                if not error.retryable:
                    raise
            else:
                self.acked[event.header.id] = event.raw
                return


def _changed(settings: Mapping[str, JsonValue]) -> ChangeRequested:
    changes: Sequence[Change] = [Change(key=key, value=value) for key, value in settings.items()]
    return ChangeRequested(actor="client", changes=tuple(changes))
