"""What workers say to orders: for each type of order the facts that follow, when each comes, and the failure of it."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered
from kite_schemas.model import Data
from kite_schemas.proof import EffectProven
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BlendDeleted,
    BlendFailed,
    BlendLoaded,
    BlendStored,
    BlendUnloaded,
    DeleteOrdered,
    EffectPrint,
    InjectionAdmitted,
    LoadFailed,
    LoadOrdered,
    Resident,
    RetireOrdered,
    RollbackOrdered,
    RolledBack,
    VerificationOrdered,
    Violation,
)
from kite_schemas.why import Order
from kite_schemas.yoco import (
    DrainOrdered,
    InstanceChanged,
    InstanceOrder,
    InstanceReady,
    OrderFailed,
    Path,
    SleepOrdered,
    StartOrdered,
    StopOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import State as Life

BEGUN_US = 2_000
"""From an order to the first thing that its worker says."""

TAKES_US: dict[type[Order], int] = {
    VerificationOrdered: 20_000,
    InjectionAdmitted: 150_000,
    LoadOrdered: 80_000,
    RollbackOrdered: 10_000,
    RetireOrdered: 10_000,
    DeleteOrdered: 20_000,
    ComparisonOrdered: 120_000,
    StartOrdered: 1_500_000,
    DrainOrdered: 100_000,
    SleepOrdered: 50_000,
    WakeOrdered: 260_000,
    StopOrdered: 300_000,
}
"""How long each takes, on average, from the order to its last fact; starts are faster than real ones."""

LOADED_PPM = 400_000
"""Share of a load, or a wake, after which the version is loaded; the rest is its proof."""

PORT = 8_000


class Said(NamedTuple):
    """One fact, and after which share of the order's time it comes."""

    after_ppm: int
    data: Data


class Move(NamedTuple):
    """One step in the life of an instance."""

    old: Life
    new: Life
    code: str


STARTING = Move(Life.ABSENT, Life.STARTING, "ordered")
WAKING = Move(Life.ASLEEP, Life.WAKING, "ordered")
DRAINING = Move(Life.READY, Life.DRAINING, "ordered")
DRAINED = Move(Life.DRAINING, Life.DRAINING, "drained")
PAUSED = Move(Life.DRAINING, Life.ASLEEP, "paused")
STOPPED = Move(Life.READY, Life.ABSENT, "stopped")

Ending = dict[str, Any]
"""The fields that make a fact the last one of its order."""

Answer = Callable[[Any, Ending, int], list[Said]]
"""Takes the order (Any: each of the type that it stands for), the ending, and how long it takes in µs."""

END_PPM = 1_000_000


def answer(order: Order, order_id: str, took_us: int, *, well: bool) -> list[Said]:
    """Return what is said to an order that went well or did not, in order; nothing to a type that nobody carries out.

    The last fact has `done`, and every one has the order's id.
    """
    table = GOOD if well else BAD
    make = table.get(type(order)) or GOOD.get(type(order))
    return make(order, {"order": order_id, "done": True}, took_us) if make else []


def endpoint(instance: str) -> str:
    """Return an address for an instance, always the same; nothing listens there."""
    return f"http://{instance}:{PORT}"


def digest(text: str) -> str:
    """Return 64 hex digits that stand for something."""
    return sha256(text.encode()).hexdigest()


def _last(data: Data) -> list[Said]:
    return [Said(END_PPM, data)]


def _verified(order: VerificationOrdered, end: Ending, took_us: int) -> list[Said]:
    about: Ending = {**end, "request": order.request, "adapter": order.adapter, "duration_us": took_us}
    return _last(AdapterVerified(**about, parameters=460_800, share_ppm=3_000, rank=4))


def _refused(order: VerificationOrdered, end: Ending, took_us: int) -> list[Said]:
    broken = Violation(code="dora", where="adapter_config.json", expected="use_dora false", found="true")
    about: Ending = {**end, "request": order.request, "adapter": order.adapter, "duration_us": took_us}
    return _last(AdapterRefused(**about, violations=(broken,), total=1))


def _blended(order: InjectionAdmitted, end: Ending, took_us: int) -> list[Said]:
    content = digest(order.request)
    resident = Resident(blend=order.blend, version=f"{order.blend}@{content[:12]}", path=f"store/sha256/{content}")
    about: Ending = {**end, "request": order.request, "digest": content, "duration_us": took_us}
    stored = BlendStored(**about, resident=resident, method="concatenate", rank=8, residual_ppm=0, share_ppm=5_000)
    return _last(stored)


def _blend_failed(order: InjectionAdmitted, end: Ending, took_us: int) -> list[Said]:
    return _last(BlendFailed(**end, request=order.request, code="rank_exceeded", message="", duration_us=took_us))


def _proven(order_id: str, end: Ending, instance: str, resident: Resident, took_us: int) -> list[Said]:
    version = resident.version
    loaded = BlendLoaded(
        order=order_id, instance=instance, version=version, duration_us=took_us * LOADED_PPM // END_PPM
    )
    mark = digest(version)
    seen = EffectPrint(path=f"store/prints/{mark}.json", digest=mark, distance_micronats=90_000)
    about: Ending = {"instance": instance, "version": version, "effect_print": seen}
    proven = EffectProven(**end, **about, base_micronats=90_000, base_min_micronats=1_000)
    return [Said(LOADED_PPM, loaded), Said(END_PPM, proven)]


def _loaded(order: LoadOrdered, end: Ending, took_us: int) -> list[Said]:
    return _proven(end["order"], end, order.instance, order.resident, took_us)


def _load_failed(order: LoadOrdered, end: Ending, _took_us: int) -> list[Said]:
    about: Ending = {"instance": order.instance, "version": order.resident.version, "stage": "load"}
    return _last(LoadFailed(**end, **about, code="engine_refused", message=""))


def _rolled_back(order: RollbackOrdered, end: Ending, _took_us: int) -> list[Said]:
    return _last(RolledBack(**end, request=order.request, instance=order.instance, version=order.version))


def _retired(order: RetireOrdered, end: Ending, took_us: int) -> list[Said]:
    return _last(BlendUnloaded(**end, instance=order.instance, version=order.version, duration_us=took_us))


def _deleted(order: DeleteOrdered, end: Ending, _took_us: int) -> list[Said]:
    return _last(BlendDeleted(**end, version=order.version, digest=order.digest, freed_bytes=0))


def _compared(order: ComparisonOrdered, end: Ending, took_us: int) -> list[Said]:
    about: Ending = {**end, **_sides(order), "model": order.model, "duration_us": took_us}
    return _last(Compared(**about, kl_micronats=0, p99_micronats=0, covered_ppm=990_000, positions=32))


def _comparison_failed(order: ComparisonOrdered, end: Ending, _took_us: int) -> list[Said]:
    return _last(ComparisonFailed(**end, **_sides(order), code="engine_late", message=""))


def _sides(order: ComparisonOrdered) -> Ending:
    first, second = (side.instance for side in order.sides)
    return {"request": order.request, "first": first, "second": second}


def _started(order: StartOrdered, end: Ending, took_us: int) -> list[Said]:
    return [_begun(order, STARTING, end), _ready(order, end, Path.COLD, (), took_us)]


def _woken(order: WakeOrdered, end: Ending, took_us: int) -> list[Said]:
    said = [_begun(order, WAKING, end)]
    for resident in order.residents:
        said += _proven(end["order"], {"order": end["order"]}, order.instance, resident, took_us)
    versions = tuple(resident.version for resident in order.residents)
    return [*sorted(said, key=lambda one: one.after_ppm), _ready(order, end, order.path, versions, took_us)]


def _ready(order: StartOrdered | WakeOrdered, end: Ending, path: Path, versions: tuple[str, ...], took_us: int) -> Said:
    about: Ending = {**end, "instance": order.instance, "node": order.node, "path": path, "versions": versions}
    times: Ending = {"t_wake_us": took_us * LOADED_PPM // END_PPM, "t_first_token_us": took_us}
    address = endpoint(order.instance)
    return Said(END_PPM, InstanceReady(**about, **times, pid=1, endpoint=address, noise_micronats=0))


def _drained(order: DrainOrdered, end: Ending, took_us: int) -> list[Said]:
    return [_begun(order, DRAINING, end), _moved(order, end, DRAINED, took_us)]


def _asleep(order: SleepOrdered, end: Ending, took_us: int) -> list[Said]:
    return [_moved(order, end, PAUSED, took_us)]


def _stopped(order: StopOrdered, end: Ending, took_us: int) -> list[Said]:
    return [_moved(order, end, STOPPED, took_us)]


def _begun(order: InstanceOrder, move: Move, end: Ending) -> Said:
    return Said(0, _moved(order, {"order": end["order"]}, move, BEGUN_US).data)


def _moved(order: InstanceOrder, end: Ending, move: Move, took_us: int) -> Said:
    about: Ending = {**end, "instance": order.instance, "node": order.node, "duration_us": took_us}
    return Said(END_PPM, InstanceChanged(**about, from_state=move.old, to_state=move.new, code=move.code))


def _failed(order: StartOrdered | WakeOrdered, end: Ending, _took_us: int) -> list[Said]:
    state = Life.FAILED if isinstance(order, StartOrdered) else Life.ASLEEP
    about: Ending = {"instance": order.instance, "state": state, "stage": "start"}
    return _last(OrderFailed(**end, **about, code="engine_died", message=""))


GOOD: dict[type[Order], Answer] = {
    VerificationOrdered: _verified,
    InjectionAdmitted: _blended,
    LoadOrdered: _loaded,
    RollbackOrdered: _rolled_back,
    RetireOrdered: _retired,
    DeleteOrdered: _deleted,
    ComparisonOrdered: _compared,
    StartOrdered: _started,
    WakeOrdered: _woken,
    DrainOrdered: _drained,
    SleepOrdered: _asleep,
    StopOrdered: _stopped,
}
"""What is said when all goes well."""

BAD: dict[type[Order], Answer] = {
    VerificationOrdered: _refused,
    InjectionAdmitted: _blend_failed,
    LoadOrdered: _load_failed,
    ComparisonOrdered: _comparison_failed,
    StartOrdered: _failed,
    WakeOrdered: _failed,
}
"""What is said when it does not; what is missing here does not fail."""
