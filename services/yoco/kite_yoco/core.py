"""What to do, from what is known: pure functions, no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kite.engine import Activity
from kite_schemas.model import TEXT_MAX_CHARS
from kite_schemas.upcycle import EffectPrint, Resident
from kite_schemas.yoco import Device, State

FIRST_TOKEN_PROMPT = (1,)
"""Token ids of the warm-up prompt: one token is the shortest there is, and every vocabulary has an id 1."""

GPU_PREFIX = "GPU-"


class Opening(StrEnum):
    """How a start order begins."""

    SPAWN = "spawn"
    REPLACE = "replace"  # end what an earlier attempt left, then spawn
    LET_ON = "let_on"  # it waits for its weights
    REPORT = "report"  # it runs already
    REFUSE = "refuse"


OPENINGS: Mapping[State, Opening] = {
    State.ABSENT: Opening.SPAWN,
    State.STARTING: Opening.REPLACE,
    State.WARMING: Opening.REPLACE,
    State.FAILED: Opening.REPLACE,
    State.PREWARMED: Opening.LET_ON,
    State.READY: Opening.REPORT,
    State.DRAINING: Opening.REFUSE,
    State.ASLEEP: Opening.REFUSE,
    State.WAKING: Opening.REFUSE,
    State.QUARANTINED: Opening.REFUSE,
}


@dataclass(frozen=True, slots=True)
class Wake:
    """The plan of a wake: what to load, what to prove, and whether the base itself has to give a token."""

    load: tuple[Resident, ...]
    prove: tuple[tuple[Resident, EffectPrint], ...]
    base: bool


def plan_wake(residents: Sequence[Resident], listed: Sequence[str]) -> Wake:
    """Plan a wake from the residents ordered and the names that the engine lists.

    A proof is the first token of its resident as well. A resident without a print cannot be proven: then, and when
    there is no resident, a token of the base shows that the engine computes.
    """
    prove = tuple((resident, found) for resident in residents if (found := resident.effect_print) is not None)
    return Wake(
        load=tuple(resident for resident in residents if resident.version not in listed),
        prove=prove,
        base=len(prove) < len(residents) or not residents,
    )


def versions(residents: Sequence[Resident]) -> tuple[str, ...]:
    """Return the versions of the residents, in their order."""
    return tuple(resident.version for resident in residents)


def loaded(listed: Sequence[str], base: str) -> tuple[str, ...]:
    """Return what an engine serves beside its base."""
    return tuple(name for name in listed if name != base)


def merged(held: Sequence[str], added: Sequence[str]) -> tuple[str, ...]:
    """Return what is held with what was added, each once.

    >>> merged(("a", "b"), ("b", "c"))
    ('a', 'b', 'c')
    """
    return tuple(dict.fromkeys((*held, *added)))


def is_lost(state: State, *, lives: bool) -> bool:
    """Say whether an instance whose order failed cannot be kept: its process is gone, or was never ready."""
    return not lives or state in (State.STARTING, State.WARMING)


def is_idle(activity: Activity) -> bool:
    """Say whether no request runs or waits."""
    return activity.running == 0 and activity.waiting == 0


def pinned(device: str) -> dict[str, str]:
    """Return the variables that show an engine its own GPU only; CPU engines get their cores from their spec."""
    return {"CUDA_VISIBLE_DEVICES": device} if device.startswith(GPU_PREFIX) else {}


def cpu_devices(cores: Sequence[int], memory_bytes: int) -> tuple[Device, ...]:
    """Return one device per usable core, each with an equal share of the memory."""
    share_bytes = memory_bytes // len(cores)
    return tuple(Device(id=f"cpu{core}", kind="cpu", memory_bytes=share_bytes) for core in sorted(cores))


def fitted(text: str) -> str:
    """Return a message that fits an event; the end of a long one is what is cut."""
    return text if len(text) <= TEXT_MAX_CHARS else text[: TEXT_MAX_CHARS - 1] + "…"
