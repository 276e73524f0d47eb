"""The acts of the demo: the whole job once, on real parts, with every claim checked."""

import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import cast, get_args

from kite.bus import DEC, EVT, Bus, Message
from kite.clock import mono_us
from kite.engine import Engine
from kite.errors import Fault, KiteError, UsageError
from kite.proof import read_pair
from kite_cli.asking import capacity, request
from kite_cli.asking.request import Injection
from kite_cli.asking.telling import tell
from kite_cli.demo import versions
from kite_cli.demo.episode import episode
from kite_cli.demo.material import ANCHOR, EXAMPLES, SECOND, BaseKind, Material, fresh, prepare
from kite_cli.embedded.fleet import Fleet, embedded
from kite_cli.embedded.options import EngineKind, Options
from kite_cli.place import in_folder, reading
from kite_incident.replay import Verdict, verify
from kite_schemas.envelope import Event, decode
from kite_schemas.upcycle import Ending, InjectionClosed, Violation
from kite_schemas.yoco import State

DEFAULT_DIR = Path(".kite-demo")
REPORT = "report.json"
BLEND = "risk"
ANCHOR_PPM, SECOND_PPM = 600_000, 400_000
NEARER_FACTOR = 4
"""The loaded blend must be nearer to the blend computed with torch than to anything else, by this factor."""

PROMISED = (
    "kite.upcycle.injection_admitted.v1",
    "kite.upcycle.blend_promoted.v1",
    "kite.upcycle.rollback_closed.v1",
    "kite.upcycle.retire_ordered.v1",
    "kite.upcycle.blend_unloaded.v1",
    "kite.yoco.start_ordered.v1",
    "kite.yoco.sleep_ordered.v1",
    "kite.yoco.wake_ordered.v1",
    "kite.guard.comparison_ordered.v1",
    "kite.arbitration.channel_selected.v1",
    "kite.arbitration.pressure_changed.v1",
    "kite.upcycle.decay_set.v1",
)
ENDINGS = (Ending.PROMOTED, Ending.REFUSED)

Say = Callable[[str], None]


class DemoFailed(KiteError):
    """Something that the demo promises did not happen."""

    code = "demo_failed"
    fault = Fault.KITE

    def __init__(self, what: str, directory: Path) -> None:
        super().__init__(what, hint=f"logs are in {directory / 'logs'}, the ledger is {directory / 'ledger.db'}")
        self.what = what


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo runs on."""

    engine: EngineKind = "vllm"
    base: BaseKind = "smollm2"
    dir: Path = DEFAULT_DIR
    examples: Path = EXAMPLES


def options(engine: str, base: str, directory: Path, examples: Path) -> DemoOptions:
    """Return the options as given on the command line. Raises UsageError."""
    if engine not in get_args(EngineKind):
        raise UsageError(f"no engine {engine!r}", hint=f"one of {', '.join(get_args(EngineKind))}")
    if base not in get_args(BaseKind):
        raise UsageError(f"no base {base!r}", hint=f"one of {', '.join(get_args(BaseKind))}")
    return DemoOptions(engine=cast("EngineKind", engine), base=cast("BaseKind", base), dir=directory, examples=examples)


@dataclass(slots=True)
class Report:
    """What was seen. Times in milliseconds or seconds as the names say, divergences in micronats."""

    engine: str
    base: str
    phases_s: dict[str, float] = field(default_factory=dict[str, float])
    torch_kl_micronats: dict[str, int] = field(default_factory=dict[str, int])
    refused: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    handover_ms: float = 0.0
    deadline_ms: float = 0.0
    compared_micronats: int = 0
    decision_ms_p50: float = 0.0
    decision_ms_p99: float = 0.0
    decisions: int = 0
    rollback_ms: float = 0.0
    retired_version: str = ""
    explained: str = ""
    pressure: str = ""
    rolled_back: str = ""
    retired: str = ""


class Demo:
    """One run; `say` is told each step in a line."""

    def __init__(self, options: DemoOptions, say: Say) -> None:
        self._options = options
        self._say = say
        self.report = Report(options.engine, options.base)

    async def run(self) -> Verdict:
        """Do everything and return what the replay of it found. Raises DemoFailed and the errors of each part."""
        directory = fresh(self._options.dir)
        with self._phase("base and adapters"):
            material = prepare(self._options.base, self._options.examples, directory / "material")
        async with embedded(self._fleet_options(material.base)) as fleet:
            await self._on(fleet, material)
        with self._phase("replay"):
            return self._judge(directory)

    async def _on(self, fleet: Fleet, material: Material) -> None:
        with self._phase("fleet up"):
            await fleet.wait_settled(on_event=self._told)
        with self._phase("two adapters blended"):
            await self._blend(fleet, material)
        with self._phase("compared with torch"):
            await self._against_torch(fleet, material)
        with self._phase("rolled back and forward again"):
            await self._return(fleet)
        with self._phase("former version retired"):
            self.report.retired = await versions.retire(fleet, self.report.retired_version, self._say)
        with self._phase("two defective adapters refused"):
            for kind, path in material.bad.items():
                await self._refuse(fleet, kind, path)
        with self._phase("pressed and relieved"):
            self.report.pressure = await episode(fleet, BLEND, self._say)
        with self._phase("standby handed over"):
            await self._hand_over(fleet)
        with self._phase("instances compared"):
            await self._compare(fleet)
        await self._latencies(fleet)

    async def _blend(self, fleet: Fleet, material: Material) -> None:
        first = await self._inject(fleet, material.good[ANCHOR], ANCHOR_PPM, anchors=(ANCHOR,))
        self._expect(first.ending is Ending.PROMOTED, f"{ANCHOR} was {first.ending}: {first.detail or first.reason}")
        second = await self._inject(fleet, material.good[SECOND], SECOND_PPM)
        self._expect(
            second.ending is Ending.PROMOTED, f"{SECOND} was {second.ending}: {second.detail or second.reason}"
        )
        weights = {m.adapter.name: m.weight_ppm for m in second.members}
        self._expect(weights == {ANCHOR: ANCHOR_PPM, SECOND: SECOND_PPM}, f"the blend has the weights {weights}")

    async def _inject(self, fleet: Fleet, path: Path, weight_ppm: int, *, anchors: Sequence[str] = ()) -> Injection:
        return await request.inject(
            fleet,
            adapter=path,
            base=fleet.base,
            blend=BLEND,
            weight_ppm=weight_ppm,
            anchors=anchors,
            reason="demo",
            on_event=self._told,
        )

    async def _against_torch(self, fleet: Fleet, material: Material) -> None:
        """Read the promoted version on the running engine, and what torch computes for blend, base and members."""
        from kite.testing.reference import Reference

        good = material.good
        weights = {ANCHOR: ANCHOR_PPM / 1e6, SECOND: SECOND_PPM / 1e6}
        models = {"blend": [(good[name], weight) for name, weight in weights.items()], "base": []}
        models |= {name: [(path, 1.0)] for name, path in good.items()}
        reference = Reference.load(material.base, models)
        ready = next(i for i in fleet.state().instances.values() if i.state is State.READY)
        version = fleet.state().blends[BLEND].resident.version
        async with Engine(ready.endpoint) as engine:
            for name in models:
                found = await read_pair(engine, version, reference, name, material.prompts)
                self.report.torch_kl_micronats[name] = found.kl_micronats
        self._nearest(self.report.torch_kl_micronats)

    def _nearest(self, distances: Mapping[str, int]) -> None:
        own = distances["blend"]
        shown = ", ".join(f"{name} {kl / 1e6:.6f}" for name, kl in distances.items())
        self._say(f"nats from what torch computes: {shown}")
        others = {name: kl for name, kl in distances.items() if name != "blend"}
        self._expect(all(kl > NEARER_FACTOR * own for kl in others.values()), f"the blend is not nearest: {shown}")

    async def _return(self, fleet: Fleet) -> None:
        returned = await versions.there_and_back(fleet, BLEND, self._say, self._told)
        self.report.rollback_ms = returned.took_us / 1_000
        self.report.rolled_back, self.report.retired_version = returned.decision, returned.former

    async def _refuse(self, fleet: Fleet, kind: str, path: Path) -> None:
        refused = await self._inject(fleet, path, SECOND_PPM)
        self._expect(refused.ending is Ending.REFUSED, f"the adapter with defect {kind} was {refused.ending}")
        for line in grouped(refused.violations):
            self._say(f"  {line}")
        self.report.refused[kind] = sorted({violation.code for violation in refused.violations})

    async def _hand_over(self, fleet: Fleet) -> None:
        handover = await capacity.order(fleet, fleet.base, reason="demo", on_event=self._told)
        self._expect(handover.ok, f"the standby did not wake: {handover.code}: {handover.detail}")
        self.report.handover_ms, self.report.deadline_ms = handover.took_us / 1_000, handover.deadline_us / 1_000
        verdict = "met" if handover.in_time else "missed"
        deadline = f"deadline {self.report.deadline_ms:.0f} ms"
        self._say(f"first token {self.report.handover_ms:.0f} ms after the order, {deadline} {verdict}")

    async def _compare(self, fleet: Fleet) -> None:
        first, second = sorted(i.id for i in fleet.state().instances.values() if i.state is State.READY)
        comparison = await request.compare(fleet, first, second, blend=BLEND, reason="demo", on_event=self._told)
        measured = comparison.measured
        if measured is None:
            raise DemoFailed(f"no verdict on {first} and {second}: {comparison.detail}", self._options.dir)
        self.report.compared_micronats = measured.kl_micronats

    async def _latencies(self, fleet: Fleet) -> None:
        async with await Bus.connect(fleet.nats_url, "demo") as bus:
            spans_us = sorted(await latencies_us(bus))
        self.report.decision_ms_p50 = spans_us[len(spans_us) // 2] / 1_000
        self.report.decision_ms_p99 = spans_us[len(spans_us) * 99 // 100] / 1_000

    def _judge(self, directory: Path) -> Verdict:
        """Look for every promised decision, then replay the whole run."""
        with reading(in_folder(directory)) as reader:
            events = [(row, decode(row.raw)) for row in reader.rows()]
            kinds = {row.type for row, _ in events}
            for kind in PROMISED:
                self._expect(kind in kinds, f"no {kind} was decided")
            endings = {event.data.outcome for _, event in events if isinstance(event.data, InjectionClosed)}
            for ending in ENDINGS:
                self._expect(ending in endings, f"no injection was closed as {ending}")
            admitted = [row.event_id for row, _ in events if row.type == PROMISED[0]]
            self.report.explained = admitted[-1]
            verdict = verify(reader)
        self._expect(verdict.identical, f"the replay diverges at position {verdict.divergence}")
        self.report.decisions = verdict.decisions
        (directory / REPORT).write_text(json.dumps(asdict(self.report), indent=2) + "\n", encoding="utf-8")
        return verdict

    def _fleet_options(self, base: Path) -> Options:
        dtype = "bfloat16" if self._options.base == "smollm2" else "float32"
        return Options(
            base=base, name=self._options.base, engine=self._options.engine, dir=self._options.dir, dtype=dtype
        )

    def _expect(self, holds: bool, what: str) -> None:  # reads as a sentence
        if not holds:
            raise DemoFailed(what, self._options.dir)

    def _told(self, event: Event) -> None:
        line = tell(event)
        if line:
            self._say(f"  {line}")

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        self._say(f"{name} …")
        began_us = mono_us()
        yield
        self.report.phases_s[name] = round((mono_us() - began_us) / 1e6, 1)


def grouped(violations: Sequence[Violation]) -> Iterator[str]:
    """Yield a line per violation; one line for those that differ in their place only."""
    for (code, expected, found), same in groupby(violations, key=lambda v: (v.code, v.expected, v.found)):
        places = [violation.where for violation in same]
        where = places[0] if len(places) == 1 else f"{len(places)} places, {places[0]} to {places[-1]}"
        yield f"{code}: {where}: expected {expected}, found {found}"


async def latencies_us(bus: Bus) -> list[int]:
    """Return, per decision, the time from its cause on the bus to itself on the bus, by the clock of the bus."""
    causes = {message.event_id: message.published_us async for message in _stored(bus, EVT)}
    spans: list[int] = []
    async for message in _stored(bus, DEC):
        cause = decode(message.payload).header.causationid
        if cause in causes:
            spans.append(message.published_us - causes[cause])
    return spans


async def _stored(bus: Bus, stream: str) -> AsyncGenerator[Message]:
    last = (await bus.stream(stream)).last_seq
    async with aclosing(bus.follow(stream, after_seq=0)) as messages:
        while last and (message := await anext(messages)):
            yield message
            if message.seq >= last:
                return
