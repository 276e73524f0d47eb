"""The three streams: their bounds, how they come to be, and what they hold."""

import json
from collections.abc import Collection, Mapping
from functools import partial
from typing import NotRequired, TypedDict, cast

import structlog
from nats.js.api import DiscardPolicy, PersistMode, RetentionPolicy, StorageType, StreamConfig

from kite.bus.errors import BusForbidden, StreamMissing, StreamRefused
from kite.bus.link import API, Link, NotNow
from kite.bus.mark import StreamState
from kite.bus.message import DESCRIPTION, STATUS, Message, from_direct, is_direct
from kite.bus.subjects import DEC, EVT, TEL
from kite_schemas.model import INT64_MAX

GIB = 1024**3
DAY_S = 86_400
FACTS_AGE_S = 7 * DAY_S
FACTS_BYTES = 4 * GIB
TELEMETRY_AGE_S = 3_600
TELEMETRY_BYTES = 1 * GIB
DUPLICATE_WINDOW_S = 120

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class _State(TypedDict):
    first_seq: int
    last_seq: int
    bytes: int
    deleted: NotRequired[list[int] | None]


class _Config(TypedDict):
    max_bytes: int


class _Info(TypedDict):
    created: str
    config: _Config
    state: _State


def _facts(name: str, subject: str, max_bytes: int, replicas: int) -> StreamConfig:
    return StreamConfig(
        name=name,
        subjects=[subject],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,  # back-pressure, not loss
        max_age=FACTS_AGE_S,
        max_bytes=max_bytes,
        duplicate_window=DUPLICATE_WINDOW_S,
        num_replicas=replicas,
        deny_delete=True,
        deny_purge=True,
        allow_direct=True,
    )


def _telemetry(replicas: int) -> StreamConfig:
    return StreamConfig(
        name=TEL,
        subjects=["kite.tel.v1.>"],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,  # lossy by contract
        max_age=TELEMETRY_AGE_S,
        max_bytes=TELEMETRY_BYTES,
        duplicate_window=DUPLICATE_WINDOW_S,
        num_replicas=replicas,
        allow_direct=True,
        # Telemetry does not wait for fsync, where the server has that: not for replicas (2.15.1).
        persist_mode=PersistMode.ASYNC if replicas == 1 else None,
    )


def configs(facts_bytes: int = FACTS_BYTES, replicas: int = 1) -> tuple[StreamConfig, ...]:
    """Return the configuration of every stream; `facts_bytes` bounds the facts and the decisions each."""
    return (
        _facts(EVT, "kite.evt.v1.>", facts_bytes, replicas),
        _facts(DEC, "kite.dec.v1.>", facts_bytes, replicas),
        _telemetry(replicas),
    )


async def provision(link: Link, facts_bytes: int | None = None, replicas: int | None = None) -> None:
    """Create what is missing and adjust limits that differ; see `Bus.provision`."""
    bounds = () if facts_bytes else ("max_bytes",)
    copies = () if replicas else ("num_replicas", "persist_mode")
    for config in configs(facts_bytes or FACTS_BYTES, replicas or 1):
        await link.patiently(partial(_ensure, link, config, kept=(*bounds, *copies)))


async def _ensure(link: Link, config: StreamConfig, *, kept: Collection[str]) -> None:
    """Make a stream, or adjust it; what is `kept` stays as it is where the stream exists."""
    body = config.as_dict()
    found = await _found(link, str(config.name))
    if found is not None:
        as_it_is = {key: found[key] for key in kept if key in found}
        body = {key: value for key, value in body.items() if key not in kept} | as_it_is
    if found is not None and all((found.get(key) or None) == (value or None) for key, value in body.items()):
        return
    try:
        await _make(link, config, body)
    except BusForbidden as forbidden:
        if found is None:
            raise StreamMissing(str(config.name)) from forbidden
        log.warning("stream_differs", stream=config.name, hint="`kite provision` of this version adjusts it")


async def _found(link: Link, stream: str) -> Mapping[str, object] | None:
    """Return the configuration of a stream, None when there is none."""
    try:
        return cast("Mapping[str, object]", (await read_info(link, stream))["config"])
    except StreamMissing:
        return None


async def _make(link: Link, config: StreamConfig, body: Mapping[str, object]) -> None:
    try:
        await link.api(f"STREAM.CREATE.{config.name}", body)  # the same configuration again is no error
    except StreamRefused as refused:
        try:
            await link.api(f"STREAM.UPDATE.{config.name}", body)
        except StreamMissing:  # so it was not refused for being there already
            raise refused from None


async def read_info(link: Link, stream: str, *, deleted: bool = False) -> Mapping[str, object]:
    """Ask the leader of a stream about it. Raises StreamMissing, NotNow.

    Without most of its servers a replica answers for the leader that there is not, from what it has (2.15.1).
    """
    info = await link.api(f"STREAM.INFO.{stream}", {"deleted_details": True} if deleted else {})
    if "cluster" in info and not cast("dict[str, object]", info["cluster"]).get("leader"):
        raise NotNow(f"{stream} has no leader")
    return info


async def read_state(link: Link, stream: str) -> StreamState:
    """Ask what `stream` holds. Raises StreamMissing, NotNow."""
    info = cast("_Info", await read_info(link, stream))
    state, limit_bytes = info["state"], max(info["config"]["max_bytes"], 0)  # -1 is no bound
    return StreamState(stream, info["created"], state["first_seq"], state["last_seq"], state["bytes"], limit_bytes)


async def get_message(link: Link, stream: str, seq: int) -> Message | None:
    """Read the message at `seq`, None when it is not stored. Raises NotNow, BusForbidden."""
    found = await any_message(link, stream, seq)
    return found or await _deny(link, stream, seq, seq)


async def any_message(link: Link, stream: str, seq: int) -> Message | None:
    """Read the message at `seq` from any replica, None when that one does not have it. Raises NotNow."""
    return await _direct(link, stream, {"seq": seq})


async def next_message(link: Link, stream: str, seq: int) -> Message | None:
    """Read the first message stored at or after `seq`, None when there is none. Raises NotNow, BusForbidden."""
    found = await _direct(link, stream, {"seq": seq, "next_by_subj": ">"})
    return found or await _deny(link, stream, seq, INT64_MAX)


async def _direct(link: Link, stream: str, body: Mapping[str, object]) -> Message | None:
    answer = await link.ask(f"{API}.DIRECT.GET.{stream}", json.dumps(body).encode())
    headers = answer.headers or {}
    if is_direct(headers):
        return from_direct(answer.data, headers)
    if headers.get(STATUS) == "404":
        return None
    raise StreamRefused(f"DIRECT.GET.{stream}", headers.get(DESCRIPTION, "no such message or stream"))


async def _deny(link: Link, stream: str, first: int, last: int) -> None:
    """Make sure with the leader that nothing is stored from `first` to `last`: a replica may be behind, and answers.

    Raises NotNow when something is.
    """
    state = cast("_Info", await read_info(link, stream, deleted=True))["state"]
    deleted = frozenset(state.get("deleted") or ())
    stored = range(max(first, state["first_seq"]), min(last, state["last_seq"]) + 1)
    if any(seq not in deleted for seq in stored):
        raise NotNow(f"a replica that is behind does not have {first} yet")
