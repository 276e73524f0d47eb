"""Record what later versions must still read and replay: the demo's history, and one payload of every event type.

    KITE_CACHE=/tmp/kite-golden/bases .venv/bin/python tests/golden/record.py

A recorded file is never edited; a new version of a type or of the rules gets a new one. What is there is left alone.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from kite.ledger import Reader
from kite_cli.demo.acts import Demo, DemoOptions
from kite_cli.output import note, quiet
from kite_cli.place import in_folder
from kite_incident.history import lines
from kite_schemas import upcycle, yoco
from kite_schemas.arbitration import (
    Channel,
    ChannelSelected,
    Discarded,
    GapAcknowledged,
    Held,
    Mode,
    ModeChanged,
    OrderExpired,
    PressureChanged,
    Transport,
    TransportChanged,
)
from kite_schemas.envelope import Header, encode
from kite_schemas.guard import ComparisonFailed, DistributionMeasured, Logprobs, MeasurementOrdered, Side
from kite_schemas.ledger import (
    BusEpochChanged,
    BusGap,
    Checkpointed,
    ClockStepped,
    DeadlineMissed,
    EpochEnd,
    EventIdConflict,
    LeaseTaken,
    ProducerKeyAdded,
    Refusal,
    Rejected,
)
from kite_schemas.model import Data
from kite_schemas.policy import ChangeRejected
from kite_schemas.probes import Registered
from kite_schemas.proof import EffectMissing, Missing
from kite_schemas.registry import TYPES
from kite_schemas.telemetry import (
    DeviceWindow,
    FragmentationSource,
    InstanceWindow,
    NodeFound,
    NodeLost,
    Source,
    Window,
)
from kite_schemas.upcycle import (
    AdapterRef,
    BlendFailed,
    DecaySet,
    Frozen,
    InjectionDeferred,
    InjectionRejected,
    LoadFailed,
    MemberDropped,
    RollbackFailed,
    RollbackOrdered,
    RolledBack,
    Shift,
    Unfrozen,
)
from kite_schemas.why import Reason, RuleValue, Why
from kite_schemas.yoco import OrderFailed, OrderRefused, PrewarmBlocked, PrewarmReleased, State, StopOrdered

HERE = Path(__file__).parent
DIR = Path("/tmp/kite-golden/demo")  # noqa: S108 # it ends up in the history, so it is the same everywhere
HISTORY = HERE / "histories" / "demo-fake-1.jsonl"

ID = "018f0000-0000-7000-8000-000000000000"
VERSION, NEWER = "risk@0123456789ab", "risk@ba9876543210"
DIGEST = "0123456789ab" + "0" * 52
WHY = Why(
    reason=Reason.EXPIRED,
    rules=(RuleValue(id="order.open_us", value=2, threshold=1, margin=-1, fired=True),),
    causes=(1,),
    policy="0" * 64,
)
ORDER: dict[str, Any] = {"why": WHY, "node": "n1", "target": "instance/a", "expires_us": 1, "ttl_us": 1}
DONE: dict[str, Any] = {"order": ID, "attempt": 1, "done": True}
ADAPTER = AdapterRef(name="credit", path="adapters/credit", digest="0" * 64)

RARE: tuple[tuple[str, Data], ...] = (
    ("blend/risk", InjectionRejected(why=WHY, request=ID, blend="risk", detail="no room")),
    ("blend/risk", InjectionDeferred(why=WHY, request=ID, blend="risk", until_us=1)),
    ("blend/risk", Frozen(why=WHY, blend="risk", until_us=1, severity=1)),
    ("blend/risk", Unfrozen(why=WHY, blend="risk", lasted_us=1)),
    ("blend/risk", MemberDropped(why=WHY, request=ID, blend="risk", member=ADAPTER, weight_ppm=9_000)),
    ("blend/risk", BlendFailed(**DONE, request=ID, code="rank_exceeded", message="12 > 8", duration_us=1)),
    ("instance/a", LoadFailed(**DONE, instance="a", version=VERSION, stage="load", code="refused", message="")),
    (
        "instance/a",
        RollbackOrdered(**ORDER, request=ID, instance="a", endpoint="http://127.0.0.1:8000", version=VERSION),
    ),
    ("instance/a", RolledBack(**DONE, request=ID, instance="a", version=VERSION)),
    ("instance/a", RollbackFailed(**DONE, request=ID, instance="a", version=VERSION, code="unreachable", message="")),
    ("instance/a", EffectMissing(**DONE, instance="a", version=VERSION, code=Missing.LIKE_BASE, message="")),
    ("instance/a", StopOrdered(**ORDER, instance="a")),
    ("instance/a", OrderRefused(**DONE, instance="a", code="wrong_state", message="")),
    (
        "instance/a",
        OrderFailed(**DONE, instance="a", state=State.FAILED, stage="start", code="engine_died", message=""),
    ),
    ("instance/a", ComparisonFailed(**DONE, request=ID, first="a", second="b", code="timeout", message="")),
    (
        "instance/b",
        MeasurementOrdered(
            **ORDER,
            request=ID,
            first="a",
            second="b",
            side=Side(instance="b", endpoint="http://127.0.0.1:8001"),
            model=VERSION,
            probes="0" * 64,
            tokens=((11, 42),),
        ),
    ),
    (
        "instance/b",
        DistributionMeasured(
            **DONE,
            request=ID,
            first="a",
            second="b",
            instance="b",
            model=VERSION,
            probes="0" * 64,
            positions=(Logprobs(tokens=(11, 42, 87), logprobs_micronats=(-105_361, -2_995_732, -4_605_170)),),
            duration_us=1,
        ),
    ),
    (
        "base/tiny",
        Registered(
            actor="golden",
            base="tiny",
            digest="0" * 64,
            path=f"store/probes/{'0' * 64}.json",
            probes=17,
            longest_tokens=43,
        ),
    ),
    (
        "node/n1",
        Window(
            node="n1",
            boot=ID,
            seq=7,
            interval_us=100_000,
            sampled_us=1_767_225_600_000_000,
            emitted_us=1_767_225_600_000_200,
            instances=(
                InstanceWindow(
                    id="a",
                    source=Source.STAT_LOGGER,
                    age_us=31_000,
                    arrivals=3,
                    finished=2,
                    latency_sum_us=810_000,
                    latency_squares_ms2=330_500,
                    cache_queries=96,
                    cache_hits=64,
                    preemptions=0,
                    running=4,
                    waiting=1,
                    kv_usage_ppm=120_000,
                    engine_step_age_us=33_000,
                ),
                InstanceWindow(id="b"),
            ),
            devices=(
                DeviceWindow(
                    id="GPU-7e57",
                    bandwidth_ppm=420_000,
                    fragmentation_ppm=90_000,
                    fragmentation_source=FragmentationSource.TORCH,
                ),
            ),
        ),
    ),
    ("base/tiny", Held(why=WHY, detail="no standby", request=ID)),
    (
        "instance/a",
        Discarded(why=WHY, decision="kite.yoco.wake_ordered.v1", target="instance/a", request=ID),
    ),
    ("channel/risk", ChannelSelected(why=WHY, blend="risk", channel=Channel.YOCO)),
    ("pool/n1.tiny", PressureChanged(why=WHY, node="n1", base="tiny", on=True, lasted_us=5_000_000)),
    ("arbitration/fleet", ModeChanged(why=WHY, mode=Mode.DEGRADED)),
    ("arbitration/fleet", GapAcknowledged(actor="operator", reason="looked at it")),
    ("node/n1", TransportChanged(why=WHY, node="n1", boot=ID, transport=Transport.RELIABLE)),
    ("node/n1", NodeLost(why=WHY, node="n1", silence_us=5_000_000)),
    ("node/n1", NodeFound(why=WHY, node="n1", silence_us=9_000_000)),
    ("base/tiny", DecaySet(why=WHY, base="tiny", decay_ppm=710_000)),
    ("node/n1", PrewarmBlocked(why=WHY, node="n1")),
    ("node/n1", PrewarmReleased(why=WHY, node="n1", lasted_us=60_000_000)),
    (
        "node/n1",
        yoco.ChannelSampled(
            node="n1", instances=4, healthy_ppm=750_000, prewarm_success_ppm=950_000, fragmentation_ppm=90_000
        ),
    ),
    (
        "node/n1",
        upcycle.ChannelSampled(
            node="n1",
            decay_ppm=930_000,
            kv_pollution_ppm=120_000,
            shifts=(Shift(version=VERSION, former="risk@ba9876543210", kl_micronats=153_642),),
        ),
    ),
    ("blend/risk", upcycle.RollbackRequested(actor="golden", reason="odd answers", blend="risk", version=VERSION)),
    (
        "blend/risk",
        upcycle.RollbackClosed(
            why=WHY, request=ID, blend="risk", outcome=upcycle.Return.DONE, version=VERSION, former=NEWER
        ),
    ),
    (
        "instance/a",
        upcycle.RetireOrdered(
            **ORDER, blend="risk", instance="a", endpoint="http://127.0.0.1:8000", version=VERSION, slot=1
        ),
    ),
    ("instance/a", upcycle.BlendUnloaded(**DONE, instance="a", version=VERSION, slots_taken=2, duration_us=40_000)),
    (
        "instance/a",
        upcycle.RetireFailed(**DONE, instance="a", version=VERSION, code="still_used", message="1 request runs"),
    ),
    (
        "version/risk@0123456789ab",
        upcycle.DeleteOrdered(
            **ORDER,
            blend="risk",
            version=VERSION,
            digest=DIGEST,
            effect_print=upcycle.EffectPrint(path="prints/a.json", digest="1" * 64, distance_micronats=153_642),
        ),
    ),
    (
        "version/risk@0123456789ab",
        upcycle.BlendDeleted(**DONE, version=VERSION, digest=DIGEST, freed_bytes=81_000_000),
    ),
    (
        "version/risk@0123456789ab",
        upcycle.DeleteFailed(**DONE, version=VERSION, digest=DIGEST, code="store_unwritable", message="read-only"),
    ),
    (
        "blend/risk",
        upcycle.RebuildOrdered(
            **ORDER,
            request=ID,
            blend="risk",
            version=VERSION,
            base=upcycle.BaseRef(name="tiny", path="/bases/tiny", digest="0" * 64),
            members=(upcycle.Member(adapter=ADAPTER, weight_ppm=600_000, anchored=True),),
            base_weight_ppm=400_000,
            max_lora_rank=16,
            residual_max_ppm=50_000,
        ),
    ),
    (
        "instance/a",
        upcycle.ResidentsSet(
            why=WHY,
            node="n1",
            instance="a",
            endpoint="http://127.0.0.1:8000",
            base="tiny",
            residents=(upcycle.Resident(blend="risk", version=VERSION, path=f"store/sha256/{DIGEST}"),),
            interval_us=10_000_000,
        ),
    ),
    (
        "instance/a",
        upcycle.DriftObserved(
            node="n1", instance="a", told=ID, expected=(VERSION,), found=("stray",), missing=(VERSION,)
        ),
    ),
    ("ledger/fleet", DeadlineMissed(first=5, last=6, took_us=21_000, deadline_us=17_000)),
    (
        f"order/{ID}",
        OrderExpired(why=WHY, order=ID, service="yoco", kind="start_ordered", target="instance/a", node="n1"),
    ),
    ("instance/a", yoco.DrainRequested(actor="golden", instance="a", force=True)),
    (
        "instance/c",
        yoco.PrewarmOrdered(
            **ORDER,
            instance="c",
            device="cpu1",
            cores="0-2,5",
            spec=yoco.EngineSpec(
                kind="vllm",
                base_path="/bases/tiny",
                served_name="tiny",
                dtype="float32",
                max_model_len=2_048,
                max_loras=4,
                max_lora_rank=8,
                block_size=32,
                kv_cache_bytes=536_870_912,
                cpus="1",
            ),
        ),
    ),
    ("policy/fleet", ChangeRejected(why=WHY, request=ID, detail="unknown setting")),
    (
        "ledger/fleet",
        Rejected(
            stream="KITE_EVT", seq=1, bus_subject="x", code=Refusal.MALFORMED, message="not JSON", content="AAECAw=="
        ),
    ),
    ("ledger/fleet", EventIdConflict(stream="KITE_EVT", seq=1, event_id=ID)),
    ("ledger/fleet", BusGap(stream="KITE_EVT", first=1, last=2)),
    (
        "ledger/fleet",
        BusEpochChanged(
            stream="KITE_EVT",
            bus_epoch=2,
            why=EpochEnd.OTHER_MESSAGE,
            seq=42,
            msg_id=f"{ID}.0123456789abcdef",
            created="2026-01-01T00:00:00Z",
            found="2026-01-01T00:00:00Z",
        ),
    ),
    ("ledger/fleet", ClockStepped(by_us=-3_600_000_000)),
    (
        "ledger/fleet",
        Checkpointed(ledger=ID, pos=1_000, hash="0" * 64, key_id="0123456789abcdef", signature="0" * 128),
    ),
    ("ledger/fleet", ProducerKeyAdded(actor="golden", source="kite/yoco/n1", public_key="0" * 64)),
)


def main() -> int:
    """Record what is missing; fail when a type has no recorded payload in the end."""
    quiet()
    if not HISTORY.exists():
        asyncio.run(Demo(DemoOptions(engine="fake", base="tiny", dir=DIR), note).run())
        with Reader.open(in_folder(DIR).ledger_url) as reader:
            recorded = [line for row in reader.rows() for line in lines([row])]
            events = {row.type: row.raw for row in reader.rows() if row.type != LeaseTaken.TYPE}
        HISTORY.write_text("\n".join(map(_nameless, recorded)) + "\n", encoding="utf-8")
        for kind, raw in events.items():
            _keep(kind, raw)
    for subject, data in (*RARE, ("ledger/fleet", LeaseTaken(epoch=1, holder="arbitrator:1"))):
        header = Header(
            id=ID,
            source="kite/golden/1",
            type=data.TYPE,
            subject=subject,
            time="2026-01-01T00:00:00.000000Z",
            producer="golden@0",
        )
        _keep(data.TYPE, encode(header, data))
    missing = [kind for kind in TYPES if not _place(kind).exists()]
    for kind in missing:
        note(f"no payload of {kind} was recorded")
    return 1 if missing else 0


def _nameless(line: str) -> str:
    """Leave the recording machine's name out of the history."""
    fields = json.loads(line)
    if fields["type"] == LeaseTaken.TYPE:
        fields["event"]["data"]["holder"] = "arbitrator:1"
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def _place(kind: str) -> Path:
    return HERE / "events" / f"{kind}.json"


def _keep(kind: str, raw: bytes) -> None:
    if not _place(kind).exists():
        _place(kind).write_bytes(raw + b"\n")


if __name__ == "__main__":
    sys.exit(main())
