"""Spawn the process of an instance, once what an earlier order left of it is gone."""

from collections.abc import Sequence
from pathlib import Path

from kite.errors import Fault, KiteError
from kite.orders import stage
from kite.telemetry import variables
from kite_schemas.yoco import EngineOffer, EngineSpec, PrewarmOrdered, StartOrdered, State
from kite_yoco import core
from kite_yoco.duty import Duty
from kite_yoco.lifecycle import Event

WITHOUT = (State.ABSENT, State.FAILED)
"""The states in which an instance is not thought to have a process."""


class BaseMissing(KiteError):
    """The folder of the base is not there."""

    code = "base_missing"
    fault = Fault.OPERATOR


class EngineTooOld(KiteError):
    """The installed engine (`kind`, `version`) may not be started."""

    code = "engine_too_old"
    fault = Fault.OPERATOR

    def __init__(self, kind: str, version: str, reason: str) -> None:
        super().__init__(f"{kind} {version} is not started: {reason}", hint="install a newer one beside yoco")
        self.kind = kind
        self.version = version
        self.reason = reason


async def clear(duty: Duty[StartOrdered] | Duty[PrewarmOrdered], began_us: int) -> None:
    """End what an earlier order left, and say so when it was thought to live. Raises EngineLate."""
    instance = duty.instance
    if instance.state not in WITHOUT:
        await duty.tell(instance.change(Event.FAILED, "replaced", began_us, "started anew: it does not answer"))
    await instance.end()


async def spawn(duty: Duty[StartOrdered] | Duty[PrewarmOrdered], *, held: bool = False) -> None:
    """Start the process and watch it. Raises EngineTooOld, BaseMissing or SpawnFailed."""
    instance, order = duty.instance, duty.order
    stage("spawn")
    check_version(duty.place.engines, order.spec.kind)
    check_base(order.spec)
    instance.device = order.device
    telling = variables(duty.place.telemetry, instance.id)
    await instance.spawn(order.spec, duty.log_file, {**core.pinned(order.device), **telling}, held=held)
    duty.place.instances.watch(instance)


def check_version(engines: Sequence[EngineOffer], kind: str) -> None:
    """Raise EngineTooOld when a kind of engine has no mode at all here, which is how a registration says so."""
    for offer in engines:
        if offer.kind == kind and not offer.modes and offer.lacks:
            raise EngineTooOld(kind, offer.version, offer.lacks[0].reason)


def check_base(spec: EngineSpec) -> None:
    """Raise BaseMissing unless the base is a folder: an engine takes half a minute to say it, and says it worse."""
    if not Path(spec.base_path).is_dir():
        raise BaseMissing(
            f"no base in {spec.base_path}",
            hint="the path of the pool must be that of a folder on this node",
        )
