"""What telemetry costs a node: `python benchmarks/telemetry.py [--instances 8] [--seconds 20]`.

A real bus, a real yoco in its own process, and fake engines as its children: they send their readings idle and under
traffic. The processor time of yoco's process while it has no order is the sampler's (and an idle worker's: an upper
bound). Latency is from the moment an engine sent a reading until a subscriber of the bus holds the window with it; most
of it is the 30 ms that a window waits for stragglers. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil

from kite.bus import EVT, TEL, Bus, EmbeddedServer, dec_subject
from kite.clock import US_PER_S, mono_us, wall_us
from kite.engine import Engine
from kite.events import Origin, compose
from kite.launch import command
from kite.testing import bases
from kite.testing.engine import tiny_spec
from kite_schemas.envelope import decode
from kite_schemas.model import PPM
from kite_schemas.telemetry import Window
from kite_schemas.why import Reason, Why
from kite_schemas.yoco import InstanceReady, StartOrdered

NODE = "bench"
START_US = 240 * US_PER_S
PROMPT = (11, 87, 203, 45)
PAUSE_S = 0.25  # of each client between two requests: the engines share the cores with what is measured
SETTLE_S = 3.0


@dataclass(slots=True)
class Heard:
    """The windows of a span, each with the wall clock at which it was here."""

    windows: list[tuple[int, Window]] = field(default_factory=list[tuple[int, Window]])

    async def listen(self, bus: Bus) -> None:
        """Hear all windows, for ever."""
        after = (await bus.stream(TEL)).last_seq
        async with aclosing(bus.follow(TEL, after_seq=after)) as followed:
            async for message in followed:
                here_us = wall_us()
                data = decode(message.payload).data
                if isinstance(data, Window):
                    self.windows.append((here_us, data))

    def latencies_us(self) -> list[int]:
        """Return how old each reading that was new in its window was when the window was here."""
        return sorted(
            here_us - window.sampled_us + one.age_us
            for here_us, window in self.windows
            for one in window.instances
            if one.age_us is not None and one.finished is not None
        )

    def absent(self) -> int:
        """Return how often an instance was in a window without a value."""
        return sum(one.source is None for _, window in self.windows for one in window.instances)


def quantile(values: Sequence[int], share: float) -> int:
    """Return a quantile of sorted values, 0 of none."""
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0


def cpu_s(process: psutil.Process) -> float:
    """Return the processor time of a process, without its children's."""
    times = process.cpu_times()
    return times.user + times.system


def start_order(base: Path, instance: str) -> StartOrdered:
    """Return an order to start a fake engine."""
    return StartOrdered(
        why=Why(reason=Reason.ASKED),
        node=NODE,
        target=f"instance/{instance}",
        instance=instance,
        expires_us=START_US,
        ttl_us=START_US,
        device="cpu0",
        standby=False,
        spec=tiny_spec("fake", base),
    )


async def started(bus: Bus, base: Path, names: Sequence[str]) -> dict[str, InstanceReady]:
    """Order all starts and return what is ready, by instance."""
    for name in names:
        order = start_order(base, name)
        event = compose(order.target, order, Origin("kite/arbitrator/bench", "arbitrator@0"))
        await bus.publish(dec_subject("yoco", NODE, "start_ordered", order.target), event.raw, event.header.id)
    found: dict[str, InstanceReady] = {}
    async with asyncio.timeout(START_US / US_PER_S), aclosing(bus.follow(EVT, after_seq=0)) as followed:
        async for message in followed:
            fact = decode(message.payload).data
            if isinstance(fact, InstanceReady):
                found[fact.instance] = fact
            if len(found) == len(names):
                break
    return found


async def client(url: str) -> None:
    """Ask one engine again and again."""
    async with Engine(url) as engine:
        while True:
            await engine.distributions("tiny", [PROMPT], top=1)
            await asyncio.sleep(PAUSE_S)


async def measured(bus: Bus, yoco: psutil.Process, seconds: float) -> dict[str, int]:
    """Measure one span."""
    heard = Heard()
    ear = asyncio.create_task(heard.listen(bus))
    await asyncio.sleep(SETTLE_S)
    heard.windows.clear()
    began_us, began_s = mono_us(), cpu_s(yoco)
    await asyncio.sleep(seconds)
    took_us, used_s = mono_us() - began_us, cpu_s(yoco) - began_s
    ear.cancel()
    latencies = heard.latencies_us()
    seqs = [window.seq for _, window in heard.windows]
    return {
        "cpu_share_ppm": round(used_s * US_PER_S / took_us * PPM),
        "windows_per_s_milli": round(len(seqs) * 1_000 * US_PER_S / took_us),
        "windows_lost": seqs[-1] - seqs[0] + 1 - len(seqs),
        "window_bytes": len(heard.windows[-1][1].model_dump_json(exclude_none=True)),
        "values_absent": heard.absent(),
        "requests": sum(one.finished or 0 for _, window in heard.windows for one in window.instances),
        "reading_to_window_us_p50": quantile(latencies, 0.5),
        "reading_to_window_us_p99": quantile(latencies, 0.99),
    }


async def run(instances: int, seconds: float) -> dict[str, object]:
    """Measure idle, then under traffic."""
    with tempfile.TemporaryDirectory(prefix="kite-bench-") as folder:
        async with EmbeddedServer(Path(folder) / "nats") as server, await Bus.connect(server.url, "bench") as bus:
            await bus.provision()
            process = await asyncio.create_subprocess_exec(
                *command([sys.executable, "-m", "kite_yoco"]),
                env={
                    **os.environ,
                    "KITE_NATS_URL": server.url,
                    "KITE_NODE": NODE,
                    "KITE_STATE_DIR": f"{folder}/yoco",
                    "KITE_ADAPTER_ROOT": folder,
                    "KITE_LOG_LEVEL": "warning",
                },
                start_new_session=True,
            )
            try:
                ready = await started(bus, bases.tiny(bases.cache()), [f"i{number}" for number in range(instances)])
                yoco = psutil.Process(process.pid)
                idle = await measured(bus, yoco, seconds)
                clients = [asyncio.create_task(client(fact.endpoint)) for fact in ready.values()]
                busy = await measured(bus, yoco, seconds)
                for task in clients:
                    task.cancel()
            finally:
                process.terminate()
                await process.wait()
    return {
        "instances": instances,
        "seconds": seconds,
        "cpu_share": busy["cpu_share_ppm"] / PPM,
        "idle": idle,
        "busy": busy,
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "cores": os.cpu_count(),
    }


def main() -> int:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(run(cast("int", options.instances), cast("float", options.seconds)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
