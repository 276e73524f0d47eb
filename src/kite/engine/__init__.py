"""The port to one inference server: start it, ask it, change what it serves. Nothing else speaks HTTP to an engine."""

from kite.engine.client import Engine, Loaded
from kite.engine.command import command
from kite.engine.errors import (
    Death,
    EngineAnswer,
    EngineDied,
    EngineError,
    EngineLate,
    EngineRefused,
    EngineUnreachable,
    Refusal,
)
from kite.engine.facts import Facts
from kite.engine.process import EngineProcess, Keep, free_port
from kite.engine.reading import Activity, Distribution
from kite_schemas.yoco import EngineSpec

__all__ = [
    "Activity",
    "Death",
    "Distribution",
    "Engine",
    "EngineAnswer",
    "EngineDied",
    "EngineError",
    "EngineLate",
    "EngineProcess",
    "EngineRefused",
    "EngineSpec",
    "EngineUnreachable",
    "Facts",
    "Keep",
    "Loaded",
    "Refusal",
    "command",
    "free_port",
]
