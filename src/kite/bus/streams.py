"""The three streams: their bounds, how they come to be, and what they hold."""

import json
from collections.abc import Mapping
from functools import partial
from typing import TypedDict, cast

import structlog
from nats.js.api import DiscardPolicy, PersistMode, RetentionPolicy, StorageType, StreamConfig

from kite.bus.errors import BusForbidden, StreamMissing, StreamRefused
from kite.bus.link import API, Link
from kite.bus.mark import StreamState
from kite.bus.message import DESCRIPTION, STATUS, Message, from_direct, is_direct
from kite.bus.subjects import DEC, EVT, TEL

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


class _Config(TypedDict):
    max_bytes: int


class _Info(TypedDict):
    created: str
    config: _Config
    state: _State


def _facts(name: str, subject: str, max_bytes: int) -> StreamConfig:
    return StreamConfig(
        name=name,
        subjects=[subject],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,  # back-pressure, not loss
        max_age=FACTS_AGE_S,
        max_bytes=max_bytes,
        duplicate_window=DUPLICATE_WINDOW_S,
        num_replicas=1,
        deny_delete=True,
        deny_purge=True,
        allow_direct=True,
    )


def _telemetry() -> StreamConfig:
    return StreamConfig(
        name=TEL,
        subjects=["kite.tel.v1.>"],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,  # lossy by contract
        max_age=TELEMETRY_AGE_S,
        max_bytes=TELEMETRY_BYTES,
        duplicate_window=DUPLICATE_WINDOW_S,
        num_replicas=1,
        allow_direct=True,
        persist_mode=PersistMode.ASYNC,  # telemetry never waits for fsync
    )


def configs(facts_bytes: int = FACTS_BYTES) -> tuple[StreamConfig, ...]:
    """Return the configuration of every stream; `facts_bytes` bounds the facts and the decisions each."""
    return (
        _facts(EVT, "kite.evt.v1.>", facts_bytes),
        _facts(DEC, "kite.dec.v1.>", facts_bytes),
        _telemetry(),
    )


async def provision(link: Link, facts_bytes: int | None = None) -> None:
    """Create what is missing and adjust limits that differ; see `Bus.provision`."""
    for config in configs(facts_bytes or FACTS_BYTES):
        await link.patiently(partial(_ensure, link, config, keep_bytes=facts_bytes is None))


async def _ensure(link: Link, config: StreamConfig, *, keep_bytes: bool) -> None:
    body = config.as_dict()
    found = await _found(link, str(config.name))
    if found is not None and keep_bytes:
        body["max_bytes"] = found["max_bytes"]
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
        return cast("Mapping[str, object]", (await link.api(f"STREAM.INFO.{stream}", {}))["config"])
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


async def read_state(link: Link, stream: str) -> StreamState:
    """Ask what `stream` holds. Raises StreamMissing, NotNow."""
    info = cast("_Info", await link.api(f"STREAM.INFO.{stream}", {}))
    state, limit_bytes = info["state"], max(info["config"]["max_bytes"], 0)  # -1 is no bound
    return StreamState(stream, info["created"], state["first_seq"], state["last_seq"], state["bytes"], limit_bytes)


async def get_message(link: Link, stream: str, seq: int) -> Message | None:
    """Read the message at `seq`, None when it is not stored. Raises NotNow."""
    return await _direct(link, stream, {"seq": seq})


async def next_message(link: Link, stream: str, seq: int) -> Message | None:
    """Read the first message stored at or after `seq`, None when there is none. Raises NotNow."""
    return await _direct(link, stream, {"seq": seq, "next_by_subj": ">"})


async def _direct(link: Link, stream: str, body: Mapping[str, object]) -> Message | None:
    answer = await link.ask(f"{API}.DIRECT.GET.{stream}", json.dumps(body).encode())
    headers = answer.headers or {}
    if is_direct(headers):
        return from_direct(answer.data, headers)
    if headers.get(STATUS) == "404":
        return None
    raise StreamRefused(f"DIRECT.GET.{stream}", headers.get(DESCRIPTION, "no such message or stream"))
