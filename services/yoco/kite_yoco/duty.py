"""One order that is being carried out, with all that its steps need."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from kite.orders import Emit
from kite.probes import Probes
from kite_schemas.yoco import EngineOffer, InstanceOrder
from kite_yoco.channel import recent
from kite_yoco.instances import Instance, Instances

OrderT_co = TypeVar("OrderT_co", bound=InstanceOrder, covariant=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a yoco works: its instances, the folder of their logs, the adapters, the probes of its proofs, the name of
    the socket that its engines send their readings to, what its kinds of engine can do, and how the last starts and
    wakes went.
    """

    instances: Instances
    logs: Path
    adapter_root: Path
    probes: Probes
    telemetry: str
    engines: tuple[EngineOffer, ...] = ()
    starts: deque[bool] = field(default_factory=recent)


@dataclass(frozen=True, slots=True)
class Duty(Generic[OrderT_co]):
    """An order, the instance it is about, the place, and the way to tell what happens."""

    order: OrderT_co
    instance: Instance
    place: Place
    tell: Emit

    @property
    def log_file(self) -> Path:
        """The file of the engine's output."""
        return self.place.logs / f"{self.instance.id}.log"
