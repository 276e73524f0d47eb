"""Prewarm an instance: no engine can be held before its weights yet, and each order is told so."""

from kite.errors import KiteError
from kite_schemas.yoco import InstanceChanged, PrewarmOrdered
from kite_yoco.duty import Duty


class PrewarmUnsupported(KiteError):
    """The engine cannot be held before its weights."""

    code = "prewarm_unsupported"

    def __init__(self, kind: str) -> None:
        super().__init__(f"{kind} cannot be held before its weights", hint="set `prewarmed` of the pool to 0")
        self.kind = kind


async def prewarm(duty: Duty[PrewarmOrdered]) -> InstanceChanged:
    """Refuse. Raises PrewarmUnsupported."""
    raise PrewarmUnsupported(duty.order.spec.kind)
