"""The HTTP face of the fake: vLLM's routes, one thread a connection."""

import json
import select
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias, cast
from urllib.parse import parse_qs, urlsplit

from msgspec import structs

from kite.clock import US_PER_S
from kite.telemetry import Totals
from kite.telemetry.extension import ADAPTERS, ALLOCATOR, DROP
from kite.testing.fake.cache import PrefixCache
from kite.testing.fake.completion import complete, parse
from kite.testing.fake.gate import Gate, Gone
from kite.testing.fake.model import Refused, Served
from kite.testing.fake.sleep import FORGETS_LEVEL, Sleep
from kite.testing.fake.spans import request_span
from kite.testing.fake.trouble import RUBBISH, Trouble

BODY_MAX_BYTES = 4 * 1024 * 1024
MODES = ("wait",)
RELOAD = "reload_weights"

Json: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Fake:
    """What all connections share."""

    served: Served
    cache: PrefixCache
    gate: Gate = field(default_factory=Gate)
    rest: Sleep = field(default_factory=Sleep)
    trouble: Trouble = field(default_factory=Trouble)

    def totals(self) -> Totals:
        """Return what vLLM's stat logger tells."""
        return structs.replace(self.gate.totals(), cache_queries=self.cache.queries, cache_hits=self.cache.hits)


class Server(ThreadingHTTPServer):
    """A listening fake."""

    daemon_threads = True  # a held request must not hold up the end
    allow_reuse_address = False  # a taken port is an error, as with vLLM

    def __init__(self, address: tuple[str, int], fake: Fake) -> None:
        super().__init__(address, Handler)
        self.fake = fake


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave together
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride] - the base class knows only its own kind

    def do_GET(self) -> None:
        """Answer a read."""
        self._answer(GETS)

    def do_POST(self) -> None:
        """Answer a change or a completion."""
        self._answer(POSTS)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Stay silent: no prompts, no noise."""

    def gone(self) -> bool:
        """Say whether the client has closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def body(self) -> Json:
        """Read the body as a JSON object. Raises Refused."""
        size = int(self.headers.get("Content-Length", "0"))
        if size > BODY_MAX_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {BODY_MAX_BYTES} bytes")
        try:
            found = cast("object", json.loads(self.rfile.read(size) or b"{}"))
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"JSON decode error: {error}") from error
        if not isinstance(found, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "Request body must be a JSON object")
        return cast("Json", found)

    @property
    def query(self) -> Mapping[str, list[str]]:
        """The parameters behind the path."""
        return parse_qs(urlsplit(self.path).query)

    def send(self, status: HTTPStatus, content: bytes, kind: str = "application/json") -> None:
        """Write a whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, routes: "Mapping[str, Route]") -> None:
        route = routes.get(urlsplit(self.path).path, unknown)
        if route is not begin_trouble:
            self.server.fake.trouble.hang()
            if self.server.fake.trouble.rubbish:
                self.send(HTTPStatus.OK, RUBBISH, "text/html")
                return
        try:
            route(self, self.server.fake)
        except Refused as refused:
            error = {"message": refused.text, "type": refused.status.phrase, "code": int(refused.status)}
            self.send(refused.status, json.dumps({"error": error}).encode())
        except (Gone, BrokenPipeError, ConnectionResetError):
            self.close_connection = True


Route: TypeAlias = Callable[[Handler, Fake], None]


def send_json(handler: Handler, answer: Json) -> None:
    """Answer 200 with JSON. Raises Refused for a number that JSON does not have, as vLLM fails on NaN."""
    try:
        content = json.dumps(answer, allow_nan=False).encode()
    except ValueError as error:
        raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
    handler.send(HTTPStatus.OK, content)


def unknown(handler: Handler, fake: Fake) -> None:
    """Answer a path that is not offered."""
    del handler, fake
    raise Refused(HTTPStatus.NOT_FOUND, "Not Found")


def health(handler: Handler, fake: Fake) -> None:
    """Alive, paused or not."""
    del fake
    handler.send(HTTPStatus.OK, b"")


def models(handler: Handler, fake: Fake) -> None:
    """List what is served, the base first."""
    served = fake.served
    cards = [{"id": served.name, "object": "model", "max_model_len": served.max_model_len}]
    loras = [{"id": name, "object": "model", "root": path} for name, path in served.paths.items()]
    send_json(handler, {"object": "list", "data": [*cards, *loras]})


def server_info(handler: Handler, fake: Fake) -> None:
    """Tell the part of vLLM's configuration that KITE reads."""
    config = {
        "lora_config": {"max_lora_rank": fake.served.max_lora_rank},
        "cache_config": {"block_size": fake.cache.block_tokens, "cache_dtype": "auto"},
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
    }
    send_json(handler, {"vllm_config": config, "vllm_env": {}})


def load(handler: Handler, fake: Fake) -> None:
    """Load an adapter; works while paused."""
    body = handler.body()
    name, path = str(body.get("lora_name", "")), str(body.get("lora_path", ""))
    if not name or not path:
        raise Refused(HTTPStatus.BAD_REQUEST, "Both 'lora_name' and 'lora_path' must be provided.")
    fake.served.load(name, path)
    handler.send(HTTPStatus.OK, f"Success: LoRA adapter '{name}' added successfully.".encode(), "text/plain")


def unload(handler: Handler, fake: Fake) -> None:
    """Take a name away."""
    name = str(handler.body().get("lora_name", ""))
    fake.served.unload(name)
    handler.send(HTTPStatus.OK, f"Success: LoRA adapter '{name}' removed successfully.".encode(), "text/plain")


def pause(handler: Handler, fake: Fake) -> None:
    """Hold new requests once those inside have finished; other modes are not offered."""
    handler.body()
    if handler.query.get("mode", ["abort"])[0] not in MODES:
        raise Refused(HTTPStatus.BAD_REQUEST, f"the fake pauses in mode {MODES[0]} only")
    fake.gate.pause()
    send_json(handler, {"status": "paused"})


def resume(handler: Handler, fake: Fake) -> None:
    """Serve again."""
    handler.body()
    fake.gate.resume()
    send_json(handler, {"status": "resumed"})


def sleep(handler: Handler, fake: Fake) -> None:
    """Hold new requests once those inside have finished, and give back memory by level."""
    handler.body()
    if handler.query.get("mode", ["abort"])[0] not in MODES:
        raise Refused(HTTPStatus.BAD_REQUEST, f"the fake sleeps in mode {MODES[0]} only")
    level = int(handler.query.get("level", ["1"])[0])
    if not 0 <= level <= FORGETS_LEVEL:
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f"level {level}")
    fake.gate.pause()
    fake.cache.clear()
    fake.rest.fall(level, fake.served)
    send_json(handler, {"status": "sleeping", "level": level})


def release(handler: Handler, fake: Fake) -> None:
    """Give back the KV cache alone; only while paused."""
    handler.body()
    fake.rest.release(paused=fake.gate.paused)
    fake.cache.clear()
    send_json(handler, {"status": "kv_cache_released"})


def wake_up(handler: Handler, fake: Fake) -> None:
    """Take memory again, by tags or all; serve when all is there."""
    handler.body()
    tags = handler.query.get("tags", [])
    awake = fake.rest.rise(tags)
    if awake:
        fake.gate.resume()
    send_json(handler, {"status": "awake" if awake else "sleeping", "tags": tags or None})


def is_sleeping(handler: Handler, fake: Fake) -> None:
    """Say whether it sleeps at any level, and, unlike vLLM, what it has given back."""
    given = sorted(fake.rest.tags)
    send_json(handler, {"is_sleeping": fake.gate.paused or bool(given), "level": fake.rest.level, "tags": given})


def is_paused(handler: Handler, fake: Fake) -> None:
    """Say whether new requests are held."""
    send_json(handler, {"is_paused": fake.gate.paused})


def reset_prefix_cache(handler: Handler, fake: Fake) -> None:
    """Forget all blocks; refused while a request runs."""
    handler.body()
    idle = fake.gate.running == 0
    if idle:
        fake.cache.clear()
    send_json(handler, {"success": idle})


def collective_rpc(handler: Handler, fake: Fake) -> None:
    """Call a method of the one worker, which has no GPU: it has nothing to say of an allocator."""
    body = handler.body()
    match body.get("method"), cast("list[object]", body.get("args") or []):
        case str(method), [] if method == ALLOCATOR:
            send_json(handler, {"results": [None]})
        case str(method), [] if method == ADAPTERS:
            send_json(handler, {"results": [fake.served.slots.held()]})
        case str(method), [int(slot)] if method == DROP:
            fake.served.slots.drop(slot)
            send_json(handler, {"results": [fake.served.slots.held()]})
        case str(method), [] if method == RELOAD:
            fake.rest.reload(fake.served)
            send_json(handler, {"results": [None]})
        case _:
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "")


def metrics(handler: Handler, fake: Fake) -> None:
    """Write some of vLLM's metrics. Like vLLM's, the gauges do not count the requests that a pause holds."""
    totals = fake.totals()
    found = {
        "vllm:num_requests_running": totals.running,
        "vllm:num_requests_waiting": totals.waiting,
        "vllm:prefix_cache_queries_total": totals.cache_queries,
        "vllm:prefix_cache_hits_total": totals.cache_hits,
        "vllm:e2e_request_latency_seconds_count": totals.finished,
        "vllm:e2e_request_latency_seconds_sum": (totals.latency_sum_us or 0) / US_PER_S,
    }
    labels = f'{{engine="0",model_name="{fake.served.name}"}}'
    lines = [f"{name}{labels} {float(value or 0)}\n" for name, value in found.items()]
    lines += fake.served.slots.lines()
    handler.send(HTTPStatus.OK, "".join(lines).encode(), "text/plain; version=0.0.4; charset=utf-8")


def begin_trouble(handler: Handler, fake: Fake) -> None:
    """Do wrong from now on. vLLM has no such route; it needs none."""
    how = handler.query.get("how", [""])[0]
    if not fake.trouble.begin(how):
        raise Refused(HTTPStatus.BAD_REQUEST, f"no trouble is called {how!r}")
    send_json(handler, {"trouble": how})


def completions(handler: Handler, fake: Fake) -> None:
    """Compute, unless paused."""
    body = handler.body()
    with request_span(dict(handler.headers)):
        request = parse(body, fake.served)
        with fake.gate.inside(handler.gone), fake.served.slots.used(request.model):
            for prompt in request.prompts:
                fake.cache.look_up(request.model, prompt)
            answer = complete(request, fake.served)
    send_json(handler, answer)


GETS: Mapping[str, Route] = {
    "/health": health,
    "/v1/models": models,
    "/server_info": server_info,
    "/is_paused": is_paused,
    "/is_sleeping": is_sleeping,
    "/metrics": metrics,
}

POSTS: Mapping[str, Route] = {
    "/v1/completions": completions,
    "/v1/load_lora_adapter": load,
    "/v1/unload_lora_adapter": unload,
    "/pause": pause,
    "/resume": resume,
    "/sleep": sleep,
    "/wake_up": wake_up,
    "/release_kv_cache_memory": release,
    "/reset_prefix_cache": reset_prefix_cache,
    "/collective_rpc": collective_rpc,
    "/trouble": begin_trouble,
}
