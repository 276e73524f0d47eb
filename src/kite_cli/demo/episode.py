"""The pressure episode of the demo: load that begins and ends on real engines, and what the arbitrator makes of it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from kite.clock import US_PER_S, mono_us
from kite.errors import Fault, KiteError
from kite.ledger import Reader
from kite.testing.load.traffic import Bounds, Prompts, Workers, drive
from kite_arbitrator.records import Instance
from kite_arbitrator.state import State, current, serving
from kite_cli.asking import request
from kite_cli.embedded.fleet import Fleet
from kite_cli.place import reading
from kite_cli.view import View
from kite_incident.timeline import detail
from kite_schemas.arbitration import Channel, ChannelSelected, PressureChanged
from kite_schemas.envelope import decode
from kite_schemas.model import PPM, Data
from kite_schemas.upcycle import DecaySet
from kite_schemas.yoco import DrainOrdered, InstanceChanged, InstanceReady, SleepOrdered, WakeOrdered
from kite_schemas.yoco import State as Life

LIMITS: Mapping[str, int] = {
    "arbitration.concurrency_max": 2,
    "arbitration.sustained_us": 1_500_000,
    "arbitration.latency_sigma_max_us": 5_000_000,
    "arbitration.idle_us": 2_000_000,
}
"""What a machine of two cores needs, and what keeps the demo short: the shipped limits are those of a GPU fleet."""

PROMPT_TOKENS, ANSWER_TOKENS, CALM_ANSWER_TOKENS = 65, 48, 8
"""A repeated prompt of whole blocks and one token hits the prefix cache but for that token. While it is calm, answers
are short, so that prompts come often: the hits of five seconds are known from 200 tokens on."""

CALM_S = 5.0
"""The misses of one second are compared with those of the five before it."""

CALM = Workers(number=2, pause_us=50_000)
PRESSING = Workers(number=8)
VARIETY = 2
LOAD_S = 300.0
"""A drive ends by itself after this, should nobody end it."""

STAGE_S = 60.0
"""How long the fleet may take to answer the load, at each stage."""

POLL_S = 0.1
TOLD = (ChannelSelected, PressureChanged, DecaySet, WakeOrdered, InstanceReady, DrainOrdered, SleepOrdered)

Say = Callable[[str], None]
Sees = Callable[[State], bool]


class EpisodeIncomplete(KiteError):
    """A stage of an act did not come: `stage` says which."""

    code = "episode_incomplete"
    fault = Fault.KITE

    def __init__(self, stage: str) -> None:
        super().__init__(
            f"{stage} did not come within {STAGE_S:g} s of what asks for it",
            hint="`kite timeline --steps` and `kite status` on the demo's folder tell what was decided instead",
        )
        self.stage = stage


class NotChanged(KiteError):
    """A limit was refused."""

    code = "limit_refused"
    fault = Fault.KITE


@dataclass(slots=True)
class Watch:
    """Follows the ledger of the fleet, and tells what the load brings about."""

    reader: Reader
    say: Say
    told: tuple[type[Data], ...] = TOLD
    view: View = field(init=False)
    decided: dict[type[Data], list[str]] = field(default_factory=dict[type[Data], list[str]])

    def __post_init__(self) -> None:
        """Begin at the end of the ledger."""
        self.view = View(self.reader)
        self.view.refresh()

    async def until(self, stage: str, seen: Sees) -> None:
        """Wait for a state of the fleet. Raises EpisodeIncomplete."""
        until_us = mono_us() + int(STAGE_S * US_PER_S)
        while not seen(self.look()):
            if mono_us() >= until_us:
                raise EpisodeIncomplete(stage)
            await asyncio.sleep(POLL_S)

    def look(self) -> State:
        """Tell what was decided since the last look, and return the state."""
        types = {model.TYPE for model in (*self.told, InstanceChanged)}
        for row in self.reader.find(types=types, first=self.view.state.pos + 1):
            data = decode(row.raw).data
            if data is not None:
                self.decided.setdefault(type(data), []).append(row.event_id)
                self.say(f"  {row.type.split('.')[2]}: {detail(data) or row.subject}")
        return self.view.refresh()


async def episode(fleet: Fleet, blend: str, say: Say) -> str:
    """Press the fleet until it answers, relieve it until it rests again; return the id of the decision on pressure.

    Raises EpisodeIncomplete for a stage that does not come, NotChanged for a limit that is refused.
    """
    await set_limits(fleet, say, LIMITS, "limits of a small machine")
    with reading(fleet) as reader:
        watch = Watch(reader, say)
        version = watch.view.state.blends[blend].resident.version
        load = partial(pressing, reader, blend, version)
        async with load(CALM, shared_ppm=PPM, answer_tokens=CALM_ANSWER_TOKENS):
            await watch.until("the upcycle channel", lambda state: state.channels[blend].channel is Channel.UPCYCLE)
            await watch.until("the standby's rest", rests)
            await asyncio.sleep(CALM_S)
        async with load(PRESSING, shared_ppm=0, answer_tokens=ANSWER_TOKENS):
            await watch.until("pressure", lambda state: bool(state.pressing))
            await watch.until("the standby", lambda state: any(map(helps, state.instances.values())))
        async with load(CALM, shared_ppm=PPM, answer_tokens=CALM_ANSWER_TOKENS):
            await watch.until("the end of the pressure", lambda state: not state.pressing)
            await watch.until("the upcycle channel", lambda state: state.channels[blend].channel is Channel.UPCYCLE)
        await watch.until("the standby's sleep", rests)
        return watch.decided[PressureChanged][0]


async def set_limits(fleet: Fleet, say: Say, limits: Mapping[str, int], reason: str) -> None:
    """Set limits, as `kite config set` does. Raises NotChanged."""
    for key, value in limits.items():
        say(f"  kite config set {key} {value}")
    changed = await request.change(fleet, list(limits.items()), reason=f"demo: {reason}")
    if not changed.ok:
        raise NotChanged(changed.detail)


@asynccontextmanager
async def pressing(
    reader: Reader, blend: str, version: str, workers: Workers, *, shared_ppm: int, answer_tokens: int
) -> AsyncGenerator[None]:
    """Ask the instances that the routes name, so many at a time, until the block ends."""
    asked = Prompts(tokens=PROMPT_TOKENS, shared_ppm=shared_ppm, variety=VARIETY, answer_tokens=answer_tokens)
    load = drive(
        lambda name: [route.endpoint for route in reader.routes(name)],
        blend,
        workers,
        Bounds(seconds=LOAD_S),
        asked=asked,
        model=version,
    )
    driving = asyncio.create_task(load)
    try:
        yield
    finally:
        driving.cancel()
        with suppress(asyncio.CancelledError):
            await driving


def helps(instance: Instance) -> bool:
    """Tell whether an instance is a standby that answers."""
    return instance.standby and serving(instance)


def rests(state: State) -> bool:
    """Tell whether every standby sleeps, for long enough that waking it is no jitter."""
    window_us = current(state).arbitration.switch_window_us or 0
    standbys = [i for i in state.instances.values() if i.standby]
    turns = [turn for i in standbys if (turn := state.turns.get(f"instance/{i.id}")) is not None]
    settled = all(state.now_us - turn.at_us >= window_us for turn in turns)
    return settled and all(i.state is Life.ASLEEP for i in standbys)
