"""Every event type by its name. A type that is not here does not exist."""

from types import ModuleType

from kite_schemas import arbitration, guard, ledger, policy, probes, proof, telemetry, upcycle, yoco
from kite_schemas.model import Data

FAMILIES: tuple[ModuleType, ...] = (upcycle, proof, yoco, telemetry, guard, probes, arbitration, policy, ledger)


def _types(module: ModuleType) -> dict[str, type[Data]]:
    classes = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Data))
    return {model.TYPE: model for model in classes if "TYPE" in vars(model)}


TYPES: dict[str, type[Data]] = {name: model for family in FAMILIES for name, model in _types(family).items()}
